"""The benchmark of pipelines: measurements, arithmetic, the results file and the report."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.bench.pipeline import report as reports
from hpcdist.bench.pipeline import results, run
from hpcdist.bench.pipeline.request import CONTENDERS, PipelineCase, PipelineRequest, PipelineShape, cases
from hpcdist.bench.pipeline.results import PipelineResults
from hpcdist.bench.pipeline.run import PipelineSample, place_units
from hpcdist.bench.pipeline.schedules import trace
from hpcdist.cli.bench import pipeline, skeleton
from hpcdist.cli.bench.group import command
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError, StorageError, UsageError
from hpcdist.strategies.pipeline.costs import PassSeconds
from hpcdist.strategies.schedule.generate.operation_list import generated
from hpcdist.strategies.schedule.generate.passes import expand
from hpcdist.strategies.schedule.operations import COMPUTE, Kind
from hpcdist.strategies.schedule.simulate import timeline as simulate_timeline
from hpcdist.strategies.schedule.simulate.program import LinkCost, StepCosts

TINY = PipelineShape(layers=4, hidden=8, context=8, samples=2)
WANTED = PipelineRequest(("1f1b", "zb-h1", "zb-v"), (2, 3), ranks=2, chunks=2, shape=TINY, steps=3, warmup=1)


def simulated_results(case, costs, steps=3, overhead_s=0.0):
    """Return the measurements of a machine that behaves as simulated, with ``overhead_s`` added to each SEND."""
    of = generated(case.schedule, case.ranks, case.microbatches, case.chunks)
    placement = of.place([range(unit, unit + 1) for unit in range(case.ranks * case.chunks)])
    lists = [expand(row, placement, rank) for rank, row in enumerate(of.passes)]
    timeline = simulate_timeline.simulate_lists(lists, placement, costs)
    samples = []
    for rank, row in enumerate(lists):
        at = timeline.program.row(rank)
        spans = np.stack([timeline.times.begin_s[at], timeline.times.end_s[at]], axis=1) + 100.0
        sent = np.cumsum([op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT) for op in row])
        spans += overhead_s * np.stack([sent - np.diff(sent, prepend=0), sent], axis=1)
        samples.append([PipelineSample(100.0, float(spans.max()) - 100.0, spans, 1.0)] * steps)
    ideal_s = np.full((steps, case.ranks), timeline.makespan_s)
    return run._measured(case, placement, run._Raw(lists, samples), ideal_s, costs.link.latency_s, one_clock=True)


def case(schedule, microbatches=4, chunks=1):
    return PipelineCase(schedule, microbatches, 2, chunks, TINY)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_bubble_of_simulated_machine_matches_simulation(name, chunks):
    rows = np.random.default_rng(3).uniform(1.0, 2.0, (4, 2 * chunks)).tolist()
    names = ("forward_s", "backward_s", "input_s", "weight_s")
    costs = StepCosts(**dict(zip(names, rows, strict=True)), link=LinkCost(latency_s=0.25))
    result = simulated_results(case(name, 6, chunks), costs)
    assert reports.bubbles(result) == pytest.approx([result.simulated] * 3)
    assert result.replayed == pytest.approx([result.simulated] * 3) and 0 < result.simulated < 0.5
    (row,) = reports.rows(PipelineResults({}, (result,)))
    assert [measurements for measurements, _ in row.by_rank] == pytest.approx(
        [simulated for _, simulated in row.by_rank]
    )
    used = np.array(rows).T * [1, *((0, 1, 1) if name.startswith("zb") else (1, 0, 0))]
    assert result.unit_s == pytest.approx(used)


def test_overhead_is_separate_from_compute_and_bubble():
    quick = simulated_results(case("1f1b", 8), StepCosts.equal(2, 1.0, 1.0, 1.0))
    slow = simulated_results(case("1f1b", 8), StepCosts.equal(2, 1.0, 1.0, 1.0), overhead_s=0.5)
    rows = reports.rows(PipelineResults({}, (quick,))), reports.rows(PipelineResults({}, (slow,)))
    (without,), (with_it,) = rows
    assert without.overhead == pytest.approx(0.0, abs=1e-12) and without.operation_us == pytest.approx(0.0, abs=1e-6)
    span_s, sends = 27.0 + 0.5 * 8, 8
    assert with_it.overhead == pytest.approx(0.5 * sends / span_s)
    assert with_it.operation_us == pytest.approx(1e6 * 0.5 * sends / len(slow.operations[0]))
    assert with_it.measured == pytest.approx(3.0 / span_s)


def test_closed_forms_use_the_mean_stage():
    assert simulated_results(case("1f1b", 8), StepCosts.equal(2, 1.0, 2.0, 1.0)).closed == pytest.approx(1 / 9)
    assert simulated_results(case("zb-h1", 8), StepCosts.equal(2, 1.0, 2.0, 1.0)).closed == pytest.approx(2 / (32 + 2))
    assert simulated_results(case("zb-h1", 8), StepCosts.equal(2, 1.0, 1.0, 2.0)).closed is None


def test_speed_is_relative_to_independent_ranks_and_1f1b():
    costs = StepCosts.equal(2, 1.0, 1.0, 1.0)
    one, split = (simulated_results(case(name, 8), costs) for name in ("1f1b", "zb-h1"))
    ideal = replace(one, ideal_s=np.full((3, 2), 48.0))  # 8 micro-batches of 6 s
    first, second = reports.rows(PipelineResults({}, (ideal, replace(split, ideal_s=ideal.ideal_s))))
    assert (first.schedule, first.step_s, first.x_1f1b) == ("1f1b", pytest.approx(27.0), 1.0)
    assert first.x_ideal == pytest.approx(24 / 27) and first.of_bound == pytest.approx(1.0)
    assert second.x_1f1b == pytest.approx(27 / 25) and second.of_bound == pytest.approx(1.0)
    assert first.tokens_per_s == pytest.approx(8 * 2 * 8 / 27.0)


def test_invalid_cases_are_left_out_with_a_reason():
    result, left_out = cases(replace(WANTED, schedules=CONTENDERS, microbatches=(1, 4), chunks=4))
    assert len(result) == 2 * len(CONTENDERS) - 2
    assert set(left_out) == {"interleaved, 1 micro-batches", "interleaved, 4 micro-batches"}
    assert "8 chunks" in left_out["interleaved, 4 micro-batches"].replace("2 x 4", "8")
    assert len({one.id for one in result}) == len(result)
    with pytest.raises(UsageError, match="choose from gpipe, 1f1b"):
        skeleton.chosen("--schedule", ["sequential"], CONTENDERS)


def test_stages_are_balanced_by_the_passes_of_their_schedule():
    """The head is slow, but only in schedules that do not separate the weight gradients."""
    seconds = [PassSeconds(1.0, 2.0, 1.0, 1.0)] * 5 + [PassSeconds(1.0, 8.0, 1.0, 1.0)]
    assert place_units(case("1f1b"), seconds).chunks == (range(4), range(4, 6))
    assert place_units(case("zb-h1"), seconds).chunks == (range(3), range(3, 6))
    assert place_units(case("zb-v", chunks=2), seconds).ranks == (0, 1, 1, 0)


@pytest.fixture(scope="module")
def measurements():
    """Results of two ranks in one process. The times have no meaning."""
    kept = []

    def body(comm):
        run.run(comm, WANTED, [case("1f1b", 2).id], kept.extend, lambda line: None)

    run_threads(2, body)
    return kept


def test_every_operation_of_every_step_is_timed(measurements):
    names = [(one.case.schedule, one.case.microbatches) for one in measurements]
    assert names == [("zb-h1", 2), ("zb-v", 2), ("1f1b", 3), ("zb-h1", 3), ("zb-v", 3)]  # 1f1b of 2 is in the file
    for one in measurements:
        assert one.step_s.shape == one.ideal_s.shape == one.idle_s.shape == (3, 2)
        assert [len(chunk) for chunk in one.placement.chunks] and one.placement.units == range(6)
        for rank, spans in enumerate(one.spans_s):
            assert spans.shape == (3, len(one.operations[rank]), 2)
            assert (np.diff(spans.reshape(3, -1), axis=1) >= 0).all()  # one after the other
        assert (one.busy_s + one.idle_s <= one.span_s * (1 + 1e-6)).all() and (one.span_s <= one.step_s).all()
        split = one.case.schedule != "1f1b"
        assert ((one.unit_s > 0) == [True, not split, split, split]).all() and one.message_s > 0
        assert (one.replayed >= 0).all() and 0 <= one.simulated < 1


def test_results_file_is_read_back(measurements, tmp_path):
    path = tmp_path / "p.h5"
    results.append(path, measurements[:2], {"git_commit": "abc"})
    results.append(path, measurements[1:], {"git_commit": "later"})
    result = results.read(path)
    assert result.provenance["git_commit"] == "abc" and len(result.cases) == len(measurements)
    kept = {one.case.id: one for one in result.cases}
    for one in measurements:
        again = kept[one.case.id]
        assert (again.case, again.placement, again.closed) == (one.case, one.placement, one.closed)
        assert np.array_equal(again.spans_s[1], one.spans_s[1]) and np.array_equal(again.unit_s, one.unit_s)
        assert [(op.kind, op.unit) for op in again.operations[0] if op.kind in COMPUTE] == [
            (op.kind, op.unit) for op in one.operations[0] if op.kind in COMPUTE
        ]
    assert reports.rows(result) == reports.rows(PipelineResults({}, tuple(measurements)))
    (tmp_path / "no.h5").write_bytes(b"nothing")
    with pytest.raises(StorageError):
        results.read(tmp_path / "no.h5")


def test_schedule_with_a_different_loss_is_an_error():
    run._check_losses([2.0, 2.0001], ["one rank", "1f1b"])
    for other in (2.1, float("nan")):
        with pytest.raises(NonFiniteError, match="1f1b has loss"):
            run._check_losses([2.0, other], ["one rank", "1f1b"])


def test_table_json_and_plots(measurements, tmp_path):
    result = PipelineResults({"git_commit": "abc"}, tuple(measurements))
    table = reports.rows(result)
    assert [(row.microbatches, row.schedule) for row in table] == [
        (2, "zb-h1"), (2, "zb-v"), (3, "1f1b"), (3, "zb-h1"), (3, "zb-v"),
    ]  # fmt: skip
    assert table[0].x_1f1b is None and table[2].x_1f1b == 1.0
    lines = reports.text(table, {"gpipe, 2 micro-batches": "why"}).splitlines()
    assert lines[1].split()[:2] == ["zb-h1", "2"] and lines[3] == "" and lines[-1].endswith("why")
    document = json.loads(json.dumps(reports.jsonable(result, {})))
    assert document["rows"][0]["schedule"] == "zb-h1" and document["rows"][2]["closed"] == pytest.approx(1 / 4)
    passes = [event for event in trace(reports.panels(result))["traceEvents"] if event["ph"] == "X"]
    # 2 chunks of 1f1b at 3 and of zb-h1 at 2 micro-batches, 4 chunks of zb-v at 2, each with its passes.
    assert len(passes) == 2 * 3 * 2 + 2 * 2 * 3 + 4 * 2 * 3
    assert 0 <= min(event["ts"] for event in passes) < max(event["ts"] for event in passes)
    pytest.importorskip("matplotlib")
    reports.plot(result, tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 5000
    with pytest.raises(UsageError, match="nothing to plot"):
        reports.plot(PipelineResults({}, ()), tmp_path / "c.png")


def test_ranks_get_the_same_options(monkeypatch):
    lines = []

    def start(ranks, call):
        lines.append((ranks, skeleton.rank_arguments(call)))
        return 0

    monkeypatch.setattr(skeleton, "start_ranks", start)
    given = ["--schedule", "1f1b", "--schedule", "zb-h1", "--microbatches", "5", "--json", "-o", "x.h5", "--steps", "4"]
    assert CliRunner().invoke(command, ["pipeline", "-n", "3", *given]).exit_code == 0
    ranks, line = lines[0]
    assert ranks == 3 and "--ranks" not in line and "-n" not in line
    parsed = pipeline.command.make_context("pipeline", list(line)).params
    assert parsed == pipeline.command.make_context("pipeline", given).params


def test_invalid_options_are_rejected(monkeypatch):
    def invoke_pipeline(*arguments):
        return CliRunner().invoke(command, ["pipeline", *arguments])

    listed = invoke_pipeline("--list", "--microbatches", "1").output.splitlines()
    assert listed[0] == "gpipe, 1 micro-batches, 1 chunks on each of 2 ranks"
    assert listed[-1].startswith("left out: interleaved, 1 micro-batches")
    assert isinstance(invoke_pipeline("--schedule", "1f2b").exception, UsageError)
    assert "3 units" in str(invoke_pipeline("--schedule", "interleaved", "--layers", "1").exception)
    for option, name in (("-o", "x.h5"), ("--plot", "x.png"), ("--timeline", "x.svg"), ("--timeline", "x.json")):
        assert isinstance(invoke_pipeline(option, f"/proc/no/{name}").exception, StorageError)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "one of 2 ranks" in str(invoke_pipeline("-n", "3").exception)
