"""Budgets, and the units of their bytes."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import budget as budget_module
from torchbudget.budget import MemoryBudget, limit_device_memory
from torchbudget.errors import BudgetError, OptionError, TorchBudgetError
from torchbudget.machine.host import MemoryPool, host_memory
from torchbudget.units import MAX_BYTES, GiB, KiB, MiB, format_bytes, parse_bytes

UNITS = [(KiB, 2**10), (MiB, 2**20), (GiB, 2**30)]
TEXT_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}


@pytest.mark.parametrize(("unit", "unit_bytes"), UNITS)
@given(pair=st.tuples(*2 * [st.fractions(0, 1000)]), narrow=st.floats(0, 1000, width=32))
def test_a_unit_rounds_down_and_is_monotone(unit, unit_bytes, pair, narrow):
    """0 <= exact - unit(number) < 1; a float32 is read exactly."""
    small, large = sorted(pair)
    assert 0 <= small * unit_bytes - unit(small) < 1
    assert type(unit(small)) is int
    assert unit(small) <= unit(large)
    assert unit(np.float32(narrow)) == unit(narrow)


@pytest.mark.parametrize("number", [2, 2.0, Fraction(2), np.int64(2), np.uint8(2), np.float16(2)])
def test_a_unit_takes_every_kind_of_number(number):
    """Python's and NumPy's numbers mean the same bytes, and no narrow type overflows."""
    for unit, unit_bytes in UNITS:
        assert unit(number) == 2 * unit_bytes
        assert type(unit(number)) is int


def test_a_large_fraction_is_read_exactly():
    """No float stands between: 2**53 + 1 kibibytes are not 2**53."""
    assert KiB(2**52 + 1) == 2**62 + 2**10
    assert parse_bytes("4503599627370497 KiB") == 2**62 + 2**10
    assert parse_bytes(str(MAX_BYTES)) == MAX_BYTES


@pytest.mark.parametrize(
    "number", [-0.5, math.inf, math.nan, 2**63, 1e300, True, np.bool_(True), "1", None, 1j, [1]]
)
def test_a_unit_refuses_what_is_no_amount(number):
    for unit, _ in UNITS:
        with pytest.raises(BudgetError, match=r"expected (a finite number|between 0 and)"):
            unit(number)


@given(
    whole=st.integers(0, 10**6),
    decimals=st.text("0123456789", max_size=12),
    unit=st.sampled_from(sorted(TEXT_UNITS)),
    case=st.sampled_from([str, str.lower, str.upper, str.title]),
    pad=st.sampled_from(["", " ", "\t "]),
)
def test_text_means_number_times_unit_rounded_down(whole, decimals, unit, case, pad):
    """parse(f"{number} {unit}") = floor(number * unit), whatever the case and the spaces."""
    number = f"{whole}.{decimals}" if decimals else str(whole)
    expected = math.floor(Fraction(number) * TEXT_UNITS[unit])
    assert parse_bytes(f"{pad}{number}{pad}{case(unit)}{pad}") == expected


@given(num_bytes=st.integers(0, MAX_BYTES))
def test_ints_are_bytes(num_bytes):
    """An int, a NumPy int and its digits are the same amount."""
    for amount in (num_bytes, np.int64(num_bytes), str(num_bytes), f"{num_bytes:_}"):
        assert parse_bytes(amount) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "GiB", "-1", "1e9", "1,5GiB", "1..5", ".5GiB", "8 GB iB", "8 Go", "8 PiB"],
        *["0x10", "1__0", "1_", "_1", "²", "٣", "nan", "inf", "8GiB\0"],
    ],
)
def test_text_that_is_no_amount_is_refused_by_its_own_words(text):
    """The error repeats the text and shows how to write it."""
    with pytest.raises(BudgetError, match="'8GiB'") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, TorchBudgetError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("amount", [1.0, np.float64(1), Fraction(3, 2), None, True, b"8GiB", [8]])
def test_what_is_neither_int_nor_text_is_refused(amount):
    with pytest.raises(BudgetError, match="expected whole bytes as an int or text"):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", [2**63, "9223372036854775808", "8388608TiB", "9" * 5000, -1])
def test_an_amount_past_64_bits_or_below_zero_is_refused(amount):
    with pytest.raises(BudgetError, match=r"2\*\*63 - 1 bytes"):
        parse_bytes(amount)


@given(pair=st.tuples(*2 * [st.integers(0, 2**62)]), exponent=st.sampled_from([0, 10, 20, 30, 40]))
def test_formatted_bytes_read_back(pair, exponent):
    """They differ by half of the third digit at most, by nothing for whole units; and rise."""
    small, large = sorted(pair)
    assert abs(parse_bytes(format_bytes(small)) - small) <= small * 0.005 + 1
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))
    whole = small % 1024 << exponent
    assert parse_bytes(format_bytes(whole)) == whole
    assert format_bytes(-large or -1) == "-" + format_bytes(large or 1)


def test_format_examples():
    for num_bytes, text in (
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20 - 513, "1023 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**30 - 1, "1 GiB"),
        (GiB(99.96), "100 GiB"),
        (GiB(0.5), "512 MiB"),
        (np.int64(GiB(139.7)), "140 GiB"),
        (np.iinfo(np.int64).min, "-8388608 TiB"),
    ):
        assert format_bytes(num_bytes) == text


amounts = st.integers(1, MAX_BYTES)
stated = st.fixed_dictionaries(
    {name: st.one_of(st.none(), amounts) for name in ("device", "host", "shared")}
).filter(lambda arguments: any(amount is not None for amount in arguments.values()))


# --- stated --------------------------------------------------------------------------------------


@given(arguments=stated)
def test_a_budget_is_a_value(arguments):
    """Ints are bytes, None is no limit; equal amounts are equal, also copied and pickled.

    Text, and numbers of NumPy, are kept as plain ints.
    """
    budget = MemoryBudget(**arguments)
    assert dataclasses.asdict(budget) == arguments
    for kind in (lambda amount: f"{amount} B", np.int64):
        others = {name: amount and kind(amount) for name, amount in arguments.items()}
        assert repr(MemoryBudget(**others)) == repr(budget)
    assert len({budget, MemoryBudget(**arguments)}) == 1
    assert copy.deepcopy(budget) == pickle.loads(pickle.dumps(budget)) == budget  # noqa: S301
    assert eval(repr(budget)) == budget  # noqa: S307  (our own text)
    assert MemoryBudget.of(budget) is budget
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.device = 1


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
            "device_memory": lambda device: SimpleNamespace(
                pool=lambda: dataclasses.replace(gpu, name=str(device))
            ),
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
