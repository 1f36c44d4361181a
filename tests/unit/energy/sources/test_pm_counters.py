"""Counters of a Cray node from trees like its sysfs: consistent updates, no stale values, nothing counted twice."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from harness.marks import cases
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.energy.sources import counters, sysfs
from hpcdist.energy.sources.counters import CounterReader, CounterResetError, SensorReadError
from hpcdist.energy.sources.discovery import GpuClaim, open_node_sources
from hpcdist.energy.sources.sysfs import STALE_NS, PmCounter, PmCounterFiles

S = 1_000_000_000


class Node:
    """A counter tree that the test updates, with a separate clock."""

    def __init__(self, root, accelerators=0):
        self.root, self.now_ns = root, 0
        root.mkdir(parents=True, exist_ok=True)
        self.values = {"energy": "1000 J", "power": "300 W", "cpu_energy": "400 J", "cpu_power": "120 W"}
        self.values |= {
            "memory_energy": "50 J",
            "memory_power": "20 W",
            "freshness": "7",
            "startup": "17",
            "version": "2",
        }
        self.values |= {"generation": "3", "power_cap": "0 W"}
        for number in range(accelerators):
            self.values |= {f"accel{number}_energy": f"{100 + number} J", f"accel{number}_power": "70 W"}
        self.renew()

    def renew(self, **changes):
        self.values |= {"freshness": str(int(self.values["freshness"]) + 1)} | changes
        for name, value in self.values.items():
            (self.root / "new").write_text(f"{value}\n")
            (self.root / "new").replace(self.root / name)  # a file of the kernel is never half written

    def clock(self):
        return self.now_ns


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path / "pm")


def test_node_counter_precedes_part_counters(tmp_path):
    result, missing = sysfs.find_cray(Node(tmp_path, accelerators=12).root)
    assert missing == {}
    names = ["energy", "cpu_energy", "memory_energy", *(f"accel{number}_energy" for number in range(12))]
    assert [counter.name for counter in result] == [f"pm_counters/{name}" for name in names]
    assert [counter.kind for counter in result] == ["node", "cpu", "dram", *["gpu"] * 12]
    assert [counter.read() for counter in result[:4]] == [1000_000_000, 400_000_000, 50_000_000, 100_000_000]
    assert [counter.power_mw() for counter in result[:4]] == [300_000, 120_000, 20_000, 70_000]
    assert result[0].about.power_scope == "node" and result[0].about.note == ""


@cases(
    "text, uj",
    ("81147367 J 1700061210920464 us", 81_147_367_000_000),
    ("5 J", 5_000_000),
    ("1234567 uJ", 1_234_567),
    ("12 mJ", 12_000),
    ("9", 9_000_000),
)
def test_values_are_converted_by_unit(node, text, uj):
    node.renew(energy=text)
    assert sysfs.find_cray(node.root)[0][0].read() == uj


@pytest.mark.parametrize("text", ["", "J", "12 kWh", "twelve J", "-"])
def test_invalid_value_is_reported(node, text):
    node.renew(energy=text)
    result, missing = sysfs.find_cray(node.root)
    assert result == [] and "not a number and its unit" in missing["node"]


def test_values_of_two_updates_are_never_mixed(node, monkeypatch):
    """The controller updates the files after each read of the energy, while it has updates left."""
    real, left = counters.read_text, [2]

    def renewing(path):
        result = real(path)
        if str(path).endswith("/energy") and left[0]:
            left[0] -= 1
            node.renew(energy=f"{int(node.values['energy'].split()[0]) + 100} J", cpu_energy=f"{500 + left[0]} J")
        return result

    group = PmCounterFiles(node.root)
    group.watch("energy", "cpu_energy")
    monkeypatch.setattr(counters, "read_text", renewing)
    assert (group.value("energy"), group.value("cpu_energy")) == (1200_000_000, 500_000_000)
    left[0] = 10**9
    node.renew()
    with pytest.raises(SensorReadError, match="changed during each of"):
        group.value("energy")


def test_value_is_read_only_with_new_freshness(node):
    group = PmCounterFiles(node.root, node.clock)
    group.watch("energy")
    track = CounterReader(PmCounter(group, "node", "energy", ""))
    assert track.read(0) == 1_000_000
    (node.root / "energy").write_text("5555 J\n")  # an incomplete update
    assert track.read(1) == 1_000_000
    node.renew(energy="1100 J")
    assert track.read(2) == 1_100_000
    node.now_ns += STALE_NS + S
    assert track.read(3) is None and "freshness has been 9 for 4 s, but should change" in track.failure
    node.renew(energy="1200 J")
    assert track.read(4) == 1_200_000 and track.failed_reads == 1


def test_restarted_controller_abandons_the_counter(node):
    group = PmCounterFiles(node.root)
    group.watch("energy")
    track = CounterReader(PmCounter(group, "node", "energy", ""))
    assert track.read(0) == 1_000_000
    node.renew(startup="18", energy="2000 J")
    assert track.read(1) is None and "startup changed from 17 to 18" in track.explain()
    node.renew(energy="2100 J")
    assert track.read(2) is None, "what was counted before and after does not add up"
    with pytest.raises(CounterResetError):
        group.value("energy")


def test_changed_power_cap_is_noted(node):
    track = CounterReader(sysfs.find_cray(node.root)[0][0])
    track.read(0)
    assert track.about.note == ""
    node.renew(generation="4", energy="1001 J")
    assert track.read(1) == 1_001_000 and "power cap was changed" in track.about.note


def test_decreasing_counter_is_abandoned(node):
    track = CounterReader(sysfs.find_cray(node.root)[0][0])
    track.read(0)
    node.renew(energy="5 J")
    assert track.read(1) is None and "went back" in track.explain()


def test_failing_part_does_not_affect_other_counters(node):
    tracks = [CounterReader(counter) for counter in sysfs.find_cray(node.root)[0]]
    (node.root / "cpu_energy").unlink()
    node.renew()
    (node.root / "cpu_energy").write_text("broken\n")
    node.renew(cpu_energy="broken")
    assert [track.read(0) for track in tracks] == [1_000_000, None, 50_000]


def test_missing_freshness_rejects_all_counters(node):
    (node.root / "freshness").unlink()
    result, missing = sysfs.find_cray(node.root)
    assert result == [] and "freshness" in missing["node"]


def test_permission_reason_names_the_cure():
    root = Path(tempfile.mkdtemp(prefix="pm-"))  # other users may enter it, unlike pytest's tmp_path
    try:
        root.chmod(0o755)
        node = Node(root)
        (root / "energy").chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)  # root ignores mode bits
        try:
            missing = sysfs.find_cray(node.root)[1]
        finally:
            os.seteuid(before)
        assert missing["node"].endswith(f"ask the site to let users read it (chmod a+r {root}/energy)")
    finally:
        shutil.rmtree(root)


def powercap(root):
    for number, (place, name) in enumerate([("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "dram")]):
        (root / place).mkdir(parents=True)
        (root / place / "name").write_text(name)
        (root / place / "energy_uj").write_text(str(number))
    return root


def test_cpu_and_memory_are_not_read_twice(node, tmp_path):
    config = EnergyConfig(powercap=str(powercap(tmp_path / "cap")), pm_counters=str(node.root), utilisation_s=0.0)
    result = open_node_sources(config, [GpuClaim()], computing=False)
    assert [(counter.kind, counter.name) for counter in result.counters] == [
        ("node", "pm_counters/energy"),
        ("cpu", "pm_counters/cpu_energy"),
        ("dram", "pm_counters/memory_energy"),
    ]
    (node.root / "memory_energy").unlink()
    result = open_node_sources(config, [GpuClaim()], computing=False)
    assert [(counter.kind, counter.name) for counter in result.counters] == [
        ("dram", "package-0 dram"),
        ("node", "pm_counters/energy"),
        ("cpu", "pm_counters/cpu_energy"),
    ]
    assert set(result.missing) == {"gpu"}


def test_missing_cray_counters_are_reported_only_if_selected(tmp_path):
    config = EnergyConfig(sources="cray", pm_counters=str(tmp_path / "none"), utilisation_s=0.0)
    result = open_node_sources(config, [GpuClaim()], computing=False)
    assert result.counters == [] and "this is not a Cray" in result.missing["node"]
    elsewhere = open_node_sources(
        EnergyConfig(powercap=str(tmp_path), pm_counters=str(tmp_path / "none")), [GpuClaim()], False
    )
    assert "node" not in elsewhere.missing, "other machines have no node counter"


def test_total_is_the_node_counter_without_parts(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(counters, "PROBE_NS", 0)
    node = Node(tmp_path / "pm", accelerators=2)
    config = EnergyConfig(sources="cray", pm_counters=str(node.root), interval_s=5.0, utilisation_s=0.0)
    steps = [int(value) for value in rng.integers(10, 1000, 6)]

    def body(comm):
        with EnergyMonitor(comm, config, environment={}) as monitor:
            with monitor.window("training"):
                for joules in itertools.accumulate(steps):
                    node.renew(energy=f"{1000 + joules} J", cpu_energy=f"{400 + joules // 2} J", accel0_energy="900 J")
                    monitor.sampler.read()
                node.renew()
            return monitor.report()

    report = run_threads(1, body)[0]
    assert report["by_kind"] == {"node": sum(steps)} and report["energy_j"] == sum(steps), report["reason"]
    assert report["parts"]["cpu"] == sum(steps) // 2
    assert [row["kind"] for row in report["sources"] if row["counted"]] == ["node"]
