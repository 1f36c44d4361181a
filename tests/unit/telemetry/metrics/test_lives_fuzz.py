"""Jobs that survive the death of ranks at any operation between ranks, some of them twice in a row.


Each seed draws a layout, and the number of operations after which one or two ranks die: while they train, save, meet
again, restore their state, or leave. HPCDIST_TEST_LIFE_SEEDS=n tries n more seeds.
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
from hpcdist.training.run.elastic_job import ElasticJob

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
    """Counts the operations of each rank's thread from the start of its lives. ``limits`` define when ranks die."""

    def __init__(self, limits):
        self.counts = Counter()
        self._limits, self._begun = limits, set[str]()
        self.struck = []

    def begin(self):
        """Count the operations of this thread from here on."""
        self._begun.add(threading.current_thread().name)

    def tick(self, what):
        """Count an operation. The rank dies if its limit is exceeded."""
        name = threading.current_thread().name
        if name not in self._begun:  # a helper thread of a rank: the rank dies instead
            return
        self.counts[name] += 1
        if self.counts[name] == self._limits.get(name):
            self.struck.append(f"{name} in its operation {self.counts[name]}, {what}")
            raise RankDeath


@contextmanager
def ticking(clock):
    """Let ``clock`` count all operations between threads."""
    patch = pytest.MonkeyPatch()

    def count_calls(method):
        def called(self, *arguments):
            clock.tick(f"{method.__name__} of {self.name}")
            return method(self, *arguments)

        return called

    def train(lives, origin=None, before=ElasticJob.train):
        clock.begin()
        return before(lives, origin)

    for name in OPERATIONS:
        patch.setattr(ThreadCommunicator, name, count_calls(getattr(ThreadCommunicator, name)))
    patch.setattr(ElasticJob, "train", train)
    try:
        yield
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def calm_run(tmp_path_factory, shared_text):
    """A function that returns the losses of a layout without deaths, and the number of operations of a rank."""
    cache = {}

    def run_layout(name):
        if name not in cache:
            clock = Clock({})
            with ticking(clock):
                rows = train(name, tmp_path_factory.mktemp("calm") / "run", shared_text, 0)
            cache[name] = rows.steps["loss"], max(clock.counts.values())
        return cache[name]

    return run_layout


def train(name, out, shared_text, spares, ranks_per_node=None):
    keys = {"run.steps": STEPS, "run.seed": 3, "precision.mode": "float64", "checkpoint.every_steps": 2}
    return survive(RANKS, out, shared_text, keys | LAYOUTS[name], spares=spares, ranks_per_node=ranks_per_node)


def limits(rng, spares, operations):
    """Return the number of operations after which ranks die. Enough ranks survive to continue."""
    victims = rng.choice(RANKS + spares, rng.integers(1, 3), replace=False)
    first, second = rng.integers(1, operations + 1, 2).tolist()
    if rng.integers(2):
        second = first + int(rng.integers(120))  # while they go on without the first
    return dict(zip([f"rank {victim}" for victim in victims], (first, second), strict=False))


@pytest.mark.parametrize("seed", [AT_THE_END, *range(MANY, MANY + 2 + SEEDS)])
@pytest.mark.full
def test_job_survives_deaths_at_any_operation(seed, tmp_path, shared_text, calm_run):
    rng = np.random.default_rng(seed)
    name, spares = str(rng.choice([*LAYOUTS])), int(rng.choice([0, SPARES]))
    losses, operations = calm_run(name)
    clock = Clock(limits(rng, spares, operations))
    ranks_per_node = (None, 1, 2)[int(rng.integers(3))]
    with ticking(clock):
        rows = train(name, tmp_path / "run", shared_text, spares, ranks_per_node)
    output = f"{name}, {spares} spares, {ranks_per_node} ranks on a node: {clock.struck}"
    assert rows.steps["step"].tolist() == list(range(1, STEPS + 1)), output
    if spares:
        np.testing.assert_array_equal(rows.steps["loss"], losses, err_msg=output)
    else:
        np.testing.assert_allclose(rows.steps["loss"], losses, rtol=1e-9, err_msg=output)
