"""Limits of power and clocks: what is asked is in force, and what was before comes back, however it ends.

GPUs are those of the stand-in for the driver, through the real pynvml: each test of them is a program of its own, since
the dynamic loader reads LD_LIBRARY_PATH when a process starts. Processors are file trees as sysfs shows them.
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
from hpcdist.energy.power_limits import apply, devices
from hpcdist.energy.power_limits import journal as kept
from hpcdist.energy.power_limits.devices import check_value
from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError

PRELUDE = """
import atexit, json, os, signal, sys, threading, time
from pathlib import Path
from hpcdist.energy.power_limits import apply, devices, journal
from hpcdist.energy.sources import nvml
from hpcdist.energy.power_limits.devices import GPU_CLOCK, GPU_POWER
from hpcdist.energy.power_limits.devices import check_value
from hpcdist.errors import ConfigurationError, HpcdistError, MissingCapabilityError

FOLDER = Path(os.environ["FOLDER"])

def power(driver, *numbers):
    return devices.gpu_limits(driver, [f"GPU-{number:02d}" for number in numbers], GPU_POWER)

def clocks(driver, *numbers):
    return devices.gpu_limits(driver, [f"GPU-{number:02d}" for number in numbers], GPU_CLOCK)

def refused(call):
    try:
        call()
    except HpcdistError as error:
        return f"{type(error).__name__}: {error}"

def enter(wanted):
    with apply.limited(wanted, FOLDER):
        return "changed"

def tell(value):
    print(json.dumps(value), flush=True)
"""


def gpu(number, *words, mig=0, energy="fixed:1000"):
    more = " ".join(words or ("limits=100000:300000:350000", "clocks=210:1980"))
    return f"GPU-{number:02d} 00000000:{number + 16:02X}:00.0 H200 {mig} {energy} {more}\n"


@pytest.fixture
def place(nvml_environment, tmp_path):
    """The driver's file, records, and the environment in which a program finds both."""
    state = tmp_path / "state"
    return tmp_path, nvml_environment | {"FOLDER": str(state / "hpcdist" / "limits"), "XDG_STATE_HOME": str(state)}


@pytest.fixture
def program(place):
    """``program(gpus, source)`` -> what the program told; ``code`` is how it is to end."""
    folder, environment = place

    def run(gpus, source, code=0):
        if gpus is not None:
            (folder / "gpus").write_text("".join(gpus))
        done = jobs.python(PRELUDE + source, env=environment)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def set_limits(folder):
    """Return what the driver holds: uuid -> (limit in mW, lowest and highest MHz)."""
    path = folder / "gpus.set"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {row[0]: (int(row[1]), int(row[4]), int(row[5])) for row in rows}


def left(folder):
    return sorted(path.name for path in (folder / "state/hpcdist/limits").glob("*.json"))


def test_limits_of_chosen_gpus_hold_inside_and_only_there(program, place, rng):
    chosen = sorted(rng.choice(12, 3, replace=False).tolist(), key=lambda number: -number)
    watts = int(rng.integers(100, 350))
    source = f"""
with nvml.NvmlDriver() as driver:
    knobs = power(driver, *{chosen}, {chosen[0]})
    before = [knob.now() for knob in power(driver, *range(12))]
    with apply.limited([(knob, {watts}.0) for knob in knobs], FOLDER) as in_force:
        inside = [knob.now() for knob in power(driver, *range(12))]
        records = len(journal.records(FOLDER)[0])
    after = [knob.now() for knob in power(driver, *range(12))]
tell([list(in_force), before, inside, after, records, len(journal.records(FOLDER)[0])])
"""
    in_force, before, inside, after, records, records_after = program([gpu(number) for number in range(12)], source)
    assert in_force == [watts] * 3, "a GPU that is named twice is limited once"
    expected = [1000 * watts if number in chosen else 300_000 for number in range(12)]
    assert before == after == [300_000] * 12 and inside == expected
    assert (records, records_after) == (1, 0)


def test_what_was_there_before_is_no_default(program, place):
    (place[0] / "gpus.set").write_text("GPU-00 222000 0 0 0 0\n")
    source = """
with nvml.NvmlDriver() as driver:
    (knob,) = power(driver, 0)
    with apply.limited([(knob, 150.0)], FOLDER):
        inside = knob.now()
    tell([inside, knob.now()])
"""
    assert program([gpu(0)], source) == [150_000, 222_000]


