"""The ledger of a run and the registry of runs: reads return the written entries, also with several writers."""

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


def test_recorded_entry_is_read_back(tmp_path):
    chain = ["7", "8"]
    ledger.record(tmp_path / "new" / "run", "submitted", job="7", scheduler="slurm", name="é\n\x1b[31m", chain=chain)
    (result,) = ledger.read(tmp_path / "new" / "run")
    assert (result.event, result.job, result.text("scheduler"), result.text("name")) == (
        "submitted",
        "7",
        "slurm",
        "é\n\x1b[31m",
    )
    assert result.texts("chain") == chain
    assert abs((datetime.now(UTC) - result.time).total_seconds()) < 3600
    assert (result.text("log"), result.number("restart"), result.texts("scheduler")) == ("", None, [])
    assert (tmp_path / "new" / "run" / "journal.jsonl").read_bytes().count(b"\n") == 1


def test_missing_ledger_has_no_entries(tmp_path):
    assert ledger.read(tmp_path) == ledger.read(tmp_path / "missing") == []


def test_concurrent_writers_lose_no_entries(tmp_path):
    names = ["1", "2", "3"]
    writers = [subprocess.Popen([sys.executable, "-P", "-c", WRITER, tmp_path, name]) for name in names]
    assert [writer.wait(LIMIT_S) for writer in writers] == [0, 0, 0]
    result = ledger.jobs(ledger.read(tmp_path))
    assert {job: [entry.number("restart") for entry in each.entries] for job, each in result.items()} == {
        name: list(range(100)) for name in names
    }


GOOD = {"time": "2026-11-22T04:00:00+00:00", "event": "began", "job": "1"}
FOREIGN = [
    b'{"time": "2026-11-22T04:00:00+00:00", "event": "beg',  # cut off
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
def test_invalid_lines_are_skipped(tmp_path, line):
    good = json.dumps(GOOD).encode()
    (tmp_path / "journal.jsonl").write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    assert [entry.job for entry in ledger.read(tmp_path)] == ["1", "1"]


def test_jobs_of_an_earlier_version_are_read(tmp_path):
    (tmp_path / "jobs.jsonl").write_text(json.dumps(GOOD) + "\n")
    ledger.record(tmp_path, "ended", job="1", code=0)
    assert [entry.event for entry in ledger.read(tmp_path)] == ["began", "ended"]


@given(before=st.binary(max_size=60))
def test_damaged_last_line_loses_no_new_entries(tmp_path_factory, before):
    folder = tmp_path_factory.mktemp("ledger")
    (folder / "journal.jsonl").write_bytes(before)
    ledger.record(folder, "ended", job="1", code=75)
    ledger.record(folder, "ended", job="2", code=0)
    assert [entry.number("code") for entry in ledger.read(folder)] == [75, 0]


def test_unreadable_or_unwritable_ledger_is_rejected(tmp_path):
    (tmp_path / "journal.jsonl").mkdir()
    for call in (lambda: ledger.read(tmp_path), lambda: ledger.record(tmp_path, "began", job="1")):
        with pytest.raises(StorageError, match=r"journal\.jsonl.* cannot be"):
            call()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    (tmp_path / "pipe").rename(tmp_path / "run" / "journal.jsonl")
    with pytest.raises(StorageError, match="not a regular file"):
        ledger.read(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        ledger.record(tmp_path / "file", "began", job="1")
    assert ledger.read(tmp_path / "file") == []


def test_jobs_are_ended_or_cancelled_by_their_entries(tmp_path):
    for job in ("1", "2", "3", "4"):
        ledger.record(tmp_path, "submitted", job=job)
    for event, job, values in (
        ("began", "1", {}),
        ("ended", "1", {"code": 75, "word": "again"}),  # requeued or continued by its next link; the scheduler knows
        ("began", "2", {}),
        ("began", "3", {}),
        ("ended", "3", {"code": 0, "word": "stop"}),
        ("cancelled", "3", {"how": "save"}),
        ("ended", "5", {"code": 78}),  # written by an older version
    ):
        ledger.record(tmp_path, event, job=job, **values)
    jobs = ledger.jobs(ledger.read(tmp_path)).values()
    assert [job.id for job in jobs if not job.is_ended] == ["1", "2", "4"]
    result = ledger.jobs(ledger.read(tmp_path))
    assert [job.id for job in result.values() if job.is_cancelled] == ["3"]


@pytest.mark.parametrize("local_data", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_later_links_of_a_chain(tmp_path, local_data, whole):
    """A chain may name all links or only the links before, with or without the job itself."""
    links = ["1", "2", "3"]
    ledger.record(tmp_path, "submitted", job="0", chain=[])
    for number, job in enumerate(links):
        reference = links if whole else links[: number + 1]
        chain = [link for link in reference if local_data or whole or link != job]
        ledger.record(tmp_path, "submitted", job=job, chain=chain)
    result = ledger.jobs(ledger.read(tmp_path))
    assert [ledger.later_links(result, job) for job in ("0", *links, "9")] == [[], ["2", "3"], ["3"], [], []]


def test_registry_lists_each_run_once(tmp_path, monkeypatch):
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


def test_registry_path_follows_home_and_xdg_state(tmp_path):
    assert ledger.registry({"HOME": "/h"}) == ledger.Path("/h/.local/state/hpcdist/runs.jsonl")
    assert ledger.registry({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == ledger.Path("/s/hpcdist/runs.jsonl")
    assert ledger.registered_runs({"XDG_STATE_HOME": str(tmp_path)}) == []


def test_unwritable_registry_only_warns(tmp_path, capsys):
    (tmp_path / "state").touch()
    ledger.register_run(tmp_path, {"XDG_STATE_HOME": str(tmp_path / "state")})
    output = capsys.readouterr()
    assert output.out == "" and "warning" in output.err and "XDG_STATE_HOME" in output.err
    assert ledger.registered_runs({"XDG_STATE_HOME": str(tmp_path / "state")}) == []
