"""Backup workers: the exact mean of the first gradients, the same on all servers; late gradients are dropped."""

import random
import time
from functools import partial

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from harness.rank_run import RankRun, meet, optimizer_of
from hpcdist.arrays import backend
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.build import server_exchange
from hpcdist.strategies.parameter_server.backup_workers import BackupExchange, Quorum
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.control_messages import (
    ControlChannel,
    ControlFields,
    ControlKind,
    Rendezvous,
)
from hpcdist.strategies.parameter_server.partition import Roles

STEPS, SAMPLES = 5, 3  # of each worker
MODEL = ModelConfig(layers=1, hidden=32, heads=2)
PLACES = [(3, 1, "dedicated"), (5, 2, "dedicated"), (3, 3, "colocated"), (3, 1, "colocated"), (4, 2, "colocated")]


class Place(RankRun):
    """One rank with a tiny gpt. ``keys`` are keys of the optimizer."""

    def __init__(self, comm, config, on="cpu", **keys):
        make = partial(server_exchange, config=config)
        super().__init__(
            comm, make, servers=config, config=MODEL, optimizer=optimizer_of(**keys), total_steps=STEPS, on=on
        )
        self.workers = len(self.roles.workers)

    def batch(self, data, step):
        samples = backend.place(data[step, self.comm.rank], self.context.on)
        return [(samples[:, :-1], samples[:, 1:])]


class Backup(Place):
    """``pause`` is called with the clock before each push of a worker."""

    exchange: BackupExchange

    def train(self, data, pause):
        place = self.exchange
        self.operations = place.attended(self.operations)
        place.resume()
        self.taken = []
        while place.works and place.clock < STEPS and not place.meetings.called:
            before = place.clock
            pause(self, before)
            divisor = place.weigh(SAMPLES, SAMPLES * self.workers)
            self.executor.run(self.operations, self.batch(data, before), divisor, before, np.zeros(0))
            self.taken.append((before, place.taken))
        meet(place)
        place.refresh()


def text(rng, workers):
    return rng.integers(0, 256, (STEPS, workers, SAMPLES, 9)).astype(np.uint8)


def serve_until(place, ready):
    limit = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < limit
        place.serve()
        time.sleep(1e-3)


def lock_step(workers, data, taken, **keys):
    """Make the same steps in one process on the samples of the ``taken`` workers. Return all parameters."""

    def body(comm):
        place = Place(comm, ParameterServerConfig(placement="colocated"), **keys)
        for step, ranks in enumerate(taken):
            samples = np.concatenate([data[step, rank] for rank in ranks])
            place.executor.run(place.operations, [(samples[:, :-1], samples[:, 1:])], len(samples), step, np.zeros(0))
        return place.exchange.parameters.array.tobytes()

    return run_threads(1, body)[0]


def config_of(servers, placement):
    return ParameterServerConfig(servers=servers, placement=placement, backup_workers=1)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
@pytest.mark.parametrize(("size", "servers", "placement"), PLACES)
def test_late_worker_is_skipped_and_catches_up(size, servers, placement, name, rng):
    """The last worker misses the first three updates. It may replace another worker in the fourth."""
    config = config_of(servers, placement)
    workers = len(Roles.of(config, size).workers)
    slow, data = workers - 1, text(rng, workers)
    others_at = [0] * workers

    def pause(run, clock):
        others_at[run.comm.rank] = clock
        rank = run.comm.rank
        if rank == slow and clock == 0:
            serve_until(run.exchange, lambda: min(others_at[:slow]) >= 3)
        elif rank != slow and clock == 3:
            serve_until(run.exchange, lambda: others_at[slow] >= 3)

    def body(comm):
        run = Backup(comm, config, name=name, learning_rate=1e-2 if name != "lars" else 1.0)
        run.train(data, pause)
        assert run.exchange.clock == run.exchange.updates == STEPS or not run.exchange.works
        return run.exchange.parameters.array.tobytes() if run.exchange.works else b"", run.taken

    results = run_threads(size, body)
    taken = [[w for w in range(workers) if (clock, True) in results[w][1]] for clock in range(STEPS)]
    assert all(len(ranks) == workers - 1 for ranks in taken), taken
    assert [clock for clock, _ in results[slow][1]][:2] == [0, 3], "it goes on where the others are"
    assert results[slow][1][0] == (0, False)
    expected = np.frombuffer(lock_step(workers, data, taken, name=name, learning_rate=1e-2 if name != "lars" else 1.0))
    for values, _ in results[:workers]:
        assert values == results[0][0]
        assert np.linalg.norm(np.frombuffer(values) - expected) <= 1e-12 * np.linalg.norm(expected)