def test_clocks_are_locked_and_free_again(program, place):
    source = """
with nvml.NvmlDriver() as driver:
    with apply.limited([(clocks(driver, 0)[0], 1200.0)], FOLDER) as in_force:
        inside = [line.split()[4:] for line in open(os.environ["NVML_STUB"] + ".set")]
    tell([inside, list(in_force), refused(lambda: check_value(clocks(driver, 0)[0], 2000.0))])
"""
    inside, in_force, why = program([gpu(0)], source)
    assert inside == [["1200", "1200"]] and in_force == [None], "nobody can tell which clock is locked"
    assert set_limits(place[0])["GPU-00"][1:] == (0, 0)
    assert why.startswith("ConfigurationError: 2000 MHz for GPU-00 (H200): it takes 210 to 1980 MHz")


def test_out_of_range_is_refused_before_anything_changes(program, place):
    values = [99.0, 351.0, 0.0, -5.0, math.nan, math.inf]
    source = f"""
from math import inf, nan
with nvml.NvmlDriver() as driver:
    first, second = power(driver, 0, 1)
    tell([refused(lambda: enter([(first, 200.0), (second, watts)])) for watts in {values}])
"""
    for watts, said in zip(values, program([gpu(0), gpu(1)], source), strict=True):
        assert said.startswith(f"ConfigurationError: {watts:g} W for GPU-01 (H200): it takes 100 to 350 W")
    assert not set_limits(place[0]) and not left(place[0])


def test_no_permission_is_refused_with_the_cure_and_the_others_are_put_back(program, place):
    denied = gpu(1, "limits=100000:300000:350000", "clocks=210:1980", "denied")
    source = """
with nvml.NvmlDriver() as driver:
    both = power(driver, 0, 1)
    tell([
        refused(lambda: enter([(knob, 200.0) for knob in both])),
        refused(lambda: apply.check_permitted(both, FOLDER)),
        refused(lambda: apply.check_permitted(clocks(driver, 1), FOLDER)),
        apply.check_permitted(power(driver, 0), FOLDER),
    ])
"""
    *words, permitted = program([gpu(0), denied], source)
    assert permitted is None
    for said in words:
        assert said.startswith("MissingCapabilityError: GPU-01 (H200): its")
        assert "by root only (the driver says: Insufficient Permissions)" in said and "--sweep KEY=V1,V2" in said
    assert set_limits(place[0])["GPU-00"][0] == 300_000 and not left(place[0])


def test_what_cannot_be_limited_says_so(program):
    gpus = [gpu(0, "power=1"), gpu(1, mig=1), gpu(2, energy="lost")]
    source = """
with nvml.NvmlDriver() as driver:
    tell([refused(lambda: call(driver, n)) for call, n in [
        (lambda d, n: check_value(power(d, n)[0], 200.0), 0), (lambda d, n: clocks(d, n)[0].put(900), 0),
        (power, 1), (power, 77), (lambda d, n: enter([(power(d, n)[0], None)]), 2)]])
"""
    no_limit, no_clock, mig, unknown, lost = program(gpus, source)
    assert "power limit cannot be changed (Not Supported)" in no_limit and "clock cannot be changed" in no_clock
    assert "in MIG mode" in mig and "also those of others" in mig
    assert "GPU-77: this process cannot see it" in unknown and "GPU is lost" in lost


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
def test_however_the_process_ends_limits_come_back(program, place, ending):
    source = f"""
with nvml.NvmlDriver() as driver:
    wanted = [(power(driver, 0)[0], 200.0), (power(driver, 1)[0], 250.0), (clocks(driver, 1)[0], 900.0)]
    with apply.limited(wanted, FOLDER):
        tell([line.split()[0:2] for line in open(os.environ["NVML_STUB"] + ".set")])
        {ENDINGS[ending]}
"""
    assert sorted(program([gpu(0), gpu(1)], source, CODES[ending])) == [["GPU-00", "200000"], ["GPU-01", "250000"]]
    assert set_limits(place[0]) == {"GPU-00": (300_000, 0, 0), "GPU-01": (300_000, 0, 0)} and not left(place[0])


PUTS_BACK = """
        if value == 300000:
            os.kill(os.getpid(), signal.SIGTERM)  # in the middle: GPU-00 is still to come
        first(value)"""
SETS = """
        first(value)
        if value == 200000:
            os.kill(os.getpid(), signal.SIGTERM)  # set, and nobody has noted it yet"""


