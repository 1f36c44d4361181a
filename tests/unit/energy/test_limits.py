"""Power and clock limits: requested limits are in force, and earlier limits are restored after every kind of exit.

GPUs belong to the stub driver, through the real pynvml. Each GPU test is a separate program, since the dynamic loader
reads LD_LIBRARY_PATH when a process starts. Processors are file trees like sysfs.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.energy import limit_devices, limit_journal, power_limits
from hpcdist.energy.limit_devices import check_value
from hpcdist.energy.limit_journal import ChangedLimit
from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError

PRELUDE = """
import atexit, json, os, signal, sys, threading, time
from pathlib import Path
from hpcdist.energy import limit_devices, limit_journal, power_limits
from hpcdist.energy.sources import nvml
from hpcdist.energy.limit_devices import GPU_CLOCK, GPU_POWER
from hpcdist.energy.limit_devices import check_value
from hpcdist.errors import ConfigurationError, HpcdistError, MissingCapabilityError

FOLDER = Path(os.environ["FOLDER"])

def power(driver, *numbers):
    return limit_devices.gpu_limits(driver, [f"GPU-{number:02d}" for number in numbers], GPU_POWER)

def clocks(driver, *numbers):
    return limit_devices.gpu_limits(driver, [f"GPU-{number:02d}" for number in numbers], GPU_CLOCK)

def error_text(call):
    try:
        call()
    except HpcdistError as error:
        return f"{type(error).__name__}: {error}"

def enter(limits):
    with power_limits.limited(limits, FOLDER):
        return "changed"

def print_json(value):
    print(json.dumps(value), flush=True)
"""


def gpu(number, *words, mig=0, energy="fixed:1000"):
    more = " ".join(words or ("limits=100000:300000:350000", "clocks=210:1980"))
    return f"GPU-{number:02d} 00000000:{number + 16:02X}:00.0 H200 {mig} {energy} {more}\n"


@pytest.fixture
def workspace(nvml_environment, tmp_path):
    """The folder of the stub driver's file and of the records, and the environment of a program that uses both."""
    state = tmp_path / "state"
    return tmp_path, nvml_environment | {"FOLDER": str(state / "hpcdist" / "limits"), "XDG_STATE_HOME": str(state)}


@pytest.fixture
def program(workspace):
    """``program(gpus, source, code)`` returns the printed JSON. ``code`` is the expected exit code."""
    folder, environment = workspace

    def run(gpus, source, code=0):
        if gpus is not None:
            (folder / "gpus").write_text("".join(gpus))
        done = jobs.python(PRELUDE + source, env=environment)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def driver_limits(folder):
    """Return the limits set in the driver: uuid -> (power in mW, lowest MHz, highest MHz)."""
    path = folder / "gpus.set"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {row[0]: (int(row[1]), int(row[4]), int(row[5])) for row in rows}


def remaining_records(folder):
    return sorted(path.name for path in (folder / "state/hpcdist/limits").glob("*.json"))


def test_limits_hold_for_chosen_gpus_only_inside_the_context(program, workspace, rng):
    chosen = sorted(rng.choice(12, 3, replace=False).tolist(), key=lambda number: -number)
    watts = int(rng.integers(100, 350))
    source = f"""
with nvml.NvmlDriver() as driver:
    knobs = power(driver, *{chosen}, {chosen[0]})
    before = [knob.now() for knob in power(driver, *range(12))]
    with power_limits.limited([(knob, {watts}.0) for knob in knobs], FOLDER) as in_force:
        inside = [knob.now() for knob in power(driver, *range(12))]
        records = len(limit_journal.records(FOLDER)[0])
    after = [knob.now() for knob in power(driver, *range(12))]
print_json([list(in_force), before, inside, after, records, len(limit_journal.records(FOLDER)[0])])
"""
    in_force, before, inside, after, records, records_after = program([gpu(number) for number in range(12)], source)
    assert in_force == [watts] * 3, "a GPU that is named twice is limited once"
    expected = [1000 * watts if number in chosen else 300_000 for number in range(12)]
    assert before == after == [300_000] * 12 and inside == expected
    assert (records, records_after) == (1, 0)


