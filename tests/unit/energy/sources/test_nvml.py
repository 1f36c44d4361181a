"""NVIDIA GPUs through the real pynvml, on a stub of the driver's library that is compiled from C.

Each test is a separate program, since the dynamic loader reads LD_LIBRARY_PATH when a process starts.
"""

import json
import sys

import pytest

from harness import jobs
from hpcdist.energy.sources import nvml
from hpcdist.errors import MissingCapabilityError

PRELUDE = """
import json, math, os, sys, threading, time
from pathlib import Path
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.energy.sources import counters, nvml
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.sources.counters import SensorReadError, CounterReader
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.errors import MissingCapabilityError

NVML_ONLY = EnergyConfig(sources="nvml", interval_s=0.005, utilisation_s=0.0)
driver = nvml.NvmlDriver

def set_counters(**mj):
    '''Set the ENERGY of GPUs, by uuid with _ for -.'''
    path = Path(os.environ["NVML_STUB"])
    rows = [line.split() for line in path.read_text().splitlines()]
    new = [[*row[:4], mj.get(row[0].replace("-", "_"), row[4]), *row[5:]] for row in rows]
    path.with_suffix(".new").write_text("".join(" ".join(row) + "\\n" for row in new))
    path.with_suffix(".new").replace(path)

def error_text(call):
    try:
        call()
    except (MissingCapabilityError, SensorReadError) as error:
        return str(error)

def print_json(value):
    print(json.dumps(value))
"""


def gpu(number, energy="fixed:1000", mig=0, name="H200", more=""):
    return f"GPU-{number:02d} 00000000:{number + 16:02X}:00.0 {name} {mig} {energy} {more}\n"


@pytest.fixture
def program(nvml_environment, tmp_path):
    """``program(gpus, source, **environment)`` returns the printed JSON, or all output with ``raw``."""

    def run(gpus, source, *, raw=False, **environment):
        (tmp_path / "gpus").write_text("".join(gpus))
        done = jobs.python(PRELUDE + source, env=nvml_environment | environment)
        assert done.returncode == 0, done.stderr
        return done.stdout if raw else json.loads(done.stdout.splitlines()[-1])

    return run


TWELVE = [gpu(number) for number in range(12)]
OF_TWELVE = {
    "11,3,7": [11, 3, 7],
    "10": [10],
    "GPU-11,GPU-02": [11, 2],
    " 2 , 1": [2, 1],
    "0,12,1": [0],  # CUDA stops at the first invalid index
    "-1": [],
    "1,-1,2": [1],
    "NoDevFiles": [],
    "GPU-1": [],  # a prefix of two UUIDs
    "": [],
}
VISIBLE = """
with driver() as one:
    print_json({value: nvml.gpus_in_use(one, None, {nvml.VISIBLE_GPUS: value}) for value in VALUES})
"""


def test_visible_gpus_follow_cuda_order(program):
    result = program(TWELVE, f"VALUES = {[*OF_TWELVE]}{VISIBLE}")
    assert result == {value: [f"GPU-{number:02d}" for number in gpus] for value, gpus in OF_TWELVE.items()}


def test_gpu_of_a_rank_is_found_by_pci_address(program):
    source = (
        "with driver() as one:\n"
        "    print_json([nvml.gpus_in_use(one, '0000:1b:00.0', {}), error_text(lambda: one.at('0000:ff:00.0'))])"
    )
    result, reason = program(TWELVE, source, CUDA_VISIBLE_DEVICES="3")
    assert result == ["GPU-11"] and "NVML finds no GPU at PCI 0000:ff:00.0" in reason


def test_index_of_unlike_gpus_needs_bus_order(program):
    source = """
first = {nvml.VISIBLE_GPUS: "0"}
with driver() as one:
    message = error_text(lambda: nvml.gpus_in_use(one, None, first))
    by_bus = nvml.gpus_in_use(one, None, first | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    print_json([message, by_bus, nvml.gpus_in_use(one, None, {nvml.VISIBLE_GPUS: "GPU-00"})])
"""
    output, by_bus, by_uuid = program([gpu(0, name="T400"), gpu(1)], source)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in output and by_bus == by_uuid == ["GPU-00"]


