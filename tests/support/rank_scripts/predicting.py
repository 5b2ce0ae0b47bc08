"""Ranks that predict together: all outputs, failures of one rank, and plans that differ."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.predicting import Encoder, killed_after, loader_of, one_by_one, texts_of
from tests.support.rank_scripts import error_of, join
from tests.support.samplers import LENGTHS
from torchbudget import distributed, predict
from torchbudget.distributed import gathered


def total(batch: Any) -> Tensor:
    return batch.data.sum(1)


class Unknown:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


def unknown(outputs: Any, batch: Any) -> Sequence[Any]:
    return [Unknown() for _ in outputs] if dist.get_rank() == 1 else outputs


def fails(batch: Any) -> Tensor:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("here")
    return total(batch)


def outputs(workers: str, chunk_bytes: str) -> dict[str, Any]:
    """What is told of all outputs, and of calls that fail on one rank or on all."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    distributed._PIECE_BYTES = int(chunk_bytes)
    rank, ranks = join()
    told: dict[str, Any] = {}
    torch.manual_seed(0)
    model, calls = Encoder(), []
    expected = one_by_one(model, LENGTHS)

    def called(batch: Any) -> Any:
        calls.append(batch.num_samples)
        first = batch.data[:, 0].bfloat16()
        return {"mean": model(batch), "more": (batch.lengths, None), "low": first}

    for gather in ("all", "first"):
        loader = loader_of(window=100, num_workers=int(workers))
        found = predict(called, loader, gather=gather)
        if found:
            means = [one["mean"] for one in found]
            torch.testing.assert_close(means, expected, rtol=1e-12, atol=1e-13)
            assert [int(one["more"][0]) for one in found] == LENGTHS.tolist()
            firsts = [text[0].bfloat16() for text in texts_of(LENGTHS)]
            assert [one["low"] for one in found] == firsts
            assert all(one.untyped_storage().nbytes() == 32 for one in means)
        told[gather] = len(found)
    told["samples"] = sum(calls) // 2
    replicated = predict(DistributedDataParallel(model), loader_of())
    torch.testing.assert_close([*replicated], expected, rtol=1e-12, atol=1e-13)
    if ranks == 1:
        return told
    alone = [10] * 7  # no two fit together, and two ranks cannot share them evenly
    found = predict(model, loader_of(alone, 15))
    torch.testing.assert_close([*found], one_by_one(model, alone), rtol=1e-12, atol=1e-13)
    told["model"] = error_of(lambda: predict(fails, loader_of()))
    told["pickle"] = error_of(lambda: predict(total, loader_of(), split_outputs=unknown))
    other = loader_of(LENGTHS[:299] if rank else LENGTHS, texts=LENGTHS)
    told["sizes"] = error_of(lambda: predict(total, other))
    told["after"] = len(predict(total, loader_of()))
    # Each rank its own plan: the first one's has other windows.
    own = loader_of(window=50 * rank + 50, num_replicas=ranks, rank=rank)
    told["plans"] = error_of(lambda: predict(total, own))
    # One rank goes on with the pass of two.
    folder = Path(sys.argv[1]) / "outputs"
    seen: list[int] = []
    fails_late = killed_after(5 + 2 * rank, model, seen)
    told["killed"] = error_of(lambda: predict(fails_late, loader_of(window=100), folder=folder))
    done = sum(gathered(sum(seen[:5])))  # that both ranks have saved
    # All samples on each rank, without any collective: only the first rank calls it.
    if rank == 0:
        assert len(predict(total, loader_of(num_replicas=1, rank=0))) == 300
        seen.clear()
        own = loader_of(num_replicas=1, rank=0, window=100)
        found = predict(killed_after(-1, model, seen), own, folder=folder)
        torch.testing.assert_close([*found], expected, rtol=1e-12, atol=1e-13)
        assert sum(seen) == 300 - done
    dist.barrier()
    told["ranks"] = error_of(lambda: predict(total, loader_of(num_replicas=4, rank=rank)))
    return told