def train_with_three_of_four(data, order, on="cpu"):
    """Train with four workers, of which the workers in ``order`` always come first, in this order.

    Return the parameters.
    """
    runs = {}

    def body(comm):
        run = runs[comm.rank] = Backup(comm, config_of(1, "dedicated"), on)
        comm.barrier()
        quorum = runs[4].exchange._quorum
        assert quorum is not None

        def pause(run, clock):
            if comm.rank in order:
                place = order.index(comm.rank)
                serve_until(run.exchange, lambda: (quorum.clock, len(quorum._here)) == (clock, place))
            else:
                serve_until(run.exchange, lambda: quorum.clock == STEPS)

        run.train(data, pause)
        assert comm.rank == 4 or run.taken == ([(0, False)] if comm.rank == 3 else [(n, True) for n in range(STEPS)])
        assert backend.is_device(run.exchange.parameters.array) == (on == "gpu")
        return backend.to_host(run.exchange.parameters.array)

    return run_threads(5, body)[0]


def test_order_of_arrival_does_not_matter(rng):
    """The sum is in rank order."""
    data = text(rng, 4)
    assert np.array_equal(train_with_three_of_four(data, [0, 1, 2]), train_with_three_of_four(data, [2, 1, 0]))


@pytest.mark.full
def test_backup_workers_on_the_gpu_match_the_cpu(gpu, rng):
    data = text(rng, 4)
    host, device = (train_with_three_of_four(data, [0, 1, 2], on) for on in ("cpu", "gpu"))
    assert np.linalg.norm(device - host) <= 1e-10 * np.linalg.norm(host)


def test_restored_state_has_one_clock_for_all():
    def body(comm):
        run = Backup(comm, config_of(3, "colocated"))
        run.exchange.restore({"count": 2, "clocks": [3, 2, 4], "updates": 9})
        shard = run.exchange.shard
        assert shard is not None
        return run.exchange.clock, run.exchange.clocks, shard.updates, run.exchange.state()

    assert run_threads(3, body) == [(2, [2, 2, 2], 2, {"count": 2})] * 3


def test_late_worker_does_not_revert_the_last_step_at_a_meeting():
    """It learns of the meeting at clock 1, the others one step later.

    All of them and the saved state are at clock 2.
    """
    runs = {}
    data = text(np.random.default_rng(5), 3)

    def pause(run, clock):
        place, late = run.exchange, runs[2].exchange
        if place.rank == 2:
            serve_until(place, lambda: min(runs[0].exchange.clock, runs[1].exchange.clock) == 1)
            place.meetings.call()
        elif clock == 1:
            serve_until(place, lambda: late.meetings.called)

    def body(comm):
        run = runs[comm.rank] = Backup(comm, config_of(1, "dedicated"))
        comm.barrier()
        run.train(data, pause)
        place = run.exchange
        return place.updates, place.clocks, place.state(), run.taken, place.parameters.array.tobytes()

    results = run_threads(4, body)
    assert [taken for *_, taken, _ in results] == [[(0, True), (1, True)]] * 2 + [[(0, False)], []]
    assert [(updates, clocks, state) for updates, clocks, state, *_ in results] == [(2, [2, 2, 2], {"count": 2})] * 4
    assert results[0][-1] == results[1][-1] == results[2][-1]
    assert runs[2].exchange.clock == 2


BATCH = 12


def accepted_fields(clock, workers, scale):
    return ControlFields(clock, scale, workers=workers)


def dropped_fields(clock, worker):
    return ControlFields(clock, dropped=True, workers=(worker,))


def push(quorum, worker, clock, samples=3):
    return quorum.push(worker, clock, samples, BATCH)


def test_first_gradients_are_accepted_in_rank_order():
    quorum = Quorum(range(4), 1)
    assert push(quorum, 3, 1) == push(quorum, 0, 1) == []
    assert push(quorum, 2, 1) == [accepted_fields(1, (0, 2, 3), 12 / 9)]
    assert quorum.clock == 1 and quorum.dropped == 0


