"""Every schedule for every number of ranks, micro-batches and chunks: proven, with the stated peaks and times."""

import itertools

import pytest

from harness import jobs
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.operations import Kind, folded, looped
from hpcdist.strategies.schedule.operation_list import evaluation_operations
from hpcdist.strategies.schedule.passes import interleaved, interleaved_group, spell, zb_h1, zb_v
from hpcdist.strategies.schedule.registry import NAMES, SCHEDULES, check_schedule
from hpcdist.strategies.schedule.verify import liveness

RANKS = range(1, 9)
MICROBATCHES = (*range(1, 16), 17, 24, 31, 32)


def legal(name):
    """Return the (ranks, micro-batches, chunks) that are accepted, up to 8, 32 and 4."""
    row = SCHEDULES[name]
    chunks = [row.most] if row.most is not None else range(row.least, 5)
    return [
        (p, m, v)
        for p, m, v in itertools.product(RANKS if row.pipelines else [1], MICROBATCHES, chunks)
        if m >= row.fewest(p)
    ]


def units(count):
    return [range(unit, unit + 1) for unit in range(count)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.full_except("zb-h2")
def test_schedules_match_between_ranks_and_hold_the_stated_memory(name):
    row = SCHEDULES[name]
    for p, m, v in legal(name):
        assert check_schedule(name, p, m, v) == v
        passes = [row.passes(rank, p, m, v) for rank in range(p)]
        peaks = liveness.prove(passes, row.place(units(p * v), p), m)
        for rank, (peak, bound) in enumerate(zip(peaks, [row.peak(rank, p, m, v) for rank in range(p)], strict=True)):
            exact = name != "zb-v" or m >= 2 * p - 1
            assert (peak.live, peak.both) == (bound.live, bound.both), f"rank {rank} of {p}, {m} x {v}"
            assert peak.held == bound.held if exact else peak.held <= bound.held
        for steps in passes:  # gradients are summed in the order of the micro-batches
            done = {}
            for way, microbatch, chunk in steps:
                if way in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    assert done.get(chunk, -1) == microbatch - 1
                    done[chunk] = microbatch
            assert row.splits == any(way is Kind.BACKWARD_WEIGHT for way, _, _ in steps)


def times(passes, placement, seconds):
    """Return the longest idle time of a rank between its first and last pass, and the end. Messages take no time."""
    numbers = [[n for n, owner in enumerate(placement.ranks) if owner == rank] for rank in range(len(passes))]
    ends = {}
    at, clock, begin = [0] * len(passes), [0.0] * len(passes), [-1.0] * len(passes)
    left = sum(map(len, passes))
    while left:
        before = left
        for rank, steps in enumerate(passes):
            while at[rank] < len(steps):
                way, microbatch, chunk = steps[at[rank]]
                here = numbers[rank][chunk]
                needed = here - 1 if way is Kind.FORWARD else here + 1
                alone = way is Kind.BACKWARD_WEIGHT or not 0 <= needed < len(placement.chunks)
                if not alone and (way is Kind.FORWARD, microbatch, needed) not in ends:
                    break
                start = max(clock[rank], 0 if alone else ends[way is Kind.FORWARD, microbatch, needed])
                begin[rank] = start if begin[rank] < 0 else begin[rank]
                clock[rank] = start + seconds[way]
                if way is not Kind.BACKWARD_WEIGHT:
                    ends[way is Kind.FORWARD, microbatch, here] = clock[rank]
                at[rank], left = at[rank] + 1, left - 1
        assert left < before, "a circle"
    work = [sum(seconds[way] for way, _, _ in steps) for steps in passes]
    return max(clock[rank] - begin[rank] - work[rank] for rank in range(len(passes))), max(clock)


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.0, 1.5)])
def test_idle_times_match_the_papers(f, b, w):
    seconds = {Kind.FORWARD: f, Kind.BACKWARD: b + w, Kind.BACKWARD_INPUT: b, Kind.BACKWARD_WEIGHT: w}
    closed = {
        "gpipe": lambda p: (p - 1) * (f + b + w),
        "1f1b": lambda p: (p - 1) * (f + b + w),
        "interleaved": lambda p: (p - 1) * (f + b + w),  # of passes that are 1/v of a rank's work
        "zb-h1": lambda p: (p - 1) * (f + b - w),
        "zb-h2": lambda p: (p - 1) * (f + b - 2 * w),
        "zb-v": lambda p: 0 if f == b == w else None,
    }
    for name, expected in closed.items():
        row = SCHEDULES[name]
        for p, m, v in legal(name):
            if p not in (1, 2, 3, 4, 7) or m not in (2 * p - 1, 2 * p, 17, 31) or m < 2 * p - 1 or v == 4:
                continue
            passes = [row.passes(rank, p, m, v) for rank in range(p)]
            if expected(p) is not None:
                result, _ = times(passes, row.place(units(p * v), p), seconds)
                assert result == pytest.approx(expected(p)), (name, p, m, v)