@cases(
    "number, put, ending, last",
    (1, PUTS_BACK, "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "inside"),
    (0, SETS, "pass", "outside"),
    ids=["put back", "set"],
)
def test_a_signal_while_limits_are_changed_waits(number, put, ending, last, program, place):
    source = f"""
with nvml.NvmlDriver() as driver:
    knobs = power(driver, 0, 1)
    first = knobs[{number}].put
    def interrupted(value):{put}
    knobs[{number}].put = interrupted
    tell("outside")
    with apply.limited([(knob, 200.0) for knob in knobs], FOLDER):
        tell("inside")
        {ending}
"""
    assert program([gpu(0), gpu(1)], source, -signal.SIGTERM) == last
    assert {row[0] for row in set_limits(place[0]).values()} == {300_000} and not left(place[0])


def test_the_end_of_the_process_puts_back_what_a_thread_has_limited(program, place):
    source = """
driver = nvml.NvmlDriver()
inside = threading.Event()
def work():
    with apply.limited([(power(driver, 0)[0], 200.0)], FOLDER):
        inside.set()
        time.sleep(600)
threading.Thread(target=work, daemon=True).start()
inside.wait()
tell(power(driver, 0)[0].now())
"""
    assert program([gpu(0)], source) == 200_000
    assert set_limits(place[0])["GPU-00"][0] == 300_000 and not left(place[0])


def test_a_child_that_was_forked_puts_nothing_back(program):
    source = """
with nvml.NvmlDriver() as driver:
    with apply.limited([(power(driver, 0)[0], 200.0)], FOLDER):
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        tell(power(driver, 0)[0].now())
"""
    assert program([gpu(0)], source) == 200_000


def test_a_limit_that_cannot_be_put_back_is_told_and_stays_in_the_record(program, place):
    source = """
with nvml.NvmlDriver() as driver:
    def body():
        with apply.limited([(knob, 200.0) for knob in power(driver, 0, 1)], FOLDER):
            path = Path(os.environ["NVML_STUB"])
            path.write_text(path.read_text().replace("210:1980\\n", "210:1980 denied\\n", 1))
    said = refused(body)
    ((change,),) = [record.changes for record in journal.records(FOLDER)[0]]
    tell([said, change.device, change.before])
    atexit._clear()  # which would try once more, and tell once more
"""
    said, device, before = program([gpu(0), gpu(1)], source)
    assert "GPU-00 (H200) is not what it was before" in said and "Insufficient Permissions" in said
    assert "sudo nvidia-smi -i GPU-00 -pl 300" in said and "hpcdist bench power --restore" in said
    assert (device, before) == ("GPU-00", 300_000)
    assert {uuid: row[0] for uuid, row in set_limits(place[0]).items()} == {"GPU-00": 200_000, "GPU-01": 300_000}


KILLED = """
with nvml.NvmlDriver() as driver:
    wanted = [(power(driver, 0)[0], 200.0), (power(driver, 1)[0], 250.0), (clocks(driver, 1)[0], 900.0)]
    with apply.limited(wanted, FOLDER):
        tell("inside")
        os.kill(os.getpid(), signal.SIGKILL)
"""
RESTORE = """
lines = []
well = apply.put_back(FOLDER, lines.append)
tell([well, lines])
"""


def test_after_a_kill_the_record_brings_limits_back(program, place):
    program([gpu(0), gpu(1)], KILLED, -signal.SIGKILL)
    assert set_limits(place[0]) == {"GPU-00": (200_000, 0, 0), "GPU-01": (250_000, 900, 900)}
    (name,) = left(place[0])
    path = place[0] / "state/hpcdist/limits" / name
    assert path.stat().st_mode & 0o077 == 0, "nobody else may say what limits were"

    again = "with nvml.NvmlDriver() as driver:\n    tell(refused(lambda: enter([(power(driver, 1)[0], 150.0)])))"
    said = program(None, again)
    assert "still those of a process that was killed" in said and "hpcdist bench power --restore" in said
    well, lines = program(None, RESTORE)
    assert well and lines == [
        "GPU-00 (H200): 300 W again (it was at 200 W)",
        "GPU-01 (H200): 300 W again (it was at 250 W)",
        "GPU-01 (H200): free again",
    ]
    assert set_limits(place[0]) == {"GPU-00": (300_000, 0, 0), "GPU-01": (300_000, 0, 0)} and not left(place[0])
    assert program(None, RESTORE) == [True, ["nothing was left changed"]]


def test_what_somebody_else_has_set_since_is_left(program, place):
    program([gpu(0), gpu(1)], KILLED, -signal.SIGKILL)
    (place[0] / "gpus.set").write_text("GPU-00 175000 0 0 0 0\nGPU-01 300000 0 0 900 900\n")
    well, lines = program(None, RESTORE)
    assert well and "175 W, which somebody else has set since; left as it is (it was 300 W)" in lines[0]
    assert lines[1] == "GPU-01 (H200): 300 W, as it was"
    assert set_limits(place[0])["GPU-00"][0] == 175_000


def test_a_record_that_cannot_be_acted_on_stays(program, place):
    program([gpu(0), gpu(1)], KILLED, -signal.SIGKILL)
    (place[0] / "gpus").write_text(gpu(1, "limits=100000:300000:350000", "clocks=210:1980", "denied"))
    well, lines = program(None, RESTORE)
    assert not well and "GPU-00: not put back: GPU-00: this process cannot see it" in lines[0]
    assert "GPU-01: not put back" in lines[1] and len(left(place[0])) == 1


def test_a_second_sweep_of_the_same_gpu_is_refused_while_the_first_is_at_work(program, place):
    source = """
import subprocess
with nvml.NvmlDriver() as driver, apply.limited([(power(driver, 0)[0], 200.0)], FOLDER):
    other = subprocess.run([sys.executable, "-c", os.environ["OTHER"]], capture_output=True, text=True)
    tell(json.loads(other.stdout.splitlines()[-1]))
"""
    other = f"""{PRELUDE}
with nvml.NvmlDriver() as driver:
    lines = []
    well = apply.put_back(FOLDER, lines.append)
    tell([refused(lambda: enter([(power(driver, 0)[0], 150.0)])), enter([(power(driver, 1)[0], 150.0)]), well, lines])
"""
    folder, environment = place
    environment["OTHER"] = other
    said, free, well, lines = program([gpu(0), gpu(1)], source)
    assert "has changed the limits of GPU-00 since" in said and "wait for its end" in said
    assert free == "changed" and well and "is at work, and puts its limits back itself" in lines[0]
    assert {row[0] for row in set_limits(folder).values()} == {300_000}


# Processors.


@pytest.fixture
def powercap():
    """A directory that other users may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="powercap-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def zone(root, number, limit_w=150, most_w=200, constraints=("long_term", "short_term"), **files):
    path = root / f"intel-rapl:{number}"
    path.mkdir()
    texts = {"name": f"package-{number}", "energy_uj": "5", "enabled": "1"} | files
    for place, name in enumerate(constraints):
        texts |= {
            f"constraint_{place}_name": name,
            f"constraint_{place}_power_limit_uw": str((limit_w + 100 * place) * 1_000_000),
            f"constraint_{place}_max_power_uw": str(most_w * 1_000_000),
            f"constraint_{place}_time_window_us": str(27_983_872),
        }
    for name, text in texts.items():
        (path / name).write_text(f"{text}\n")
    return path


def shown(path, constraint=0):
    return (path / f"constraint_{constraint}_power_limit_uw").read_text().strip()


def test_packages_are_limited_together_and_put_back(powercap, tmp_path):
    zones = [zone(powercap, 0, 150), zone(powercap, 1, 140, constraints=("short_term", "long_term"))]
    (powercap / "intel-rapl").mkdir()
    part = powercap / "intel-rapl:0:0"
    part.mkdir()
    (part / "name").write_text("dram\n")
    knobs = devices.cpu_limits(powercap)
    assert [knob.name for knob in knobs] == ["intel-rapl:0 (package-0)", "intel-rapl:1 (package-1)"]
    assert knobs[0].window_s == pytest.approx(27.98, abs=0.01) and knobs[0].allowed().most == 200
    with apply.limited([(knob, 90.0) for knob in knobs], tmp_path) as in_force:
        assert in_force == (90.0, 90.0)
        assert shown(zones[0]) == "90000000" and shown(zones[1], 1) == "90000000", "the long-term one, where it stands"
        assert shown(zones[0], 1) == "250000000" and shown(zones[1], 0) == "140000000", "bursts are left as they are"
    assert shown(zones[0]) == "150000000" and shown(zones[1], 1) == "240000000"
    assert not list(tmp_path.glob("*.json"))


def test_range_of_a_processor(powercap):
    zone(powercap, 0)
    zone(powercap, 1, most_w=0)
    first, second = devices.cpu_limits(powercap)
    for watts in (0.0, -1.0, 201.0, float("nan")):
        with pytest.raises(ConfigurationError, match=r"it takes more than 0 to 200 W; choose values in there"):
            check_value(first, watts)
    check_value(second, 500.0)  # it does not tell the most
    with pytest.raises(ConfigurationError, match="does not tell the most"):
        check_value(second, 0.0)


def test_what_processors_do_not_show(powercap, tmp_path):
    with pytest.raises(MissingCapabilityError, match="nowhere does not exist"):
        devices.cpu_limits(powercap / "nowhere")
    with pytest.raises(MissingCapabilityError, match="shows no processor package"):
        devices.cpu_limits(powercap)
    zone(powercap, 0, constraints=())  # as AMD's
    zone(powercap, 1, enabled="0")
    bare, off = devices.cpu_limits(powercap)
    with pytest.raises(MissingCapabilityError, match="shows energy, and no limit"):
        check_value(bare, 90.0)
    with pytest.raises(MissingCapabilityError, match="write 1 to .*enabled as root"):
        check_value(off, 90.0)


def test_firmware_that_keeps_its_limit_is_found_out(powercap, tmp_path, monkeypatch):
    zones = [zone(powercap, 0), zone(powercap, 1)]
    knobs = devices.cpu_limits(powercap)
    put = knobs[1].put
    monkeypatch.setattr(knobs[1], "put", lambda value: put(value if value == 150_000_000 else 125_000_000))
    with pytest.raises(MissingCapabilityError, match="90 W was set, and 125 W is what it shows"):
        apply.limited([(knob, 90.0) for knob in knobs], tmp_path).__enter__()
    assert [shown(path) for path in zones] == ["150000000"] * 2, "what had been set is put back"
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives its rights up for a while; anybody else has none to give")
def test_a_user_without_permission_is_told_how_to_get_it(powercap, tmp_path):
    path = zone(powercap, 0)
    records = Path(tempfile.mkdtemp(prefix="limits-"))
    records.chmod(0o777)
    os.seteuid(65534)
    try:
        with pytest.raises(MissingCapabilityError, match=r"may be written by root only; run this as root .*--sweep"):
            apply.check_permitted(devices.cpu_limits(powercap), records)
    finally:
        os.seteuid(0)
        shutil.rmtree(records)
    assert shown(path) == "150000000"


def test_without_a_place_for_the_record_nothing_changes(powercap, tmp_path):
    path = zone(powercap, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="so none was changed; set XDG_STATE_HOME"):
        apply.limited([(devices.cpu_limits(powercap)[0], 90.0)], tmp_path / "file" / "limits").__enter__()
    assert shown(path) == "150000000"


# Records.


def test_records_of_other_starts_and_other_machines(powercap, tmp_path):
    change = kept.ChangedLimit("rapl-power", zone(powercap, 0).name, str(powercap), 150_000_000, 90_000_000)
    written = kept.write(tmp_path, [change])
    content = json.loads(written.read_text())
    content["boot_id"] = "another"
    written.write_text(json.dumps(content))
    lines = []
    assert apply.put_back(tmp_path, lines.append) and "was started again since" in lines[0]
    assert not written.exists(), "a restart has put the limits back"
    content["host"] = "elsewhere"
    written.write_text(json.dumps(content))
    written.chmod(0o600)
    assert (
        apply.put_back(tmp_path, lines.append) and "of elsewhere; run `hpcdist bench power --restore` there" in lines[1]
    )
    assert written.exists()
    with apply.limited([(devices.cpu_limits(powercap)[0], 100.0)], tmp_path):
        pass  # neither is in the way


@cases(
    "spoil",
    lambda path: path.write_text("{"),
    lambda path: path.write_text('{"format": 2}'),
    lambda path: path.write_text(path.read_text().replace("150000000", '"150"')),
    lambda path: path.chmod(0o666),
)
def test_a_record_that_cannot_be_trusted_is_told_and_not_used(powercap, tmp_path, spoil):
    path = zone(powercap, 0, limit_w=90)
    written = kept.write(tmp_path, [kept.ChangedLimit("rapl-power", path.name, str(powercap), 150_000_000, 90_000_000)])
    spoil(written)
    lines = []
    assert not apply.put_back(tmp_path, lines.append)
    assert "cannot be read as a record of limits" in lines[0] and shown(path) == "90000000"


def test_whether_a_process_is_at_work(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        begun = kept.process_start(child.pid)
        assert begun is not None and int(begun) > 0
        child.communicate(timeout=LIMIT_S)
        end = time.monotonic() + LIMIT_S
        while kept.process_start(child.pid) is not None:
            assert time.monotonic() < end
    finally:
        child.kill()
        child.wait()
    assert kept.process_start(os.getpid()) != begun
