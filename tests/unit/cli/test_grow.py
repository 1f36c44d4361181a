"""`hpcdist grow`: the file that asks for more ranks, and where it is refused."""

import pytest

from hpcdist.cli import main
from hpcdist.comm.launch.exit_file import SURVIVE
from hpcdist.errors import CONFIGURATION, OK, STORAGE, USAGE
from hpcdist.training.run.start_record import STARTS_FILE, STOPPED, StartRecord
from hpcdist.training.run.stop_requests import GROW_FILE, StopRequests


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a run whose job is at work and survives."""
    monkeypatch.setenv(SURVIVE, "shrink")
    StartRecord(tmp_path)
    for name in ("recipe.toml", "lock"):
        (tmp_path / name).touch()
    return tmp_path


def grow(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main.main(["grow", *map(str, arguments)])
    return leaving.value.code


def test_the_job_reads_what_was_asked(run):
    assert (grow(run, 2), grow(run, 3)) == (OK, OK)
    stop_requests = StopRequests()
    stop_requests.grow_file = run / GROW_FILE
    assert stop_requests.ranks() == 3
    assert sorted(path.name for path in run.iterdir()) == ["grow", "lock", "recipe.toml", "starts.json"]


@pytest.mark.parametrize("ranks", ["0", "-1", "1.5", "many"])
def test_what_is_no_number_of_ranks(run, ranks):
    assert grow(run, "--", ranks) == USAGE
    assert not (run / GROW_FILE).exists()


def test_a_directory_without_a_run(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert grow(path, 1) == CONFIGURATION
        assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / GROW_FILE).exists()


def test_a_run_that_nobody_trains(run, capsys):
    (run / "lock").unlink()
    assert grow(run, 1) == CONFIGURATION and "nothing trains" in capsys.readouterr().err
    (run / "lock").touch()
    StartRecord(run).ended(STOPPED)
    assert grow(run, 1) == CONFIGURATION and "nothing trains" in capsys.readouterr().err


def test_a_record_that_cannot_be_read(run, capsys):
    (run / STARTS_FILE).write_text("[1]")
    assert grow(run, 1) == STORAGE and "starts.json cannot be read" in capsys.readouterr().err


def test_a_job_that_does_not_survive(run, capsys, monkeypatch):
    monkeypatch.delenv(SURVIVE)
    StartRecord(run)
    assert grow(run, 1) == CONFIGURATION and "fixed number" in capsys.readouterr().err
    assert not (run / GROW_FILE).exists()