def test_gpu_without_counter_is_rejected_with_reason(program):
    gpus = [gpu(0, "unsupported"), gpu(2, "lost")]
    source = """
with driver() as one:
    unsupported, unknown = (error_text(lambda: one.counter(f"GPU-{n}")) for n in ("00", "77"))
    lost = error_text(one.counter("GPU-02").read)
    power = error_text(one.counter("GPU-02").power_mw)
print_json([unsupported, unknown, lost, power])
"""
    words = ["has no energy counter, and reports no power", "cannot access the GPU", "GPU is lost", "GPU is lost"]
    for result, word in zip(program(gpus, source), words, strict=True):
        assert word in result


def test_failed_reads_are_counted_and_reloaded_driver_is_detected(program):
    source = """
with driver() as one:
    track = CounterReader(one.counter("GPU-00"))
    values = []
    for number, energy in enumerate(["fixed:9007199254740993", "lost", "lost", "fixed:9007199254740999",
                                  "fixed:18446744073709551615", "fixed:9007199254741000", "fixed:5"]):
        set_counters(GPU_00=energy)
        values.append(track.read(number))
print_json([values, track.failed_reads, track.explain()])
"""
    values, failed, why = program([gpu(0)], source)
    assert values == [9007199254740993, None, None, 9007199254740999, None, 9007199254741000, None]
    assert failed == 3 and "went back" in why


def test_missing_driver_is_reported_with_reason(program):
    source = "print_json([error_text(driver), 'pynvml' in sys.modules])"
    assert program([], source, LD_LIBRARY_PATH="") == [
        "no NVIDIA driver is available (NVML Shared Library Not Found); run nvidia-smi",
        True,
    ]
    assert "Driver Not Loaded" in program([], source, NVML_STUB="/nowhere")[0]


def test_missing_pynvml_is_reported_with_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.load_pynvml.cache_clear()
    try:
        with pytest.raises(MissingCapabilityError, match=r"install hpcdist\[nvml\]"):
            nvml.NvmlDriver()
    finally:
        nvml.load_pynvml.cache_clear()


# Rank 0 advances the counters while the other ranks wait, so the energy of a window is exact on slow machines.
JOB = """
counters.PROBE_NS = 0  # the pace of a counter is settled after three changes

def spend(monitor, comm, **mj):
    comm.barrier()
    if comm.rank == 0:
        set_counters(**{uuid: f"fixed:{value}" for uuid, value in mj.items()})
    comm.barrier()
    monitor.sampler.read()

def settle(monitor, comm):
    '''Make the window longer than two updates, as far as this rank has seen any.'''
    seen = [track.pace.update_s for track in monitor.sampler.tracks]
    longest = max([0.0, *(one for row in comm.allgather_object(seen) for one in row if not math.isnan(one))])
    time.sleep(2.2 * longest + 0.001)

def body(comm):
    host = f"host {comm.rank // RANKS}"
    with EnergyMonitor(comm, NVML_ONLY, bus_id=BUS[comm.rank], environment={}, host=host) as monitor:
        running = [thread.name for thread in threading.enumerate()].count("energy sampler")
        with monitor.window("training"):
            for mj in (1000, 2000, 3000):
                spend(monitor, comm, GPU_00=mj, GPU_01=2 * mj, GPU_02=0)
                time.sleep(0.01)
            settle(monitor, comm)
            with monitor.window("checkpoint"):
                spend(monitor, comm, GPU_00=3500, GPU_01=7000, GPU_02=SECOND)
                settle(monitor, comm)
            spend(monitor, comm, GPU_00=4500, GPU_01=9000, GPU_02=2 * SECOND)
        report = monitor.report()
    return report, running, len(monitor.sampler.tracks)

def run(size):
    results = run_threads(size, body)
    left = [thread.name for thread in threading.enumerate()].count("energy sampler")
    print_json([[r[0] for r in results], [r[1] for r in results], [r[2] for r in results], left])
"""
THREE = [gpu(number, "fixed:0") for number in range(3)]


