"""The same laws where ranks, workers and kills are real."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.fuzzing.streams import StreamCase
from tests.support.dying_workers import no_signals_of_workers
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.refusals import accepted
from tests.support.resuming import as_json
from tests.support.stories import tell

WITHIN_S = 1200  # others may need the processors more


def samplers(chance: random.Random, folder: Path) -> Counter[str]:
    """Ranks with workers that are killed, and started as other ranks under another budget."""
    options: dict[str, Any] = {"seed": chance.randrange(2**30), "shuffle": chance.random() < 0.8}
    options[chance.choice(["samples_per_step", "window"])] = chance.choice([10, 50, 120])
    chapters = chance.choice([2, 3])
    tell(chance, folder, chapters=chapters, within_s=WITHIN_S, **options)
    return Counter(starts=chapters)


def steps(chance: random.Random, folder: Path) -> Counter[str]:
    """Three steps over two or three ranks, wrapped in DDP or FSDP, whole or in part."""
    ranks = chance.choice([2, 3])
    number = chance.randrange(2**30)
    for told in run_ranks(script("random_steps"), folder, ranks, number, 1, within_s=WITHIN_S):
        for case in told:
            assert case[-1] <= 1e-12, str(case)
    return Counter(steps=3)


# ---------------------------------------------------------------------- streams


def streams(chance: random.Random, folder: Path) -> Counter[str]:
    """Workers that are forked or spawned, and killed; each loop goes on from a state."""
    case, told = StreamCase(chance, samples=(100, 150)), Counter[str]()
    case.workers, case.ranks = chance.choice([1, 2, 3]), min(case.ranks, 2)
    case.apart &= case.ranks > 1
    method = chance.choice(["fork"] * 12 + ["forkserver"] * 5 + ["spawn"])
    if case.kind == "function" and method != "fork":  # it is local, and cannot be pickled
        method = "fork"

    def loop(stream: Any) -> Any:
        context = multiprocessing.get_context(method)
        options: dict[str, Any] = {"num_workers": case.workers, "multiprocessing_context": context}
        return stream.tracked(DataLoader(stream, batch_size=None, **options))

    reasons = case.reasons(case.ranks, case.workers, len(case.sizes))
    ranks = [
        accepted(lambda rank=rank: list(loop(case.make(rank=rank))), reasons)
        for rank in range(case.ranks)
    ]
    case.check_epoch([[batches] for batches in ranks])
    told["batches"] += sum(map(len, ranks))
    rank, done, state = chance.randrange(case.ranks), 0, None
    whole = ranks[rank]
    for stop in (chance.randint(0, len(whole)), chance.randint(0, len(whole)), len(whole)):
        told["starts"] += 1
        stream = case.make(rank=rank)
        if state is not None:
            stream.load_state_dict(as_json(state))
        if state is not None and done == len(whole):  # the state is that of the next epoch
            break
        number = max(stop - done, 0) if stop < len(whole) else None
        kills = number is not None and chance.random() < 0.5
        with no_signals_of_workers():
            batches = loop(stream)
            found = list(islice(batches, number))
            assert found == whole[done : done + len(found)], "resumed is not as uninterrupted"
            if kills:
                told["killed"] += 1
                kill_worker(chance)
                found += until_it_dies(batches, whole[done + len(found) :])
            state = stream.state_dict()
            del batches
        done += len(found)
    assert done == len(whole), "the rest is too short"
    return told


def kill_worker(chance: random.Random) -> None:
    """Any of this process's, if one is alive still."""
    workers = sorted(one.pid or 0 for one in multiprocessing.active_children())
    if workers:
        os.kill(chance.choice(workers), signal.SIGKILL)


def until_it_dies(batches: Any, expected: list[Any]) -> list[Any]:
    """What the other workers, and the queues, still have."""
    found: list[Any] = []
    try:
        for batch in batches:
            assert batch == expected[len(found)], "another batch after a worker was killed"
            found.append(batch)
    except RuntimeError as error:
        assert "DataLoader worker" in str(error), str(error)  # noqa: PT017
    return found


# ---------------------------------------------------------------------- trainings

FIT = """
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from tests.fuzzing.drawing import chance_of
from tests.fuzzing.fits import Fitted, Options

folder, files, name, seed, after_s, workers = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run():
    where = Path(files, name)
    torch.manual_seed(int(seed) + rank)
    training = Fitted(Options(random.Random(int(seed))), workers=int(workers))
    epochs = training.train(where)
    tensors = [training.model, training.averaging.average]
    sums = [p.tolist() for one in tensors for p in one.state_dict().values()]
    return [training.result(where, epochs), sums]


if float(after_s):
    timer = threading.Timer(float(after_s), die)
    timer.daemon = True
    timer.start()
    try:
        run()
    finally:
        die()
Path(folder, f"{rank}.json").write_text(json.dumps(run()))
"""


def fits(chance: random.Random, folder: Path) -> Counter[str]:
    """A training on one or two ranks that SIGKILL ends at random moments, and one that goes on."""
    ranks, workers = chance.choice([1, 1, 2]), chance.choice([0, 0, 1])
    seed, starts = chance.randrange(2**30), chance.choice([1, 1, 2])
    results = []
    for number, name in enumerate(["whole", *["part"] * starts, "part"]):
        after_s = round(chance.uniform(0.1, 2), 2) if 0 < number <= starts else 0
        own = folder / str(number)
        own.mkdir()
        arguments = [folder, name, seed, after_s, workers]
        killed = range(ranks) if after_s else ()
        results.append(run_ranks(FIT, own, ranks, *arguments, killed=killed, within_s=WITHIN_S))
    assert json.dumps(results[-1]) == json.dumps(results[0]), "resumed is not as uninterrupted"
    return Counter(starts=starts + 1, killed=starts)
