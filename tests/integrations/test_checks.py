"""The checks of `BudgetTrainerMixin` before a step: what they refuse, and how often they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from torchbudget import MemoryBudgetBatchSampler, PadCollate, PaddedCost
from torchbudget.errors import OptionError
from torchbudget.train.batches import halves

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers.trainer_pt_utils import LabelSmoother  # noqa: E402

from torchbudget.integrations.transformers import BudgetTrainerMixin, check_weights  # noqa: E402

pytestmark = pytest.mark.peer

CLASSES = 23


def num_labels(batch: Any) -> int:
    return int(batch["labels"].ne(-100).sum())


def texts(seed: int, rows: int) -> dict[str, Tensor]:
    """Texts, some of whose labels do not count; each text has one that does."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CLASSES, (rows, 9), generator=generator)
    counts = torch.rand(ids.shape, generator=generator) < 0.7
    counts[:, 0] = True
    return {"ids": ids, "labels": ids.flip(1).where(counts, -100)}


def loss_of(
    seed: int, dtype: torch.dtype = torch.float32, smoothing: float = 0.0, spread: float = 1.0
) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """A model, and its mean loss over labels; smoothed as the Trainer does, with float32 sums.

    The smaller the spread, the more equal the losses of different labels.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)).to(dtype)
    for parameter in model.parameters():
        parameter.data *= spread
    smoothed = LabelSmoother(epsilon=smoothing)

    def loss(batch: Any) -> Tensor:
        logits = model(batch["ids"])
        if smoothing:
            return smoothed((logits,), batch["labels"].clone())  # type: ignore[no-any-return]
        return F.cross_entropy(logits.mT, batch["labels"])

    return model, loss


cases = {
    "seed": st.integers(0, 2**32 - 1),
    "rows": st.integers(2, 64),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "smoothing": st.sampled_from([0.0, 0.1]),
    "spread": st.sampled_from([1.0, 0.1, 0.01]),
}


@given(**cases)
def test_a_right_weight_is_not_refused(
    seed: int, rows: int, dtype: torch.dtype, smoothing: float, spread: float
) -> None:
    """Nor if the loss has sums in float32 in a model of float64, as label smoothing has."""
    model, loss = loss_of(seed, dtype, smoothing, spread)
    check_weights(model, texts(seed, rows), loss=loss, weight=num_labels)


@given(
    **cases,
    factor=st.floats(0.5, 0.98) | st.floats(1.02, 2) | st.sampled_from([0.98, 1.02]),
    half=st.sampled_from([0, 1]),
    of_whole=st.booleans(),
)
def test_a_weight_that_is_wrong_is_refused_or_not_judged(
    seed: int,
    rows: int,
    dtype: torch.dtype,
    smoothing: float,
    spread: float,
    factor: float,
    half: int,
    of_whole: bool,
) -> None:
    """By 2 % or more, of one half, with or without the whole batch: it never passes as checked."""
    model, loss = loss_of(seed, dtype, smoothing, spread)
    batch = texts(seed, rows)
    parts = halves(batch)

    def wrong(part: Any) -> float:
        """The halves that `check_weights` makes are views of the batch."""
        weights = [num_labels(one) * (factor if at == half else 1) for at, one in enumerate(parts)]
        if len(part["ids"]) == rows:
            return sum(weights) if of_whole else num_labels(batch)
        return weights[part["ids"].data_ptr() != batch["ids"].data_ptr()]

    could_tell = False
    with suppress(OptionError):
        could_tell = check_weights(model, batch, loss=loss, weight=wrong)
    assert not could_tell


def test_a_wrong_weight_of_typical_losses_is_noticed() -> None:
    """The check is not silent: of 100 models and batches, it could judge most."""
    judged = 0
    for seed in range(100):
        model, loss = loss_of(seed)
        judged += check_weights(model, texts(seed, 8), loss=loss, weight=num_labels)
    assert judged > 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_half_precision_and_quantized_parameters_are_not_judged(dtype: torch.dtype) -> None:
    """Nothing is run, since the losses would say nothing."""
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    assert not check_weights(model, {"x": torch.ones(4, 2)}, loss=pytest.fail, weight=len)


def test_an_error_in_a_check_names_its_flag() -> None:
    """A loss that needs the whole batch, say; the error of the loss is its cause."""

    def loss(batch: Any) -> Tensor:
        if len(batch["x"]) == 2:
            raise RuntimeError("pairs of pairs")
        return model(batch["x"]).mean()

    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"pairs of pairs.*checks_weights = False") as raised:
        check_weights(model, {"x": torch.ones(4, 2)}, loss=loss, weight=lambda one: len(one["x"]))
    assert isinstance(raised.value.__cause__, RuntimeError)


# ---------------------------------------------------------------------- within the Trainer


class Model(nn.Module):
    """Its loss is the same for every sample, or their number; forwards without gradients count."""

    def __init__(self, varies: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.varies, self.checks = varies, 0

    def forward(self, x: Tensor, labels: Tensor, texts: Any = None) -> dict[str, Tensor]:
        self.checks += not torch.is_grad_enabled()
        return {"loss": (self.weight * (x if self.varies else torch.ones_like(x))).mean()}


def train(model: nn.Module, path: Path, collate: Any = None, units: Any = None, **own: Any) -> None:
    """Train 20 steps of one micro-batch of four samples each."""
    samples = [{"x": torch.tensor(float(i)), "labels": torch.tensor(i)} for i in range(80)]
    sampler = MemoryBudgetBatchSampler(
        [1] * 80, PaddedCost(unit_bytes=1), 4, samples_per_step=4, units=units, shuffle=False
    )

    class Trainer(BudgetTrainerMixin, hf.Trainer):  # type: ignore[misc,name-defined]
        def budget_loader(self) -> DataLoader[Any]:
            return DataLoader(samples, batch_sampler=sampler, collate_fn=collate or PadCollate())

    arguments = hf.TrainingArguments(
        path, report_to=[], use_cpu=True, num_train_epochs=1, learning_rate=0.0, max_grad_norm=0,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    type("Own", (Trainer,), own)(model, arguments).train()


@pytest.mark.parametrize(("varies", "checks"), [(True, 1), (False, 5)])
def test_a_check_that_cannot_tell_is_repeated_ever_more_rarely(
    varies: bool, checks: int, tmp_path: Path
) -> None:
    """Of 20 items, before the first, the second, the 4th, the 8th and the 16th; not at each."""
    model = Model(varies)
    train(model, tmp_path)
    assert model.checks == 3 * checks


def listed(samples: list[Any]) -> dict[str, Any]:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "texts": ["a"]}


def test_batches_that_cannot_be_halved(tmp_path: Path) -> None:
    """The error names the flag, with which they are trained on."""
    with pytest.raises(OptionError, match="checks_weights = False"):
        train(Model(), tmp_path, listed)
    train(Model(), tmp_path, listed, checks_weights=False)


class Paired(Model):
    """Its loss compares the two samples of a pair, whose halves would be no batch."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = (x[::2] - x[1::2]).square().mean() * self.weight
        return {**super().forward(x, labels), "loss": loss}


def test_units_are_not_halved(tmp_path: Path) -> None:
    """The check of weights would cut units that stay in one micro-batch: it is left out."""
    model, pairs = Paired(), [i // 2 for i in range(80)]
    train(model, tmp_path, units=(pairs, "micro_batch"))
    assert model.checks == 0