def test_node_has_one_sampler_and_shared_gpu_is_counted_once(program):
    # node 0: both ranks on GPU-00; node 1: one rank on GPU-01, one on GPU-00, which the nodes of this test share
    source = JOB + "SECOND = 0\nBUS = [f'0000:{bus}:00.0' for bus in (10, 10, 11, 10)]\nRANKS = 2\nrun(4)"
    reports, running, tracks, left = program(THREE, source)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert tracks == [1, 0, 2, 0] and max(running) <= 2 and left == 0
    assert [(row["node"], row["name"]) for row in report["sources"]] == [(0, "GPU-00"), (1, "GPU-00"), (1, "GPU-01")]
    assert [row["note"] for row in report["sources"]] == ["shared by 2 ranks", "", ""]
    assert report["reason"] is None
    assert report["energy_j"] == pytest.approx(4.5 + 4.5 + 9.0)
    assert report["phases"]["checkpoint"]["joules"] == pytest.approx(0.5 + 0.5 + 1.0)
    assert report["phases"]["training"]["joules"] == pytest.approx(4.0 + 4.0 + 8.0)


def test_stuck_or_unmeasurable_gpu_makes_total_nan(program):
    source = JOB + "SECOND = 0\nBUS = [f'0000:{bus}:00.0' for bus in (10, 12)]\nRANKS = 1\nrun(2)"
    report = program(THREE, source)[0][0]
    assert report["energy_j"] != report["energy_j"]
    assert report["reason"] == "node 1, GPU-02: its counter did not move twice"
    report = program([*THREE[:2], gpu(2, "unsupported")], source)[0][0]
    assert report["energy_j"] != report["energy_j"]
    assert "node 1 has no gpu: GPU-02: a H200 has no energy counter, and reports no power" in report["reason"]


def test_totals_continue_after_resume_on_other_nodes(program):
    source = (
        """
SECOND = 0
RANKS = 2
BUS = ["0000:10:00.0"] * 4
"""
        + JOB.replace("    with EnergyMonitor(", "    monitor = EnergyMonitor(")
        .replace(" as monitor:\n", "\n    monitor.restore(STATE)\n    with monitor:\n")
        .replace("report = monitor.report()", "report = json.loads(json.dumps(monitor.state()))")
        + """
STATE = None
first = run_threads(4, body)[0][0]
STATE = first
set_counters(GPU_00="fixed:0")
print_json([first, run_threads(1, body)[0][0]])
"""
    )
    first, second = program(THREE, source)
    assert first["by_kind"]["gpu"] == pytest.approx(9.0) and second["by_kind"]["gpu"] == pytest.approx(9.0 + 4.5)
    assert second["phases"]["checkpoint"]["joules"] == pytest.approx(1.5)
    assert second["reason"] is None


def test_counter_on_running_clock_gives_watts_times_seconds(program):
    """Ten watts with a step every 20 ms: joules are watts times seconds, apart from late edges."""
    source = """
def body(comm):
    with EnergyMonitor(comm, NVML_ONLY, bus_id="0000:10:00.0", environment={}) as monitor:
        with monitor.window("training"):
            time.sleep(0.8)
        rows = monitor.collect()[0]
        return monitor.report(), rows.drained.samples.tolist(), [source[:2] for source in rows.sources]
print_json(run_threads(1, body)[0])
"""
    report, samples, sources = program([gpu(0, "power:10000:20")], source)
    training = report["phases"]["training"]
    assert training["joules"] == pytest.approx(10 * training["seconds"], rel=0.25)
    assert report["sources"][0]["update_s"] >= 0.015
    assert sources == [["gpu", "GPU-00"]] and all(row[1] == 0 for row in samples) and len(samples) > 10
    assert all(isinstance(value, int) for row in samples for value in row)