def text(passes):
    return " ".join(map(spell, passes))


def test_interleaved_of_two_ranks_with_two_chunks():
    """Figure 4 of the paper, for p = 2 and m = 4: groups of 2 micro-batches alternate between the chunks."""
    assert [text(interleaved(rank, 2, 4, 2)) for rank in range(2)] == [
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0",
    ]
    assert [interleaved_group(4, m) for m in range(4, 17)] == [4, 5, 6, 7, 4, 5, 5, 6, 4, 7, 5, 5, 4]


def test_zero_bubble_defers_the_weights_of_later_ranks():
    """Figure 3 of the paper, above."""
    assert [text(zb_h1(rank, 3, 4)).replace(".0", "") for rank in range(3)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert text(zb_v(1, 2, 1)) == "F0.0 F0.1 I0.1 W0.1 I0.0 W0.0"


def test_evaluation_passes_all_chunks_once():
    for p, v in itertools.product(range(1, 6), (1, 2, 3)):
        for place in (looped, folded) if v == 2 else (looped,):
            placement = place(units(p * v), p)
            passes = [
                [
                    (Kind.FORWARD, op.microbatch, placement.of(rank).index(range(op.unit, op.unit + 1)))
                    for op in evaluation_operations(placement, rank)
                    if op.kind is Kind.FORWARD
                ]
                for rank in range(p)
            ]
            assert passes == [[(Kind.FORWARD, 0, chunk) for chunk in range(v)]] * p
            assert times(passes, placement, {Kind.FORWARD: 1.0})[1] == v * p


def test_impossible_sizes_are_rejected_with_the_possible_ones():
    for name, p, m, v, match in (
        ("interleaved", 4, 3, 2, r"microbatches = 3: .* set parallel.microbatches to at least 4"),
        ("interleaved", 4, 8, 1, r"parallel.chunks = 1 .* needs at least 2 chunks"),
        ("1f1b", 4, 8, 2, r"parallel.chunks = 2 .* this schedule has 1 per rank"),
        ("zb-v", 4, 8, 3, r"parallel.chunks = 3 .* this schedule has 2 per rank"),
        ("sequential", 2, 8, 1, r"parallel.pipeline = 2: in this schedule, only one pipeline rank computes"),
        ("2f2b", 2, 8, 1, r"parallel.schedule = '2f2b' is unknown; choose one of .*zb-h1.*file"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            check_schedule(name, p, m, v)
    assert check_schedule("zb-v", 4, 1) == check_schedule("zb-v", 4, 1, 2) == 2
    assert set(NAMES) == {*SCHEDULES, "file"}


def test_recipe_check_does_not_import_numpy():
    code = "import sys, hpcdist.strategies.schedule.registry; print('numpy' in sys.modules)"
    assert jobs.python(code, check=True).stdout == "False\n"
