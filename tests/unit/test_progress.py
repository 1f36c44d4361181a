"""What a log shows: the first step, the last, and a line now and then; nothing on other ranks."""

import pytest

from hpcdist.training.progress import Progress


def test_a_log_gets_the_first_and_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(steps=10, first=0, every_s=1e9, shown=True)
    for done in range(1, 11):
        progress.step(done, loss=2.5, targets=100, communication=0.25)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 10/10"]
    assert "loss 2.5000" in lines[1] and "comm 25%" in lines[1] and "ETA 0 s" in lines[1]


def test_every_step_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(steps=3, first=0, every_s=0.0, shown=True)
    for done in range(1, 4):
        progress.step(done, 1.0, 1, 0.0)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(steps=1, first=0, every_s=0.0, shown=False)
    progress.say("nothing")
    progress.step(1, 1.0, 1, 0.0)
    progress.close()
    assert capsys.readouterr() == ("", "")
