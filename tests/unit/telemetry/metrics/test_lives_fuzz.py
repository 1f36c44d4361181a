"""Jobs that outlive their ranks, wherever these die: at any operation between ranks, some twice in a row.

Each seed draws a layout, and how many operations one rank makes, or two, before it dies: while they train, save, meet
again, take their state back, or leave. HPCDIST_TEST_LIFE_SEEDS=n tries n seeds more.
"""

import os
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from harness.trainings import survive
from hpcdist.comm.threads.communicator import ThreadCommunicator
from hpcdist.comm.threads.group import RankDeath
from hpcdist.training.elastic.job import ElasticJob

RANKS, SPARES, STEPS = 4, 2, 4
AT_THE_END = 1105  # a spare dies when some have come to the end, and another spare has not been told
SEEDS = int(os.environ.get("HPCDIST_TEST_LIFE_SEEDS", "0"))
MANY = int(os.environ.get("HPCDIST_TEST_SEED", "0")) % 100_000 * 1000  # other seeds in every run
LAYOUTS = {
    "allreduce": {},
    "overlapped": {"communication.overlap": "thread"},
    "delayed": {"communication.delayed": "true", "communication.overlap": "poll", "communication.algorithm": "ring"},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "servers": {"parallel.strategy": "parameter_server"},
    "pipeline": {"parallel.pipeline": 2, "parallel.microbatches": 2},
    "seldom copied": {"parallel.strategy": "zero1", "survival.every_steps": 3},
    "saved beside": {"parallel.strategy": "zero1", "checkpoint.asynchronous": "true"},
}
OPERATIONS = ("_send", "_post", "_arrived", "_everyone", "_iallreduce", "_poll", "_agree", "_shrink", "_shared")


class Clock:
    """Counts the operations of each thread that is a rank from where its lives begin; ``limits`` say who dies when."""

    def __init__(self, limits):
        self.counts = Counter()
        self._limits, self._begun = limits, set[str]()
        self.struck = []

    def begin(self):
        """Count this thread's operations from here on."""
        self._begun.add(threading.current_thread().name)

    def tick(self, what):
        """Take note of an operation; dies where it is one too many."""
        name = threading.current_thread().name
        if name not in self._begun:  # a thread beside a rank: that one dies for it
            return
        self.counts[name] += 1
        if self.counts[name] == self._limits.get(name):
            self.struck.append(f"{name} in its operation {self.counts[name]}, {what}")
            raise RankDeath


@contextmanager
def ticking(clock):
    """Let ``clock`` count all operations between threads."""
    patch = pytest.MonkeyPatch()

    def counted(method):
        def called(self, *arguments):
            clock.tick(f"{method.__name__} of {self.name}")
            return method(self, *arguments)

        return called

    def train(lives, origin=None, before=ElasticJob.train):
        clock.begin()
        return before(lives, origin)

    for name in OPERATIONS:
        patch.setattr(ThreadCommunicator, name, counted(getattr(ThreadCommunicator, name)))
    patch.setattr(ElasticJob, "train", train)
    try:
        yield
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def calm(tmp_path_factory, shared_text):
    """What a layout comes to where nobody dies: its losses, and the operations of a rank."""
    known = {}

    def found(name):
        if name not in known:
            clock = Clock({})
            with ticking(clock):
                rows = train(name, tmp_path_factory.mktemp("calm") / "run", shared_text, 0)
            known[name] = rows.steps["loss"], max(clock.counts.values())
        return known[name]

    return found


def train(name, out, shared_text, spares, ranks_per_node=None):
    keys = {"run.steps": STEPS, "run.seed": 3, "precision.mode": "float64", "checkpoint.every_steps": 2}
    return survive(RANKS, out, shared_text, keys | LAYOUTS[name], spares=spares, ranks_per_node=ranks_per_node)


def limits(rng, spares, operations):
    """Who dies after how many operations; never more than there are to go on."""
    victims = rng.choice(RANKS + spares, rng.integers(1, 3), replace=False)
    first, second = rng.integers(1, operations + 1, 2).tolist()
    if rng.integers(2):
        second = first + int(rng.integers(120))  # while they go on without the first
    return dict(zip([f"rank {victim}" for victim in victims], (first, second), strict=False))


@pytest.mark.parametrize("seed", [AT_THE_END, *range(MANY, MANY + 2 + SEEDS)])
@pytest.mark.full
def test_a_job_outlives_deaths_anywhere(seed, tmp_path, shared_text, calm):
    rng = np.random.default_rng(seed)
    name, spares = str(rng.choice([*LAYOUTS])), int(rng.choice([0, SPARES]))
    losses, operations = calm(name)
    clock = Clock(limits(rng, spares, operations))
    ranks_per_node = (None, 1, 2)[int(rng.integers(3))]
    with ticking(clock):
        rows = train(name, tmp_path / "run", shared_text, spares, ranks_per_node)
    told = f"{name}, {spares} spares, {ranks_per_node} ranks on a node: {clock.struck}"
    assert rows.steps["step"].tolist() == list(range(1, STEPS + 1)), told
    if spares:
        np.testing.assert_array_equal(rows.steps["loss"], losses, err_msg=told)
    else:
        np.testing.assert_allclose(rows.steps["loss"], losses, rtol=1e-9, err_msg=told)