def test_earlier_limit_is_restored_instead_of_default(program, workspace):
    (workspace[0] / "gpus.set").write_text("GPU-00 222000 0 0 0 0\n")
    source = """
with nvml.NvmlDriver() as driver:
    (knob,) = power(driver, 0)
    with power_limits.limited([(knob, 150.0)], FOLDER):
        inside = knob.now()
    print_json([inside, knob.now()])
"""
    assert program([gpu(0)], source) == [150_000, 222_000]


def test_clocks_are_locked_and_unlocked(program, workspace):
    source = """
with nvml.NvmlDriver() as driver:
    with power_limits.limited([(clocks(driver, 0)[0], 1200.0)], FOLDER) as in_force:
        inside = [line.split()[4:] for line in open(os.environ["NVML_STUB"] + ".set")]
    print_json([inside, list(in_force), error_text(lambda: check_value(clocks(driver, 0)[0], 2000.0))])
"""
    inside, in_force, why = program([gpu(0)], source)
    assert inside == [["1200", "1200"]] and in_force == [None], "the locked clock cannot be read"
    assert driver_limits(workspace[0])["GPU-00"][1:] == (0, 0)
    assert why.startswith("ConfigurationError: 2000 MHz is invalid for GPU-00 (H200): expected 210 to 1980 MHz")


def test_value_out_of_range_is_rejected_before_any_change(program, workspace):
    values = [99.0, 351.0, 0.0, -5.0, math.nan, math.inf]
    source = f"""
from math import inf, nan
with nvml.NvmlDriver() as driver:
    first, second = power(driver, 0, 1)
    print_json([error_text(lambda: enter([(first, 200.0), (second, watts)])) for watts in {values}])
"""
    for watts, output in zip(values, program([gpu(0), gpu(1)], source), strict=True):
        assert output.startswith(f"ConfigurationError: {watts:g} W is invalid for GPU-01 (H200): expected 100 to 350 W")
    assert not driver_limits(workspace[0]) and not remaining_records(workspace[0])


def test_missing_permission_is_rejected_and_other_gpus_restored(program, workspace):
    denied = gpu(1, "limits=100000:300000:350000", "clocks=210:1980", "denied")
    source = """
with nvml.NvmlDriver() as driver:
    both = power(driver, 0, 1)
    print_json([
        error_text(lambda: enter([(knob, 200.0) for knob in both])),
        error_text(lambda: power_limits.check_permitted(both, FOLDER)),
        error_text(lambda: power_limits.check_permitted(clocks(driver, 1), FOLDER)),
        power_limits.check_permitted(power(driver, 0), FOLDER),
    ])
"""
    *words, permitted = program([gpu(0), denied], source)
    assert permitted is None
    for output in words:
        assert output.startswith("MissingCapabilityError: GPU-01 (H200): the ")
        assert "by root only (the driver says: Insufficient Permissions)" in output and "--sweep KEY=V1,V2" in output
    assert driver_limits(workspace[0])["GPU-00"][0] == 300_000 and not remaining_records(workspace[0])


def test_devices_that_cannot_be_limited_are_rejected(program):
    gpus = [gpu(0, "power=1"), gpu(1, mig=1), gpu(2, energy="lost")]
    source = """
with nvml.NvmlDriver() as driver:
    print_json([error_text(lambda: call(driver, n)) for call, n in [
        (lambda d, n: check_value(power(d, n)[0], 200.0), 0), (lambda d, n: clocks(d, n)[0].put(900), 0),
        (power, 1), (power, 77), (lambda d, n: enter([(power(d, n)[0], None)]), 2)]])
"""
    no_limit, no_clock, mig, unknown, lost = program(gpus, source)
    assert "power limit cannot be changed (Not Supported)" in no_limit and "clock cannot be changed" in no_clock
    assert "in MIG mode" in mig and "instances of other users" in mig
    assert "GPU-77: this process cannot access the GPU" in unknown and "GPU is lost" in lost


