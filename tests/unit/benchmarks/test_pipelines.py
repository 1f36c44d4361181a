"""The study of pipelines: shares of a span, simulated and replayed bubbles, placement, and the study on two threads."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.harness import Results
from benchmarks.training import pipelines
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.pipeline.costs import PassSeconds
from hpcdist.strategies.schedule import timeline as simulate_timeline
from hpcdist.strategies.schedule.operation_list import generated
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.simulated_program import LinkCost, StepCosts


def simulated_machine(schedule, microbatches, chunks, costs, overhead_s=0.0):
    """Return placement, lists, timeline and spans of a machine that behaves as simulated.

    ``overhead_s`` is added before each operation that follows a SEND.
    """
    text = generated(schedule, 2, microbatches, chunks)
    placement = text.place([range(stage, stage + 1) for stage in range(2 * chunks)])
    lists = [expand(row, placement, rank) for rank, row in enumerate(text.passes)]
    timeline = simulate_timeline.simulate_lists(lists, placement, costs)
    spans = []
    for rank, row in enumerate(lists):
        at = timeline.program.row(rank)
        times = np.stack([timeline.times.begin_s[at], timeline.times.end_s[at]], axis=1) + 100.0
        sent = np.cumsum([op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT) for op in row])
        times += overhead_s * np.stack([sent - np.diff(sent, prepend=0), sent], axis=1)
        spans.append(np.stack([times] * 3))
    return placement, lists, timeline, spans


def bubble(lists, spans):
    shares = np.array([pipelines.shares_of(row, times) for row, times in zip(lists, spans, strict=True)])
    rank = shares[:, 0].argmax(axis=0)[0]
    span_s, busy_s, idle_s = shares[rank, :, 0]
    return idle_s / span_s, (span_s - busy_s - idle_s) / span_s, span_s


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_bubble_of_a_simulated_machine_equals_the_simulation(name, chunks):
    rows = np.random.default_rng(3).uniform(1.0, 2.0, (4, 2 * chunks)).tolist()
    names = ("forward_s", "backward_s", "input_s", "weight_s")
    costs = StepCosts(**dict(zip(names, rows, strict=True)), link=LinkCost(latency_s=0.25))
    placement, lists, timeline, spans = simulated_machine(name, 6, chunks, costs)
    measured, overhead, _ = bubble(lists, spans)
    assert 0 < measured < 0.5 and measured == pytest.approx(timeline.bubble) and overhead == pytest.approx(0.0)
    assert pipelines.replay(timeline, [times[0] for times in spans]) == pytest.approx(timeline.bubble)
    again = pipelines.costs_of(placement, lists, spans, 0.25)
    used = [1, *((0, 1, 1) if name.startswith("zb") else (1, 0, 0))]
    result = np.array([again.forward_s, again.backward_s, again.input_s, again.weight_s])
    assert result == pytest.approx(np.array(rows) * np.array(used)[:, None])


def test_overhead_is_separate_from_computing_and_waiting():
    costs = StepCosts.equal(2, 1.0, 1.0, 1.0)
    _, lists, _, spans = simulated_machine("1f1b", 8, 1, costs, overhead_s=0.5)
    measured, overhead, span_s = bubble(lists, spans)
    assert span_s == pytest.approx(27.0 + 0.5 * 8)
    assert overhead == pytest.approx(0.5 * 8 / span_s) and measured == pytest.approx(3.0 / span_s)


@pytest.mark.parametrize(
    ("name", "costs", "expected"),
    [("1f1b", (1.0, 2.0, 1.0), 1 / 9), ("zb-h1", (1.0, 2.0, 1.0), 2 / 34), ("zb-h1", (1.0, 1.0, 2.0), np.nan)],
)
def test_closed_form_uses_the_mean_stage(name, costs, expected):
    contender = SimpleNamespace(
        schedule=name, microbatches=8, placement=SimpleNamespace(chunks=(range(1), range(1, 2)))
    )
    form = pipelines.closed_form(contender, 2, StepCosts.equal(2, *costs))
    assert form == pytest.approx(expected, nan_ok=True)


def test_stages_are_balanced_by_the_passes_of_their_schedule():
    """The last layer is slow, but only in schedules that do not split the backward pass."""
    seconds = [PassSeconds(1.0, 2.0, 1.0, 1.0)] * 5 + [PassSeconds(1.0, 8.0, 1.0, 1.0)]
    assert pipelines.place("1f1b", 2, 4, 1, seconds).chunks == (range(4), range(4, 6))
    assert pipelines.place("zb-h1", 2, 4, 1, seconds).chunks == (range(3), range(3, 6))
    assert pipelines.place("zb-v", 2, 4, 2, seconds).ranks == (0, 1, 1, 0)
    with pytest.raises(ConfigurationError, match="6 layers for 8 stages"):
        pipelines.place("interleaved", 2, 4, 4, seconds)


def test_different_losses_are_an_error():
    contenders = [SimpleNamespace(schedule="sequential"), SimpleNamespace(schedule="1f1b")]
    pipelines.check_losses([2.0, 2.0001], contenders)
    for loss in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="1f1b has loss"):
            pipelines.check_losses([2.0, loss], contenders)


def test_study_measures_every_schedule_and_draws_it(tmp_path, capsys):
    sizes = {"layers": 2, "hidden": 8, "context": 8, "samples": 2, "chunks": 4}
    options = Namespace(**sizes, microbatches=[2, 3], steps=3, only=["1f1b", "zb-h1", "interleaved"])

    def body(comm):
        return pipelines.measure(options, Session(comm, None, "threads", None))

    results = run_threads(2, body)[0]
    assert "left out: interleaved with 2 micro-batches" in capsys.readouterr().out
    names = ["one rank, m = 2", "1f1b, m = 2", "zb-h1, m = 2", "one rank, m = 3", "1f1b, m = 3", "zb-h1, m = 3"]
    assert results.names() == names and results.arrays["time_s"].shape == (6, 3, 2)
    arrays = results.arrays
    assert (arrays["busy_s"] + arrays["idle_s"] <= arrays["span_s"] * (1 + 1e-6)).all()
    assert (arrays["span_s"] <= arrays["time_s"]).all() and (arrays["replayed"] >= 0).all()
    assert list(pipelines.ratios(results)) == [name for name in names if "one rank" not in name]
    table = pipelines.lines(results)
    assert len(table) == 7 and table[2].split()[0] == "1f1b," and "33.3%" in table[2]
    pytest.importorskip("matplotlib")
    pipelines.plot(results, tmp_path / "bubbles.png")
    assert (tmp_path / "bubbles.png").stat().st_size > 5000


def test_ratio_is_relative_to_ranks_without_a_pipeline():
    times = np.array([[[16.0, 16.0]], [[9.0, 10.0]]])
    results = Results({"time_s": times}, {}, {"contenders": "one rank, m = 4;1f1b, m = 4"})
    assert pipelines.ratios(results)["1f1b, m = 4"].tolist() == [10.0 / 8.0]
