"""The simulator: its times by another method, in closed form and by hand; the critical path, and live activations."""

from dataclasses import replace

import numpy as np
import pytest

from hpcdist.arrays.ranges import Range
from hpcdist.bench.schedules import bars
from hpcdist.errors import ScheduleError, UsageError
from hpcdist.strategies.core.operations import Kind, Operation, looped
from hpcdist.strategies.schedule import registry, timeline
from hpcdist.strategies.schedule.operation_list import generated
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.strategies.schedule.simulated_program import CODES, LinkCost, StepCosts

PIPELINES = [name for name, schedule in SCHEDULES.items() if schedule.pipelines]


def generated_schedule(name, stages, microbatches, chunks=2):
    return generated(name, stages, microbatches, chunks if SCHEDULES[name].most is None else 1)


def cases():
    """Yield (schedule, stages, micro-batches, chunks)."""
    for name in PIPELINES:
        for stages in range(1, 5):
            for microbatches in (1, 2, 4, 7):
                for chunks in (2, 3) if SCHEDULES[name].most is None else (1,):
                    if microbatches >= SCHEDULES[name].fewest(stages):
                        yield name, stages, microbatches, chunks


def uneven_costs(placement, draw, link=None):
    """Return costs in whole seconds, so that sums in any order are exact."""
    units = placement.units.stop
    rows = draw.integers(0, 6, (4, units)).astype(float).tolist()
    names = ("forward_s", "backward_s", "input_s", "weight_s")
    return StepCosts(**dict(zip(names, rows, strict=True)), link=link or LinkCost())


def parts(chunks, draw):
    """Return chunks of one to three units."""
    ends = np.cumsum(draw.integers(1, 4, chunks)).tolist()
    return [range(first, stop) for first, stop in zip([0, *ends], ends, strict=False)]


def simulate_lists(of, placement, costs, recompute=False):
    exchange = Operation(Kind.REDUCE, range=Range(0, 100)), Operation(Kind.AGREE)  # which takes no time
    steps = [[*expand(row, placement, rank, recompute=recompute), *exchange] for rank, row in enumerate(of.passes)]
    return timeline.simulate_lists(steps, placement, costs)


def simulate_passes(of, placement, costs, recompute=False):
    return timeline.simulate_passes([timeline.compact(row) for row in of.passes], placement, costs, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.full_except("True")
def test_lists_and_passes_have_the_same_times_and_memory(recompute, rng):
    link = LinkCost(latency_s=2.0, carries_s=1.5)
    for name, stages, microbatches, chunks in cases():
        of = generated_schedule(name, stages, microbatches, chunks)
        placement = of.place(parts(stages * of.chunks, rng))
        costs = uneven_costs(placement, rng, link)
        long, short = (form(of, placement, costs, recompute) for form in (simulate_lists, simulate_passes))
        assert bars(long) == bars(short), (name, stages, microbatches)
        assert long.makespan_s == short.makespan_s
        assert timeline.peaks(long.program) == timeline.peaks(short.program), (name, stages, microbatches)


def relaxed_ends(of, placement, costs, latency_s):
    """Return the end of each (chunk, pass, micro-batch), by relaxation of its dependencies until nothing changes."""
    rows = {Kind.FORWARD: costs.forward_s, Kind.BACKWARD: costs.backward_s}
    rows |= {Kind.BACKWARD_INPUT: costs.input_s, Kind.BACKWARD_WEIGHT: costs.weight_s}
    order = [
        [(number, way, microbatch) for way, microbatch, local in row for number in [_number(placement, rank, local)]]
        for rank, row in enumerate(of.passes)
    ]
    ends = {}
    changed = True
    while changed:
        changed = False
        for row in order:
            now_s = 0.0
            for number, way, microbatch in row:
                if way is not Kind.BACKWARD_WEIGHT:
                    other = number - 1 if way is Kind.FORWARD else number + 1
                    if 0 <= other < len(placement.chunks):
                        far = placement.ranks[other] != placement.ranks[number]
                        now_s = max(now_s, ends.get((other, way, microbatch), 0.0) + latency_s * far)
                now_s += sum(rows[way][unit] for unit in placement.chunks[number])
                changed |= ends.get((number, way, microbatch)) != now_s
                ends[number, way, microbatch] = now_s
    return ends


def _number(placement, rank, local):
    return [number for number, owner in enumerate(placement.ranks) if owner == rank][local]


def test_times_match_the_longest_path_to_each_pass(rng):
    codes = {code: way for way, code in CODES.items()}
    for name, stages, microbatches, chunks in cases():
        of = generated_schedule(name, stages, microbatches, chunks)
        placement = of.place(parts(stages * of.chunks, rng))
        costs = uneven_costs(placement, rng, None)
        costs = replace(costs, link=LinkCost(latency_s=3.0))
        results = {
            (bar.chunk, codes[bar.work], bar.microbatch): bar.end_s
            for bar in bars(simulate_lists(of, placement, costs))
        }
        assert results == relaxed_ends(of, placement, costs, 3.0), (name, stages, microbatches)


def simulate_equal(name, stages, microbatches, costs, chunks=2):
    of = generated_schedule(name, stages, microbatches, chunks)
    count = stages * of.chunks
    placement = of.place([range(number, number + 1) for number in range(count)])
    return simulate_passes(of, placement, StepCosts.equal(count, *(seconds / of.chunks for seconds in costs)))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 1.0)])