def test_command_lists_every_source_with_reason(program, tmp_path):
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("5")
    source = f"""
from hpcdist.cli.main import main
main(["energy", "sources", "--json", "--powercap", "{zone.parent}", "--pm-counters", "{tmp_path}/none"])"""
    gpus = [gpu(0, more="instant=7 module=9"), gpu(1, mig=1, name="A100"), gpu(2, "unsupported"), gpu(3, "unsupported")]
    gpus[3] = gpu(3, "unsupported", more="power=5000")
    result = program(gpus, source, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    rows = {row["name"]: row for row in result["sources"]}
    names = [f"GPU-0{number}" for number in range(4)]
    assert result["readable"] and list(rows) == [*names, "package-0", "rapl", "pm_counters", "declared"]
    assert [rows[name]["readable"] for name in rows] == [True, True, False, True, True, False, False, False]
    assert [rows[name].get("held") for name in names] == [False, True, False, False]
    assert "no energy counter" in rows["GPU-02"]["reason"] and "no dram zone" in rows["rapl"]["reason"]
    assert "does not exist" in rows["pm_counters"]["reason"] and "only on request" in rows["declared"]["reason"]
    assert [rows[names[number]]["power"] for number in (0, 3)] == ["instant of the gpu", "usage of the gpu"]
    assert rows["GPU-01"]["note"] == nvml.MIG_NOTE and rows["GPU-03"]["note"] == "integrated power"
    assert rows["GPU-01"]["sensor"][:2] == [0.1, 0.025]
    lines = program(gpus, source.replace('"--json", ', ""), CUDA_VISIBLE_DEVICES="", raw=True)
    assert "power: instant of the gpu" in lines and "averages 25 ms of every 100 ms" in lines


INSTANCES = [
    gpu(0),
    gpu(1, mig=1, more="instance=MIG-a1 instance=MIG-a2 average=50000"),
    gpu(2, mig=1, more="instance=MIG-b1"),
]


OF_INSTANCES = {
    "MIG-a2": ["GPU-01"],
    "MIG-a1,MIG-a2": ["GPU-01"],
    "MIG-b1,MIG-a1,0": ["GPU-02", "GPU-01", "GPU-00"],
    "MIG-b1,MIG-b1,0": ["GPU-02"],  # CUDA stops at a repeated name
    "MIG-zz,0": [],
    "MIG-GPU-02/1/0": ["GPU-02"],  # as older drivers name them
}


def test_mig_instance_selects_its_gpu(program):
    assert program(INSTANCES, f"VALUES = {[*OF_INSTANCES]}{VISIBLE}") == OF_INSTANCES


def test_partitioned_gpu_is_counted_once_and_marked(program):
    """Four ranks of one node on three instances of two GPUs."""
    source = """
counters.PROBE_NS = 0
NAMES = ["MIG-a1", "MIG-a2", "MIG-b1", "MIG-a1"]
def body(comm):
    environment = {"CUDA_VISIBLE_DEVICES": NAMES[comm.rank]}
    with EnergyMonitor(comm, NVML_ONLY, environment=environment, host="one") as monitor:
        with monitor.window("training"):
            for mj in (2000, 3000, 4000):
                comm.barrier()
                if comm.rank == 0:
                    set_counters(GPU_01=f"fixed:{mj}", GPU_02=f"fixed:{2 * mj}")
                comm.barrier()
                monitor.sampler.read()
                time.sleep(0.02)
            time.sleep(0.1)
        report = monitor.report()
        rows = monitor.collect()
    abouts = [(name, about.ranks, about.power_field) for row in rows for _, name, about in row.sources]
    return report, abouts
report, abouts = run_threads(4, body)[0]
print_json([report, abouts])
"""
    report, abouts = program([line.replace("fixed:1000", "fixed:0") for line in INSTANCES], source)
    assert abouts == [["GPU-01", 3, "average"], ["GPU-02", 1, ""]]
    assert [row["note"] for row in report["sources"]] == [f"shared by 3 ranks; {nvml.MIG_NOTE}", nvml.MIG_NOTE]
    assert report["reason"] is None and report["energy_j"] == pytest.approx(4 + 8)


def test_power_uses_the_best_field_and_keeps_its_scope(program):
    gpus = [
        gpu(0, more="power=1 average=2 instant=3 module=4"),
        gpu(1, more="power=1 average=2 module=4"),
        gpu(2, more="power=1 module=4"),
        gpu(3, more="power=1"),
        gpu(4),
    ]
    source = """
with driver() as one:
    sensors = [one.counter(f"GPU-0{number}") for number in range(5)]
    print_json([[c.about.power_field, c.about.power_scope, c.power_mw(), c.read()] for c in sensors])
"""
    assert program(gpus, source) == [
        ["instant", "gpu", 3, 1000],
        ["average", "gpu", 2, 1000],
        ["instant", "module", 4, 1000],
        ["usage", "gpu", 1, 1000],
        ["", "", None, 1000],
    ]


def test_power_is_integrated_if_gpu_has_no_counter(program):
    """The power falls from 50 W to 10 W, and the driver is silent for too long to be bridged."""
    source = """
from hpcdist.energy.sources import counters
now = [0]
real = counters.IntegratedPower
integrated_with_clock = lambda *arguments, **named: real(*arguments, clock_ns=lambda: now[0], **named)
nvml.IntegratedPower = integrated_with_clock

def tell_power(words):
    path = Path(os.environ["NVML_STUB"])
    path.write_text("GPU-00 00000000:10:00.0 P4 0 unsupported " + words + "\\n")

with driver() as one:
    counter = one.counter("GPU-00", 1, 0.1)
    track, values = CounterReader(counter), []
    for seconds, words in [(0, "power=50000"), (1, "power=50000"), (1.5, "power=10000"), (2, ""), (2.5, "power=10000"),
                           (3, "power=10000"), (9, "power=10000"), (10, "power=10000")]:
        now[0] = round(seconds * 1e9)
        tell_power(words)
        values.append([track.read(now[0]), track.gaps])
    print_json([values, track.failed_reads, track.explain(), counter.about.note, counter.about.power_field])
"""
    values, failed, why, note, field = program([gpu(0, "unsupported", name="P4", more="power=50000")], source)
    mj = [0, 50_000, 65_000, None, 75_000, 80_000, 80_000, 90_000]
    assert values == [[value, int(place >= 6)] for place, value in enumerate(mj)]
    assert failed == 1 and "power was not always known (1 gaps)" in why
    assert note == "integrated power" and field == "usage"


def test_counter_and_integrated_power_agree(program):
    """The stub driver reports 300 W both as energy and as power, over a running clock."""
    source = """
from dataclasses import replace
from hpcdist.energy.sources.counters import IntegratedPower
with driver() as one:
    counter = one.counter("GPU-00")
    watts = IntegratedPower("GPU-00", counter._sensor.power_mw, counter.about, 0.01)
    first, then = counter.read(), watts.read()
    for _ in range(100):
        time.sleep(0.005)
        last, now = counter.read(), watts.read()
    print_json([(last - first) / 1e3, (now - then) / 1e12])
"""
    counted, integrated = program([gpu(0, "power:300000:1", more="instant=300000")], source)
    assert counted > 100 and integrated == pytest.approx(counted, rel=0.05)


def test_gpu_utilisation_needs_all_gpus(program):
    source = """
from hpcdist.energy.sources.utilisation import COLUMNS
def body(comm):
    chosen = EnergyConfig(sources="none", utilisation_s=0.05)
    bus = f"0000:{10 + comm.rank}:00.0"
    with EnergyMonitor(comm, chosen, bus_id=bus, environment={}, host="one") as monitor:
        rows = []
        while not rows or not len(rows[0].drained.looks):
            time.sleep(0.02)
            rows = monitor.collect() or rows
            if comm.rank: break
        return monitor.measures, monitor.live.utilisation(), monitor.live.power(), monitor.report()["reason"]
print_json(run_threads(2, body)[0])
"""
    gpus = [gpu(0, more="use=90:5 memory=30:100"), gpu(1, "lost", more="use=50:5 memory=50:100")]
    measures, shares, power, reason = program(gpus, source)
    assert not measures and power == {} and "energy.sources = 'none'" in reason
    assert "gpu" not in shares and 0 <= shares["node_cpu"] <= 1, "half of the GPUs is no measurement"
    gpus[1] = gpu(1, more="use=50:5 memory=50:100")
    shares = program(gpus, source)[1]
    assert (shares["gpu"], shares["gpu_memory"]) == (pytest.approx(0.7), pytest.approx(0.4))
