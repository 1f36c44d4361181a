"""Damaged files next to the checkpoints: no command ends with a traceback, and every run can resume."""

import json
import random
import shutil
from pathlib import Path

import click
import h5py
import numpy as np
import pytest

from hpcdist.batch import ledger
from hpcdist.cli.main import group
from hpcdist.collectives.tuning_cache import Tuning
from hpcdist.collectives.tuning_cache import path_of as tuning_path
from hpcdist.collectives.tuning_cache import read as read_tuning
from hpcdist.collectives.tuning_cache import save as keep_tuning
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.record.run_journal import StartRecord
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.telemetry.prometheus import CounterTotals
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.recipe.recipe import Recipe

USED = {
    "since_step": 0,
    "joules": {
        "by_kind": {"cpu": 5.0},
        "phases": {"training": {"joules": 5.0, "seconds": 2.0, "windows": 1}},
        "reason": None,
        "label": "",
    },
    "activities": {"compute": {"joules": 4.0, "error_j": 0.1, "seconds": 1.0, "reason": None}},
}
TUNED_FOR = {"ranks": 2, "kind": "allreduce", "max_bytes": 4096, "software": {"hpcdist": "1"}}
DOCUMENTED = (0, 1, 2, 74, 78)  # 1: `hpcdist hang` has found something
VALUES = (None, True, -1, 1e308, float("inf"), 10**30, "x", [], {}, [1], {"a": 1}, float("nan"))


def metrics(run, resume_step, *steps):
    with MetricsWriter(run / "metrics.h5", 2, resume_step) as writer:
        for step in steps:
            writer.append(step=step, loss=1.0, learning_rate=0.1, tokens=3, **{name: np.ones(2) for name in PER_RANK})
        writer.evaluation(steps[-1], 1.0)


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    (run / "recorder").mkdir(parents=True)
    metrics(run, None, 1, 2, 3)
    StartRecord(run).ended("stopped")
    (run / "usage.json").write_text(json.dumps(USED))
    (run / "totals.json").write_text(json.dumps({"steps_total": 3.0}))
    for rank in range(2):
        recorder = Recorder(run / "recorder" / f"rank-{rank:05d}.rec", rank, 2, capacity=16)
        recorder.end(recorder.begin("world", "allreduce", "float32", 4, 16, -1, 0))
        recorder.note("finished", "exit code 0")
        recorder.close()
        spans = Spans(run / "recorder" / f"rank-{rank:05d}.spans", rank, 2, capacity=16)
        spans.close()
    for event in (ledger.SUBMITTED, ledger.BEGAN):
        ledger.record(run, event, job="12", chain=["12"], restart=1)
    return run


@pytest.fixture(autouse=True)
def user_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def code_of(*arguments):
    try:
        value = group.main(args=list(map(str, arguments)), prog_name="hpcdist", standalone_mode=False)
    except (click.ClickException, HpcdistError) as error:
        return error.exit_code
    return value if isinstance(value, int) else 0


def resume_side_files(run):
    """Do with the side files of ``run`` what a resumed start does."""
    starts = StartRecord(run)
    assert starts.mtbf_s >= 0
    starts.ended("stopped")
    energy = EnergyRecorder(solo(), Recipe(), None, run)
    energy.note()
    energy.figures(4)
    metrics(run, 3, 4)
    CounterTotals(run / "totals.json").show("steps_total", 4.0)
    assert code_of("jobs", "begin", run, "--job=13") == 0
    assert code_of("report", run) == 0 and code_of("energy", "report", run) == 0


def flip_bits(path, random_of):
    data = bytearray(path.read_bytes())
    for _ in range(random_of.choice((1, 2, 64))):
        data[random_of.randrange(len(data))] ^= 1 << random_of.randrange(8)
    path.write_bytes(data[: random_of.randrange(len(data))] if random_of.random() < 0.1 else data)


def json_paths(value, above=()):
    yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from json_paths(each, (*above, key))


def forge_json(path, random_of):
    """Replace a value somewhere in a JSON file by a value of another type, or remove it."""
    lines = path.suffix == ".jsonl"
    whole = [json.loads(line) for line in path.read_text().splitlines()] if lines else json.loads(path.read_text())
    place = random_of.choice(list(json_paths(whole)))
    holder, value = whole, random_of.choice(VALUES)
    for key in place[:-1]:
        holder = holder[key]
    if not place:
        whole = value
    elif isinstance(holder, dict) and random_of.random() < 0.2:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    rows = whole if lines and isinstance(whole, list) else [whole]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def forge_hdf5(path, random_of):
    """Change an attribute, a type, a shape or a place of an object of an HDF5 file."""
    with h5py.File(path, "r+") as file:
        names = []
        file.visit(names.append)
        name = random_of.choice(names)
        odd = (h5py.Empty("f8"), np.arange(3), "x", -1, 1e300, np.zeros((2, 2)))
        how = random_of.randrange(5)
        if how < 2:
            of = file[name] if how else file
            of.attrs[random_of.choice(list(of.attrs) or ["a"])] = random_of.choice(odd)
        elif how == 2:
            del file[name]
            file[name] = h5py.SoftLink(f"/{name}")
        elif how == 3:
            del file[name]
            file[name] = random_of.choice(odd)
        elif isinstance(file[name], h5py.Dataset) and file[name].maxshape[0] is None:
            file[name].resize(random_of.choice((0, 1, 1 << 20, 1 << 40)), axis=0)


READERS = {
    "usage.json": (("report",), ("energy", "report", "--json")),
    "metrics.h5": (("report",), ("report", "--json"), ("energy", "report"), ("trace",)),
    "recorder/rank-00000.rec": (("hang",), ("trace", "--json")),
    "recorder/rank-00001.spans": (("trace",),),
    "journal.jsonl": (("report", "--json"), ("hang",), ("jobs", "status")),
    "totals.json": (),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.full_except("journal.jsonl")
def test_any_damage_has_a_documented_exit_code_and_stops_no_run(name, complete_run, tmp_path, capfd):
    random_of = random.Random(f"{name} 1")
    structured = {".json": forge_json, ".jsonl": forge_json, ".h5": forge_hdf5}.get(Path(name).suffix, flip_bits)
    for number in range(9):
        run = tmp_path / str(number)
        shutil.copytree(complete_run, run)
        (flip_bits if number % 3 == 0 else structured)(run / name, random_of)
        for command in READERS[name]:
            assert code_of(*command, run) in DOCUMENTED, (command, number)
        if not name.startswith("recorder"):
            resume_side_files(run)
    capfd.readouterr()


def test_directories_in_place_of_files_stop_no_run(complete_run, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(complete_run, run)
    names = ("usage.json", "metrics.h5", "journal.jsonl")
    for name in names:
        (run / name).unlink()
        (run / name).mkdir()
    resume_side_files(run)
    stderr = capfd.readouterr().err
    for name in names:
        assert (run / f"{name}.damaged-1").is_dir() and f"{name}.damaged-1" in stderr


def test_damaged_measurement_is_only_measured_again():
    random_of = random.Random(1)
    keep_tuning(Tuning("ring"), TUNED_FOR)
    path = tuning_path(TUNED_FOR)
    text = path.read_bytes()
    for number in range(100):
        path.write_bytes(text)
        (flip_bits if number % 3 == 0 else forge_json)(path, random_of)
        result, reason = read_tuning(TUNED_FOR, 0.0)
        assert result is not None or reason.startswith(str(path))
