"""Closed forms of pipelines compared with the simulator, published formulas, and the minimum work of a rank."""

import pytest

from hpcdist.planner.time.pipeline import PipelineTime, PlannedSeconds, closed_time, simulated_timeline
from hpcdist.strategies.schedule import registry
from hpcdist.strategies.schedule.registry import SCHEDULES, chunks_of

EQUAL = PlannedSeconds(1.0, 1.0, 1.0)
TIMES = [
    EQUAL,
    PlannedSeconds(1.0, 1.2, 0.8),
    PlannedSeconds(1.0, 2.0, 1.0),
    PlannedSeconds(0.7, 0.9, 1.1),
    PlannedSeconds(1.0, 1.6, 0.5),
]
SIZES = [(2, 2), (2, 7), (3, 1), (4, 3), (4, 8), (5, 9), (8, 8), (8, 24), (8, 31)]
PLAIN = ["gpipe", "1f1b", "zb-h1", "zb-h2"]


def closed_form_and_timeline(schedule, seconds, ranks, m, message_s=0.0, each=2):
    """Return the closed form and the timeline of the simulator."""
    each = each if schedule == "interleaved" else chunks_of(schedule)
    result = closed_time(schedule, seconds, seconds, ranks, m, chunks=each, message_s=message_s)
    chunk = PlannedSeconds(*(part / each for part in seconds))
    return result, simulated_timeline(schedule, [chunk] * ranks * each, ranks, m, message_s=message_s)


@pytest.mark.parametrize("seconds", TIMES)
@pytest.mark.parametrize(("ranks", "m"), SIZES)
@pytest.mark.parametrize("schedule", PLAIN)
def test_closed_form_matches_the_simulator(schedule, ranks, m, seconds):
    result, ran = closed_form_and_timeline(schedule, seconds, ranks, m)
    assert result.whole_s == pytest.approx(ran.computes_s, rel=1e-9)


@pytest.mark.parametrize("seconds", TIMES)
@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if m >= ranks])
@pytest.mark.parametrize("each", [2, 3, 5])
def test_closed_form_of_interleaved_matches_the_simulator(ranks, m, seconds, each):
    result, ran = closed_form_and_timeline("interleaved", seconds, ranks, m, each=each)
    assert result.whole_s == pytest.approx(ran.computes_s, rel=1e-9)


@pytest.mark.parametrize(("ranks", "m"), SIZES)
def test_closed_form_of_zb_v_matches_the_simulator_for_equal_passes(ranks, m):
    result, ran = closed_form_and_timeline("zb-v", EQUAL, ranks, m)
    assert result.whole_s == pytest.approx(ran.computes_s, rel=1e-9)


@pytest.mark.parametrize("seconds", TIMES)
@pytest.mark.parametrize(("ranks", "m"), SIZES)
def test_closed_form_of_zb_v_is_within_5_percent_for_unequal_passes(ranks, m, seconds):
    result, ran = closed_form_and_timeline("zb-v", seconds, ranks, m)
    assert result.whole_s == pytest.approx(ran.computes_s, rel=0.05)


@pytest.mark.parametrize("schedule", [*PLAIN, "interleaved", "zb-v"])
def test_bubbles_match_the_papers(schedule):
    ranks, m = 4, 8
    each = 2 if schedule == "interleaved" else chunks_of(schedule)
    result = closed_time(schedule, EQUAL, EQUAL, ranks, m, chunks=each)
    assert result.bubble == pytest.approx(registry.bubble(schedule, ranks, m, chunks=each))
    _, ran = closed_form_and_timeline(schedule, EQUAL, ranks, m)
    assert result.bubble == pytest.approx(ran.bubble)


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
def test_overlapping_steps_have_no_bubble(schedule):
    """arXiv:2401.10241, section 4: without a barrier between steps."""
    result = closed_time(schedule, EQUAL, EQUAL, 4, 12, steps_overlap=True)
    assert result.idle_s == 0.0
    assert result.bubble == 0.0
    apart = closed_time(schedule, EQUAL, EQUAL, 4, 12)
    assert apart.idle_s == pytest.approx(3 * EQUAL.forward_s / chunks_of(schedule))


