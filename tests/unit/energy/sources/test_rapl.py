"""RAPL from trees as sysfs shows them: which zones count, and a clear word for what cannot be read."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from hpcdist.energy.sources import rapl
from hpcdist.energy.sources.counters import CounterReader, SensorReadError

RANGE = 262_143_328_850


@pytest.fixture
def root():
    """A directory that other users may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="powercap-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def zone(root, place, name, energy_uj, range_uj=RANGE):
    path = root / place
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    if range_uj is not None:
        (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path


def two_sockets(root):
    """Two packages with memory, and everything that must not be counted beside them."""
    (root / "intel-rapl").mkdir()  # the control type, which has no counter
    for socket in range(2):
        zone(root, f"intel-rapl:{socket}", f"package-{socket}", 1000 + socket)
        zone(root, f"intel-rapl:{socket}:0", "core", 10)
        zone(root, f"intel-rapl:{socket}:1", "dram", 100 + socket)
    zone(root, "intel-rapl:2", "psys", 5000)
    zone(root, "intel-rapl-mmio:0", "package-0", 1000)
    inner = root / "intel-rapl:0" / "intel-rapl:0:1"
    inner.symlink_to(root / "intel-rapl:0:1")  # sysfs shows it twice


def test_packages_and_their_memory_once_each(root):
    two_sockets(root)
    counters, missing = rapl.find(root)
    assert [(counter.kind, counter.name, counter.read()) for counter in counters] == [
        ("cpu", "package-0", 1000),
        ("cpu", "package-1", 1001),
        ("dram", "package-0 dram", 100),
        ("dram", "package-1 dram", 101),
    ]
    assert missing == {}


def test_zones_that_only_lie_inside_their_package(root):
    zone(root, "intel-rapl:0", "package-0", 1)
    zone(root, "intel-rapl:0/intel-rapl:0:0", "dram", 2)
    assert [counter.name for counter in rapl.find(root)[0]] == ["package-0", "package-0 dram"]


def test_a_wrap_is_unrolled_by_the_range_of_the_zone(root):
    path = zone(root, "intel-rapl:0", "package-0", 999_000, range_uj=1_000_000)
    track = CounterReader(rapl.find(root)[0][0])
    first = track.read(0)
    (path / "energy_uj").write_text("4000\n")
    assert track.read(1) - first == 5


def test_without_a_range_a_wrap_gives_the_zone_up(root):
    path = zone(root, "intel-rapl:0", "package-0", 999_000, range_uj=None)
    track = CounterReader(rapl.find(root)[0][0])
    assert track.read(0) == 999
    (path / "energy_uj").write_text("4000\n")
    assert track.read(1) is None and "its range is not known" in track.lost


def test_no_powercap_at_all(root):
    counters, missing = rapl.find(root / "nowhere")
    assert counters == [] and set(missing) == {"cpu", "dram"} and "does not exist" in missing["cpu"]


def test_a_machine_without_memory_zones(root):
    zone(root, "intel-rapl:0", "package-0", 1)
    counters, missing = rapl.find(root)
    assert [counter.kind for counter in counters] == ["cpu"] and "no dram zone" in missing["dram"]


def test_amd_has_cores_inside_of_packages_and_no_memory(root):
    for socket in range(2):
        zone(root, f"intel-rapl:{socket}", f"package-{socket}", 1000, range_uj=65_532_610_987)
        zone(root, f"intel-rapl:{socket}/intel-rapl:{socket}:0", "core", 400, range_uj=65_532_610_987)
    counters, missing = rapl.find(root)
    assert [counter.name for counter in counters] == ["package-0", "package-1"] and set(missing) == {"dram"}


def test_a_package_of_several_dies_is_all_of_them(root):
    for die in range(2):
        zone(root, f"intel-rapl:{die}", f"package-0-die-{die}", 10 + die)
    assert [counter.read() for counter in rapl.find(root)[0]] == [10, 11]


def test_half_of_the_packages_is_no_measurement(root):
    two_sockets(root)
    (root / "intel-rapl:1" / "energy_uj").unlink()
    counters, missing = rapl.find(root)
    assert {counter.kind for counter in counters} == {"dram"} and missing["cpu"].startswith("package-1: ")


def test_a_counter_that_is_no_number(root):
    path = zone(root, "intel-rapl:0", "package-0", "")
    assert "cannot be read" in rapl.find(root)[1]["cpu"]
    (path / "energy_uj").unlink()
    (path / "energy_uj").mkdir()
    assert "cannot be read" in rapl.find(root)[1]["cpu"]


def test_permission_denied_says_who_may_change_it(root):
    path = zone(root, "intel-rapl:0", "package-0", 1)
    counter = rapl.find(root)[0][0]
    (path / "energy_uj").chmod(0o400 if os.geteuid() == 0 else 0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)  # as root, no mode bit would refuse
    try:
        with pytest.raises(SensorReadError, match="may be read by root only"):
            counter.read()
        assert rapl.find(root)[1]["cpu"].startswith("package-0: ")
    finally:
        os.seteuid(before)
