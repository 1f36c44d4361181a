"""Whole steps, every schedule under every exchange: proven, performed, and rejected if one operation is wrong.


Steps that the verifier accepts are also performed by independent rules (`step_lists`), so that the two check each
other.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.step_lists import EXCHANGES, build, is_supported, perform
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.operations import ENDS, Kind
from hpcdist.strategies.schedule.operation_list import insert_polls, overlap_reductions, prefetch_gathers
from hpcdist.strategies.schedule.registry import SCHEDULES

PAIRS = [(schedule, exchange) for schedule in SCHEDULES for exchange in EXCHANGES if is_supported(schedule, exchange)]


def sizes(schedule, rng):
    """Return (ranks, micro-batches, chunks): the extremes of the legal sizes up to 8, 32 and 4, and one in between."""
    row = SCHEDULES[schedule]
    most = 8 if row.pipelines else 1
    chunks = row.most or 4
    for ranks in {1, most}:
        yield ranks, row.fewest(ranks), chunks
    yield most, 32, chunks
    ranks = int(rng.integers(1, most + 1))
    yield ranks, int(rng.integers(row.fewest(ranks), 33)), row.most or int(rng.integers(2, 5))


@pytest.mark.parametrize(("schedule", "exchange"), PAIRS)
@pytest.mark.matrix_except("zb-h1-zero1", *("-".join(pair) for pair in PAIRS[::2]))
@pytest.mark.full_except("zb-h1-zero1")
def test_steps_are_proven_with_their_bounds(schedule, exchange, rng):
    row = SCHEDULES[schedule]
    for ranks, microbatches, chunks in sizes(schedule, rng):
        data = 1 if microbatches * chunks > 64 else 2
        step = build(schedule, exchange, ranks, microbatches, chunks, data)
        proof = step.verify()
        peaks = [row.peak(rank, ranks, microbatches, chunks) for rank in range(ranks)]
        assert proof.live == proof.whole == tuple(peak.live for peak in peaks)
        assert proof.both == tuple(peak.both for peak in peaks)
        assert all(held <= peak.held for held, peak in zip(proof.held, peaks, strict=True))
        crossing = sum(step.placement.crosses(unit) for unit in step.placement.units)
        assert proof.messages == 2 * microbatches * crossing * data
        gathers, keep, _ = EXCHANGES[exchange]
        assert proof.gathered == ((chunks if keep else 1) * gathers,) * ranks


@pytest.mark.parametrize(("schedule", "exchange"), PAIRS)
def test_steps_sum_every_microbatch_of_every_replica_once(schedule, exchange):
    row = SCHEDULES[schedule]
    for ranks, microbatches in ((1, 2), (2, 3), (3, 3)) if row.pipelines else ((1, 3),):
        step = build(schedule, exchange, ranks, microbatches, row.most or 2, each=2)
        step.verify()
        everything = {((r, m, half), 1) for r in range(2) for m in range(microbatches) for half in ("input", "weight")}
        for rank, values in enumerate(perform(step)):
            values.pop(-1)
            assert values, f"rank {rank}"
            for old, (_, summed), _ in values.values():
                assert old == "old" and set(summed) == everything


def overlap_step(step, in_flight, ahead):
    """Return the step with reductions and gathers that overlap the computation."""
    lists = []
    for rank, steps in enumerate(step.lists):
        place = step.placement.of(step.grid.coordinates(rank)["pipeline"])
        local_values = {unit: step.units[unit] for chunk in place for unit in chunk}
        begun = overlap_reductions(steps, local_values, {unit: [unit] for unit in local_values}, in_flight)
        lists.append(insert_polls(prefetch_gathers(begun, ahead)))
    return replace(step, lists=lists)


def some_step(draw):
    schedule, exchange = draw(st.sampled_from(PAIRS))
    row = SCHEDULES[schedule]
    ranks = draw(st.sampled_from([1, 2, 2, 3])) if row.pipelines else 1
    microbatches = row.fewest(ranks) + draw(st.integers(0, 2))
    return build(schedule, exchange, ranks, microbatches, row.most or 2, 2, draw(st.sampled_from([1, 1, 2])))


@st.composite
def overlapped_step(draw):
    step = some_step(draw)
    in_flight, ahead = draw(st.sampled_from([None, 1, 2])), draw(st.integers(0, 2))
    return step, overlap_step(step, in_flight, ahead), in_flight, ahead


def most_in_flight(steps, begins):
    """Return the largest number that is in flight at once."""
    result = under_way = 0
    for op in steps:
        under_way += (op.kind is begins) - (op.kind is ENDS[begins])
        result = max(result, under_way)
    assert under_way == 0
    return result


@settings(max_examples=40, deadline=None)
@given(overlapped_step())
def test_overlapped_pipelines_keep_their_bounds(case):
    step, behind, in_flight, ahead = case
    proof, before = behind.verify(), step.verify()
    assert (proof.live, proof.both, proof.messages) == (before.live, before.both, before.messages)
    assert perform(behind) == perform(step)
    for rank, steps in enumerate(behind.lists):
        assert most_in_flight(steps, Kind.START) <= (in_flight or len(steps))
        assert most_in_flight(steps, Kind.START_GATHER) <= ahead
        assert Counter(op.kind for op in steps)[Kind.START] == sum(op.kind is Kind.REDUCE for op in step.lists[rank])
        under_way = 0
        for op, after in zip(steps, steps[1:], strict=False):
            under_way += (op.kind in ENDS) - (op.kind in ENDS.values())
            computes = op.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            assert (after.kind is Kind.POLL) == (computes and under_way > 0)


@st.composite
def changed_step(draw):
    """Return a step, and the same step with one operation of one rank removed, doubled, moved, or renamed."""
    step = some_step(draw)
    if draw(st.booleans()):
        step = overlap_step(step, 2, 1)
    rank = draw(st.integers(0, len(step.lists) - 1))
    steps = list(step.lists[rank])
    at = draw(st.integers(0, len(steps) - 1))
    op = steps[at]
    change = draw(st.sampled_from(["drop", "double", "swap", "swap", "micro-batch", "unit"]))
    if change == "drop":
        del steps[at]
    elif change == "double":
        steps.insert(draw(st.integers(0, len(steps))), op)
    elif change == "swap":
        other = min(len(steps) - 1, at + draw(st.integers(1, 4)))
        steps[at], steps[other] = steps[other], steps[at]
    elif change == "micro-batch":
        assume(op.microbatch >= 0)
        steps[at] = replace(op, microbatch=max(0, op.microbatch + draw(st.sampled_from([-1, 1, 7]))))
    else:
        assume(op.unit >= 0)
        steps[at] = replace(op, unit=max(0, op.unit + draw(st.sampled_from([-1, 1, 5]))))
    assume(steps != step.lists[rank])
    lists = [*step.lists[:rank], steps, *step.lists[rank + 1 :]]
    return step, replace(step, lists=lists), f"{change} {op} of rank {rank}"


HARMLESS = (Kind.POLL, Kind.FREE)  # a POLL more or less; the micro-batch by which a FREE is named


@settings(max_examples=200, deadline=None)
@given(changed_step())
@pytest.mark.full
def test_changed_step_is_rejected_or_computes_the_same(case):
    step, broken, what = case
    try:
        broken.verify()
    except ScheduleError:
        return
    assert what.startswith("swap") or any(kind.name in what for kind in HARMLESS), f"accepted: {what}"
    assert perform(broken) == perform(step), f"accepted, and another step: {what}"


def test_reduction_per_microbatch_needs_joint_backward_halves():
    step = build("zb-h1", "zero2", 2, 3, 1)
    with pytest.raises(
        ScheduleError,
        match=r"rank 2: REDUCE\(0, \[24:48\]\) exchanges the gradients of unit 1 summed over the micro-batches \[0",
    ):
        step.verify()
    build("zb-h1", "zero2", 1, 3, 1).verify()  # a rank alone puts nothing off


def test_reduction_before_its_weight_gradient_is_rejected():
    for exchange in ("allreduce", "zero1", "zero3 keep both"):
        step = build("zb-h1", exchange, 2, 3, 1)
        steps = step.lists[0]
        last = max(index for index, op in enumerate(steps) if op.kind is Kind.BACKWARD_WEIGHT)
        reduce = next(index for index, op in enumerate(steps) if op.kind is Kind.REDUCE)
        steps.insert(reduce, steps.pop(last))
        with pytest.raises(ScheduleError, match=r"rank 0: .* put REDUCE\(.*\[0:24\]\) after BACKWARD_WEIGHT\(2, 0\)"):
            step.verify()


def test_units_of_another_placement_are_rejected():
    step = build("interleaved", "allreduce", 2, 2, 2)
    step.placement = SCHEDULES["zb-v"].place(step.placement.chunks, 2)
    with pytest.raises(
        ScheduleError, match=r"computes the model units \[0, 2\], but the placement assigns .* \[0, 3\]"
    ):
        step.verify()
