"""The ledger of a run and the registry of runs: what is read is what was written, whoever else writes there."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.jobs import LIMIT_S
from hpcdist.batch import ledger
from hpcdist.errors import StorageError

WRITER = """
import sys
from pathlib import Path
from hpcdist.batch import ledger
for number in range(100):
    ledger.record(Path(sys.argv[1]), "began", job=sys.argv[2], restart=number, filler="x" * 300)
"""


def test_an_entry_comes_back(tmp_path):
    chain = ["7", "8"]
    ledger.record(tmp_path / "new" / "run", "submitted", job="7", scheduler="slurm", name="é\n\x1b[31m", chain=chain)
    (found,) = ledger.read(tmp_path / "new" / "run")
    assert (found.event, found.job, found.text("scheduler"), found.text("name")) == (
        "submitted",
        "7",
        "slurm",
        "é\n\x1b[31m",
    )
    assert found.texts("chain") == chain
    assert abs((datetime.now(UTC) - found.time).total_seconds()) < 3600
    assert (found.text("log"), found.number("restart"), found.texts("scheduler")) == ("", None, [])
    assert (tmp_path / "new" / "run" / "jobs.jsonl").read_bytes().count(b"\n") == 1


def test_nothing_there_is_no_entry(tmp_path):
    assert ledger.read(tmp_path) == ledger.read(tmp_path / "missing") == []


def test_many_write_at_once(tmp_path):
    names = ["1", "2", "3"]
    writers = [subprocess.Popen([sys.executable, "-P", "-c", WRITER, tmp_path, name]) for name in names]
    assert [writer.wait(LIMIT_S) for writer in writers] == [0, 0, 0]
    found = ledger.jobs(ledger.read(tmp_path))
    assert {job: [entry.number("restart") for entry in each.entries] for job, each in found.items()} == {
        name: list(range(100)) for name in names
    }


GOOD = {"time": "2026-11-22T04:00:00+00:00", "event": "began", "job": "1"}
FOREIGN = [
    b'{"time": "2026-11-22T04:00:00+00:00", "event": "beg',  # torn
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"1e999",
    b"null",
    b"[]",
    b"",
    *(json.dumps(GOOD | {name: value}).encode() for name in GOOD for value in (None, 3, "", [])),
    json.dumps(GOOD | {"time": "yesterday"}).encode(),
]


@pytest.mark.parametrize("line", FOREIGN, ids=range(len(FOREIGN)))
def test_what_is_no_entry_is_skipped(tmp_path, line):
    good = json.dumps(GOOD).encode()
    (tmp_path / "jobs.jsonl").write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    assert [entry.job for entry in ledger.read(tmp_path)] == ["1", "1"]


@given(before=st.binary(max_size=60))
def test_what_others_left_takes_no_new_entry_along(tmp_path_factory, before):
    folder = tmp_path_factory.mktemp("ledger")
    (folder / "jobs.jsonl").write_bytes(before)
    ledger.record(folder, "ended", job="1", code=75)
    ledger.record(folder, "ended", job="2", code=0)
    assert [entry.number("code") for entry in ledger.read(folder)] == [75, 0]


def test_what_cannot_be_read_or_written(tmp_path):
    (tmp_path / "jobs.jsonl").mkdir()
    for call in (lambda: ledger.read(tmp_path), lambda: ledger.record(tmp_path, "began", job="1")):
        with pytest.raises(StorageError, match=r"jobs\.jsonl cannot be"):
            call()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    (tmp_path / "pipe").rename(tmp_path / "run" / "jobs.jsonl")
    with pytest.raises(StorageError, match="not a regular file"):
        ledger.read(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        ledger.record(tmp_path / "file", "began", job="1")
    assert ledger.read(tmp_path / "file") == []


def test_who_waits(tmp_path):
    for job in ("1", "2", "3", "4"):
        ledger.record(tmp_path, "submitted", job=job)
    for event, job, values in (
        ("began", "1", {}),
        ("ended", "1", {"code": 75, "word": "again"}),  # requeued, or its next link goes on: the scheduler knows
        ("began", "2", {}),
        ("began", "3", {}),
        ("ended", "3", {"code": 0, "word": "stop"}),
        ("cancelled", "3", {"how": "save"}),
        ("ended", "5", {"code": 78}),  # by an older version
    ):
        ledger.record(tmp_path, event, job=job, **values)
    jobs = ledger.jobs(ledger.read(tmp_path)).values()
    assert [job.id for job in jobs if not job.is_ended] == ["1", "2", "4"]
    found = ledger.jobs(ledger.read(tmp_path))
    assert [job.id for job in found.values() if job.is_cancelled] == ["3"]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_the_later_links_of_a_chain(tmp_path, own, whole):
    """Whether a chain names all links or those before, with or without the job itself."""
    links = ["1", "2", "3"]
    ledger.record(tmp_path, "submitted", job="0", chain=[])
    for number, job in enumerate(links):
        known = links if whole else links[: number + 1]
        ledger.record(tmp_path, "submitted", job=job, chain=[link for link in known if own or whole or link != job])
    found = ledger.jobs(ledger.read(tmp_path))
    assert [ledger.later_links(found, job) for job in ("0", *links, "9")] == [[], ["2", "3"], ["3"], [], []]


def test_the_registry_names_each_run_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    names = ["one", "two", "gone"]
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (*names, *names, str(tmp_path / "one")):
        ledger.register_run(ledger.Path(name))
    (tmp_path / "gone").rmdir()
    with ledger.registry().open("ab") as file:
        file.write(b'torn{\n{"run_dir": 3}\n{"run_dir": "a\\u0000b"}\n')
    assert ledger.registered_runs() == [tmp_path / "one", tmp_path / "two"]
    assert len(ledger.registry().read_text().splitlines()) == 3 + 3


def test_the_registry_is_in_the_home_directory(tmp_path):
    assert ledger.registry({"HOME": "/h"}) == ledger.Path("/h/.local/state/hpcdist/runs.jsonl")
    assert ledger.registry({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == ledger.Path("/s/hpcdist/runs.jsonl")
    assert ledger.registered_runs({"XDG_STATE_HOME": str(tmp_path)}) == []


def test_a_registry_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "state").touch()
    ledger.register_run(tmp_path, {"XDG_STATE_HOME": str(tmp_path / "state")})
    said = capsys.readouterr()
    assert said.out == "" and "warning" in said.err and "XDG_STATE_HOME" in said.err
    assert ledger.registered_runs({"XDG_STATE_HOME": str(tmp_path / "state")}) == []
