"""Time booking: seconds by phase add up, each operation is a span, and a GPU is waited for once per phase."""

import itertools

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.schedule import step
from hpcdist.strategies.schedule.step import PHASES, PhaseTimer, phase_of

OPERATIONS = [
    Operation(Kind.FORWARD, 0, 0),
    Operation(Kind.FORWARD, 0, 1),
    Operation(Kind.BACKWARD, 0, 1),
    Operation(Kind.REDUCE),
    Operation(Kind.BACKWARD, 0, 0),
    Operation(Kind.REDUCE),
    Operation(Kind.AGREE),
    Operation(Kind.DIRECTION),
    Operation(Kind.APPLY),
]
ARRAY = np.zeros(1)


class Kept:
    def __init__(self):
        self.rows = []

    def add(self, *row):
        self.rows.append(row)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 10 ns with each read."""
    times = itertools.count(1000, 10)
    monkeypatch.setattr(step, "now_ns", lambda: next(times))


def book_phases(kept):
    seconds = dict.fromkeys(("compute_s", "communication_s", "update_s"), 0.0)
    book = PhaseTimer(OPERATIONS, seconds, 7, ARRAY, *([] if kept is None else [kept]))
    for place in range(len(OPERATIONS)):
        book.done(place)
    return {name: round(value * 1e9) for name, value in seconds.items()}


def test_every_operation_is_a_span_without_gaps(clock):
    kept = Kept()
    assert book_phases(kept) == {"compute_s": 40, "communication_s": 30, "update_s": 20}
    assert [row[:3] for row in kept.rows] == [(phase_of(op.kind), op.kind.name, 7) for op in OPERATIONS]
    assert [row[3:] for row in kept.rows] == [
        (1000 + 10 * place, 1010 + 10 * place, op.microbatch, op.unit) for place, op in enumerate(OPERATIONS)
    ]


def test_clock_without_spans_is_read_once_per_phase(clock):
    # compute, reduce, compute, communication, update
    assert book_phases(None) == {"compute_s": 20, "communication_s": 20, "update_s": 10}


def test_gpu_is_waited_for_once_per_phase(clock, monkeypatch):
    waits = []
    monkeypatch.setattr(backend, "is_device", lambda array: True)
    monkeypatch.setattr(backend, "synchronise", waits.append)
    kept = Kept()
    assert book_phases(kept) == {"compute_s": 20, "communication_s": 20, "update_s": 10}
    assert len(waits) == 5
    assert [(row[0], row[1], *row[5:]) for row in kept.rows] == [
        ("compute", "FORWARD to BACKWARD"),
        ("communication", "REDUCE", -1, -1),
        ("compute", "BACKWARD", 0, 0),
        ("communication", "REDUCE to AGREE"),
        ("update", "DIRECTION to APPLY"),
    ]


def test_unlisted_operations_count_as_communication():
    assert {phase_of(kind) for kind in Kind if kind not in PHASES} == {"communication"}
