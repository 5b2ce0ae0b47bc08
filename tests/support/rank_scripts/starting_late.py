"""Samplers and streams that were made, begun or loaded before their ranks started."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.support.samplers import loader_of, sampler_of
from tests.support.tracked_streams import make
from torchbudget.errors import OptionError, StateMismatchError

state, streamed_state = map(json.loads, sys.argv[2:4])


def stream_loader(workers: int, **options: Any) -> Any:
    return DataLoader(make("shards", **options), batch_size=None, num_workers=workers)


def refusal(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (OptionError, StateMismatchError) as error:
        return str(error)


streams = [stream_loader(n) for n in (0, 2)] + [stream_loader(2, split="ranks", uneven=True)]
begun_stream, resumed_stream = make("shards"), make("shards")
waiting = make("shards", split="ranks")
next(iter(begun_stream))
resumed_stream.load_state_dict(streamed_state)
loaders = [loader_of(sampler_of(), num_workers=workers) for workers in (0, 2)]
alone = [len(loader) for loader in loaders]
resumed, chosen, begun = sampler_of(), sampler_of(), sampler_of()
resumed.load_state_dict(state)
chosen.load_state_dict(state)
chosen.set_epoch(chosen.epoch)
next(iter(begun))
copied = pickle.loads(pickle.dumps(begun))  # noqa: S301  (made here)
dist.init_process_group("gloo")
alone_stream = make("shards")
alone_stream.load_state_dict(begun_stream.state_dict())
refused = [refusal(lambda: len(begun))]
refused += [refusal(lambda one=one: next(iter(one))) for one in (alone_stream, waiting)]
begun.set_epoch(1)
begun_stream.set_epoch(1)
by_hand = sampler_of(num_replicas=3, rank=2)
result = {
    "ranks": [sampler_of().num_replicas, sampler_of().rank, sampler_of(rank=0).rank],
    "by hand": [pickle.loads(pickle.dumps(by_hand)).rank, by_hand.num_replicas],  # noqa: S301
    "alone": alone,
    "len": [len(loader) for loader in loaders],
    "batches": [list(loader) for loader in loaders],
    "resumed": list(resumed),
    "chosen": list(chosen),
    "refused": refused,
    "copied": list(copied),
    "later": list(begun),
    "streams": [[[n for n, _ in batch] for batch in loader] for loader in streams],
    "resumed stream": list(resumed_stream),
    "later stream": list(begun_stream),
}
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(result))
