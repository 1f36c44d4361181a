"""NVIDIA GPUs through the real pynvml, over a stand-in for the driver's library that a C compiler makes of a file.

Each test is a program of its own, since the dynamic loader reads LD_LIBRARY_PATH when a process starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist.energy import nvml
from hpcdist.errors import MissingCapabilityError

LIMIT_S = 120
PRELUDE = """
import json, math, os, sys, threading, time
from pathlib import Path
from hpcdist.comm.threads import run_threads
from hpcdist.energy import counters, nvml
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.counters import ReadError, Track
from hpcdist.energy.monitor import Monitor
from hpcdist.errors import MissingCapabilityError

NVML_ONLY = EnergyConfig(sources="nvml", interval_s=0.005)
driver = nvml.Driver

def set_counters(**mj):
    '''Give GPUs, by uuid with - for _, another ENERGY.'''
    path = Path(os.environ["NVML_STUB"])
    rows = [line.split() for line in path.read_text().splitlines()]
    new = [[*row[:4], mj.get(row[0].replace("-", "_"), row[4])] for row in rows]
    path.with_suffix(".new").write_text("".join(" ".join(row) + "\\n" for row in new))
    path.with_suffix(".new").replace(path)

def refused(call):
    try:
        call()
    except (MissingCapabilityError, ReadError) as error:
        return str(error)

def tell(value):
    print(json.dumps(value))
"""


def gpu(number, energy="fixed:1000", mig=0, name="H200"):
    return f"GPU-{number:02d} 00000000:{number + 16:02X}:00.0 {name} {mig} {energy}\n"


@pytest.fixture
def program(nvml_stub, tmp_path):
    """``program(gpus, source, **environment)`` -> what the program told."""

    def run(gpus, source, **environment):
        (tmp_path / "gpus").write_text("".join(gpus))
        added = {"LD_LIBRARY_PATH": str(nvml_stub), "NVML_STUB": str(tmp_path / "gpus")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        added["PYTHONPATH"] = os.pathsep.join([str(Path(hpcdist.__file__).parents[1]), kept.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + source],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=kept | added | environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


TWELVE = [gpu(number) for number in range(12)]
VISIBLE = "with driver() as open_driver:\n    tell(nvml.used(open_driver, None, os.environ))"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("11,3,7", [11, 3, 7]),
        ("10", [10]),
        ("GPU-11,GPU-02", [11, 2]),
        (" 2 , 1", [2, 1]),
        ("0,12,1", [0]),  # CUDA stops at the first that is none
        ("-1", []),
        ("1,-1,2", [1]),
        ("NoDevFiles", []),
        ("GPU-1", []),  # the beginning of two
        ("", []),
    ],
)
def test_twelve_gpus_in_the_order_of_cuda(program, variable, expected):
    assert program(TWELVE, VISIBLE, CUDA_VISIBLE_DEVICES=variable) == [f"GPU-{number:02d}" for number in expected]


def test_a_rank_on_a_gpu_is_found_by_its_pci_address(program):
    source = (
        "with driver() as one:\n    tell([nvml.used(one, '0000:1b:00.0', {}), refused(lambda: one.at('0000:ff:00.0'))])"
    )
    found, reason = program(TWELVE, source, CUDA_VISIBLE_DEVICES="3")
    assert found == ["GPU-11"] and "NVML does not find the GPU at 0000:ff:00.0" in reason


def test_unlike_gpus_have_no_index_but_in_bus_order(program):
    gpus = [gpu(0, name="T400"), gpu(1)]
    asked = "with driver() as one:\n    tell(refused(lambda: nvml.used(one, None, os.environ)))"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in program(gpus, asked, CUDA_VISIBLE_DEVICES="0")
    assert program(gpus, VISIBLE, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["GPU-00"]
    assert program(gpus, VISIBLE, CUDA_VISIBLE_DEVICES="GPU-00") == ["GPU-00"]


def test_what_has_no_counter_of_its_own_is_refused_with_the_reason(program):
    gpus = [gpu(0, "unsupported"), gpu(1, mig=1), gpu(2, "lost")]
    source = """
with driver() as one:
    unsupported, mig, unknown = (refused(lambda: one.counter(f"GPU-{n}")) for n in ("00", "01", "77"))
    lost = refused(one.counter("GPU-02").read)
instance = refused(lambda: nvml.visible([], {"CUDA_VISIBLE_DEVICES": "MIG-5"}))
tell([unsupported, mig, unknown, lost, instance])
"""
    words = ["has no energy counter", "in MIG mode", "cannot see it", "GPU is lost", "MIG instance"]
    for found, word in zip(program(gpus, source), words, strict=True):
        assert word in found


def test_failing_reads_and_a_driver_that_was_reloaded(program):
    source = """
with driver() as one:
    track = Track(one.counter("GPU-00"))
    values = []
    for number, energy in enumerate(["fixed:9007199254740993", "lost", "lost", "fixed:9007199254740999", "fixed:5"]):
        set_counters(GPU_00=energy)
        values.append(track.read(number))
