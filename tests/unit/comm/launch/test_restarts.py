"""Restarts of a job: the exit codes, the number of starts, the pauses, and the end."""

import re
import signal

import pytest

from hpcdist.comm.launch import restarts
from hpcdist.comm.launch.supervisor import LaunchOutcome


class Story:
    """Scripted starts that end with ``(code, checkpoint)``. The checkpoint is None if the start saved nothing."""

    def __init__(self, *ends, asked=None, pressed=None, died=(), waits=None, short=""):
        self.ends, self.asked, self.pressed = ends, asked, pressed
        self.started, self.pauses, self.messages, self.given_up = [], [], [], []
        self.checkpoints = {}
        # The nodes lost after each start, the signal that ends the wait for nodes, and the reason for a shortage.
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
            self.checkpoints = {name: number} | {old: at for old, at in self.checkpoints.items() if old != name}
        return LaunchOutcome(code, self.asked, agreed=False)

    def pause(self, seconds):
        self.pauses.append(seconds)
        return self.pressed

    def give_up(self, why):
        self.messages.append(why)
        self.given_up.append(why)

    def run(self, most):
        code = restarts.repeat(
            self.start, most, lambda: dict(self.checkpoints), self.pause, self.messages.append, self.give_up, self
        )
        assert self.given_up == [text for text in self.messages if " follows " not in text] in ([], self.messages[-1:])
        return code


@pytest.mark.parametrize("code", [0, 2, 69, 75, 78, 130])
def test_final_exit_codes_are_not_restarted(code):
    story = Story((code, "step-1"))
    assert story.run(5) == code
    assert (story.started, story.pauses, story.messages) == ([1], [], [])


def test_failure_after_checkpoint_restarts_at_once():
    story = Story((137, "step-10"), (1, "step-20"), (0, "step-30"))
    assert story.run(5) == 0
    assert story.started == [1, 2, 3] and story.pauses == [0.0, 0.0]
    assert re.search(
        r"^start 1 of at most 6 ended with exit code 137 after .*; start 2 .* from step-10$", story.messages[0]
    )


def test_two_starts_without_checkpoint_end_the_job():
    story = Story((1, None), (2 + 40, None))
    assert story.run(100) == 42
    assert story.started == [1, 2] and story.pauses == [1.0]
    assert "from the beginning" in story.messages[0]
    assert "exit code 42" in story.messages[1] and "2 starts in a row made no new checkpoint" in story.messages[1]


def test_earlier_checkpoints_are_no_progress():
    story = Story((1, None), (1, None))
    story.checkpoints = {"step-5": 0}
    assert story.run(100) == 1 and story.started == [1, 2]


def test_rewritten_checkpoint_is_progress():
    story = Story((1, "step-5"), (1, "step-5"), (1, "step-5"), (0, None))
    assert story.run(100) == 0 and story.started == [1, 2, 3, 4]


def test_number_of_restarts_is_limited():
    story = Story(*[(1, f"step-{number}") for number in range(9)])
    assert story.run(2) == 1
    assert story.started == [1, 2, 3] and "allows no more" in story.messages[-1]


def test_pauses_double_up_to_a_minute():
    ends = [(1, None if number % 2 else f"step-{number}") for number in range(1, 17)]
    story = Story(*ends)
    story.run(15)
    assert story.pauses == [1, 0, 2, 0, 4, 0, 8, 0, 16, 0, 32, 0, 60, 0, 60]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_requested_stop_prevents_restart(number):
    story = Story((143, "step-1"), asked=number)
    assert story.run(5) == 143
    assert story.started == [1] and number.name in story.messages[-1]


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGINT, "step-1", 130), (signal.SIGUSR1, "step-1", 75), (signal.SIGTERM, None, 9)],
)
def test_signal_between_starts_cancels_the_restart(number, name, code):
    story = Story((9, name), pressed=number)
    assert story.run(5) == code, "75: the scheduler may resume from the checkpoint"
    assert story.started == [1] and "start 2 is cancelled" in story.messages[-1]


def test_lost_node_does_not_count_as_start_without_progress():
    story = Story((1, None), (1, None), (1, None), (1, None), died=[["n2"], ["n3", "n4"]])
    assert story.run(100) == 1
    assert story.started == [1, 2, 3, 4] and story.pauses == [0.0, 0.0, 1.0]
    assert "having lost n2; start 2 follows at once, from the beginning" in story.messages[0]
    assert "having lost n3, n4; start 3 follows at once" in story.messages[1]
    assert "2 starts in a row made no new checkpoint" in story.messages[3]


def test_too_few_nodes_end_with_requeue_code():
    story = Story((1, None), died=[["n2"]], short="the job has lost n2")
    assert story.run(5) == 75
    assert story.started == [1] and story.messages[-1] == "start 2 is cancelled: the job has lost n2"


@pytest.mark.parametrize(("name", "code"), [("step-1", 75), (None, 9)])
def test_signal_during_wait_for_nodes_cancels_the_restart(name, code):
    story = Story((9, name), died=[["n2"]], waits=signal.SIGTERM, short="the job has lost n2")
    assert story.run(5) == code
    assert story.started == [1] and "SIGTERM: start 2 is cancelled" in story.messages[-1]


def test_nodes_are_not_checked_after_the_last_start():
    story = Story((1, "step-1"), (1, "step-2"), died=[[], ["n2"]])
    assert story.run(1) == 1 and story.deaths == [["n2"]]
