"""RAPL zones from trees like sysfs: the counted zones, and clear reasons for unreadable zones."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from hpcdist.energy.sources import sysfs
from hpcdist.energy.sources.counters import CounterReader, SensorReadError

RANGE = 262_143_328_850


@pytest.fixture
def root():
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
    """Create two packages with memory, and zones that must not be counted."""
    (root / "intel-rapl").mkdir()  # the control type, which has no counter
    for socket in range(2):
        zone(root, f"intel-rapl:{socket}", f"package-{socket}", 1000 + socket)
        zone(root, f"intel-rapl:{socket}:0", "core", 10)
        zone(root, f"intel-rapl:{socket}:1", "dram", 100 + socket)
    zone(root, "intel-rapl:2", "psys", 5000)
    zone(root, "intel-rapl-mmio:0", "package-0", 1000)
    inner = root / "intel-rapl:0" / "intel-rapl:0:1"
    inner.symlink_to(root / "intel-rapl:0:1")  # sysfs shows it twice


def test_packages_and_memory_are_counted_once(root):
    two_sockets(root)
    counters, missing = sysfs.find_rapl(root)
    assert [(counter.kind, counter.name, counter.read()) for counter in counters] == [
        ("cpu", "package-0", 1000),
        ("cpu", "package-1", 1001),
        ("dram", "package-0 dram", 100),
        ("dram", "package-1 dram", 101),
    ]
    assert missing == {}


def test_zones_nested_in_their_package_are_found(root):
    zone(root, "intel-rapl:0", "package-0", 1)
    zone(root, "intel-rapl:0/intel-rapl:0:0", "dram", 2)
    assert [counter.name for counter in sysfs.find_rapl(root)[0]] == ["package-0", "package-0 dram"]


def test_wrap_is_unrolled_by_zone_range(root):
    path = zone(root, "intel-rapl:0", "package-0", 999_000, range_uj=1_000_000)
    track = CounterReader(sysfs.find_rapl(root)[0][0])
    first = track.read(0)
    (path / "energy_uj").write_text("4000\n")
    assert track.read(1) - first == 5


def test_wrap_without_zone_range_abandons_the_zone(root):
    path = zone(root, "intel-rapl:0", "package-0", 999_000, range_uj=None)
    track = CounterReader(sysfs.find_rapl(root)[0][0])
    assert track.read(0) == 999
    (path / "energy_uj").write_text("4000\n")
    assert track.read(1) is None and "its range is not known" in track.lost


def test_missing_powercap_is_reported(root):
    counters, missing = sysfs.find_rapl(root / "nowhere")
    assert counters == [] and set(missing) == {"cpu", "dram"} and "does not exist" in missing["cpu"]


def test_missing_memory_zones_are_reported(root):
    zone(root, "intel-rapl:0", "package-0", 1)
    counters, missing = sysfs.find_rapl(root)
    assert [counter.kind for counter in counters] == ["cpu"] and "no dram zone" in missing["dram"]


def test_amd_packages_are_counted_without_cores_and_memory(root):
    for socket in range(2):
        zone(root, f"intel-rapl:{socket}", f"package-{socket}", 1000, range_uj=65_532_610_987)
        zone(root, f"intel-rapl:{socket}/intel-rapl:{socket}:0", "core", 400, range_uj=65_532_610_987)
    counters, missing = sysfs.find_rapl(root)
    assert [counter.name for counter in counters] == ["package-0", "package-1"] and set(missing) == {"dram"}


def test_all_dies_of_a_package_are_counted(root):
    for die in range(2):
        zone(root, f"intel-rapl:{die}", f"package-0-die-{die}", 10 + die)
    assert [counter.read() for counter in sysfs.find_rapl(root)[0]] == [10, 11]


def test_unreadable_package_removes_all_cpu_counters(root):
    two_sockets(root)
    (root / "intel-rapl:1" / "energy_uj").unlink()
    counters, missing = sysfs.find_rapl(root)
    assert {counter.kind for counter in counters} == {"dram"} and missing["cpu"].startswith("package-1: ")


def test_counter_that_is_no_number_is_reported(root):
    path = zone(root, "intel-rapl:0", "package-0", "")
    assert "cannot be read" in sysfs.find_rapl(root)[1]["cpu"]
    (path / "energy_uj").unlink()
    (path / "energy_uj").mkdir()
    assert "cannot be read" in sysfs.find_rapl(root)[1]["cpu"]


def test_permission_denied_reason_names_root(root):
    path = zone(root, "intel-rapl:0", "package-0", 1)
    counter = sysfs.find_rapl(root)[0][0]
    (path / "energy_uj").chmod(0o400 if os.geteuid() == 0 else 0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)  # root ignores mode bits
    try:
        with pytest.raises(SensorReadError, match="may be read by root only"):
            counter.read()
        assert sysfs.find_rapl(root)[1]["cpu"].startswith("package-0: ")
    finally:
        os.seteuid(before)