tell([values, track.failed_reads, track.explain()])
"""
    values, failed, why = program([gpu(0)], source)
    assert values == [9007199254740993, None, None, 9007199254740999, None]
    assert failed == 2 and "went back" in why


def test_without_a_driver_the_loader_is_asked_and_the_reason_told(program):
    source = "tell([refused(driver), 'pynvml' in sys.modules])"
    assert program([], source, LD_LIBRARY_PATH="") == [
        "no NVIDIA driver answers (NVML Shared Library Not Found)",
        True,
    ]
    assert "Driver Not Loaded" in program([], source, NVML_STUB="/nowhere")[0]


def test_without_pynvml_the_reason_is_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.binding.cache_clear()
    try:
        with pytest.raises(MissingCapabilityError, match=r"install hpcdist\[nvml\]"):
            nvml.Driver()
    finally:
        nvml.binding.cache_clear()


# Rank 0 turns the counters, everybody else waits: what a window costs is exact, however slow the machine is.
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
    longest = max([0.0, *(one for found in comm.allgather_object(seen) for one in found if not math.isnan(one))])
    time.sleep(2.2 * longest + 0.001)

def body(comm):
    with Monitor(comm, NVML_ONLY, bus_id=BUS[comm.rank], environment={}, host=f"host {comm.rank // RANKS}") as monitor:
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
    tell([[r[0] for r in results], [r[1] for r in results], [r[2] for r in results], left])
"""
THREE = [gpu(number, "fixed:0") for number in range(3)]


def test_one_sampler_a_node_and_a_shared_gpu_once(program):
    # node 0: both ranks on GPU-00; node 1: one rank on GPU-01, one on GPU-00, which the nodes of this test share
    source = JOB + "SECOND = 0\nBUS = [f'0000:{bus}:00.0' for bus in (10, 10, 11, 10)]\nRANKS = 2\nrun(4)"
    reports, running, tracks, left = program(THREE, source)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert tracks == [1, 0, 2, 0] and max(running) <= 2 and left == 0
    assert [(row["node"], row["name"]) for row in report["sources"]] == [(0, "GPU-00"), (1, "GPU-00"), (1, "GPU-01")]
    assert report["reason"] is None
    assert report["energy_j"] == pytest.approx(4.5 + 4.5 + 9.0)
    assert report["phases"]["checkpoint"]["joules"] == pytest.approx(0.5 + 0.5 + 1.0)
    assert report["phases"]["training"]["joules"] == pytest.approx(4.0 + 4.0 + 8.0)


def test_a_gpu_that_does_not_move_or_cannot_be_measured_takes_the_total(program):
    source = JOB + "SECOND = 0\nBUS = [f'0000:{bus}:00.0' for bus in (10, 12)]\nRANKS = 1\nrun(2)"
    report = program(THREE, source)[0][0]
    assert report["energy_j"] != report["energy_j"]
    assert report["reason"] == "node 1, GPU-02: its counter did not move twice"
    report = program([*THREE[:2], gpu(2, mig=1)], source)[0][0]
    assert report["energy_j"] != report["energy_j"] and "node 1 has no gpu: GPU-02: in MIG mode" in report["reason"]


def test_totals_survive_a_resume_on_other_nodes(program):
    source = (
        """
SECOND = 0
RANKS = 2
BUS = ["0000:10:00.0"] * 4
"""
        + JOB.replace("    with Monitor(", "    monitor = Monitor(")
        .replace(" as monitor:\n", "\n    monitor.restore(STATE)\n    with monitor:\n")
        .replace("report = monitor.report()", "report = json.loads(json.dumps(monitor.state()))")
        + """
STATE = None
first = run_threads(4, body)[0][0]
STATE = first
set_counters(GPU_00="fixed:0")
tell([first, run_threads(1, body)[0][0]])
"""
    )
    first, second = program(THREE, source)
    assert first["by_kind"]["gpu"] == pytest.approx(9.0) and second["by_kind"]["gpu"] == pytest.approx(9.0 + 4.5)
    assert second["phases"]["checkpoint"]["joules"] == pytest.approx(1.5)
    assert second["reason"] is None


def test_the_counter_of_a_running_clock(program):
    """Ten watts, stepping every 20 ms: joules are watts times seconds, up to what the edges are late."""
    source = """
def body(comm):
    with Monitor(comm, NVML_ONLY, bus_id="0000:10:00.0", environment={}) as monitor:
        with monitor.window("training"):
            time.sleep(0.8)
        rows = monitor.collect()[0]
        return monitor.report(), rows.samples.tolist(), rows.sources
tell(run_threads(1, body)[0])
"""
    report, samples, sources = program([gpu(0, "power:10000:20")], source)
    training = report["phases"]["training"]
    assert training["joules"] == pytest.approx(10 * training["seconds"], rel=0.25)
    assert report["sources"][0]["update_s"] >= 0.015
    assert sources == [["gpu", "GPU-00"]] and len(samples) > 10
    assert all(isinstance(value, int) for row in samples for value in row)


def test_the_command_line_lists_every_source_with_its_reason(program, tmp_path):
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("5")
    source = f"from hpcdist.cli.main import main\nmain(['energy', 'sources', '--json', '--powercap', '{zone.parent}'])"
    found = program([gpu(0), gpu(1), gpu(2, "unsupported")], source, CUDA_VISIBLE_DEVICES="1")
    rows = {row["name"]: row for row in found["sources"]}
    assert found["readable"] and list(rows) == ["GPU-00", "GPU-01", "GPU-02", "package-0", "rapl"]
    assert [rows[name]["readable"] for name in rows] == [True, True, False, True, False]
    assert [rows[f"GPU-0{number}"]["held"] for number in range(3)] == [False, True, False]
    assert "no energy counter" in rows["GPU-02"]["reason"] and "no dram zone" in rows["rapl"]["reason"]
