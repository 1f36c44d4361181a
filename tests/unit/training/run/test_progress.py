"""The log: the first step, the last step, and an occasional line; nothing on other ranks."""

from types import SimpleNamespace

from harness.marks import cases
from hpcdist.comm.launch.exit_file import TERMINAL_COLUMNS
from hpcdist.training.observe import instrumentation as subject
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.run import loop as loops
from hpcdist.training.run.loop import StepStatistics, TrainingLoop


def test_log_has_the_first_and_the_last_step(capsys):
    progress = ConsoleProgress(steps=10, first=0, every_s=1e9, shown=True)
    for done in range(1, 11):
        progress.step(done, loss=2.5, targets=100, communication_s=0.5, step_s=2.0)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 10/10"]
    assert "loss 2.5000" in lines[1] and "comm 25%" in lines[1] and "ETA 0 s" in lines[1]


def test_line_shows_the_communication_share_since_the_last_line(capsys, monkeypatch):
    """Steps of 1 s have 0.5, 0 and 0.1 s in messages, a step of 3 s has 2.4 s: the last step alone is 80 %."""
    now = [0.0]
    monkeypatch.setattr(subject.time, "monotonic", lambda: now[0])
    progress = ConsoleProgress(steps=7, first=0, every_s=5.0, shown=True)
    for done, (spent, step_s) in enumerate([(0.5, 1), (0, 1), (0.1, 1), (2.4, 3), (0.2, 1), (0.3, 1), (0, 1)], start=1):
        now[0] += step_s
        progress.step(done, 1.0, 1, spent, step_s)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("comm ")[1].split()[0] for line in lines] == ["50%", "50%", "17%"]


def test_every_step_is_logged_if_requested(capsys):
    progress = ConsoleProgress(steps=3, first=0, every_s=0.0, shown=True)
    for done in range(1, 4):
        progress.step(done, 1.0, 1, 0.0, 1.0)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_other_ranks_are_silent(capsys):
    progress = ConsoleProgress(steps=1, first=0, every_s=0.0, shown=False)
    progress.say("nothing")
    progress.step(1, 1.0, 1, 0.0, 1.0)
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_first_step_does_not_count_for_the_speed(capsys, monkeypatch):
    """It compiles for 40 s, so neither the speed nor the remaining time is derived from it."""
    now = [0.0]
    monkeypatch.setattr(subject.time, "monotonic", lambda: now[0])
    progress = ConsoleProgress(steps=105, first=5, every_s=0.0, shown=True, unit="samples")
    now[0] += 40.0
    for done in (6, 7, 8):
        progress.step(done, 1.0, 100, 0.0, 0.5)
        now[0] += 0.5
    first, second, third = capsys.readouterr().err.splitlines()
    assert "/s  comm" not in first and "ETA" not in first and "first step 40.0 s" in first
    assert "200 samples/s" in second and f"ETA {(105 - 7) * 0.5:.0f} s" in second
    assert "200 samples/s" in third and f"ETA {(105 - 8) * 0.5:.0f} s" in third


def test_progress_bar_is_shown_on_a_terminal_of_hpcdist_run(capsys, monkeypatch):
    monkeypatch.setenv(TERMINAL_COLUMNS, "90")
    progress = ConsoleProgress(steps=3, first=0, every_s=0.0, shown=True)
    progress.say("a line")
    for done in range(1, 4):
        progress.step(done, 1.0, 1, 0.25, 1.0)
    progress.close()
    text = capsys.readouterr().err
    assert "a line\n" in text and "3/3" in text and "comm 25%" in text and "step 3/3" not in text
    assert max(map(len, text.replace("\n", "\r").split("\r"))) <= 90


@cases(
    "step_s, samples, pipeline, microbatches, output",
    ((9.0, 0.3, 0.3), 1024, 1, 1, "about 6 s"),  # 1024 / 16 steps, of which it is the third part
    ((9.0, 0.3, 0.3), 1024, 1, 4, "about 6 s"),
    ((9.0, 0.3, 0.3), 1024, 4, 4, "about 15 s"),  # no two samples are in the pipeline at once
    ((9.0, 0.3, 0.3), 0, 1, 1, "about 12 s"),  # all that there are
    ((9.0, 0.1, 0.1), 1024, 1, 1, ""),
    ((9.0,), 1024, 1, 1, ""),  # which compiled, and tells nothing
    ((9.0, 0.3), 0, 0, 1, ""),  # there is no validation data
)
def test_long_validation_is_announced(step_s, samples, pipeline, microbatches, output, monkeypatch, capsys):
    monkeypatch.setattr(loops, "mean_validation_loss", lambda trainer: 2.5)
    steps = StepStatistics()
    for seconds in step_s:
        steps.add(seconds, 0.0)
    loop = object.__new__(TrainingLoop)
    loop.outcome = SimpleNamespace(steps=steps)
    loop.progress = ConsoleProgress(steps=3, first=0, every_s=1e9, shown=True)
    loop.trainer = SimpleNamespace(
        recipe=SimpleNamespace(
            run=SimpleNamespace(validation_samples=samples, global_batch=16),
            parallel=SimpleNamespace(microbatches=microbatches),
        ),
        grid=SimpleNamespace(pipeline=pipeline),
        source=SimpleNamespace(validation=SimpleNamespace(count=2000) if pipeline else None),
    )
    assert loop.validation_loss() == 2.5
    assert capsys.readouterr().err == (f"computing the validation loss: {output}\n" if output else "")
