"""A part of `tests/fuzz.py`; and it finds what breaks a law."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import KINDS, Case, main
from torchbudget import GradAccumulator
from torchbudget.data.sampler import _Iteration
from torchbudget.data.stream.epoch_reader import EpochReader
from torchbudget.train.fit import _Run

# Of each kind, as many as take a second or two.
PART = {"samplers": 20, "streams": 12, "steps": 8, "fits": 3}


def outcomes(kind: str, cases: int) -> list[dict[str, Any]]:
    return [Case(kind, number, False, 0).outcome() for number in range(cases)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_cases(kind: str) -> None:
    """No law is broken, and most cases are not refused."""
    found = outcomes(kind, PART[kind])
    assert [one["why"] for one in found if one["outcome"] == "violation"] == []
    assert sum(one["outcome"] == "held" for one in found) > len(found) / 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_cases_of_real_processes(kind: str) -> None:
    """With ranks, workers and kills that are real."""
    found = [Case(kind, number, True, 0).outcome() for number in range(2)]
    assert [one["why"] for one in found if one["outcome"] == "violation"] == []


def repeat_an_index(next_of: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    def next_batch(iterator: _Iteration) -> list[int]:
        batch = next_of(iterator)
        return [*batch, batch[0]]

    return next_batch


def lose_a_sample(next_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda reader: next_of(reader)[1:]


def scale_the_loss(backward: Callable[..., None]) -> Callable[..., None]:
    return lambda accumulator, loss: backward(accumulator, loss * (1 + 1e-9))


def forget(_: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda run: setattr(run, "loaded", None)


BROKEN: dict[str, tuple[type, str, Callable[[Any], Any], str]] = {
    "samplers": (_Iteration, "__next__", repeat_an_index, "bytes of|max_batch_size|samples of"),
    "streams": (EpochReader, "__next__", lose_a_sample, "missing|empty batch"),
    "steps": (GradAccumulator, "backward", scale_the_loss, "large batch's step"),
    "fits": (_Run, "restore_generators", forget, "epochs, statistics|not equal"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_law_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that comes twice, a lost sample, another gradient, other random numbers."""
    owner, name, breaking, law = BROKEN[kind]
    monkeypatch.setattr(owner, name, breaking(getattr(owner, name)))
    cases = (Case(kind, number, False, 0).outcome() for number in range(10))
    broken = next(one["why"] for one in cases if one["outcome"] == "violation")
    assert re.search(law, broken)


def test_what_is_in_the_record_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is stopped goes on; a case that broke a law stays in its table."""
    record, numbers = tmp_path / "fuzz.jsonl", []

    def outcome(case: Case) -> dict[str, Any]:
        if len(numbers) == 3:
            numbers.append(-1)
            raise KeyboardInterrupt
        numbers.append(case.number)
        line = {"kind": case.kind, "number": case.number, "real": case.real, "seed": case.seed}
        broken = {"outcome": "violation", "why": "a law"} if case.number == 1 else {}
        return {**line, "outcome": "held", "seconds": 1, **broken}

    monkeypatch.setattr(Case, "outcome", outcome)
    arguments = ["--kind", "steps", "--cases", "6", "--processes", "0", "--record", str(record)]
    assert main(arguments) == 1
    assert main(arguments) == 1
    assert numbers == [0, 1, 2, -1, 3, 4, 5]
    assert len(list(map(json.loads, record.read_text().splitlines()))) == 6
    assert "steps:1\na law" in capsys.readouterr().out
