"""`hpcdist grow`: the file that requests more ranks, and rejected requests."""

import pytest

from hpcdist.cli import main
from hpcdist.comm.launch.exit_file import SURVIVE
from hpcdist.comm.record.run_journal import JOURNAL_FILE, StartRecord
from hpcdist.constants import STOPPED
from hpcdist.errors import CONFIGURATION, OK, STORAGE, USAGE
from hpcdist.training.run.stop_requests import GROW_FILE, StopRequests


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a run whose job trains with --survive."""
    monkeypatch.setenv(SURVIVE, "shrink")
    StartRecord(tmp_path)
    for name in ("recipe.toml", "lock"):
        (tmp_path / name).touch()
    return tmp_path


def grow(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main.main(["grow", *map(str, arguments)])
    return leaving.value.code


def test_job_reads_the_requested_number_of_ranks(run):
    assert (grow(run, 2), grow(run, 3)) == (OK, OK)
    stop_requests = StopRequests()
    stop_requests.grow_file = run / GROW_FILE
    assert stop_requests.ranks() == 3
    assert sorted(path.name for path in run.iterdir()) == ["grow", "journal.jsonl", "lock", "recipe.toml"]


@pytest.mark.parametrize("ranks", ["0", "-1", "1.5", "many"])
def test_invalid_number_of_ranks_is_rejected(run, ranks):
    assert grow(run, "--", ranks) == USAGE
    assert not (run / GROW_FILE).exists()


def test_directory_without_a_run_is_rejected(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert grow(path, 1) == CONFIGURATION
        assert "contains no run" in capsys.readouterr().err
    assert not (tmp_path / GROW_FILE).exists()


def test_run_without_a_training_job_is_rejected(run, capsys):
    (run / "lock").unlink()
    assert grow(run, 1) == CONFIGURATION and "no training runs" in capsys.readouterr().err
    (run / "lock").touch()
    StartRecord(run).ended(STOPPED)
    assert grow(run, 1) == CONFIGURATION and "no training runs" in capsys.readouterr().err


def test_unreadable_start_record_is_rejected(run, capsys):
    (run / JOURNAL_FILE).unlink()
    (run / JOURNAL_FILE).mkdir()
    assert grow(run, 1) == STORAGE and "journal.jsonl cannot be read" in capsys.readouterr().err


def test_job_without_survive_is_rejected(run, capsys, monkeypatch):
    monkeypatch.delenv(SURVIVE)
    StartRecord(run)
    assert grow(run, 1) == CONFIGURATION and "fixed number" in capsys.readouterr().err
    assert not (run / GROW_FILE).exists()