ENDINGS = {
    "exception": "raise ValueError('boom')",
    "exit": "sys.exit(3)",
    "keyboard": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "term": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "hangup": "os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)",
    "quit": "os.kill(os.getpid(), signal.SIGQUIT); time.sleep(60)",
    "user": "os.kill(os.getpid(), signal.SIGUSR1); time.sleep(60)",
    "own": "signal.signal(signal.SIGTERM, lambda n, f: sys.exit(4)); os.kill(os.getpid(), signal.SIGTERM)",
}
CODES = {"exception": 1, "exit": 3, "keyboard": -2, "term": -15, "hangup": -1, "quit": -3, "user": -10, "own": 4}


@pytest.mark.parametrize("ending", ENDINGS)
def test_limits_are_restored_after_every_kind_of_exit(program, workspace, ending):
    source = f"""
with nvml.NvmlDriver() as driver:
    limits = [(power(driver, 0)[0], 200.0), (power(driver, 1)[0], 250.0), (clocks(driver, 1)[0], 900.0)]
    with power_limits.limited(limits, FOLDER):
        print_json([line.split()[0:2] for line in open(os.environ["NVML_STUB"] + ".set")])
        {ENDINGS[ending]}
"""
    assert sorted(program([gpu(0), gpu(1)], source, CODES[ending])) == [["GPU-00", "200000"], ["GPU-01", "250000"]]
    assert driver_limits(workspace[0]) == {"GPU-00": (300_000, 0, 0), "GPU-01": (300_000, 0, 0)}
    assert not remaining_records(workspace[0])


PUTS_BACK = """
        if value == 300000:
            os.kill(os.getpid(), signal.SIGTERM)  # in the middle: GPU-00 is not restored yet
        first(value)"""
SETS = """
        first(value)
        if value == 200000:
            os.kill(os.getpid(), signal.SIGTERM)  # set but not recorded yet"""


