"""Numbers of bytes in human-readable form."""

import pytest

from hpcdist.reporting.units import counted, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4K", 4096),
        ("4k", 4096),
        ("1m", 1 << 20),
        ("2G", 2 << 30),
        ("4T", 4 << 40),
        ("1024p", 1 << 60),
    ],
)
def test_byte_units_are_case_insensitive(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "0", "0K", "-4K", "4 K", "4KB", "1.5M", "1e3", "٤", "9" * 5000])
def test_invalid_numbers_of_bytes_are_rejected(text):
    with pytest.raises(ValueError, match="not a number of bytes; expected a number such as 4096, 16K or 1M"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1025P", str((1 << 60) + 1)])
def test_size_above_the_limit_names_the_limit(text):
    with pytest.raises(ValueError, match=f"^{text} is too large; expected at most 1024P, which is 2.60 bytes"):
        parse_bytes(text)


def test_bytes_are_shown_in_the_largest_fitting_unit():
    assert [format_bytes(nbytes) for nbytes in (5, 4096, 3 << 19, 900 << 30)] == [
        "5 bytes",
        "4.0 KiB",
        "1.5 MiB",
        "900.0 GiB",
    ]


def test_counted_uses_singular_and_plural():
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
