"""A loop of one's own under DDP and FSDP2, without any adapter, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.cells import RecordProperty, Row, assert_epochs_grow, check_rows
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import json, sys, warnings
from itertools import islice
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tests.integrations.cells import EPOCHS, STOP, each_cell, ids, loader_of, name_of
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

    def __init__(self, by, kind, *cell, state=None):
        self.loader = loader_of(*cell, kind)
        self.source = self.loader.batch_sampler or self.loader.dataset
        model = wrapped(by)
        self.model, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.0)
        steps = 1 if cell[0] == "stream" else self.source
        self.accumulator = GradAccumulator(optimizer, model, steps=steps)
        self.stateful = kind is StatefulDataLoader
        if state is not None:
            epoch, position = json.loads(state)
            self.source.set_epoch(epoch)
            (self.loader if self.stateful else self.source).load_state_dict(position)

    def epoch(self):
        \"\"\"Train on the samples of each batch, and yield them.\"\"\"
        loader = self.loader if self.stateful else self.source.tracked(self.loader)
        for batch in loader:
            with self.accumulator.micro_batch(weight=len(batch["ids"])):
                self.accumulator.backward(self.model(batch["ids"].float()[:, None]).sum())
            yield batch["ids"].tolist()

    def state(self, epoch):
        position = (self.loader if self.stateful else self.source).state_dict()
        return json.dumps([epoch, position])


def run(by, kind, *cell):
    whole = Run(by, kind, *cell)
    epochs = []
    for epoch in range(EPOCHS):
        whole.source.set_epoch(epoch)
        epochs.append([*whole.epoch()])
    run = Run(by, kind, *cell)
    stopped = [*run.epoch()]
    run.source.set_epoch(1)
    batches = run.epoch()
    stopped += islice(batches, STOP)
    state = run.state(1)
    batches.close()
    run = Run(by, kind, *cell, state=state)
    resumed = [*run.epoch()]
    run.source.set_epoch(2)
    return {"whole": epochs, "stopped": stopped, "resumed": resumed + [*run.epoch()]}


results = {}
for by, kind in (("DDP", DataLoader), ("FSDP2", DataLoader), ("DDP", StatefulDataLoader)):
    for name, result in each_cell(lambda *cell: run(by, kind, *cell)).items():
        results[name_of(name, by, kind.__name__)] = result
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
        "DDP, StatefulDataLoader": Row("own loop: `StatefulDataLoader`"),
    }
    for setting in rows:
        assert_epochs_grow(found, setting)
    check_rows(found, rows, record_property)
