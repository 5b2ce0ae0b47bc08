"""Outputs over real ranks: in order, everywhere or on the first one, and errors on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

COMMON = """
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.support.samplers import LENGTHS, TOKENS
from tests.train.test_predict import Encoder, loader_of, one_by_one, texts_of
from torchbudget import MemoryBudgetBatchSampler, PadCollate, predict
from torchbudget.errors import TorchBudgetError
from torchbudget.train import gathered

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="torch")
folder, *arguments = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def finish(told):
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def failed(call):
    "The error's type and text."
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


"""

ALL = (
    COMMON
    + """
workers, chunk_bytes = map(int, arguments)
gathered._CHUNK_BYTES = chunk_bytes
torch.manual_seed(0)
model = Encoder()
expected = one_by_one(model, LENGTHS)
sampler = MemoryBudgetBatchSampler(LENGTHS, TOKENS, 1000, window=100, shuffle=False)
loader = DataLoader(
    texts_of(LENGTHS), batch_sampler=sampler, num_workers=workers, collate_fn=PadCollate()
)
calls = []


def called(batch):
    calls.append(batch.num_samples)
    return {"mean": model(batch), "more": (batch.lengths, None), "low": batch.data[:, 0].bfloat16()}


told = {}
for gather in ("all", "first"):
    calls.clear()
    found = predict(called, loader, gather=gather)
    if found is not None:
        means = [one["mean"] for one in found]
        torch.testing.assert_close(means, expected, rtol=1e-12, atol=1e-13)
        assert [int(one["more"][0]) for one in found] == LENGTHS.tolist()
        firsts = [one["low"] for one in found]
        assert firsts == [text[0].bfloat16() for text in texts_of(LENGTHS)]
        assert {one.dtype for one in firsts} == {torch.bfloat16}
        assert all(one.untyped_storage().nbytes() == 32 for one in means)
    told[gather] = found is not None
    told["samples"] = sum(calls)
replicated = DistributedDataParallel(model)
found = predict(replicated, loader)
torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
finish(told)
"""
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "workers", "chunk_bytes"), [(1, 0, 10**6), (2, 2, 1), (3, 0, 2000)]
)
def test_every_rank_or_the_first_gets_all(
    tmp_path: Path, ranks: int, workers: int, chunk_bytes: int
) -> None:
    """In as many collectives as it takes, in the data set's order; the ranks share the work."""
    told = run_ranks(ALL, tmp_path, ranks, workers, chunk_bytes)
    assert [one["all"] for one in told] == [True] * ranks
    assert [one["first"] for one in told] == [True] + [False] * (ranks - 1)
    assert sum(one["samples"] for one in told) == 300
    assert min(one["samples"] for one in told) > 0


FAILING = (
    COMMON
    + """
where, who = arguments[0], int(arguments[1])
loader = loader_of()
seen = []


class Unknown:
    "Cannot be pickled."

    def __reduce__(self):
        raise TypeError("no pickle")


def model(batch):
    seen.append(batch.num_samples)
    if rank == who and where == "model" and len(seen) == 2:
        raise ZeroDivisionError("here")
    return batch.data


def split(outputs, batch):
    if rank == who and where == "pickle":
        return [Unknown() for _ in outputs]
    return outputs


if rank == who and where == "sizes":
    loader.dataset.append(loader.dataset[0])
first = failed(lambda: predict(model, loader, split_outputs=split))
where = ""
del loader.dataset[300:]
again = predict(model, loader, gather="first")
finish([first, again is not None])
"""
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("where", "kind"),
    [("model", "ZeroDivisionError"), ("pickle", "TypeError"), ("sizes", "OptionError")],
)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_fails_on_all(tmp_path: Path, where: str, kind: str, who: int) -> None:
    """With its own error there, and one that names it elsewhere; a later call works."""
    told = run_ranks(FAILING, tmp_path, 2, where, who)
    errors: list[Any] = [error for error, _ in told]
    assert errors[who][0] == kind
    assert errors[1 - who][0] == "RankError"
    assert f"rank {who} failed" in errors[1 - who][1]
    assert errors[who][1] in errors[1 - who][1]
    assert [came for _, came in told] == [True, False]


PLANS = (
    COMMON
    + """
told = []
# Each rank its own plan: the first one's has other windows.
loader = loader_of(window=[50, 100][rank], num_replicas=2, rank=rank)
told.append(failed(lambda: predict(lambda batch: batch.data.sum(1), loader)))
# All samples on each rank, without any collective: only the first rank calls it.
alone = loader_of(num_replicas=1, rank=0)
if rank == 0:
    assert len(predict(lambda batch: batch.data.sum(1), alone)) == 300
dist.barrier()
# Ranks that no group joins.
other = loader_of(num_replicas=4, rank=rank)
told.append(failed(lambda: predict(lambda batch: batch.data.sum(1), other)))
group = dist.new_group([0])
if rank == 0:
    told.append(failed(lambda: predict(lambda batch: batch.data.sum(1), loader_of(), group=group)))
finish(told)
"""
)


@pytest.mark.distributed
def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    """No sample is lost or repeated silently; a sampler for one rank needs no other."""
    first, second = run_ranks(PLANS, tmp_path, 2)
    for kind, text in (first[0], second[0]):
        assert kind == "OptionError"
        assert "every rank must plan with the same sizes" in text
    for told in (first, second):
        assert "deals to 4 ranks" in told[1][1]
    assert "the process group joins 1" in first[2][1]
