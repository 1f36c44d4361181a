"""A clock accepts the first gradients and no others, and every worker gets an answer."""

import random

from hpcdist.strategies.parameter_server.backup_workers import Quorum
from hpcdist.strategies.parameter_server.control_messages import ControlFields

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