@pytest.mark.parametrize(("ranks", "m"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_message_waits_match_the_simulator(schedule, ranks, m):
    result, ran = closed_form_and_timeline(schedule, PlannedSeconds(1.0, 1.2, 0.8), ranks, m, message_s=0.01)
    assert result.whole_s == pytest.approx(ran.computes_s, rel=1e-9)
    assert result.message_s > 0


@pytest.mark.parametrize(("ranks", "m"), [(2, 2), (4, 8), (4, 12), (8, 24)])
@pytest.mark.parametrize("each", [2, 3])
def test_message_waits_of_interleaved_match_the_simulator(ranks, m, each):
    result, ran = closed_form_and_timeline(
        "interleaved", PlannedSeconds(1.0, 1.2, 0.8), ranks, m, message_s=0.01, each=each
    )
    assert result.whole_s == pytest.approx(ran.computes_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_message_waits_of_zero_bubble_are_close_to_the_simulator(schedule, ranks):
    without, _ = closed_form_and_timeline(schedule, EQUAL, ranks, 6 * ranks)
    result, ran = closed_form_and_timeline(schedule, EQUAL, ranks, 6 * ranks, message_s=0.01)
    assert result.message_s == pytest.approx(ran.computes_s - without.whole_s, abs=0.01 * ranks)


@pytest.mark.parametrize(("schedule", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_blocking_messages_lengthen_every_pass(schedule, each):
    result = closed_time(schedule, EQUAL, EQUAL, 4, 8, chunks=each, message_s=0.1, blocking=True)
    longer = PlannedSeconds(1 + 0.1 * each, 1 + 0.1 * each, 1.0)
    assert result.whole_s == pytest.approx(closed_time(schedule, longer, longer, 4, 8, chunks=each).whole_s)


@pytest.mark.parametrize(
    "seconds", [EQUAL, PlannedSeconds(1.0, 1.2, 0.8), PlannedSeconds(1.0, 0.5, 0.3), PlannedSeconds(1.0, 1.0, 1.5)]
)
@pytest.mark.parametrize(("ranks", "m"), [(2, 3), (2, 9), (4, 8), (4, 2), (8, 24), (5, 1)])
@pytest.mark.parametrize(("schedule", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_recomputed_chunks_match_the_simulator(schedule, each, ranks, m, seconds):
    if schedule == "interleaved" and m <= ranks:
        pytest.skip("told for more micro-batches than ranks")
    again_s = seconds.forward_s
    result = closed_time(schedule, seconds, seconds, ranks, m, chunks=each, ahead_s=again_s)
    chunk = PlannedSeconds(*(part / each for part in seconds))
    ran = simulated_timeline(schedule, [chunk] * ranks * each, ranks, m, recompute=True)
    assert result.busy_s == pytest.approx(m * (seconds.whole_s + again_s))
    assert result.whole_s == pytest.approx(ran.computes_s, rel=1e-9)


@pytest.mark.parametrize("schedule", [*SCHEDULES])
def test_one_rank_has_no_bubble_and_no_messages(schedule):
    assert closed_time(schedule, EQUAL, EQUAL, 1, 5, message_s=1.0) == PipelineTime(15.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("slow", [0, 1, 3])
def test_slow_rank_dominates_and_the_simulator_agrees(schedule, slow):
    ranks, m = 4, 16
    of_ranks = [EQUAL] * ranks
    of_ranks[slow] = PlannedSeconds(1.5, 1.5, 1.5)
    result = closed_time(schedule, of_ranks[slow], EQUAL, ranks, m)
    ran = simulated_timeline(schedule, of_ranks, ranks, m)
    assert result.busy_s == pytest.approx(m * 4.5)
    assert result.whole_s == pytest.approx(ran.computes_s, rel=0.06)
    assert ran.computes_s >= result.busy_s


def test_folded_chunks_go_forward_and_back():
    """In zb-v the first rank has the first and the last chunk, so a slow first chunk slows down rank 0."""
    chunks = [PlannedSeconds(2.0, 2.0, 2.0)] + [EQUAL] * 7
    assert [round(stage.busy_s) for stage in simulated_timeline("zb-v", chunks, 4, 12).stages] == [12 * 9, 72, 72, 72]
