import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import budget as budget_module
from torchbudget.budget import MemoryBudget, limit_device_memory
from torchbudget.errors import BudgetError, MachineError, OptionError
from torchbudget.machine.host import MemoryPool, host_memory
from torchbudget.units import MAX_BYTES, GiB, MiB, parse_bytes

amounts = st.integers(1, MAX_BYTES)
stated = st.fixed_dictionaries(
    {name: st.one_of(st.none(), amounts) for name in ("device", "host", "shared")}
).filter(lambda arguments: any(amount is not None for amount in arguments.values()))


# --- stated --------------------------------------------------------------------------------------


@given(arguments=stated)
def test_a_budget_is_a_value(arguments):
    """Ints are bytes, None is no limit; equal amounts are equal, also copied and pickled."""
    budget = MemoryBudget(**arguments)
    assert dataclasses.asdict(budget) == arguments
    assert len({budget, MemoryBudget(**arguments)}) == 1
    assert copy.deepcopy(budget) == pickle.loads(pickle.dumps(budget)) == budget  # noqa: S301
    assert eval(repr(budget)) == budget  # noqa: S307  (our own text)
    assert MemoryBudget.of(budget) is budget
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.device = 1


@given(
    number=st.integers(1, 1000),
    unit=st.sampled_from(["B", "KiB", "MiB", "GiB", "kB", "MB", "GB", "TB"]),
    name=st.sampled_from(["device", "host", "shared"]),
)
def test_text_is_parsed(number, unit, name):
    """Each attribute of text is what `parse_bytes` reads, as a plain int."""
    budget = MemoryBudget(**{name: f"{number} {unit}"})
    assert getattr(budget, name) == parse_bytes(f"{number} {unit}")
    assert type(getattr(MemoryBudget(**{name: np.int64(5)}), name)) is int


@pytest.mark.parametrize("amount", [0, "0 GiB", "0.4 B", np.int64(0)])
def test_a_budget_of_zero_is_refused(amount):
    """Nothing fits zero bytes: who means no limit says None."""
    for name in ("device", "host", "shared"):
        with pytest.raises(BudgetError, match=rf"^{name} must be above 0 bytes, or None"):
            MemoryBudget(**{name: amount})


@pytest.mark.parametrize("amount", ["much", -1, 1.5, True, 2**63, [1], b"8GiB", math.inf])
def test_an_error_names_the_amount_that_cannot_be_read(amount):
    with pytest.raises(BudgetError, match=r"^host: (cannot read|expected)"):
        MemoryBudget(device=1, host=amount)
    with pytest.raises(BudgetError, match=r"^device: "):
        MemoryBudget.of(amount)


def test_a_budget_states_something_by_name():
    for make in (MemoryBudget, lambda: MemoryBudget.of(None)):
        with pytest.raises(BudgetError, match="at least one of device, host and shared"):
            make()
    with pytest.raises(TypeError):
        MemoryBudget(GiB(8))


def test_replace_reads_amounts_as_the_constructor_does():
    budget = dataclasses.replace(MemoryBudget(device="8GiB"), host="16GiB")
    assert budget == MemoryBudget(device="8GiB", host="16GiB")
    with pytest.raises(BudgetError, match="device must be above 0 bytes"):
        dataclasses.replace(budget, device=0)


def test_a_budget_reads_well():
    assert str(MemoryBudget(device="8GiB")) == "device 8 GiB"
    assert str(MemoryBudget(host=1500, shared="64MiB")) == "host 1.46 KiB, shared 64 MiB"


@pytest.mark.parametrize("amount", [8192, np.int32(8192), "8192", "8 KiB"])
def test_of_an_amount_is_the_devices(amount):
    assert MemoryBudget.of(amount) == MemoryBudget(device=8192)


# --- detected ------------------------------------------------------------------------------------

pools = st.builds(
    MemoryPool,
    name=st.sampled_from(["machine", "/sys/fs/cgroup/job", "cuda:0"]),
    limit_bytes=st.integers(2**10, 2**50),
    used_bytes=st.integers(0, 2**9),
    own_bytes=st.integers(0, 2**50),
)
fractions = st.fractions(Fraction(1, 4), 1).filter(lambda fraction: fraction > 0)


class Fakes:
    """Readings of a machine that does not exist, in place of the real ones."""

    def __init__(self, host, shared=None, gpu=None):
        self.readings = {
            "host_memory": lambda: tuple(host),
            "shared_memory": lambda: shared,
            "cuda_memory": lambda device: dataclasses.replace(gpu, name=str(device)),
        }

    def detect(self, device, **options):
        with pytest.MonkeyPatch.context() as patch:
            for name, reading in self.readings.items():
                patch.setattr(budget_module, name, reading)
            return MemoryBudget.detect(device, **options)


@given(
    host=st.lists(pools, min_size=1, max_size=5),
    shared=st.one_of(st.none(), pools),
    gpu=pools,
    fraction=fractions,
)
def test_each_amount_is_the_fraction_of_what_is_usable(host, shared, gpu, fraction):
    """Rounded down; the host's is of the tightest pool; no pool of shared memory is no limit."""
    budget = Fakes(host, shared, gpu).detect("cuda:0", fraction=fraction)
    assert budget.device == math.floor(gpu.usable_bytes * fraction)
    assert budget.host == math.floor(min(pool.usable_bytes for pool in host) * fraction)
    usable = None if shared is None else math.floor(shared.usable_bytes * fraction)
    assert budget.shared == usable


