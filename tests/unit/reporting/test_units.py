"""Numbers of bytes as people write them."""

import pytest

from hpcdist.reporting.units import counted, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("4096", 4096), ("4K", 4096), ("4k", 4096), ("1m", 1 << 20), ("2G", 2 << 30)]
)
def test_both_cases_of_a_unit_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "0", "0K", "-4K", "4 K", "4KB", "1.5M", "1e3", "٤", "1024G", "9" * 5000])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="no number of bytes such as 4096, 16K or 1M"):
        parse_bytes(text)


def test_numbers_are_shown_in_the_largest_unit_that_they_reach():
    assert [format_bytes(nbytes) for nbytes in (5, 4096, 3 << 19, 900 << 30)] == [
        "5 bytes",
        "4.0 KiB",
        "1.5 MiB",
        "900.0 GiB",
    ]


def test_one_is_not_many():
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
