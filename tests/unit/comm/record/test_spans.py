"""Span files: round trip, a full ring, a killed writer and damaged files."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from hpcdist.comm.launch.environment import boot_id
from hpcdist.comm.record import spans as record_spans
from hpcdist.comm.record.spans import PHASES, Span, Spans, now_ns
from hpcdist.errors import StorageError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank-00003.spans"


def draw_spans(rng, count):
    ends = np.cumsum(rng.integers(1, 10**9, count))
    return [
        Span(
            str(rng.choice(PHASES)),
            f"operation {rng.integers(9)}",
            int(rng.integers(10**6)),
            int(rng.integers(-1, 50)),
            int(rng.integers(-1, 50)),
            int(end - rng.integers(1, 10**6)),
            int(end),
        )
        for end in ends
    ]


def add(spans, span):
    spans.add(span.phase, span.name, span.step, span.begin_ns, span.end_ns, span.microbatch, span.unit)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
def test_last_spans_are_read_back(path, rng, count):
    spans = Spans(path, rank=3, world=5, capacity=8)
    expected = draw_spans(rng, count)
    for span in expected:
        add(spans, span)
    result = record_spans.read(path)  # while it is open
    assert (result.rank, result.world, result.host, result.boot_id) == (3, 5, os.uname().nodename, boot_id())
    assert result.spans == tuple(expected[-8:])
    assert abs(result.monotonic_ns - now_ns()) < 60e9
    spans.close()
    assert record_spans.read(path) == result


def test_drain_returns_each_span_once_without_steps(path, rng):
    spans = Spans(path, 0, 1, capacity=100)
    for _ in range(2):
        expected = draw_spans(rng, 40)
        for span in expected:
            add(spans, span)
        rows = [[PHASES.index(s.phase), s.begin_ns, s.end_ns] for s in expected if s.phase != "step"]
        drained = spans.drain()
        assert drained.dtype == np.int64 and drained.tolist() == rows
    assert spans.drain().shape == (0, 3)


def test_undrained_spans_are_bounded(path, rng):
    spans = Spans(path, 0, 1, capacity=10)
    for number in range(1000):
        spans.add("compute", "FORWARD", number, 2 * number, 2 * number + 1)
    assert len(spans._fresh) <= 20
    assert spans.drain()[:, 1].tolist() == list(range(1980, 2000, 2))


def test_consecutive_operations_of_a_phase_are_drained_as_one(path):
    """Many operations per step fit this way. Here: compute, communication, compute, and compute after a gap."""
    spans = Spans(path, 0, 1, capacity=10)
    for _ in range(2):
        for begin, phase in enumerate(("compute",) * 40 + ("communication",) + ("compute",) * 40):
            spans.add(phase, "x", 1, begin, begin + 1)
        spans.add("compute", "x", 1, 90, 91)
        drained = spans.drain()
        code, other = PHASES.index("compute"), PHASES.index("communication")
        assert drained.tolist() == [[code, 0, 40], [other, 40, 41], [code, 41, 81], [code, 90, 91]]
    assert len(record_spans.read(path).spans) == 10  # the ring keeps single spans


def test_full_name_table_drops_only_spans_with_new_names(path):
    spans = Spans(path, 0, 1, capacity=2000)
    for number in range(1000):
        spans.add("other", f"{number:0200d}", number, number, number + 1)
    spans.add("other", f"{0:0200d}", 5000, 1, 2)
    result = record_spans.read(path).spans
    assert 0 < len(result) < 1000 and result[-1].step == 5000
    assert all(int(span.name) == span.step for span in result[:-1])


def test_numbers_beyond_the_field_are_clipped(path):
    Spans(path, 0, 1).add("compute", "FORWARD", 1, 1, 2, microbatch=10**6, unit=2)
    assert record_spans.read(path).spans[0].microbatch == 0x7FFF


def test_spans_survive_a_killed_writer(path):
    code = (
        "import os, signal, sys; from pathlib import Path; from hpcdist.comm.record.spans import Spans\n"
        "spans = Spans(Path(sys.argv[1]), 0, 1)\n"
        "for n in range(100): spans.add('compute', 'FORWARD', n, n, n + 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=LIMIT_S, check=False)
    assert done.returncode < 0
    assert [span.step for span in record_spans.read(path).spans] == list(range(100))


def test_damaged_file_is_rejected_or_loses_spans(path, rng):
    spans = Spans(path, 0, 1, capacity=64)
    for span in draw_spans(rng, 64):
        add(spans, span)
    spans.close()
    whole = path.read_bytes()
    for cut in (0, 7, 200, record_spans.RING, len(whole) - 1):
        with pytest.raises(StorageError):
            record_spans.parse(whole[:cut], path)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=4):
            damaged[place] = rng.integers(256)
        with contextlib.suppress(StorageError):
            assert len(record_spans.parse(bytes(damaged), path).spans) <= 64


def test_unwritable_path_is_rejected(tmp_path):
    with pytest.raises(StorageError, match=r"telemetry.trace = false"):
        Spans(tmp_path / "missing" / "rank-0.spans", 0, 1)