@pytest.mark.parametrize("fraction", [0.9, np.float64(0.9), np.float32(0.9), Fraction(9, 10)])
def test_every_kind_of_number_is_a_fraction(fraction):
    """By default it leaves a tenth."""
    host = [MemoryPool(name="machine", limit_bytes=GiB(100), used_bytes=GiB(60))]
    assert Fakes(host).detect(None, fraction=fraction).host == pytest.approx(GiB(36), abs=MiB(1))
    assert Fakes(host).detect(None).host == GiB(36)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_on_the_cpu_the_device_is_the_host(device):
    """Both amounts are of one memory."""
    host = [MemoryPool(name="machine", limit_bytes=1000, used_bytes=300, own_bytes=100)]
    assert Fakes(host).detect(device, fraction=0.5) == MemoryBudget(device=400, host=400)
    assert Fakes(host).detect(None, fraction=0.5) == MemoryBudget(host=400)


@pytest.mark.parametrize(
    "full", ["machine", "/group", "/dev/shm", "cuda", "cuda:1", torch.device("cuda", 1)]
)
def test_nothing_left_is_an_error_that_names_what_is_full(full):
    """A budget of zero would only fail later, and without the reason; of GPUs the one asked for."""
    machine, group, shared, gpu = (
        MemoryPool(name=name, limit_bytes=1000, used_bytes=1000 if name == str(full) else 0)
        for name in ("machine", "/group", "/dev/shm", str(full))
    )
    device = full if "cuda" in str(full) else None
    with pytest.raises(BudgetError, match=f"no memory is left of {full}: 1000 B of its"):
        Fakes([machine, group], shared, gpu).detect(device)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.0001, math.nan, math.inf, True, "0.9", None, 1j])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(OptionError, match="fraction must be above 0 and at most 1, got"):
        MemoryBudget.detect(None, fraction=fraction)


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x", "meta"])
def test_a_device_whose_memory_cannot_be_told_is_refused(device):
    with pytest.raises(OptionError, match=r"expected a CUDA device .* state the budget's bytes"):
        MemoryBudget.detect(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(MachineError, match="cannot read the memory of cuda:0"):
        MemoryBudget.detect("cuda:0")


def test_this_machine():
    """The real readings are between what is free and the tightest limit."""
    budget = MemoryBudget.detect("cpu", fraction=0.5)
    limit = min(pool.limit_bytes for pool in host_memory())
    free = min(pool.free_bytes for pool in host_memory())
    assert 0.5 * free - GiB(1) <= budget.host <= 0.5 * limit
    assert budget.device == budget.host


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_share_the_machine_but_not_their_gpus(ranks):
    """The host's bytes and /dev/shm are divided, and a rank's own card is not."""
    machine = MemoryPool(name="machine", limit_bytes=1600, used_bytes=0)
    shm = MemoryPool(name="/dev/shm", limit_bytes=160, used_bytes=0)
    gpu = MemoryPool(name="cuda:0", limit_bytes=800, used_bytes=0)
    fakes, options = Fakes([machine], shm, gpu), {"fraction": 1, "ranks_per_machine": ranks}
    assert fakes.detect("cuda:0", **options) == MemoryBudget(
        device=800, host=1600 // ranks, shared=160 // ranks
    )
    assert fakes.detect("cpu", **options).device == 1600 // ranks


# --- a hard limit --------------------------------------------------------------------------------
# On figures that stand in for a GPU's.


def test_the_allocator_gets_what_the_budget_leaves(monkeypatch):
    """Budget less what this process uses outside; others' 40 GiB and the cache do not count."""
    fake = FakeDevice(free_bytes=GiB(31), reserved_bytes=GiB(8), process_bytes=GiB(9))
    put_in_place(monkeypatch, fake)
    fake.free(GiB(5))
    limit = limit_device_memory("10GiB", "cuda")
    assert (limit.reserved_bytes, limit.outside_bytes) == (GiB(9), GiB(1))
    assert fake.now.fraction * 80 == pytest.approx(9, abs=0.02)  # pages of 20 MiB go beyond
    assert fake.now.fraction * 80 < 9
    assert fake.now.reserved_bytes == GiB(3)  # or it could keep what it had reserved
    assert str(limit).startswith(
        "cuda:1: torch's allocator may reserve 9 GiB: the budget of 10 GiB less 1 GiB in use "
        "outside it; later allocations of libraries and"
    )
    fake.load(GiB(1))
    assert limit_device_memory(MemoryBudget(device="10GiB"), "cuda").reserved_bytes == GiB(8)
    assert limit_device_memory("200GiB", "cuda").reserved_bytes == GiB(80)
    assert fake.now.fraction > 0.999


def test_a_limit_that_leaves_nothing(monkeypatch):
    fake = put_in_place(monkeypatch, FakeDevice(free_bytes=GiB(79), process_bytes=GiB(1)))
    with pytest.raises(BudgetError, match=r"uses 1 GiB outside .* nothing of a budget of 1 GiB"):
        limit_device_memory("1GiB", "cuda")
    assert fake.now.fraction == 1
    with pytest.raises(BudgetError, match="state its bytes"):
        limit_device_memory(MemoryBudget(host="1GiB"), "cuda")


def test_on_a_cpu_nothing_is_limited_and_the_text_says_so():
    limit = limit_device_memory("8GiB", "cpu")
    assert limit.reserved_bytes is None
    assert str(limit) == "cpu: not limited: torch's allocator has no limit on this device"
    for other in ("mps", "no device"):
        with pytest.raises(OptionError, match="expected a CUDA device"):
            limit_device_memory("8GiB", other)
