import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprec._units import GIB, MIB, format_bytes, parse_bytes

FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=[unit or "none" for unit in FACTORS])
def test_parse_bytes_knows_every_unit(factor):
    unit = [unit for unit, value in FACTORS.items() if value == factor][-1]
    assert parse_bytes(f"3{unit}") == 3 * factor
    assert parse_bytes(f"  3 {unit.lower()} ") == 3 * factor


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (10**15, 10**15),
        ("40GiB", 40 * GIB),
        ("1.5 GiB", GIB * 3 // 2),
        ("0.25mib", MIB // 4),
        ("24GB", 24 * 10**9),
        ("1.9B", 1),
    ],
)
def test_parse_bytes_reads_sizes(value, expected):
    assert parse_bytes(value) == expected


@pytest.mark.parametrize(
    "text",
    [
        "24 gigs",
        "",
        " ",
        "GiB",
        "-1GiB",
        "1e9",
        "1,5GiB",
        "nan",
        "inf",
        "0x10",
        "1 2 GiB",
        "1.GiB",
        ".5GiB",
        "24 G",
    ],
)
def test_parse_bytes_rejects_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"Cannot read .* as a size\. Write a number and one of"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [0, -1, "0", "0GiB", "0.4B"])
def test_parse_bytes_rejects_sizes_that_are_not_positive(value):
    with pytest.raises(ValueError, match="must be larger than 0 bytes"):
        parse_bytes(value)


@pytest.mark.parametrize("value", [True, None, 1.5, b"1GiB", ["1GiB"]])
def test_parse_bytes_rejects_other_types(value):
    with pytest.raises(TypeError, match="`int` bytes or text such as '40GiB'"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MIB, "1.00 MiB"),
        (1610612736, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (-GIB, "-1.00 GiB"),
        (-5, "-5 B"),
    ],
)
def test_format_bytes(size, expected):
    assert format_bytes(size) == expected


@given(st.integers(min_value=1, max_value=2**60))
def test_what_is_formatted_reads_back_within_half_a_hundredth(size):
    text = format_bytes(size)
    unit = FACTORS[text.split()[1]]
    assert abs(parse_bytes(text) - size) <= 0.005 * unit + 1


@given(st.integers(min_value=1, max_value=2**20), st.sampled_from(sorted(FACTORS)))
def test_whole_numbers_of_a_unit_are_exact(number, unit):
    assert parse_bytes(f"{number}{unit}") == number * FACTORS[unit]


@given(st.text(max_size=12))
def test_parse_bytes_returns_a_positive_size_or_raises_value_error(text):
    try:
        size = parse_bytes(text)
    except ValueError:
        return
    assert isinstance(size, int)
    assert size > 0


@pytest.mark.parametrize("value", ["9" * 400 + "GiB", 2**63, "9999999999TiB"])
def test_parse_bytes_rejects_sizes_beyond_64_bits(value):
    with pytest.raises(ValueError, match="must be smaller than 9223372036854775808 bytes"):
        parse_bytes(value)
