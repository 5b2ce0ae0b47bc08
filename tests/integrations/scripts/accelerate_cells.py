"""A rank that trains under Accelerate, with the adapter and without it."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integrations.cells import (
    EPOCHS,
    LENGTHS,
    ONCE,
    STOPS,
    ids,
    loader_of,
    story,
    write_cells,
)
from tests.support.rank_scripts import join
from torchbudget.errors import OptionError, ShardedTwiceError
from torchbudget.integrations.accelerate import prepare

folder, numbers = Path(sys.argv[1]), itertools.count()
rank, ranks = join()
STATEFUL = {"use_stateful_dataloader": True}
OTHERS = {"even_batches": False, "split_batches": True, "dispatch_batches": True, "data_seed": 1}
OTHERS |= {"use_seedable_sampler": True, "non_blocking": True}


def accelerator_of(**options: Any) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def run(
    source: str, workers: int, kind: Any = DataLoader, stops: Any = ONCE, **options: Any
) -> Any:
    """Save in the loop and after it is broken off, and, without workers, between epochs."""

    def part(state: Any, stop: int | None) -> Any:
        accelerator = accelerator_of(**options)
        loader = prepare(accelerator, loader_of(source, workers, kind))
        assert accelerator.prepare(loader) is loader
        if state is not None:
            accelerator.load_state(state)
        epochs: list[Any] = []
        left = stop
        while loader.iteration < EPOCHS and left != 0:
            epochs.append([])
            for batch in ids(loader):
                epochs[-1].append(batch)
                left = left and left - 1
                if left == 0 and (workers or not loader.end_of_dataloader):
                    break
        path = folder / str(next(numbers))
        accelerator.save_state(path)
        accelerator.wait_for_everyone()
        return epochs, path

    return story(part, stops)


def by_itself(source: str, workers: int, **options: Any) -> Any:
    try:
        loader = accelerator_of(**options).prepare(loader_of(source, workers))
        return {"whole": [[*ids(loader)] for _ in range(EPOCHS)]}
    except (OptionError, ShardedTwiceError) as error:
        return type(error).__name__, str(error)


def check_a_loop_that_is_broken_off() -> None:
    """The next one starts the epoch over, unless another epoch was chosen."""
    loader = prepare(accelerator_of(), loader_of("sampler", 2))
    first = next(ids(loader))
    whole = [*ids(loader)]
    assert whole[0] == first
    assert whole == [*ids(prepare(accelerator_of(), loader_of("sampler", 0)))]
    next(ids(loader))
    loader.set_epoch(0)
    assert [*ids(loader)] == whole


def check_refusals() -> None:
    """Batches that are dealt otherwise; processes of one model take the same ones."""
    accelerator = accelerator_of()
    for source in ("sampler", "stream"):
        with pytest.raises(OptionError, match=f"pass num_replicas={ranks}, rank={rank}"):
            prepare(accelerator, loader_of(source, 0, num_replicas=ranks + 1, rank=0))
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=ranks)  # it needs GPUs itself
    whole = prepare(accelerator, loader_of("sampler", 0, num_replicas=1, rank=0))
    assert sorted(itertools.chain(*ids(whole))) == [*range(len(LENGTHS))]


check_a_loop_that_is_broken_off()
settings = {
    "default": lambda *cell: run(*cell, stops=STOPS),
    "others": lambda *cell: run(*cell, **OTHERS),
    "stateful": lambda *cell: run(*cell, StatefulDataLoader, **STATEFUL),
    "by itself": by_itself,
    "by itself, stateful": lambda *cell: by_itself(*cell, **STATEFUL),
    "by itself, read by each": lambda *cell: by_itself(*cell, dispatch_batches=False),
}
write_cells(settings)
check_refusals()  # the last: Accelerate's state is the process's
