"""The declared model: TDP times utilisation from a synthetic /proc/stat, labelled in every report."""

import os

import pytest

from hpcdist.comm.threads.communicator import run_threads
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.energy.report import DECLARED
from hpcdist.energy.sources import counters, utilisation
from hpcdist.energy.sources.counters import CounterReader
from hpcdist.energy.sources.discovery import GpuClaim, open_node_sources
from hpcdist.energy.sources.utilisation import TdpProcessors, busy_seconds, power_w
from hpcdist.errors import ConfigurationError

TICKS = os.sysconf("SC_CLK_TCK")
S = 1_000_000_000


class Machine:
    """A /proc/stat of ``cores`` processors. The test advances its time."""

    def __init__(self, path, cores):
        self.path, self.cores, self.now_ns = path, cores, 0
        self.busy = self.idle = 0.0
        self.spend(0, 0.0)

    def spend(self, seconds, share):
        self.now_ns += round(seconds * S)
        self.busy += self.cores * seconds * share
        self.idle += self.cores * seconds * (1 - share)
        busy, idle = (round(value * TICKS) for value in (self.busy, self.idle))
        # user nice system idle iowait irq softirq steal guest guest_nice: guests are in user already
        self.path.write_text(
            f"cpu  {busy} 0 0 {idle - idle // 3} {idle // 3} 0 0 0 {busy // 2} 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"
        )

    def clock(self):
        return self.now_ns


def test_power_is_linear_between_idle_and_busy():
    assert (power_w(200, 0.3, 0), power_w(200, 0.3, 1), power_w(200, 0.3, 0.5)) == pytest.approx((60, 200, 130))


def test_busy_seconds_are_read_from_proc_stat():
    busy, whole = busy_seconds("cpu  10 20 30 400 50 1 2 3 7 0", 10.0)
    assert (busy, whole) == pytest.approx((6.6, 51.6)), "guest time is included in user time"


def test_joules_are_watts_times_seconds(tmp_path, rng):
    machine = Machine(tmp_path / "stat", 8)
    counter = TdpProcessors(240.0, 0.25, machine.path, machine.clock)
    track = CounterReader(counter)
    assert track.read(machine.now_ns) == 0
    expected = 0.0
    for _ in range(20):
        seconds, share = float(rng.integers(1, 60)), float(rng.random())
        machine.spend(seconds, share)
        expected += seconds * (60 + 180 * share)
        assert track.read(machine.now_ns) == pytest.approx(expected * 1e3, rel=2e-3)
    assert counter.about.declared and not track.explain()


def test_energy_between_two_ticks_is_not_lost(tmp_path):
    machine = Machine(tmp_path / "stat", 1)
    counter = TdpProcessors(100.0, 0.0, machine.path, machine.clock)
    counter.read()
    machine.now_ns += S // 1000  # the kernel has not counted yet
    assert counter.read() == 0
    machine.spend(0.999, 1.0)
    assert counter.read() == pytest.approx(100e6, rel=0.01)


def test_time_between_ticks_uses_the_last_utilisation(tmp_path):
    machine = Machine(tmp_path / "stat", 1)
    counter = TdpProcessors(100.0, 0.0, machine.path, machine.clock)
    counter.read()
    machine.spend(1.0, 0.5)
    before = counter.read()
    machine.now_ns += S // 200
    assert counter.read() - before == pytest.approx(50e6 / 200)
    machine.now_ns -= S // 200
    machine.spend(1.0, 0.5)
    assert counter.read() == pytest.approx(100e6, rel=0.01), "the time is counted once"


def test_missing_proc_stat_is_a_failed_read(tmp_path):
    track = CounterReader(TdpProcessors(100.0, 0.3, tmp_path / "none"))
    assert track.read(0) is None and "cannot be read" in track.failure


def test_declared_model_needs_explicit_settings():
    with pytest.raises(ConfigurationError, match="has no effect with energy.sources = 'auto'"):
        EnergyConfig(cpu_tdp_w=200.0)
    with pytest.raises(ConfigurationError, match="set energy.cpu_tdp_w"):
        EnergyConfig(sources="declared")


def test_gpu_job_needs_declared_gpu_tdp():
    config = EnergyConfig(sources="declared", cpu_tdp_w=200.0, utilisation_s=0.0)
    result = open_node_sources(config, [GpuClaim(reason="no NVIDIA driver answers")], computing=True)
    assert result.needed == {"gpu"} and result.missing["gpu"] == "no NVIDIA driver answers"
    assert [counter.kind for counter in result.counters] == ["cpu"]
    result = open_node_sources(config, [GpuClaim(("GPU-0",))], computing=True)
    assert result.missing["gpu"] == "energy.gpu_tdp_w = 0"


def test_declared_label_is_kept_in_report_and_state(tmp_path, monkeypatch):
    machine = Machine(tmp_path / "stat", 4)
    monkeypatch.setattr(counters, "PROBE_NS", 0)
    real = TdpProcessors
    monkeypatch.setattr(utilisation, "TdpProcessors", lambda tdp, idle: real(tdp, idle, machine.path, machine.clock))
    config = EnergyConfig(sources="declared", cpu_tdp_w=100.0, idle_fraction=0.5, interval_s=5.0, utilisation_s=0.0)

    def body(comm):
        with EnergyMonitor(comm, config, environment={}) as monitor:
            with monitor.window("training"):
                for _ in range(4):
                    machine.spend(10.0, 0.5)
                    monitor.sampler.read()
            return monitor.report(), monitor.state(), monitor.collect()

    report, state, rows = run_threads(1, body)[0]
    assert report["energy_j"] == pytest.approx(4 * 10 * 75, rel=0.01), report["reason"]
    assert report["label"] == DECLARED and state["label"] == DECLARED
    assert report["sources"][0]["note"].startswith(DECLARED) and report["sources"][0]["name"].startswith("declared")
    assert rows[0].sources[0][2].declared
