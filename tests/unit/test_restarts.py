"""When a job is started again: after which codes, how often, how soon; and that it ends."""

import re
import signal

import pytest

from hpcdist.comm import restarts
from hpcdist.comm.supervisor import Outcome


class Story:
    """Starts that end as they are told to: ``(code, checkpoint)``, None for one that saved nothing."""

    def __init__(self, *ends, asked=None, pressed=None):
        self.ends, self.asked, self.pressed = ends, asked, pressed
        self.started, self.pauses, self.said = [], [], []
        self.there = {}

    def start(self, number):
        self.started.append(number)
        code, name = self.ends[min(number, len(self.ends)) - 1]
        if name is not None:
            self.there = {name: number} | {old: at for old, at in self.there.items() if old != name}
        return Outcome(code, self.asked, agreed=False)

    def pause(self, seconds):
        self.pauses.append(seconds)
        return self.pressed

    def run(self, most):
        return restarts.repeat(self.start, most, lambda: dict(self.there), self.pause, self.said.append)


@pytest.mark.parametrize("code", [0, 2, 69, 75, 78, 130])
def test_codes_that_are_final(code):
    story = Story((code, "step-1"))
    assert story.run(5) == code
    assert (story.started, story.pauses, story.said) == ([1], [], [])


def test_a_failure_after_a_checkpoint_is_gone_on_with_at_once():
    story = Story((137, "step-10"), (1, "step-20"), (0, "step-30"))
    assert story.run(5) == 0
    assert story.started == [1, 2, 3] and story.pauses == [0.0, 0.0]
    assert re.search(
        r"^start 1 of at most 6 ended with exit code 137 after .*; start 2 .* from step-10$", story.said[0]
    )


def test_two_starts_in_a_row_without_a_checkpoint_end_it():
    story = Story((1, None), (2 + 40, None))
    assert story.run(100) == 42
    assert story.started == [1, 2] and story.pauses == [1.0]
    assert "from the beginning" in story.said[0]
    assert "exit code 42" in story.said[1] and "2 starts in a row made no new checkpoint" in story.said[1]


def test_checkpoints_of_earlier_are_no_progress():
    story = Story((1, None), (1, None))
    story.there = {"step-5": 0}
    assert story.run(100) == 1 and story.started == [1, 2]


def test_a_checkpoint_made_anew_is_progress():
    story = Story((1, "step-5"), (1, "step-5"), (1, "step-5"), (0, None))
    assert story.run(100) == 0 and story.started == [1, 2, 3, 4]


def test_no_more_than_the_user_said():
    story = Story(*[(1, f"step-{number}") for number in range(9)])
    assert story.run(2) == 1
    assert story.started == [1, 2, 3] and "allows no more" in story.said[-1]


def test_pauses_double_up_to_a_minute():
    ends = [(1, None if number % 2 else f"step-{number}") for number in range(1, 17)]
    story = Story(*ends)
    story.run(15)
    assert story.pauses == [1, 0, 2, 0, 4, 0, 8, 0, 16, 0, 32, 0, 60, 0, 60]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_whoever_asked_for_an_end_gets_it(number):
    story = Story((143, "step-1"), asked=number)
    assert story.run(5) == 143
    assert story.started == [1] and number.name in story.said[-1]


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGINT, "step-1", 130), (signal.SIGUSR1, "step-1", 75), (signal.SIGTERM, None, 9)],
)
def test_a_signal_between_two_starts(number, name, code):
    story = Story((9, name), pressed=number)
    assert story.run(5) == code, "75: the scheduler may go on from what was saved"
    assert story.started == [1] and "start 2 is not made" in story.said[-1]
