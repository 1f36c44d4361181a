"""The starts in the journal of a run: the damage it survives, and the time between failures derived from it."""

import json

import pytest

from hpcdist.comm.launch.exit_file import LAUNCH_DIR
from hpcdist.comm.record import run_journal
from hpcdist.comm.record.run_journal import HEARTBEAT_S, JOURNAL_FILE, StartEntry, StartRecord
from hpcdist.constants import FINISHED, STOPPED


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def begin(tmp_path, clock):
    """``begin(launch="")``: make the first call of rank 0 in a start."""
    return lambda launch="": StartRecord(tmp_path, clock, launch)


def test_estimate_grows_until_a_failure(begin, clock):
    starts = begin()
    assert starts.mtbf_s == 0
    clock.now += 500
    assert (starts.mtbf_s, starts.failures) == (500, 0)
    starts.alive()  # its last sign of life
    clock.now += 10_000  # nobody ran
    again = begin()
    assert (again.seconds, again.failures, again.mtbf_s) == (500, 1, 250)
    clock.now += 100
    assert again.mtbf_s == 300


@pytest.mark.parametrize("end", [FINISHED, STOPPED])
def test_requested_end_is_no_failure(begin, clock, end):
    first = begin()
    clock.now += 60
    first.ended(end)
    clock.now += 3600
    second = begin()
    assert (second.failures, second.seconds, second.before[0].end) == (0, 60, end)


def test_survived_deaths_are_recorded_but_are_no_failures(begin, clock):
    first = begin("one")
    clock.now += 5
    first.survived(2)
    clock.now += 5
    heir = begin("one")  # the rank that wrote has died
    assert (heir.before, heir.current.deaths, heir.seconds) == ((), 2, 10)
    heir.survived(1)
    assert begin("two").before[0].deaths == 3


def test_ended_start_is_not_continued(begin):
    begin("one").ended(STOPPED)
    assert len(begin("one").before) == 1


def test_signs_of_life_are_written_periodically(begin, clock, tmp_path):
    starts = begin()
    clock.now += HEARTBEAT_S - 1
    starts.alive()
    for _ in range(3):
        clock.now += HEARTBEAT_S
        starts.alive()
    assert len((tmp_path / JOURNAL_FILE).read_text().splitlines()) == 4
    assert run_journal.known_starts(tmp_path) == [StartEntry(1000.0, clock.now)]
    (tmp_path / JOURNAL_FILE).write_text((tmp_path / JOURNAL_FILE).read_text() + '{"event": "alive", "ti')  # torn
    assert len(run_journal.read(tmp_path)) == 2 and run_journal.known_starts(tmp_path)[0].seen == clock.now


def test_clock_that_was_set_back_gives_no_negative_time(begin, clock):
    first = begin()
    clock.now -= 100
    first.alive()
    assert begin().seconds == 0


@pytest.mark.parametrize("text", ["", "[1]", '{"event": "start"}', '{"event": "start", "time": 3}', "\x00{"])
def test_invalid_lines_are_skipped_and_kept(begin, tmp_path, text):
    (tmp_path / JOURNAL_FILE).write_text(text)
    assert begin().before == ()
    assert begin().failures == 1
    assert (tmp_path / JOURNAL_FILE).read_text().startswith(text)


def test_starts_of_an_earlier_version_are_read(begin, tmp_path):
    rows = [{"began": 1, "seen": 5.5, "end": "stopped"}, {"began": 6, "seen": 9, "launch": "a", "deaths": 2}]
    invalid = [5, {"began": 1}, {"began": "x", "seen": 1}, {"began": 1e300, "seen": 2e300}]
    (tmp_path / run_journal.OLD_STARTS_FILE).write_text(json.dumps([*rows, *invalid]))
    expected = (StartEntry(1, 5.5, "stopped"), StartEntry(6, 9, launch="a", deaths=2))
    assert begin("a").current.deaths == 2 and begin("b").before[0] == expected[0]
    (tmp_path / JOURNAL_FILE).unlink()
    assert begin("b").before == expected


def test_unwritable_directory_is_reported_once(tmp_path, clock, capsys):
    starts = StartRecord(tmp_path / "gone", clock, "")
    clock.now += 60
    starts.alive()
    assert capsys.readouterr().err.count("cannot be written") == 1
    assert starts.mtbf_s == 60


def test_launch_directory_with_invalid_utf8_is_recorded(tmp_path, clock, monkeypatch):
    monkeypatch.setenv(LAUNCH_DIR, "/tmp/launch\udcff")
    assert StartRecord(tmp_path, clock).current.launch == "launch\\xff"
    assert StartRecord(tmp_path, clock).before == ()
