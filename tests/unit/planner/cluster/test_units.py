"""Quantities with units: valid and invalid inputs, and exact round trips between text and numbers."""

import math
import random

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster import hardware


@cases(
    "text, dimension, value",
    ("80 GB", "bytes", 80e9),
    ("80 GiB", "bytes", 80 * 2**30),
    ("143771 MiB", "bytes", 143771 * 2**20),
    ("1.5 TiB", "bytes", 1.5 * 2**40),
    ("4096 bytes", "bytes", 4096),
    ("2_048 B", "bytes", 2048),
    ("400 Gbit/s", "bandwidth", 50e9),
    ("25 GB/s", "bandwidth", 25e9),
    ("1 GiB/s", "bandwidth", 2**30),
    ("100Mbit/s", "bandwidth", 12.5e6),
    ("312 TFLOP/s", "flops", 312e12),
    ("66.9 TFLOP/s", "flops", 66_900_000_000_000),
    ("140 GFLOP/s", "flops", 140e9),
    ("5 us", "time", 5e-6),
    ("5 µs", "time", 5e-6),
    ("5 \u03bcs", "time", 5e-6),
    ("3 years", "time", 3 * 365.25 * 86400),
    ("264 days", "time", 264 * 86400),
    ("1.5 h", "time", 5400),
    ("0 s", "time", 0),
    ("40 ps/B", "slowness", 40e-12),
    ("1e-9 s/B", "slowness", 1e-9),
    ("10.2 kW", "power", 10_200),
    ("0.481 kg/kWh", "carbon", 481),
)
def test_quantity_is_parsed(text, dimension, value):
    assert hardware.parse(text, dimension) == value


@cases(
    "text, dimension, output",
    ("80", "bytes", "'80' has no unit; expected a number of bytes such as"),
    ("GB", "bytes", "no readable number"),
    ("", "bytes", "no readable number"),
    ("80 GB/s", "bytes", "'GB/s' is a unit for a bandwidth; expected a number of bytes"),
    ("80 GB", "bandwidth", "'GB' is a unit for a number of bytes; expected a bandwidth"),
    ("400 Gb/s", "bandwidth", "is 'Gb/s' bits or bytes? Write Gbit/s or GB/s"),
    ("400 Gbps", "bandwidth", "is 'Gbps' bits or bytes? Write Gbit/s or GB/s"),
    ("80 gb", "bytes", "is 'gb' bits or bytes? Write GB for powers of ten, GiB for powers of two"),
    ("16 K", "bytes", "unknown unit 'K'"),
    ("80 gib", "bytes", "the nearest is 'GiB'"),
    ("80 KB", "bytes", "the nearest is 'kB'"),
    ("312 TFLOPS", "flops", "the nearest is 'TFLOP/s'"),
    ("5 US", "time", "the nearest is 'us'"),
    ("700 s", "power", "'s' is a unit for a time; expected a power"),
    ("-1 W", "power", "at least 0"),
    ("1e400 W", "power", "not a finite number"),
    ("nan W", "power", "no readable number"),
    ("inf W", "power", "no readable number"),
    ("1,000 W", "power", "no readable number"),
    ("1 2 W", "power", "unknown unit '2 W'"),
    ("386 g", "carbon", "unknown unit 'g'"),
)
def test_invalid_quantity_is_rejected_with_the_reason(text, dimension, output):
    with pytest.raises(ConfigurationError) as caught:
        hardware.parse(text, dimension)
    assert output in str(caught.value)
    assert hardware.EXAMPLES[dimension] in str(caught.value), "say what would be right"


@pytest.mark.parametrize("dimension", hardware.UNITS)
def test_example_of_every_unit_is_parsed(dimension):
    for example in hardware.EXAMPLES[dimension].replace(" or ", ", ").split(", "):
        assert hardware.parse(example.strip('"'), dimension) > 0


@pytest.mark.parametrize("dimension", hardware.UNITS)
def test_text_is_parsed_back_to_the_same_number(dimension):
    drawn = random.Random(7)
    values = [0.0, 1.0, 0.1, 1 / 3, 80e9, 80 * 2.0**30, 1234567.0, 5e-6, 3 * 365.25 * 86400, 1e-300, 1e300]
    values += [drawn.uniform(1, 10) * 10.0 ** drawn.randint(-15, 18) for _ in range(500)]
    for value in values:
        text = hardware.text(value, dimension)
        assert hardware.parse(text, dimension) == value, text
        assert "bit" not in text


def test_text_uses_the_shortest_unit():
    assert hardware.text(80 * 2.0**30, "bytes") == "80 GiB"
    assert hardware.text(80e9, "bytes") == "80 GB"
    assert hardware.text(5e-6, "time") == "5 us"
    assert hardware.text(3 * 365.25 * 86400, "time") == "3 years"
    assert hardware.text(50e9, "bandwidth") == "50 GB/s"
    assert hardware.text(66.9e12, "flops") == "66.9 TFLOP/s"


def test_rough_text_has_three_digits():
    assert hardware.rough(85899345920.0, "bytes") == "85.9 GB"
    assert hardware.rough(3.4e-6, "time") == "3.4 us"
    assert hardware.rough(400.0, "power") == "400 W"
    assert math.isclose(float(hardware.rough(1e-30, "time").split()[0]), 1e-21), "in the smallest unit there is"
