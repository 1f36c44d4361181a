"""The monitor over fixture trees of RAPL: totals of nodes, a node that cannot measure, and no cost without a source."""

import math
import threading
import time

import pytest

from hpcdist.comm.threads.communicator import run_threads
from hpcdist.energy import monitor as monitors
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.energy.sources import counters
from hpcdist.energy.sources.counters import IntegratedPower, SourceInfo
from hpcdist.energy.sources.discovery import NodeSources
from hpcdist.errors import DeadlineError


@pytest.fixture(autouse=True)
def quick_pace(monkeypatch):
    """Fix the update interval of a counter after three changes, so that later delays have no effect."""
    monkeypatch.setattr(counters, "PROBE_NS", 0)


class Package:
    """A powercap tree with one package. The test advances its counter, which wraps at 10 J."""

    RANGE_UJ = 10_000_000

    def __init__(self, root, energy_uj=9_500_000):
        self.root, self.energy_uj = root, energy_uj
        zone = root / "intel-rapl:0"
        zone.mkdir(parents=True)
        (zone / "name").write_text("package-0\n")
        (zone / "max_energy_range_uj").write_text(f"{self.RANGE_UJ}\n")
        self.spend(0.0)

    def spend(self, joules):
        self.energy_uj = (self.energy_uj + round(joules * 1e6)) % self.RANGE_UJ
        path = self.root / "intel-rapl:0" / "energy_uj"
        path.with_name("new").write_text(f"{self.energy_uj}\n")
        path.with_name("new").replace(path)


def settle(monitor):
    """Make the open window longer than two updates of the counter."""
    seen = [track.pace.update_s for track in monitor.sampler.tracks if not math.isnan(track.pace.update_s)]
    time.sleep(2.2 * max(seen, default=0.0) + 0.001)


def spend(monitor, package, joules):
    """Advance the counter and read it, if this rank reads the sensors."""
    for part in range(4):
        if monitor.sampler.tracks:
            package.spend(joules / 4)
            monitor.sampler.read()
        time.sleep(0.002 * (part < 3))


def train(monitor, package):
    with monitor.window("training"):
        spend(monitor, package, 4.0)
        with monitor.window("checkpoint"):
            spend(monitor, package, 1.0)
            settle(monitor)
        settle(monitor)
    with monitor.window("validation"):
        spend(monitor, package, 0.5)
        settle(monitor)


def host(comm):
    """Return the host name of this rank. Two ranks share a host."""
    return f"host {comm.rank // 2}"


def config(root):
    return EnergyConfig(sources="rapl", interval_s=0.002, powercap=str(root), utilisation_s=0.0)


def sampler_threads():
    return [thread for thread in threading.enumerate() if thread.name == "energy sampler"]


