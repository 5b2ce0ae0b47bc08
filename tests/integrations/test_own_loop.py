"""A loop of one's own under DDP and FSDP2, without any adapter, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.cells import RecordProperty, Row, assert_epochs_grow, check_rows
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import json, sys, warnings
from functools import partial
from itertools import islice
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tests.integrations.cells import EPOCHS, STOPS, each_cell, ids, loader_of, name_of, story
from torchbudget import GradAccumulator

warnings.filterwarnings("ignore", "'set_vital' is deprecated")
from torchdata.stateful_dataloader import StatefulDataLoader

dist.init_process_group("gloo")
folder, rank = Path(sys.argv[1]), dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def wrapped(by):
    model = torch.nn.Linear(1, 1)
    return DistributedDataParallel(model) if by == "DDP" else fully_shard(model, mesh=mesh)


class Run:
    \"\"\"What a script of one's own keeps: a loader, its source, and an accumulator.\"\"\"

    def __init__(self, by, kind, *cell, state=None, **options):
        self.loader = loader_of(*cell, partial(kind, **options))
        self.source = self.loader.batch_sampler or self.loader.dataset
        model = wrapped(by)
        self.model, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.0)
        steps = 1 if cell[0] == "stream" else self.source
        self.accumulator = GradAccumulator(optimizer, model, steps=steps)
        self.stateful = kind is StatefulDataLoader
        self.epoch = 0
        if state is not None:
            self.epoch, position = json.loads(state)
            (self.loader if self.stateful else self.source).load_state_dict(position)

    def batches(self):
        \"\"\"Train on the samples of each batch, and yield them.\"\"\"
        self.source.set_epoch(self.epoch)
        loader = self.loader if self.stateful else self.source.tracked(self.loader)
        for batch in loader:
            with self.accumulator.micro_batch(weight=len(batch["ids"])):
                self.accumulator.backward(self.model(batch["ids"].float()[:, None]).sum())
            yield batch["ids"].tolist()

    def state(self):
        position = (self.loader if self.stateful else self.source).state_dict()
        return json.dumps([self.epoch if self.stateful else self.source.epoch, position])


def run(by, kind, *cell, **options):
    def part(state, stop):
        run = Run(by, kind, *cell, state=state, **options)
        epochs, left = [], stop
        while run.epoch < EPOCHS and left != 0:
            batches = run.batches()
            epochs.append([*islice(batches, left)])
            left = None if left is None else left - len(epochs[-1])
            if left == 0:
                state = run.state()
            batches.close()
            run.epoch += 1
        return epochs, state

    return story(part, STOPS if kind is DataLoader else WITHIN)


results = {}
# A StatefulDataLoader that is saved after an epoch's last batch begins with the next epoch's.
WITHIN = [stops for stops in STOPS if None not in stops]
every = [{"snapshot_every_n_steps": n} for n in (1, 4)]
for by, kind, options in [("DDP", DataLoader, {}), ("FSDP2", DataLoader, {}),
                          *(("DDP", StatefulDataLoader, one) for one in every)]:
    for name, result in each_cell(lambda *cell: run(by, kind, *cell, **options)).items():
        results[name_of(name, by, kind.__name__, *options.values())] = result
(folder / f"{rank}.json").write_text(json.dumps(results))
"""


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_in_a_loop_of_ones_own(
    ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """DDP, FSDP2 and `StatefulDataLoader`, whose states go through JSON."""
    found = run_ranks(SCRIPT, tmp_path, ranks, within_s=540)
    rows = {
        "DDP, DataLoader": Row("own loop: DDP"),
        "FSDP2, DataLoader": Row("own loop: FSDP2"),
        "DDP, StatefulDataLoader, 1": Row("own loop: `StatefulDataLoader`"),
        "DDP, StatefulDataLoader, 4": Row("own loop: `StatefulDataLoader`, every 4 steps"),
    }
    for setting in rows:
        assert_epochs_grow(found, setting)
    check_rows(found, rows, record_property)
