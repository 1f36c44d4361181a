"""Wishes to stop: flags set by signals and a file, decided by all ranks together."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from hpcdist.training.survival import EXIT_CODES, STOP_FILE, StopWishes, Wish, agreed

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
    """Put back the handlers that a test installs."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "wish"),
    [(signal.SIGTERM, Wish.REQUEUE), (signal.SIGUSR1, Wish.REQUEUE), (signal.SIGINT, Wish.INTERRUPT)],
)
def test_a_signal_becomes_a_wish_and_nothing_else(number: int, wish: Wish) -> None:
    wishes = StopWishes(None)
    wishes.listen()
    assert agreed(wishes.current()) is None
    os.kill(os.getpid(), number)
    assert agreed(wishes.current()) is wish


def test_the_second_interrupt_does_not_wait() -> None:
    wishes = StopWishes(None)
    wishes.listen()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_stop_file_asks_for_a_requeue(tmp_path: Path) -> None:
    wishes = StopWishes(tmp_path / STOP_FILE)
    assert agreed(wishes.current()) is None
    (tmp_path / STOP_FILE).touch()
    assert agreed(wishes.current()) is Wish.REQUEUE


def test_one_rank_decides_for_all_and_an_interrupt_wins() -> None:
    assert agreed(np.array([0.0, 0.0])) is None
    assert agreed(np.array([1.0, 0.0])) is Wish.REQUEUE
    assert agreed(np.array([3.0, 1.0])) is Wish.INTERRUPT
    assert EXIT_CODES == {Wish.REQUEUE: 75, Wish.INTERRUPT: 130}


@pytest.mark.parametrize("text", ["", "two", "-1", "9" * 400])
def test_a_wish_to_grow_that_is_no_number_of_ranks_is_none(tmp_path: Path, text: str) -> None:
    wishes = StopWishes()
    wishes.grow_file = tmp_path / "grow"
    assert wishes.ranks() == 0
    wishes.grow_file.write_text(text)
    assert wishes.ranks() == 0
    wishes.grow_file.write_text("2\n")
    assert wishes.ranks() == 2
