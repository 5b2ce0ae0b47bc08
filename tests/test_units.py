import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.errors import BudgetError, TorchBudgetError
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
