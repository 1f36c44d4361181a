"""When a job is started again: after which codes, how often, how soon; and that it ends."""

import re
import signal

import pytest

from hpcdist.comm.launch import restarts
from hpcdist.comm.launch.supervisor import LaunchOutcome


class Story:
    """Starts that end as they are told to: ``(code, checkpoint)``, None for one that saved nothing."""

    def __init__(self, *ends, asked=None, pressed=None, died=(), waits=None, short=""):
        self.ends, self.asked, self.pressed = ends, asked, pressed
        self.started, self.pauses, self.said, self.given_up = [], [], [], []
        self.there = {}
        # The nodes, too: which have died after each start, what ends the wait for them, and why they are too few.
        self.deaths, self.waits, self.short = list(died), waits, short

    def died(self):
        return self.deaths.pop(0) if self.deaths else []

    def wait(self, pause, say):
        return self.waits

    def shortage(self):
        return self.short

    def start(self, number):
        self.started.append(number)
        code, name = self.ends[min(number, len(self.ends)) - 1]
        if name is not None:
            self.there = {name: number} | {old: at for old, at in self.there.items() if old != name}
        return LaunchOutcome(code, self.asked, agreed=False)

    def pause(self, seconds):
        self.pauses.append(seconds)
        return self.pressed

    def give_up(self, why):
        self.said.append(why)
        self.given_up.append(why)

    def run(self, most):
        code = restarts.repeat(
            self.start, most, lambda: dict(self.there), self.pause, self.said.append, self.give_up, self
        )
        assert self.given_up == [text for text in self.said if " follows " not in text] in ([], self.said[-1:])
        return code


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


def test_a_start_that_lost_a_node_is_not_in_vain():
    story = Story((1, None), (1, None), (1, None), (1, None), died=[["n2"], ["n3", "n4"]])
    assert story.run(100) == 1
    assert story.started == [1, 2, 3, 4] and story.pauses == [0.0, 0.0, 1.0]
    assert "having lost n2; start 2 follows at once, from the beginning" in story.said[0]
    assert "having lost n3, n4; start 3 follows at once" in story.said[1]
    assert "2 starts in a row made no new checkpoint" in story.said[3]


def test_too_few_nodes_are_left_to_whoever_has_others():
    story = Story((1, None), died=[["n2"]], short="the job has lost n2")
    assert story.run(5) == 75
    assert story.started == [1] and story.said[-1] == "start 2 is not made: the job has lost n2"


@pytest.mark.parametrize(("name", "code"), [("step-1", 75), (None, 9)])
def test_a_signal_while_it_waits_for_nodes(name, code):
    story = Story((9, name), died=[["n2"]], waits=signal.SIGTERM, short="the job has lost n2")
    assert story.run(5) == code
    assert story.started == [1] and "SIGTERM: start 2 is not made" in story.said[-1]


def test_after_the_last_start_nobody_looks_for_nodes():
    story = Story((1, "step-1"), (1, "step-2"), died=[[], ["n2"]])
    assert story.run(1) == 1 and story.deaths == [["n2"]]