@cases(
    "number, put, ending, last",
    (1, PUTS_BACK, "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "inside"),
    (0, SETS, "pass", "outside"),
    ids=["put back", "set"],
)
def test_signal_during_a_change_is_deferred(number, put, ending, last, program, workspace):
    source = f"""
with nvml.NvmlDriver() as driver:
    knobs = power(driver, 0, 1)
    first = knobs[{number}].put
    def interrupted(value):{put}
    knobs[{number}].put = interrupted
    print_json("outside")
    with power_limits.limited([(knob, 200.0) for knob in knobs], FOLDER):
        print_json("inside")
        {ending}
"""
    assert program([gpu(0), gpu(1)], source, -signal.SIGTERM) == last
    assert {row[0] for row in driver_limits(workspace[0]).values()} == {300_000} and not remaining_records(workspace[0])


def test_limits_of_a_thread_are_restored_at_process_exit(program, workspace):
    source = """
driver = nvml.NvmlDriver()
inside = threading.Event()
def work():
    with power_limits.limited([(power(driver, 0)[0], 200.0)], FOLDER):
        inside.set()
        time.sleep(600)
threading.Thread(target=work, daemon=True).start()
inside.wait()
print_json(power(driver, 0)[0].now())
"""
    assert program([gpu(0)], source) == 200_000
    assert driver_limits(workspace[0])["GPU-00"][0] == 300_000 and not remaining_records(workspace[0])


def test_forked_child_does_not_restore_limits(program):
    source = """
with nvml.NvmlDriver() as driver:
    with power_limits.limited([(power(driver, 0)[0], 200.0)], FOLDER):
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print_json(power(driver, 0)[0].now())
"""
    assert program([gpu(0)], source) == 200_000


def test_unrestorable_limit_is_reported_and_stays_in_record(program, workspace):
    source = """
with nvml.NvmlDriver() as driver:
    def body():
        with power_limits.limited([(knob, 200.0) for knob in power(driver, 0, 1)], FOLDER):
            path = Path(os.environ["NVML_STUB"])
            path.write_text(path.read_text().replace("210:1980\\n", "210:1980 denied\\n", 1))
    message = error_text(body)
    ((change,),) = [record.changes for record in limit_journal.records(FOLDER)[0]]
    print_json([message, change.device, change.before])
    atexit._clear()  # it would try and report once more
"""
    output, device, before = program([gpu(0), gpu(1)], source)
    assert "GPU-00 (H200) could not be restored" in output and "Insufficient Permissions" in output
    assert "sudo nvidia-smi -i GPU-00 -pl 300" in output and "python -m benchmarks power --restore" in output
    assert (device, before) == ("GPU-00", 300_000)
    assert {uuid: row[0] for uuid, row in driver_limits(workspace[0]).items()} == {"GPU-00": 200_000, "GPU-01": 300_000}


KILLED = """
with nvml.NvmlDriver() as driver:
    limits = [(power(driver, 0)[0], 200.0), (power(driver, 1)[0], 250.0), (clocks(driver, 1)[0], 900.0)]
    with power_limits.limited(limits, FOLDER):
        print_json("inside")
        os.kill(os.getpid(), signal.SIGKILL)
"""
RESTORE = """
lines = []
well = power_limits.put_back(FOLDER, lines.append)
print_json([well, lines])
"""


def test_limits_are_restored_from_the_record_after_a_kill(program, workspace):
    program([gpu(0), gpu(1)], KILLED, -signal.SIGKILL)
    assert driver_limits(workspace[0]) == {"GPU-00": (200_000, 0, 0), "GPU-01": (250_000, 900, 900)}
    (name,) = remaining_records(workspace[0])
    path = workspace[0] / "state/hpcdist/limits" / name
    assert path.stat().st_mode & 0o077 == 0, "only the owner may write the record"

    again = """
with nvml.NvmlDriver() as driver:
    print_json(error_text(lambda: enter([(power(driver, 1)[0], 150.0)])))
"""
    output = program(None, again)
    assert "which was killed before it restored the limits" in output
    assert "python -m benchmarks power --restore" in output
    well, lines = program(None, RESTORE)
    assert well and lines == [
        "GPU-00 (H200): 300 W again (it was at 200 W)",
        "GPU-01 (H200): 300 W again (it was at 250 W)",
        "GPU-01 (H200): free again",
    ]
    assert driver_limits(workspace[0]) == {"GPU-00": (300_000, 0, 0), "GPU-01": (300_000, 0, 0)}
    assert not remaining_records(workspace[0])
    assert program(None, RESTORE) == [True, ["no changed limits were left"]]


def test_limit_set_later_by_another_process_is_kept(program, workspace):
    program([gpu(0), gpu(1)], KILLED, -signal.SIGKILL)
    (workspace[0] / "gpus.set").write_text("GPU-00 175000 0 0 0 0\nGPU-01 300000 0 0 900 900\n")
    well, lines = program(None, RESTORE)
    assert well and "175 W, set by another process since; left as it is (it was 300 W)" in lines[0]
    assert lines[1] == "GPU-01 (H200): 300 W, as it was"
    assert driver_limits(workspace[0])["GPU-00"][0] == 175_000


def test_record_that_cannot_be_restored_is_kept(program, workspace):
    program([gpu(0), gpu(1)], KILLED, -signal.SIGKILL)
    (workspace[0] / "gpus").write_text(gpu(1, "limits=100000:300000:350000", "clocks=210:1980", "denied"))
    well, lines = program(None, RESTORE)
    assert not well and "GPU-00: not restored: GPU-00: this process cannot access the GPU" in lines[0]
    assert "GPU-01: not restored" in lines[1] and len(remaining_records(workspace[0])) == 1


def test_concurrent_sweep_of_the_same_gpu_is_rejected(program, workspace):
    source = """
import subprocess
with nvml.NvmlDriver() as driver, power_limits.limited([(power(driver, 0)[0], 200.0)], FOLDER):
    other = subprocess.run([sys.executable, "-c", os.environ["OTHER"]], capture_output=True, text=True)
    print_json(json.loads(other.stdout.splitlines()[-1]))
"""
    other = f"""{PRELUDE}
with nvml.NvmlDriver() as driver:
    lines = []
    well = power_limits.put_back(FOLDER, lines.append)
    message = error_text(lambda: enter([(power(driver, 0)[0], 150.0)]))
    print_json([message, enter([(power(driver, 1)[0], 150.0)]), well, lines])
"""
    folder, environment = workspace
    environment["OTHER"] = other
    output, free, well, lines = program([gpu(0), gpu(1)], source)
    assert "has changed the limits of GPU-00 since" in output and "wait until the process ends" in output
    assert free == "changed" and well and "still runs, and restores its limits itself" in lines[0]
    assert {row[0] for row in driver_limits(folder).values()} == {300_000}


# Processors.


@pytest.fixture
def powercap():
    """A directory that other users may enter, unlike pytest's tmp_path."""
    path = Path(tempfile.mkdtemp(prefix="powercap-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def zone(root, number, limit_w=150, most_w=200, constraints=("long_term", "short_term"), **files):
    path = root / f"intel-rapl:{number}"
    path.mkdir()
    texts = {"name": f"package-{number}", "energy_uj": "5", "enabled": "1"} | files
    for index, name in enumerate(constraints):
        texts |= {
            f"constraint_{index}_name": name,
            f"constraint_{index}_power_limit_uw": str((limit_w + 100 * index) * 1_000_000),
            f"constraint_{index}_max_power_uw": str(most_w * 1_000_000),
            f"constraint_{index}_time_window_us": str(27_983_872),
        }
    for name, text in texts.items():
        (path / name).write_text(f"{text}\n")
    return path


def read_limit(path, constraint=0):
    return (path / f"constraint_{constraint}_power_limit_uw").read_text().strip()


def test_packages_are_limited_together_and_restored(powercap, tmp_path):
    zones = [zone(powercap, 0, 150), zone(powercap, 1, 140, constraints=("short_term", "long_term"))]
    (powercap / "intel-rapl").mkdir()
    part = powercap / "intel-rapl:0:0"
    part.mkdir()
    (part / "name").write_text("dram\n")
    knobs = limit_devices.cpu_limits(powercap)
    assert [knob.name for knob in knobs] == ["intel-rapl:0 (package-0)", "intel-rapl:1 (package-1)"]
    assert knobs[0].window_s == pytest.approx(27.98, abs=0.01) and knobs[0].allowed().most == 200
    with power_limits.limited([(knob, 90.0) for knob in knobs], tmp_path) as in_force:
        assert in_force == (90.0, 90.0)
        assert read_limit(zones[0]) == "90000000" and read_limit(zones[1], 1) == "90000000", "long-term limit"
        assert read_limit(zones[0], 1) == "250000000" and read_limit(zones[1], 0) == "140000000", "short-term limit"
    assert read_limit(zones[0]) == "150000000" and read_limit(zones[1], 1) == "240000000"
    assert not list(tmp_path.glob("*.json"))


def test_processor_limit_out_of_range_is_rejected(powercap):
    zone(powercap, 0)
    zone(powercap, 1, most_w=0)
    first, second = limit_devices.cpu_limits(powercap)
    for watts in (0.0, -1.0, 201.0, float("nan")):
        with pytest.raises(ConfigurationError, match=r"expected more than 0 to 200 W"):
            check_value(first, watts)
    check_value(second, 500.0)  # its maximum is unknown
    with pytest.raises(ConfigurationError, match="maximum is unknown"):
        check_value(second, 0.0)


def test_processors_without_limits_are_rejected(powercap, tmp_path):
    with pytest.raises(MissingCapabilityError, match="nowhere does not exist"):
        limit_devices.cpu_limits(powercap / "nowhere")
    with pytest.raises(MissingCapabilityError, match="has no processor package"):
        limit_devices.cpu_limits(powercap)
    zone(powercap, 0, constraints=())  # as on AMD
    zone(powercap, 1, enabled="0")
    bare, off = limit_devices.cpu_limits(powercap)
    with pytest.raises(MissingCapabilityError, match="has an energy counter but no power limit"):
        check_value(bare, 90.0)
    with pytest.raises(MissingCapabilityError, match="write 1 to .*enabled as root"):
        check_value(off, 90.0)


def test_firmware_that_ignores_the_limit_is_detected(powercap, tmp_path, monkeypatch):
    zones = [zone(powercap, 0), zone(powercap, 1)]
    knobs = limit_devices.cpu_limits(powercap)
    put = knobs[1].put
    monkeypatch.setattr(knobs[1], "put", lambda value: put(value if value == 150_000_000 else 125_000_000))
    with pytest.raises(MissingCapabilityError, match="90 W was set, but the device reports 125 W"):
        power_limits.limited([(knob, 90.0) for knob in knobs], tmp_path).__enter__()
    assert [read_limit(path) for path in zones] == ["150000000"] * 2, "the changed limits are restored"
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop its rights temporarily")
def test_missing_permission_error_names_the_cure(powercap, tmp_path):
    path = zone(powercap, 0)
    records = Path(tempfile.mkdtemp(prefix="limits-"))
    records.chmod(0o777)
    os.seteuid(65534)
    try:
        with pytest.raises(MissingCapabilityError, match=r"may be written by root only; run this as root .*--sweep"):
            power_limits.check_permitted(limit_devices.cpu_limits(powercap), records)
    finally:
        os.seteuid(0)
        shutil.rmtree(records)
    assert read_limit(path) == "150000000"


def test_no_limit_changes_if_record_cannot_be_written(powercap, tmp_path):
    path = zone(powercap, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="so no limit was changed; set XDG_STATE_HOME"):
        power_limits.limited([(limit_devices.cpu_limits(powercap)[0], 90.0)], tmp_path / "file" / "limits").__enter__()
    assert read_limit(path) == "150000000"


# Records.


def test_record_of_earlier_boot_is_dropped_and_of_other_host_kept(powercap, tmp_path):
    change = limit_journal.ChangedLimit("rapl-power", zone(powercap, 0).name, str(powercap), 150_000_000, 90_000_000)
    written = limit_journal.write(tmp_path, [change])
    content = json.loads(written.read_text())
    content["boot_id"] = "another"
    written.write_text(json.dumps(content))
    lines = []
    assert power_limits.put_back(tmp_path, lines.append) and "was restarted since" in lines[0]
    assert not written.exists(), "a reboot has reset the limits"
    content["host"] = "elsewhere"
    written.write_text(json.dumps(content))
    written.chmod(0o600)
    assert (
        power_limits.put_back(tmp_path, lines.append)
        and "of elsewhere; run `python -m benchmarks power --restore` there" in lines[1]
    )
    assert written.exists()
    with power_limits.limited([(limit_devices.cpu_limits(powercap)[0], 100.0)], tmp_path):
        pass  # neither record blocks a change


@cases(
    "spoil",
    lambda path: path.write_text("{"),
    lambda path: path.write_text('{"format": 2}'),
    lambda path: path.write_text(path.read_text().replace("150000000", '"150"')),
    lambda path: path.chmod(0o666),
)
def test_untrusted_record_is_reported_and_not_used(powercap, tmp_path, spoil):
    path = zone(powercap, 0, limit_w=90)
    written = limit_journal.write(
        tmp_path, [ChangedLimit("rapl-power", path.name, str(powercap), 150_000_000, 90_000_000)]
    )
    spoil(written)
    lines = []
    assert not power_limits.put_back(tmp_path, lines.append)
    assert "cannot be read as a record of limits" in lines[0] and read_limit(path) == "90000000"


def test_process_start_is_none_after_exit(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        begun = limit_journal.process_start(child.pid)
        assert begun is not None and int(begun) > 0
        child.communicate(timeout=LIMIT_S)
        end = time.monotonic() + LIMIT_S
        while limit_journal.process_start(child.pid) is not None:
            assert time.monotonic() < end
    finally:
        child.kill()
        child.wait()
    assert limit_journal.process_start(os.getpid()) != begun
