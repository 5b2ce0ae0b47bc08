"""Ranks that predict together: all outputs, failures of one rank, and plans that differ."""

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.predicting import Encoder, loader_of, one_by_one, texts_of
from tests.support.samplers import LENGTHS
from torchbudget import predict
from torchbudget.train import predict as module

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="torch")
folder, workers = Path(sys.argv[1]), int(sys.argv[2])
module._CHUNK_BYTES = int(sys.argv[3])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
told: dict[str, Any] = {}


def failed(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def total(batch: Any) -> Tensor:
    return batch.data.sum(1)


torch.manual_seed(0)
model, calls = Encoder(), []
expected = one_by_one(model, LENGTHS)


def called(batch: Any) -> Any:
    calls.append(batch.num_samples)
    return {"mean": model(batch), "more": (batch.lengths, None), "low": batch.data[:, 0].bfloat16()}


for gather in ("all", "first"):
    found = predict(called, loader_of(window=100, num_workers=workers), gather=gather)
    if found:
        means = [one["mean"] for one in found]
        torch.testing.assert_close(means, expected, rtol=1e-12, atol=1e-13)
        assert [int(one["more"][0]) for one in found] == LENGTHS.tolist()
        assert [one["low"] for one in found] == [text[0].bfloat16() for text in texts_of(LENGTHS)]
        assert all(one.untyped_storage().nbytes() == 32 for one in means)
    told[gather] = len(found)
told["samples"] = sum(calls) // 2
replicated = predict(DistributedDataParallel(model), loader_of())
torch.testing.assert_close(replicated, expected, rtol=1e-12, atol=1e-13)


class Unknown:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


def unknown(outputs: Any, batch: Any) -> Sequence[Any]:
    return [Unknown() for _ in outputs] if rank == 1 else outputs


def fails(batch: Any) -> Tensor:
    if rank == 1:
        raise ZeroDivisionError("here")
    return total(batch)


if ranks > 1:
    told["model"] = failed(lambda: predict(fails, loader_of()))
    told["pickle"] = failed(lambda: predict(total, loader_of(), split_outputs=unknown))
    other = loader_of(LENGTHS[:299] if rank else LENGTHS, texts=LENGTHS)
    told["sizes"] = failed(lambda: predict(total, other))
    told["after"] = len(predict(total, loader_of()))
    # Each rank its own plan: the first one's has other windows.
    own = loader_of(window=50 * rank + 50, num_replicas=ranks, rank=rank)
    told["plans"] = failed(lambda: predict(total, own))
    # All samples on each rank, without any collective: only the first rank calls it.
    if rank == 0:
        assert len(predict(total, loader_of(num_replicas=1, rank=0))) == 300
    dist.barrier()
    more = loader_of(num_replicas=4, rank=rank)
    told["ranks"] = failed(lambda: predict(total, more))
(folder / f"{rank}.json").write_text(json.dumps(told))
