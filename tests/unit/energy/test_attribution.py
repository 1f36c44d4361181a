"""Energy per activity for phases shorter than a counter update, from synthetic power seen by a counter."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.comm.record.spans import PHASES
from hpcdist.energy import phase_shares
from hpcdist.energy.attribution import Attribution, CounterSamples, update_brackets
from hpcdist.energy.part_time_sensor import PowerSensor
from hpcdist.energy.phase_shares import flatten_spans

WATTS = {"compute": 400.0, "communication": 150.0, "update": 250.0, "data": 80.0, "checkpoint": 120.0, "idle": 60.0}
WHOLE = PowerSensor(0.1, 0.1)
BEGIN_NS = 7 * 10**14


def draw_spans(rng, count, *, mean_s=None, begin_ns=BEGIN_NS, scatter=0.5):
    """Return spans (n, 3) of 75 ms steps: compute, communication, update, a gap and data, with rare checkpoints."""
    mean_s = mean_s or {"compute": 0.04, "communication": 0.02, "update": 0.01, "idle": 0.003, "data": 0.002}
    spans, now = [], begin_ns
    for step in range(count):
        saves = {"checkpoint": 0.3} if step % 100 == 99 else {}
        for name, seconds in (mean_s | saves).items():
            length = round(seconds * 1e9 * (1 + scatter * rng.uniform(-1, 1)))
            if name != "idle":
                spans.append((PHASES.index(name), now, now + length))
            now += length
    return np.array(spans, np.int64)


def power(ranks, watts=WATTS):
    """Return the edges and watts of a source shared by ``ranks``. The power is the mean over the ranks."""
    edges = np.unique(np.concatenate([spans[:, 1:].ravel() for spans in ranks]))
    total = np.zeros(len(edges) - 1)
    for spans in ranks:
        at = np.searchsorted(spans[:, 1], edges[:-1], side="right") - 1
        inside = (at >= 0) & (edges[:-1] < spans[np.maximum(at, 0), 2])
        codes = np.where(inside, spans[np.maximum(at, 0), 0], -1)
        total += np.where(inside, np.array([watts.get(name, 0.0) for name in PHASES])[codes], watts["idle"])
    return edges, total / len(ranks)


def counter(edges, watts, *, update_s=0.1, window_s=0.1, poll_s=0.1, name="GPU-a", kind="gpu", offset_ns=31_000_000):
    """A counter that adds the mean of the last ``window_s`` every ``update_s``, and is read every ``poll_s``."""
    sums = np.append(0.0, np.cumsum(np.diff(edges) / 1e9 * watts))
    updates = np.arange(edges[0] + offset_ns, edges[-1], round(update_s * 1e9))
    starts = np.maximum(updates - round(window_s * 1e9), edges[0])
    seen = (np.interp(updates, edges, sums) - np.interp(starts, edges, sums)) / window_s * update_s
    shown = np.append(0, np.cumsum(np.rint(seen * 1e3).astype(np.int64)))
    times = np.arange(edges[0], edges[-1], round(poll_s * 1e9))
    return CounterSamples(name, kind, times, 10**9 + shown[np.searchsorted(updates, times, side="right")])


def split_at(counted, moment_ns):
    at = int(np.searchsorted(counted.times_ns, moment_ns))
    return (
        CounterSamples(counted.name, counted.kind, counted.times_ns[:at], counted.energy_mj[:at]),
        CounterSamples(counted.name, counted.kind, counted.times_ns[at:], counted.energy_mj[at:]),
    )


def attribution_rows(ranks, counters, sensor=WHOLE):
    attribution = Attribution(lambda name, kind: sensor)
    attribution.add(ranks, counters)
    return attribution.rows()


def true_energy(ranks, watts=WATTS):
    """Return the seconds and joules by phase, averaged over the ranks."""
    seconds = {name: np.mean([np.sum(np.diff(r[r[:, 0] == PHASES.index(name), 1:])) / 1e9 for r in ranks])
               for name in watts if name != "idle"}  # fmt: skip
    whole = max(r[-1, 2] for r in ranks) - min(r[0, 1] for r in ranks)
    seconds["idle"] = whole / 1e9 - sum(seconds.values())
    return seconds, {name: watts[name] * seconds[name] for name in seconds}


@pytest.mark.parametrize("count", [1, 4])
def test_millisecond_phases_are_resolved_by_a_100_ms_counter(rng, count):
    ranks = [draw_spans(rng, 2000) for _ in range(count)]
    result = attribution_rows(ranks, [counter(*power(ranks))])[0]["activities"]
    seconds, joules = true_energy(ranks)
    total = sum(joules.values())
    for name in WATTS:
        assert result[name]["reason"] is None and result[name]["seconds"] == pytest.approx(seconds[name], rel=0.02)
        assert abs(result[name]["joules"] - joules[name]) < 0.03 * total and result[name]["error_j"] < 0.02 * total
    assert sum(phase["joules"] for phase in result.values()) == pytest.approx(total, rel=0.005)


def test_incremental_attribution_equals_one_call_in_bounded_memory(rng):
    """Spans are added when they end. A span that is open at one call is added at the next call."""
    ranks = [draw_spans(rng, 1500) for _ in range(2)]
    source = counter(*power(ranks))
    at_once = attribution_rows(ranks, [source])
    attribution, last_ns = Attribution(lambda name, kind: WHOLE), BEGIN_NS
    for moment_ns in [*range(BEGIN_NS, BEGIN_NS + 120 * 10**9, 5 * 10**9), np.iinfo(np.int64).max]:
        now, source = split_at(source, moment_ns)
        fresh = [spans[(spans[:, 2] > last_ns) & (spans[:, 2] <= moment_ns)] for spans in ranks]
        attribution.add(fresh, [now])
        last_ns = moment_ns
        waiting = attribution._sources["GPU-a", "gpu"]
        assert len(waiting.times_ns) < 80 and all(len(rank.spans) < 600 for rank in attribution._ranks)
    pieces = attribution.rows()
    _, joules = true_energy(ranks)
    for name, phase in at_once[0]["activities"].items():
        piece = pieces[0]["activities"][name]
        assert piece["seconds"] == pytest.approx(phase["seconds"]) and piece["reason"] is phase["reason"] is None
        assert piece["joules"] == pytest.approx(phase["joules"], abs=0.01 * sum(joules.values()))
    assert pieces == json.loads(json.dumps(pieces))


def test_source_is_attributed_to_the_ranks_that_use_it(rng):
    """Two GPUs, one for each of two ranks that are not in step, and a processor for both."""
    ranks = [draw_spans(rng, 1500), draw_spans(rng, 1500)]
    gpus = [counter(*power([spans]), name=f"GPU-{rank}") for rank, spans in enumerate(ranks)]
    gpus = [replace(gpu, ranks=(rank,)) for rank, gpu in enumerate(gpus)]
    result = attribution_rows(ranks, [*gpus, counter(*power(ranks), name="package-0", kind="cpu")])
    for row, users in zip(result, ([ranks[0]], [ranks[1]], ranks), strict=True):
        _, joules = true_energy(users)
        for name in WATTS:
            assert abs(row["activities"][name]["joules"] - joules[name]) < 0.03 * sum(joules.values())


@pytest.mark.parametrize("poll_s", [0.005, 0.02, 0.1])
def test_phases_are_resolved_by_a_part_time_sensor(rng, poll_s):
    """The sensor sees 25 ms of every 100 ms. Its phase is fitted from power and energy."""
    ranks = [draw_spans(rng, 3000)]
    _, joules = true_energy(ranks)
    offset_ns = int(rng.integers(0, 100_000_000))
    source = counter(*power(ranks), window_s=0.025, poll_s=poll_s, offset_ns=offset_ns)
    result = attribution_rows(ranks, [source], PowerSensor(0.1, 0.025))[0]["activities"]
    for name in WATTS:
        assert result[name]["reason"] is None
        assert abs(result[name]["joules"] - joules[name]) < 0.05 * sum(joules.values())


@pytest.mark.parametrize("update_s", [0.1, 0.1003, 0.099, 0.13])
@pytest.mark.full_except("0.1")
def test_attribution_tolerates_drift_between_counter_and_reader(rng, update_s):
    ranks = [draw_spans(rng, 3000)]
    _, joules = true_energy(ranks)
    sensor = PowerSensor(update_s, update_s)
    offset_ns = int(rng.integers(0, 100_000_000))
    source = counter(*power(ranks), update_s=update_s, window_s=update_s, offset_ns=offset_ns)
    result = attribution_rows(ranks, [source], sensor)[0]["activities"]
    for name in WATTS:
        assert abs(result[name]["joules"] - joules[name]) < 0.08 * sum(joules.values()), name


def test_phases_in_constant_proportion_cannot_be_separated(rng):
    """Steps of 1 ms: compute and communication are always 60 to 40, but the checkpoint is separate."""
    spans, now = [], BEGIN_NS
    for step in range(60_000):
        spans += [(0, now, now + 600_000), (1, now + 600_000, now + 1_000_000)]
        now += 1_000_000
        if step % 3000 == 2999:
            spans.append((4, now, now + 500_000_000))
            now += 500_000_000
    ranks = [np.array(spans, np.int64)]
    result = attribution_rows(ranks, [counter(*power(ranks), offset_ns=100_000_000)])[0]["activities"]
    assert "cannot be separated from communication: always in the same proportion" in result["compute"]["reason"]
    assert "compute" in result["communication"]["reason"]
    assert result["checkpoint"]["reason"] is None
    assert result["checkpoint"]["joules"] == pytest.approx(120 * 10, rel=0.03)


def test_uniform_short_steps_with_noisy_counter_have_a_reason(rng):
    ranks = [draw_spans(rng, 20_000, mean_s={"compute": 0.002, "communication": 0.001, "idle": 0.0001}, scatter=0.05)]
    source = counter(*power(ranks))
    rough = np.cumsum(
        np.diff(source.energy_mj, prepend=source.energy_mj[0]) * rng.normal(1, 0.25, len(source.times_ns))
    )
    noisy = CounterSamples("a", "gpu", source.times_ns, rough.astype(np.int64))
    result = attribution_rows(ranks, [noisy])[0]["activities"]
    assert any("only" in (phase["reason"] or "") for phase in result.values())
    assert sum(phase["joules"] for phase in result.values()) == pytest.approx(rough[-1] / 1e3, rel=0.05)


def test_few_values_and_short_phases_have_a_reason(rng):
    ranks = [draw_spans(rng, 6)]
    result = attribution_rows(ranks, [counter(*power(ranks))])[0]["activities"]
    assert all("new values, too few for" in phase["reason"] for phase in result.values())
    spans = draw_spans(rng, 900)
    spans[500, 0] = PHASES.index("other")
    result = attribution_rows([spans], [counter(*power([spans], WATTS | {"other": 1.0}))])[0]["activities"]
    assert "shorter than 2 updates" in result["other"]["reason"] and result["compute"]["reason"] is None


def test_attribution_without_spans_or_values_is_empty(rng):
    ranks = [draw_spans(rng, 100)]
    assert attribution_rows([np.empty((0, 3), np.int64)], [counter(*power(ranks))])[0]["activities"] == {}
    constant = CounterSamples("a", "gpu", np.arange(50) * 10**8, np.full(50, 7))
    assert attribution_rows(ranks, [constant])[0]["activities"] == {}
    assert attribution_rows(ranks, []) == []


def test_inner_spans_are_subtracted_from_outer_spans():
    spans = np.array([(1, 30, 40), (4, 10, 60), (0, 0, 10), (1, 45, 50), (2, 60, 60), (6, 35, 38)])
    expected = [(0, 0, 10), (4, 10, 30), (1, 30, 35), (6, 35, 38), (1, 38, 40), (4, 40, 45), (1, 45, 50), (4, 50, 60)]
    assert flatten_spans(spans).tolist() == [list(row) for row in expected]
    random = np.random.default_rng(3).integers(0, 1000, (200, 2))
    spans = np.concatenate([np.zeros((200, 1), int), np.sort(random)], axis=1)
    result = flatten_spans(spans)
    covered = np.zeros(1000, bool)
    for _, begin, end in spans:
        covered[begin:end] = True
    assert np.all(result[1:, 1] >= result[:-1, 2]) and np.diff(result[:, 1:]).sum() == covered.sum()


@pytest.mark.parametrize(("update_s", "most_ms"), [(0.1, 102), (0.13, 30), (0.173, 40), (0.001, 2)])
def test_update_times_are_bracketed_by_readings(rng, update_s, most_ms):
    """Updates locked to 100 ms readings are known to 100 ms. Drifting updates are known to a fraction of 100 ms."""
    moments = int(rng.integers(0, 10**8)) + np.rint(np.arange(round(5.1 / update_s)) * update_s * 1e9) + BEGIN_NS
    read = np.ceil(moments / 1e8) * 1e8
    seen = np.unique(read).astype(np.int64)[:-1]  # the counter stops within the last interval
    last = np.array([moments[read == at].max() for at in seen])
    result = update_brackets(seen - 10**8, seen, update_s)
    right = [(low, high) for low, high in result if np.all((low <= last) & (last <= high))]
    assert right and min(np.mean(high - low) for low, high in right) < most_ms * 1e6
    assert all(np.all(low <= high) for low, high in result)


def test_brackets_of_irregular_counters_equal_the_readings(rng):
    seen = np.cumsum(rng.integers(1, 30, 40)) * 10**8
    for update_s in (math.nan, 0.1):
        result = update_brackets(seen - 10**8, seen, update_s)
        assert all(np.all((low >= seen - 1.1e8) & (high <= seen)) for low, high in result)


def rows(**joules):
    phases = {name: {"joules": j, "error_j": 0.1 * j, "seconds": 1.0, "reason": None} for name, j in joules.items()}
    return [{"name": "a", "kind": "gpu", "activities": phases}]


def test_activities_sum_to_training_over_sources_nodes_and_starts():
    both = [*rows(compute=60.0, idle=20.0, checkpoint=7.0), *rows(compute=20.0, communication=20.0)]
    both += [{"name": "p", "kind": "cpu", "activities": rows(compute=1e6)[0]["activities"]}]
    first = phase_shares.job_activities(both, ["gpu"], 240.0, None)
    assert first["joules"] == {"compute": 160, "communication": 40, "idle": 40} and first["unknown"] is None
    assert first["error_j"]["compute"] == pytest.approx(2 * math.hypot(6, 2))
    kept = json.loads(json.dumps(phase_shares.activities_state(first)))
    second = phase_shares.job_activities(rows(compute=10.0, data=10.0), ["gpu"], 20.0, None, kept)
    assert second["joules"] == {"compute": 170, "communication": 40, "data": 10, "idle": 40}
    assert second["seconds"]["compute"] == 2


@cases(
    "result, training_j, reason, earlier, why",
    (rows(compute=1.0), math.nan, "no read", None, "no read"),
    (rows(compute=1.0), 10.0, None, {}, "an earlier start of this run: the activity of the ranks was not recorded"),
    ([], 10.0, None, None, "telemetry.trace"),
    ([{"name": "a", "kind": "gpu", "activities": {}}], 10.0, None, None, "two new values"),
)
def test_unknown_part_makes_all_activities_unknown(result, training_j, reason, earlier, why):
    reference = phase_shares.job_activities(result, ["gpu"], training_j, reason, earlier)
    assert why in reference["unknown"] and all(math.isnan(joules) for joules in reference["joules"].values())
    kept = json.loads(json.dumps(phase_shares.activities_state(reference)))
    later = phase_shares.job_activities(rows(compute=1.0), ["gpu"], 10.0, None, kept)
    assert math.isnan(later["joules"]["compute"]) and "an earlier start" in later["reason"]["compute"]


def test_doubtful_start_with_little_training_keeps_earlier_values():
    """A doubtful part of at most 2 % adds to the error of the sum. A larger part makes the sum unknown."""
    kept = phase_shares.activities_state(
        phase_shares.job_activities(rows(compute=60.0, idle=20.0), ["gpu"], 800.0, None)
    )
    doubtful = rows(compute=1.0)
    doubtful[0]["activities"]["compute"]["reason"] = "2 new values"
    little = phase_shares.job_activities(doubtful, ["gpu"], 10.0, None, kept)
    assert little["joules"] == {"compute": 610, "idle": 200} and little["error_j"]["compute"] > 60
    nothing = phase_shares.job_activities([], ["gpu"], 8.0, None, kept)
    assert nothing["joules"] == {"compute": pytest.approx(606), "idle": pytest.approx(202)}
    more = phase_shares.job_activities(doubtful, ["gpu"], 100.0, None, kept)
    assert math.isnan(more["joules"]["compute"]) and more["reason"] == {"compute": "a: 2 new values"}
    later = phase_shares.job_activities(rows(compute=1.0), ["gpu"], 500.0, None, phase_shares.activities_state(more))
    assert later["reason"]["compute"] == "an earlier start of this run: a: 2 new values"


def late_reads(rng):
    """Return the checkpoint activity at a constant 45 W, with readings up to 20 ms late only during checkpoints."""
    spans = draw_spans(rng, 2000, scatter=0.1)
    same = dict.fromkeys(WATTS, 45.0)
    source = counter(*power([spans], same), update_s=0.001, window_s=0.001, name="package-0", kind="cpu")
    saves = spans[spans[:, 0] == PHASES.index("checkpoint")]
    at = np.searchsorted(saves[:, 1], source.times_ns, side="right") - 1
    late = (at >= 0) & (source.times_ns < saves[np.maximum(at, 0), 2])
    lag_mj = np.where(late, rng.uniform(0, 0.02, len(late)) * 45e3, 0.0)
    result = attribution_rows(
        [spans], [replace(source, energy_mj=source.energy_mj + lag_mj.astype(np.int64))], PowerSensor(0.005, 0.005)
    )
    return result[0]["activities"]["checkpoint"]


@pytest.mark.full
def test_standard_error_uses_only_intervals_of_the_phase(rng):
    """The other intervals are read on time, so they must not reduce the error."""
    off = [(save["joules"] - 45 * save["seconds"]) / save["error_j"] for save in (late_reads(rng) for _ in range(40))]
    assert np.sqrt(np.mean(np.square(off))) < 1.75


@pytest.mark.parametrize("trouble", ["zeros", "lost", "server"])
@pytest.mark.full_except("zeros")
def test_silent_source_or_rank_does_not_delay_the_others(rng, trouble):
    """A counter that stays at 0, a lost sensor and a rank without steps: the other sources are not affected."""
    spans = draw_spans(rng, 4000)
    source = counter(*power([spans]), name="package-0", kind="cpu")
    attribution, last_ns = Attribution(lambda name, kind: WHOLE), BEGIN_NS
    for number, moment_ns in enumerate(range(BEGIN_NS, int(spans[-1, 2]), 5 * 10**9)):
        now, source = split_at(source, moment_ns)
        other = replace(now, name="dram", kind="dram")
        if trouble == "zeros":
            other = replace(other, energy_mj=np.zeros(len(now.times_ns), np.int64))
        ranks = [spans[(spans[:, 2] > last_ns) & (spans[:, 2] <= moment_ns)]]
        ranks += [np.empty((0, 3), np.int64)] if trouble == "server" else []
        attribution.add(ranks, [now, *([other] if trouble == "zeros" or (trouble == "lost" and number < 3) else [])])
        last_ns = moment_ns
    assert all(len(sums.times_ns) < 80 for sums in attribution._sources.values())
    assert all(len(rank.spans) < 600 for rank in attribution._ranks)
    results = {row["name"]: row["activities"] for row in attribution.rows()}
    assert results["package-0"]["compute"]["reason"] is None and (trouble != "zeros" or results["dram"] == {})
