import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.errors import BudgetError, TorchBudgetError
from torchbudget.units import MAX_BYTES, GiB, KiB, MiB, format_bytes, parse_bytes

UNITS = [(KiB, 2**10, "KiB"), (MiB, 2**20, "MiB"), (GiB, 2**30, "GiB")]
TEXT_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(("unit", "unit_bytes", "name"), UNITS)
@given(number=st.fractions(0, 1000))
def test_a_unit_rounds_down_and_by_less_than_one_byte(unit, unit_bytes, name, number):
    """0 <= exact - unit(number) < 1."""
    assert 0 <= number * unit_bytes - unit(number) < 1
    assert type(unit(number)) is int


@pytest.mark.parametrize(("unit", "unit_bytes", "name"), UNITS)
@given(pair=st.tuples(*2 * [st.floats(0, 2**30)]))
def test_a_unit_is_monotone(unit, unit_bytes, name, pair):
    """A larger number is never fewer bytes."""
    small, large = sorted(pair)
    assert unit(small) <= unit(large)


@pytest.mark.parametrize(("unit", "unit_bytes", "name"), UNITS)
@pytest.mark.parametrize(
    "number",
    [2, 2.0, Fraction(2), np.int64(2), np.uint8(2), np.float64(2), np.float32(2), np.float16(2)],
    ids=lambda number: type(number).__name__,
)
def test_a_unit_takes_every_kind_of_number(unit, unit_bytes, name, number):
    """Python's and NumPy's numbers mean the same bytes, and no narrow type overflows."""
    assert unit(number) == 2 * unit_bytes
    assert type(unit(number)) is int


@given(number=st.floats(0, 2**20, width=32))
def test_a_narrow_float_is_read_exactly(number):
    """float32 is exact in float64, so both give the same bytes."""
    assert GiB(np.float32(number)) == GiB(number)


def test_a_large_fraction_is_read_exactly():
    """No float stands between: 2**53 + 1 kibibytes are not 2**53."""
    assert KiB(2**52 + 1) == 2**62 + 2**10
    assert parse_bytes("4503599627370497 KiB") == 2**62 + 2**10
    assert parse_bytes(str(MAX_BYTES)) == MAX_BYTES


@pytest.mark.parametrize("unit", [KiB, MiB, GiB])
@pytest.mark.parametrize(
    "number",
    [
        -1,
        -0.5,
        math.inf,
        math.nan,
        np.float32("inf"),
        2**63,
        1e300,
        True,
        np.bool_(True),
        "1",
        None,
        1j,
        np.array([1]),
    ],
    ids=repr,
)
def test_a_unit_refuses_what_is_no_amount(unit, number):
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
    assert parse_bytes(num_bytes) == num_bytes
    assert parse_bytes(np.int64(num_bytes)) == num_bytes
    assert parse_bytes(str(num_bytes)) == num_bytes
    assert parse_bytes(f"{num_bytes:_}") == num_bytes


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


@pytest.mark.parametrize(
    "amount",
    [
        1.0,
        1.5,
        np.float64(1),
        Fraction(3, 2),
        None,
        True,
        np.bool_(True),
        b"8GiB",
        [8],
        np.array([1]),
    ],
    ids=repr,
)
def test_what_is_neither_int_nor_text_is_refused(amount):
    with pytest.raises(BudgetError, match="expected whole bytes as an int or text"):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", [2**63, "9223372036854775808", "8388608TiB", "9" * 5000, -1])
def test_an_amount_past_64_bits_or_below_zero_is_refused(amount):
    with pytest.raises(BudgetError, match=r"2\*\*63 - 1 bytes"):
        parse_bytes(amount)


def test_the_error_is_a_value_error_of_ours():
    with pytest.raises(ValueError, match="cannot read") as caught:
        parse_bytes("much")
    assert isinstance(caught.value, TorchBudgetError)


@given(num_bytes=st.integers(0, 2**62))
def test_formatted_bytes_read_back_close(num_bytes):
    """parse(format(n)) differs from n by at most half of the third digit."""
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= num_bytes * 0.005 + 1


@given(exponent=st.sampled_from([0, 10, 20, 30, 40]), number=st.integers(0, 1023))
def test_whole_units_read_back_exactly(exponent, number):
    """parse(format(n)) = n where n is a whole number of its unit."""
    assert parse_bytes(format_bytes(number << exponent)) == number << exponent


@given(pair=st.tuples(*2 * [st.integers(0, 2**62)]))
def test_format_is_monotone(pair):
    """More bytes never read as fewer."""
    small, large = sorted(pair)
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))


@given(num_bytes=st.integers(1, MAX_BYTES))
def test_a_negative_amount_has_the_same_digits(num_bytes):
    assert format_bytes(-num_bytes) == "-" + format_bytes(num_bytes)
    assert format_bytes(np.int64(num_bytes)) == format_bytes(num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20 - 513, "1023 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**30 - 1, "1 GiB"),
        (GiB(99.96), "100 GiB"),
        (GiB(0.5), "512 MiB"),
        (GiB(139.7), "140 GiB"),
        (np.iinfo(np.int64).min, "-8388608 TiB"),
    ],
)
def test_format_examples(num_bytes, text):
    assert format_bytes(num_bytes) == text