def test_simulated_times_match_the_closed_forms(name, costs):
    forward_s, input_s, weight_s = costs
    reference = 0
    for stages in range(1, 7):
        for microbatches in range(1, 14):
            for chunks in (2, 3, 4) if name == "interleaved" else (1,):
                if microbatches < SCHEDULES[name].fewest(stages):
                    continue
                closed = registry.bubble(
                    name, stages, microbatches, chunks=chunks, forward_s=forward_s, input_s=input_s, weight_s=weight_s
                )
                if closed is not None:
                    reference += 1
                    result = simulate_equal(name, stages, microbatches, costs, chunks).bubble
                    assert result == pytest.approx(closed, abs=1e-9), (stages, microbatches, chunks)
    assert reference > 20 or (name in ("zb-h2", "zb-v") and costs[1] != costs[2])


def test_makespan_rate_counts_late_starts_and_early_ends():
    """ZB-H2 is a parallelogram: no stage waits within its span, but stages do not work all the time."""
    result = simulate_equal("zb-h2", 4, 8, (1.0, 1.0, 1.0))
    assert result.bubble == 0.0 and [stage.begin_s for stage in result.stages] == [0, 1, 2, 3]
    assert result.makespan_rate == pytest.approx(3 / 27) and result.makespan_s == 27


def test_messages_delay_a_pipeline_and_occupy_their_links():
    place = looped([range(1), range(1, 2)], 2)
    lists = [
        [
            *(Operation(Kind.FORWARD, m, 0) for m in range(3)),
            *(Operation(Kind.SEND_ACTIVATION, m, 1) for m in range(3)),
        ],
        [Operation(Kind.RECV_ACTIVATION, m, 1) for m in range(3)],
    ]
    result = timeline.simulate_lists(lists, place, StepCosts.equal(2, 1.0, 1.0, 1.0, link=LinkCost(5.0, 3.0)))
    # Sent at 3 s all of them: each has the link for 3 s, and arrives 5 s later.
    assert result.times.end_s[result.program.row(1)].tolist() == [3 + 3 + 5, 3 + 6 + 5, 3 + 9 + 5]
    assert [(link.rank, link.travels, link.begin_s, link.end_s) for link in result.critical_path()] == [
        (0, False, 0, 1), (0, False, 1, 2), (0, False, 2, 3), (1, True, 3, 17),
    ]  # fmt: skip


def test_critical_path_is_gapless_and_as_long_as_the_step(rng):
    for name, stages, microbatches, chunks in cases():
        of = generated_schedule(name, stages, microbatches, chunks)
        placement = of.place(parts(stages * of.chunks, rng))
        for link in (None, LinkCost(1.0, 4.5)):
            result = simulate_lists(of, placement, uneven_costs(placement, rng, link))
            path = result.critical_path()
            assert not path or (path[0].begin_s, path[-1].end_s) == (0.0, result.makespan_s)
            assert all(one.end_s == other.begin_s for one, other in zip(path, path[1:], strict=False))


def test_busy_and_idle_times_of_stages_add_up(rng):
    of = generated_schedule("zb-h1", 3, 5)
    placement = of.place(parts(3, rng))
    result = simulate_lists(of, placement, uneven_costs(placement, rng, LinkCost(2.0)))
    for rank, stage in enumerate(result.stages):
        first = stage.begin_s if rank else 0.0  # what a later rank waits for its first message is not in its span
        assert stage.span_s == pytest.approx(stage.busy_s + stage.idle_s - first)
        assert stage.bubble == pytest.approx(1 - stage.busy_s / stage.span_s)


@pytest.mark.parametrize("name", PIPELINES)
def test_live_activations_stay_within_the_bound_of_the_schedule(name):
    for stages, microbatches in ((2, 5), (4, 8), (5, 5)):
        of = generated_schedule(name, stages, microbatches)
        placement = of.place([range(number, number + 1) for number in range(stages * of.chunks)])
        costs = StepCosts.equal(len(placement.chunks), 1.0, 1.0, 1.0)
        for rank, peak in enumerate(timeline.peaks(simulate_passes(of, placement, costs).program)):
            bound = SCHEDULES[name].peak(rank, stages, microbatches, of.chunks)
            assert peak.live <= bound.live and peak.both <= bound.both
            if name != "zb-v":
                assert peak == bound


def test_messages_that_never_arrive_are_rejected():
    of = generated_schedule("1f1b", 2, 3)
    placement = of.place([range(1), range(1, 2)])
    lists = [expand(row, placement, rank) for rank, row in enumerate(of.passes)]
    lists[0].remove(Operation(Kind.SEND_ACTIVATION, 1, 1))
    with pytest.raises(ScheduleError, match=r"rank 0 waits forever .* ranks \[0, 1\]"):
        timeline.simulate_lists(lists, placement, StepCosts.equal(2, 1.0, 1.0, 1.0))
    rows = [timeline.compact(row) for row in of.passes]
    missing = [rows[0][:, rows[0][0] != 0], rows[1]]  # no forward on rank 0
    with pytest.raises(ScheduleError, match="chunk 1 waits for micro-batch 0, which no rank sends"):
        timeline.simulate_passes(missing, placement, StepCosts.equal(2, 1.0, 1.0, 1.0))
    circle = [rows[0][:, ::-1], rows[1]]
    with pytest.raises(ScheduleError, match="waits forever"):
        timeline.simulate_passes(circle, placement, StepCosts.equal(2, 1.0, 1.0, 1.0))


def test_invalid_costs_are_rejected():
    with pytest.raises(UsageError, match="weight_s has 1 values, but forward_s has 2"):
        StepCosts(forward_s=[1.0, 1.0], backward_s=[1.0, 1.0], input_s=[1.0, 1.0], weight_s=[1.0])
    with pytest.raises(UsageError, match="finite and not negative"):
        StepCosts.equal(2, 1.0, -1.0, 1.0)
