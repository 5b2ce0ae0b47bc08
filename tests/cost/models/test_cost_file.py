"""Costs that are saved as JSON and loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import training_cases
from tests.support.costs import forms_of, measured
from tests.support.training_cases import CASES
from torchbudget import (
    MeasuredCost,
    PaddedCost,
    TableCost,
    describe_step,
    load_cost,
    measure_cost,
)
from torchbudget.cost.models.probe import Probe
from torchbudget.cost.models.vouched import VouchedRange
from torchbudget.errors import CostError, MeasureWarning


@pytest.mark.slow
def test_saved_and_loaded(tmp_path: Path) -> None:
    """What was saved says the same, and warns of everything that it was not measured on."""
    training = CASES["encoder and decoder"]()
    cost = measure_cost(
        training.step, training.make_batch, max_size=training.max_size, method="trace"
    )
    path = tmp_path / "cost.json"
    cost.save(path)
    loaded = load_cost(path, describe_step(training.step))
    rng = np.random.default_rng(7)
    n, sizes = rng.integers(1, 64, 20), rng.integers(1, training.max_size, (20, 2))
    assert (loaded.batch_bytes(n, sizes) == cost.batch_bytes(n, sizes)).all()
    assert loaded.report() == cost.report()
    with pytest.warns(
        MeasureWarning, match="model: 'Translator.*optimizer: 'AdamW' then, 'SGD' now"
    ):
        load_cost(path, describe_step(training_cases.images(training_cases.SGD).step))
    json.loads(path.read_text())
    path.write_text("{}")
    with pytest.raises(CostError, match="not a saved cost"):
        load_cost(path)


def test_what_training_has_shown_is_saved(tmp_path: Path) -> None:
    """The margin covers the steps that were observed; the cost itself stays as it was."""
    cost = measured(margin=0.01)
    with pytest.warns(MeasureWarning):
        cost.observe(10, 100, 1_500_000)
    cost.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json").batch_bytes(10, 100) >= 1_500_000
    assert cost.batch_bytes(10, 100) < 1_500_000


def test_forms_time_and_probes_are_saved(tmp_path: Path) -> None:
    """Tables and formulas, and the time of what was run, come back as equal values."""
    table = TableCost(numbers=(8, 2), sizes=((100, 3), (500, 4)), peak_bytes=(1000, 1200))
    formulas = PaddedCost(unit_bytes=(1, 2), floor_bytes=7), PaddedCost(unit_bytes=(3, 0.5))
    probes = (Probe(8, (100, 3), 1000, False, "run", 0.25), Probe(2, (9, 9), 7, True, "trace"))
    vouched = VouchedRange(numbers=(3, 4), sizes=((1, 1), (9, 9)), peak_bytes=(5, 6), floor_bytes=5)
    forms = tuple(form for cost in formulas for form in forms_of(cost))
    for far, rows in ((None, None), (vouched, table)):
        cost = MeasuredCost(
            forms=forms,
            margin=0.1,
            vouched=far,
            table=rows,
            time_form=PaddedCost(sample_bytes=3),
            probes=probes,
            notes=("a note",),
            predicted_for=2**30,
        )
        cost.save(tmp_path / "cost.json")
        loaded = load_cost(tmp_path / "cost.json")
        assert (loaded.forms, loaded.vouched, loaded.table) == (forms, far, rows)
        assert (loaded.margin, loaded.time, loaded.probes) == (0.1, cost.time, probes)
        assert (loaded.notes, loaded.predicted_for) == (cost.notes, 2**30)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    measured().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(CostError, match="format 1 is not 3; measure again"):
        load_cost(path)