def test_energy_of_nodes_is_summed_over_counter_wraps(tmp_path):
    packages = [Package(tmp_path / str(node)) for node in range(3)]

    def body(comm):
        package = packages[comm.rank // 2]
        with EnergyMonitor(comm, config(package.root), environment={}, host=host(comm)) as monitor:
            train(monitor, package)
            return monitor.report(), len(monitor.sampler.tracks)

    results = run_threads(5, body)
    report = results[0][0]
    assert all(result == report for result, _ in results)
    assert [tracks for _, tracks in results] == [1, 0, 1, 0, 1]
    assert report["reason"] is None and report["energy_j"] == pytest.approx(3 * 5.5)
    joules = {name: phase["joules"] for name, phase in report["phases"].items()}
    assert joules == {"training": pytest.approx(12), "checkpoint": pytest.approx(3), "validation": pytest.approx(1.5)}
    assert "gpu (node 0, 1, 2): energy.sources = 'rapl'" in report["not_included"]
    assert not sampler_threads()


@pytest.mark.parametrize(("size", "absent", "named"), [(4, (1, 3), "ranks 1, 3"), (2, (0,), "rank 0")])
@pytest.mark.full_except("4-absent0-ranks 1, 3")
def test_report_deadline_error_names_absent_ranks(tmp_path, size, absent, named):
    together = threading.Barrier(size - len(absent))

    def body(comm):
        with EnergyMonitor(comm, config(tmp_path), environment={}) as monitor:
            monitor._deadline_s = 1.0
            if comm.rank in absent:
                return
            together.wait()
            with pytest.raises(DeadlineError) as result:
                monitor.report()
            waited = f"rank {comm.rank} of world has waited 1 s, and {named} did not call"
            assert str(result.value).startswith(f"EnergyMonitor.report is collective: {waited}")

    run_threads(size, body)


def test_declared_nodes_on_one_machine_are_counted_once(tmp_path):
    package = Package(tmp_path / "0")

    def body(comm):
        with EnergyMonitor(comm, config(package.root), environment={}) as monitor:
            train(monitor, package)
            return monitor.report(), len(monitor.sampler.tracks)

    results = run_threads(4, body, ranks_per_node=1)
    assert [tracks for _, tracks in results] == [1, 0, 0, 0]
    assert results[3][0]["energy_j"] == pytest.approx(5.5)


def test_node_without_sensor_makes_total_nan_and_is_named(tmp_path):
    package = Package(tmp_path / "0")

    def body(comm):
        root = package.root if comm.rank == 0 else tmp_path / "missing"
        with EnergyMonitor(comm, config(root), environment={}, host=str(comm.rank)) as monitor:
            train(monitor, package)
            return monitor.report()

    for report in run_threads(2, body):
        assert math.isnan(report["energy_j"])
        assert report["reason"].startswith("node 1 has no cpu: ") and "missing does not exist" in report["reason"]


def test_gpu_job_is_not_measured_by_cpus_alone(tmp_path):
    package = Package(tmp_path / "0")

    def body(comm):
        chosen = EnergyConfig(powercap=str(package.root))
        with EnergyMonitor(comm, chosen, bus_id="ffff:ff:1f.0", environment={}) as monitor:  # no machine has it
            train(monitor, package)
            return monitor.report()

    report = run_threads(1, body)[0]
    assert math.isnan(report["energy_j"]) and report["reason"].startswith("node 0 has no gpu: ")
    assert report["by_kind"]["cpu"] == pytest.approx(5.5)


def test_saved_state_includes_the_open_window(tmp_path):
    package = Package(tmp_path / "0")

    def body(comm):
        with EnergyMonitor(comm, config(package.root), environment={}) as monitor, monitor.window("training"):
            spend(monitor, package, 4.0)
            settle(monitor)
            first = monitor.state()
            spend(monitor, package, 1.0)
            return first, monitor.state()

    first, second = run_threads(2, body)[1]
    assert [state["by_kind"]["cpu"] for state in (first, second)] == [pytest.approx(4.0), pytest.approx(5.0)]
    assert first["phases"]["training"]["joules"] == pytest.approx(4.0) and first["reason"] is None


def test_monitor_without_source_starts_no_thread_and_does_not_wait(tmp_path):
    waits = []

    def body(comm):
        chosen = EnergyConfig(powercap=str(tmp_path / "missing"), utilisation_s=0.0)
        with EnergyMonitor(comm, chosen, synchronise=lambda: waits.append(1), environment={}) as monitor:
            assert not monitor.measures and not sampler_threads()
            with monitor.window("training"):
                pass
            assert monitor.collect() == []
            return monitor.report(), monitor.state()

    report, state = run_threads(2, body)[0]
    assert math.isnan(report["energy_j"]) and "no source can be read" in report["reason"]
    assert all(word in report["reason"] for word in ("gpu (node 0): ", "cpu (node 0): ", "does not exist"))
    assert state["phases"]["training"]["joules"] is None and not waits


def test_all_ranks_of_a_measuring_node_synchronise_at_each_edge(tmp_path):
    packages, waits = [Package(tmp_path / "0")], [0, 0, 0]

    def body(comm):
        def wait():
            waits[comm.rank] += 1

        root = packages[0].root if comm.rank < 2 else tmp_path / "missing"
        with (
            EnergyMonitor(comm, config(root), synchronise=wait, environment={}, host=host(comm)) as monitor,
            monitor.window("training"),
            monitor.window("checkpoint"),
        ):
            pass

    run_threads(3, body)
    assert waits == [4, 4, 0]


def test_exception_in_a_window_stops_the_sampler(tmp_path):
    package = Package(tmp_path / "0")

    def body(comm):
        with EnergyMonitor(comm, config(package.root), environment={}) as monitor, monitor.window("training"):
            assert sampler_threads()
            raise ArithmeticError("the loss is NaN")

    with pytest.raises(ArithmeticError):
        run_threads(1, body)
    assert not sampler_threads()


def test_samples_of_all_nodes_are_collected_on_first_ranks(tmp_path):
    packages = [Package(tmp_path / str(node)) for node in range(2)]

    def body(comm):
        package = packages[comm.rank // 2]
        with EnergyMonitor(comm, config(package.root), environment={}, host=host(comm)) as monitor:
            train(monitor, package)
            return monitor.collect(), monitor.collect()

    for rank, (rows, again) in enumerate(run_threads(4, body)):
        if rank % 2:
            assert rows == again == []
            continue
        assert [row.node for row in rows] == [0, 1]
        assert all([window.phase for window in row.windows] == ["checkpoint", "training", "validation"] for row in rows)
        assert all(row.drained.samples[-1, 2] - row.drained.samples[0, 2] == 5500 for row in rows)
        assert not any(row.windows for row in again)


def test_power_and_utilisation_are_known_on_first_ranks_of_nodes(tmp_path):
    packages = [Package(tmp_path / str(node)) for node in range(2)]

    def body(comm):
        package = packages[comm.rank // 2]
        chosen = EnergyConfig(sources="rapl", interval_s=0.002, powercap=str(package.root), utilisation_s=0.02)
        with EnergyMonitor(comm, chosen, environment={}, host=host(comm)) as monitor:
            assert monitor.live.power() == monitor.live.utilisation() == {}
            seen, counts = monitor.sampler.intervals(), 0
            for _ in range(3):
                spend(monitor, package, 2.0)
                time.sleep(0.15)
                rows = monitor.collect()
                later = monitor.sampler.intervals()
                counts += sum(len(one.times_ns) for one in later)
                if seen and len(seen[0].times_ns):
                    assert later[0].times_ns[0] == seen[0].times_ns[-1], "no time is missed between two calls"
                    assert later[0].energy_mj[-1] - seen[0].energy_mj[-1] <= 2001
                seen = later
            looks = sum(len(row.drained.looks) for row in rows)
            return counts, looks, monitor.live.power(), monitor.live.utilisation(), monitor.report()["sampler_share"]

    results = run_threads(4, body)
    for rank, (counts, looks, power, shares, overhead) in enumerate(results):
        assert 0 <= overhead < math.inf
        if rank % 2:
            assert (counts, power, shares) == (0, {}, {}), "only the first rank of a node knows"
            continue
        assert counts > 4 and looks >= 2
        assert power["cpu"] > 0 and 0 <= shares["node_cpu"] <= 1 and 0 < shares["memory"] < 1
    assert results[0][2] == results[2][2], "both first ranks report the same job"


def test_utilisation_needs_no_source_and_no_synchronisation(tmp_path):
    waits = []

    def body(comm):
        chosen = EnergyConfig(sources="none", utilisation_s=0.02)
        with EnergyMonitor(comm, chosen, synchronise=lambda: waits.append(1), environment={}) as monitor:
            with monitor.window("training"):
                time.sleep(0.3)
            rows = monitor.collect()
            assert not monitor.measures and monitor.sampler.intervals() == []
            return len(rows), monitor.live.utilisation(), monitor.live.power(), monitor.report()["energy_j"]

    (count, shares, power, joules), (others, *_) = run_threads(2, body)
    assert count == 1 and others == 0 and "node_cpu" in shares and power == {} and math.isnan(joules)
    assert not waits and not sampler_threads()


def test_gap_in_power_invalidates_its_window_and_the_total(tmp_path, monkeypatch):
    """The integrated power has a gap that is too long to be bridged."""
    now, watts = [0], [50_000]
    counter = IntegratedPower("GPU-0", lambda: watts[0], SourceInfo(), 0.1, lambda: now[0])
    monkeypatch.setattr(monitors, "open_node_sources", lambda *_: NodeSources([counter]))

    def read_after(monitor, *seconds):
        for one in seconds:
            now[0] += round(one * 1e9)
            monitor.sampler.read()

    def body(comm):
        chosen = EnergyConfig(sources="nvml", interval_s=10.0, utilisation_s=0.0)
        monkeypatch.setattr(counter, "_bridge_ns", 10**9)
        with EnergyMonitor(comm, chosen, environment={}) as monitor:
            with monitor.window("training"):
                read_after(monitor, 0.5, 0.5)
                with monitor.window("checkpoint"):
                    read_after(monitor, 0.5, 0.5)
                    settle(monitor)
                read_after(monitor, 0.5, 30.0, 0.5)
                settle(monitor)
            return monitor.report(), monitor.collect()[0].drained

    report, drained = run_threads(1, body)[0]
    checkpoint = report["phases"]["checkpoint"]
    assert checkpoint["joules"] == pytest.approx(50.0), checkpoint["reason"]
    assert math.isnan(report["phases"]["training"]["joules"]) and math.isnan(report["energy_j"])
    assert "its power was not always known (1 gaps)" in report["reason"]
    assert len(drained.gaps) == 1 and report["sources"][0]["note"] == "integrated power"


def test_sensors_are_not_read_after_the_end(monkeypatch):
    """The state is written once more after the end. A read of the closed driver would fail."""
    closed = []

    def power_mw():
        if closed:
            raise counters.SensorReadError("the driver says: Uninitialized")
        return 50_000

    sources = NodeSources([IntegratedPower("GPU-0", power_mw, SourceInfo(), 0.1)])
    monkeypatch.setattr(NodeSources, "close", lambda self: closed.append(True))
    monkeypatch.setattr(monitors, "open_node_sources", lambda *_: sources)

    def body(comm):
        chosen = EnergyConfig(sources="nvml", interval_s=0.005, utilisation_s=0.0)
        with EnergyMonitor(comm, chosen, environment={}) as monitor:
            with monitor.window("training"):
                time.sleep(0.05)
            before = monitor.state()
        return before, (monitor.state(), monitor.collect()[0].drained.samples), monitor.report()["sources"][0]

    before, (after, samples), source = run_threads(1, body)[0]
    assert closed and before == after and len(samples)
    assert source["failed_reads"] == 0