def test_late_gradient_is_dropped_and_its_worker_catches_up():
    quorum = Quorum(range(3), 1)
    for clock in (1, 2):
        push(quorum, 0, clock)
        push(quorum, 1, clock)
    assert push(quorum, 2, 1) == [dropped_fields(2, 2)] and quorum.dropped == 1
    push(quorum, 2, 3)
    assert push(quorum, 0, 3) == [accepted_fields(3, (0, 2), 12 / 6)]


def test_scale_is_exactly_one_if_all_are_accepted():
    quorum = Quorum(range(3), 0)
    assert [quorum.push(worker, 1, samples, 7) for worker, samples in ((0, 3), (1, 3), (2, 1))][-1] == [
        accepted_fields(1, (0, 1, 2), 1.0)
    ]


def test_worker_that_could_not_complete_a_quorum_is_released():
    quorum = Quorum(range(3), 1)
    push(quorum, 0, 1)
    assert quorum.leave(1) == []
    assert quorum.leave(2) == [dropped_fields(0, 0)]
    quorum.convene(0)
    push(quorum, 1, 1)
    assert push(quorum, 0, 1) == [accepted_fields(1, (0, 1), 2.0)]


def test_any_schedule_completes_each_clock_once_and_answers_all():
    late = 0
    for seed in range(2000):
        draw = random.Random(seed)
        workers, steps = range(draw.randint(1, 5)), draw.randint(1, 6)
        spare = draw.randrange(len(workers))
        quorum, clock_of = Quorum(workers, spare), dict.fromkeys(workers, 0)
        waiting = set()
        complete = 0
        while ready := [worker for worker in workers if worker not in waiting and clock_of[worker] < steps]:
            worker = draw.choice(ready)
            waiting.add(worker)
            for turn in push(quorum, worker, clock_of[worker] + 1):
                if turn.dropped:
                    assert turn.clock == complete and len(turn.workers) == 1, "the newest"
                else:
                    complete += 1
                    assert turn.clock == complete and len(turn.workers) == len(workers) - spare
                    assert list(turn.workers) == sorted(set(turn.workers))
                    assert all(clock_of[one] == turn.clock - 1 for one in turn.workers), "none of a past clock"
                for one in turn.workers:
                    waiting.remove(one)
                    clock_of[one] = turn.clock
        assert not waiting and set(clock_of.values()) == {steps} and complete == steps
        late += quorum.dropped
    assert late > 2000


ROLES = Roles(range(1, 3), range(1))  # rank 0 serves


def test_call_after_a_meeting_is_not_mistaken_for_a_late_call():
    """The call of worker 2 is still in flight when worker 1 leaves the meeting, pushes and calls the next meeting."""

    def body(comm):
        messages = []
        notes = ControlChannel(comm.dup("notes"))
        notes.answers[ControlKind.PUSH] = lambda worker, what: messages.append(f"push {what.clock} of {worker}")
        meetings = Rendezvous(comm.rank, ROLES, notes)
        meetings.meet()
        if comm.rank == 1:
            notes.tell(0, ControlKind.PUSH, ControlFields(clock=7))
            notes.tell(0, ControlKind.CALL, ControlFields(clock=1))  # for the second meeting
            notes.tell(0, ControlKind.PUSH, ControlFields(clock=8))
        comm.barrier()
        if comm.rank == 2:
            notes.tell(0, ControlKind.CALL, ControlFields(clock=0))
        if comm.rank == 0:
            meetings.settle(pause_requests=1)
            assert messages == [] and meetings.due, "only the second meeting is due"
            notes.serve()
        comm.barrier()
        notes.settle()
        return messages

    assert run_threads(3, body)[0] == ["push 7 of 1", "push 8 of 1"]


def test_delayed_notes_come_before_others():
    def body(comm):
        messages = []
        notes = ControlChannel(comm.dup("notes"))
        notes.answers[ControlKind.PUSH] = lambda worker, what: messages.append(what.clock)
        notes.answers[ControlKind.CALL] = lambda worker, what: messages.append(-what.clock)
        if comm.rank == 1:
            for kind, clock in (
                (ControlKind.PUSH, 1),
                (ControlKind.CALL, 9),
                (ControlKind.PUSH, 2),
                (ControlKind.PUSH, 3),
            ):
                notes.tell(0, kind, ControlFields(clock=clock))
        else:
            notes.take(ControlKind.CALL)
            for alone in (True, False, True):
                notes.wait(alone=alone)
        notes.settle()
        return messages

    assert run_threads(2, body)[0] == [-9, 1, 2, 3]
