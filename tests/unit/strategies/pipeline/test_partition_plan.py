"""Partitions of recipes: counted costs, measured costs, rejected recipes, and the memory of a run."""

import numpy as np
import pytest
from click.testing import CliRunner

from harness.marks import cases
from harness.trainings import losses, recipe_keys, trainer_of
from hpcdist import models
from hpcdist.cli.plan.schedule import command as schedule
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.pipeline import costs
from hpcdist.strategies.pipeline.costs import PassSeconds, agree, measure
from hpcdist.strategies.pipeline.memory import StateBytes, moments
from hpcdist.strategies.pipeline.plan import plan
from hpcdist.strategies.schedule.operation_list import generated
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.registry import SCHEDULES, chunks_of
from hpcdist.strategies.tensor.model import cut_model
from hpcdist.training.build import pipeline
from hpcdist.training.run.saving import CheckpointSaver

STATES = StateBytes(per_parameter=16, itemsize=4)


def gpt(layers=8, **changed):
    config = ModelConfig(layers=layers, hidden=16, heads=2, vocabulary=64, **changed)
    return models.build(config, "float32", context=8)


def make_plan(model, *, seconds=None, kept=(), **keys):
    parallel = ParallelConfig(**{"pipeline": 2, "microbatches": 4, **keys})
    schedule = generated(parallel.order, parallel.pipeline, parallel.microbatches, parallel.chunks)
    return plan(model, parallel, schedule, STATES, 2, seconds=seconds, earlier_units=kept)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_moments_match_the_peaks_of_the_schedules(name):
    for ranks in (1, 2, 3, 5) if SCHEDULES[name].pipelines else (1,):
        for microbatches in (ranks, 7, 12):
            chunks = max(chunks_of(name, 2 if name == "interleaved" else 1), 1)
            written = generated(name, ranks, microbatches, chunks)
            empty = written.place([range(unit, unit + 1) for unit in range(ranks * chunks)])
            for rank in range(ranks):
                result = moments(expand(written.passes[rank], empty, rank), empty.of(rank))
                sums = [tuple(sum(getattr(live, k) for live in m) for k in ("inputs", "kept", "held")) for m in result]
                peak = SCHEDULES[name].peak(rank, ranks, microbatches, chunks)
                assert max(kept for _, kept, _ in sums) == peak.live
                assert max(inputs for inputs, _, _ in sums) == peak.both
                assert all(inputs == kept + held for inputs, kept, held in sums)


def test_recomputed_chunks_keep_their_inputs():
    written = generated("gpipe", 2, 5)
    empty = written.place([range(1), range(1, 2)])
    (moment,) = moments(expand(written.passes[0], empty, 0, recompute=True), empty.of(0))
    assert (moment[0].inputs, moment[0].kept, moment[0].held) == (5, 1, 0)


@cases(
    "keys, expected",
    ({}, (5, 5)),
    ({"partition": "parameters"}, (5, 5)),
    ({"stage_speeds": (3, 1)}, (7, 3)),
    ({"stage_units": (2, 8)}, (2, 8)),
    ({"pipeline": 5}, (2, 2, 2, 2, 2)),
    ({"schedule": "interleaved", "chunks": 2}, (3, 2, 2, 3)),
    ({"schedule": "zb-v"}, (3, 2, 2, 3)),
    ({"schedule": "zb-h1"}, (5, 5)),
)
def test_plan_covers_the_model_and_prints_a_table(keys, expected):
    model = gpt()  # the embedding is next to nothing, the head a third of a block
    made = make_plan(model, **keys)
    assert made.stage_units == expected
    assert made.gap == 0.0
    assert sum(row.parameters for row in made.rows) == model.layout.size
    assert max(row.share for row in made.rows) == 1.0 and made.balance <= 1.0
    head, names, *rows = made.table()
    assert head.startswith("stages ") and len(rows) == len(made.rows) == keys.get("pipeline", 2)
    assert ("forward GFLOP" in names) == (keys.get("partition") != "parameters")
    for text, row in zip(rows, made.rows, strict=True):
        assert f"{row.parameters:,}" in text and f"{row.share:.0%}" in text and "states" in text


def test_measured_seconds_determine_the_partition():
    """Blocks get slower towards the end of the model, which no closed form predicts."""
    model = gpt()
    seconds = [PassSeconds(1.0 + unit, 2.0, 1.5, 0.6) for unit in range(10)]
    made = make_plan(model, partition="measured", seconds=seconds)
    assert made.stage_units == (6, 4)
    assert made.rows[0].forward == sum(range(1, 7)) and made.rows[0].backward == 12.0
    split = make_plan(model, partition="measured", seconds=seconds, schedule="zb-h1")
    assert split.rows[0].backward == pytest.approx(6 * 2.1)
    again = make_plan(model, partition="measured", seconds=seconds, recompute=True)
    assert again.rows[0].backward == pytest.approx(sum(3.0 + unit for unit in again.rows[0].units[0]))
    assert make_plan(model, partition="measured", seconds=seconds, kept=(1, 9)).stage_units == (1, 9)


@cases(
    "keys, match",
    ({"partition": "luck"}, "choose one of parameters, flops, measured"),
    ({"pipeline": 1, "partition": "measured"}, "no effect with parallel.pipeline = 1"),
    ({"pipeline": 1, "stage_memory_bytes": (5,)}, r"stage_memory_bytes = \[5\] has no effect"),
    (
        {"stage_units": (5, 5), "partition": "parameters"},
        "partition = 'parameters' has no effect with parallel.stage_units",
    ),
    ({"stage_units": (5, 5), "stage_speeds": (1, 2)}, r"stage_speeds = \[1, 2\] has no effect"),
    (
        {"stage_units": (5, 4)},
        "has 2 numbers with the sum 9; expected 2 numbers .* with the sum 10",
    ),
    ({"stage_units": (10, 0)}, "each must be at least 1"),
    ({"stage_units": (3, 3, 4)}, "has 3 numbers"),
    ({"stage_speeds": (1, 2, 3)}, "give one relative speed per pipeline rank"),
    ({"stage_memory_bytes": (1, 2, 3)}, "one limit for all"),
    ({"stage_memory_bytes": (-1,)}, "at least 0"),
    ({"pipeline": 11}, "parallel.pipeline = 11 needs at least 11 model units .* only 10 units"),
    (
        {"pipeline": 4, "schedule": "interleaved", "chunks": 3},
        "needs at least 12 model units .4 ranks x 3 chunks.* only 10 units",
    ),
    ({"stage_memory_bytes": (1000, 0)}, r"(?s)however the 10 units .* rank 0 needs .* of 1,000, .*\nstage  units"),
    ({"stage_units": (5, 5), "stage_memory_bytes": (0, 1000)}, "with these stages, pipeline rank 1 needs"),
    ({"schedule": "zb-v", "stage_memory_bytes": (9,)}, "with these stages, pipeline rank 0"),
)
def test_impossible_partitions_are_rejected(keys, match):
    with pytest.raises(ConfigurationError, match=match):
        make_plan(gpt(), **keys)


def test_memory_limits_move_units_and_are_shown():
    free = make_plan(gpt())
    limit = free.rows[0].total_bytes - 1
    made = make_plan(gpt(), stage_memory_bytes=(limit, 0))
    assert made.stage_units[0] < free.stage_units[0] and made.rows[0].total_bytes <= limit
    assert " of " in made.table()[2] and " of " not in made.table()[3]


def test_state_bytes_follow_the_exchange():
    def each(degrees, **zero):
        return StateBytes.of(ZeroConfig(**zero), ShardingDegrees(*degrees), 4, 8).per_parameter

    assert each((1, 1, 1)) == 4 + 4 + 8
    assert each((1, 1, 4)) == 4 + 4 + 2
    assert each((1, 4, 4)) == 4 + 1 + 2
    assert each((4, 4, 4)) == 1 + 1 + 2
    assert each((4, 4, 4), keep_gradients=True, keep_parameters=True) == 1 + 1 + 2 + 4 + 4


def test_each_kind_of_unit_is_measured_once(monkeypatch):
    probed = []
    probe = costs._Probe

    def probe_and_count(model, unit, *rest):
        probed.append(unit)
        return probe(model, unit, *rest)

    monkeypatch.setattr(costs, "_Probe", probe_and_count)
    for model in (gpt(3, tied=True, dropout=0.1), models.build(ModelConfig(kind="mlp"), features=5, classes=3)):
        probed.clear()
        result = measure(model, 2)
        assert len(result) == len(model.stages) and probed == [0, 1, len(model.stages) - 1]
        for one in result:
            assert min(one.forward, one.backward, one.input, one.weight) > 0
        assert len(set(result[1:-1])) == 1


def test_ranks_agree_on_medians():
    def body(comm):
        speed = (1.0, 2.0, 4.0)[comm.rank]
        return agree(comm, [PassSeconds(3.0 / speed, 1.0 / speed, 0.5, 0.25 * (comm.rank + 1))], speed)

    assert run_threads(3, body) == [(PassSeconds(3.0, 1.0, 1.0, 1.0),)] * 3


def test_tensor_ranks_measure_together():
    def body(comm):
        return len(agree(comm, measure(cut_model(gpt(2), comm, sequence_parallel=True), 2)))

    assert run_threads(2, body) == [4, 4]


def test_measurements_wait_for_the_gpu_at_both_ends(gpu):
    result = measure(gpt(1), 2, "gpu")
    turns = costs.WARM + costs.TURNS
    spans = 5  # a turn: forward twice, backward, and its halves
    assert gpu.LOG.sites()[gpu.SYNCHRONISE, "costs._clock"] == 3 * turns * spans * 2 and len(result) == 3


KEYS = recipe_keys(
    "layers=5 hidden=32 heads=2 vocabulary=256 tied=true data.context=32 steps=2 global_batch=16 log_every_s=100 "
    "pipeline=2 microbatches=4"
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(np.random.default_rng(1).integers(97, 120, 20_000, np.uint8).tobytes())
    return {**KEYS, "data.path": path}


@cases(
    "changed",
    {},
    {"parallel.schedule": "gpipe", "parallel.recompute": "true"},
    {"parallel.schedule": "interleaved", "parallel.chunks": 3},
    {"parallel.schedule": "zb-h1"},
    {"parallel.schedule": "zb-v"},
    {"optimizer.name": "sgd"},
    {"parallel.data": 2, "parallel.strategy": "zero3", "model.tied": "false"},
    {"parallel.data": 2, "parallel.strategy": "zero2", "zero.keep_gradients": "true"},
    {"parallel.tensor": 2, "parallel.sequence_parallel": "true"},
    {"parallel.data": 2, "parallel.strategy": "zero1", "precision.mode": "bfloat16"},
    {"parallel.tensor": 2, "parallel.schedule": "zb-h1", "precision.mode": "float16"},
)
@pytest.mark.matrix_except("changed0", "changed1", "changed4", "changed6", "changed8", "changed9")
@pytest.mark.full_except("changed0")
def test_memory_of_a_run_matches_its_plan(text, changed):
    ranks = 2 * int(str(changed.get("parallel.data", 1))) * int(str(changed.get("parallel.tensor", 1)))

    def body(comm):
        trainer = trainer_of(comm, {**text, **changed})
        losses(trainer, 2)
        assert trainer.plan is not None and trainer.context.placement == trainer.plan.placement
        return dict(trainer.plan.rows[trainer.context.pipeline.rank].bytes), trainer.ledger.peak

    for plan_bytes, peak in run_threads(ranks, body):
        states = peak["parameters"] + peak["gradients"] + peak["optimizer"]
        assert sum(plan_bytes.values()) == pytest.approx(states + peak["activations"], rel=0.12)
        if ranks == 2:  # else some units are whole for a moment
            assert plan_bytes["states"] == pytest.approx(states, rel=0.02)


def test_resumed_run_keeps_the_measured_partition(text, tmp_path, monkeypatch):
    keys = {**text, "parallel.partition": "measured"}

    def first(comm):
        trainer = trainer_of(comm, keys)
        losses(trainer, 1)
        CheckpointSaver(trainer, tmp_path / "checkpoints").save(1)
        return units_of(trainer)

    def units_of(trainer):
        assert trainer.plan is not None
        return trainer.plan.stage_units

    monkeypatch.setattr(pipeline.pipeline_measured, "measure", lambda *of: slow_at_the_end(7))
    (cut, *_) = run_threads(2, first)
    assert cut == (4, 3)
    monkeypatch.setattr(pipeline.pipeline_measured, "measure", lambda *of: slow_at_the_end(7)[::-1])
    assert run_threads(2, lambda comm: units_of(trainer_of(comm, keys))) == [(3, 4)] * 2
    path = next((tmp_path / "checkpoints").glob("step-*"))
    assert run_threads(2, lambda comm: units_of(trainer_of(comm, keys, path))) == [cut] * 2
    other = {**keys, "parallel.pipeline": 3}
    assert run_threads(3, lambda comm: units_of(trainer_of(comm, other, path))) == [(2, 2, 3)] * 3


def slow_at_the_end(count):
    return tuple(PassSeconds(1.0 + 0.1 * unit, 2.0, 1.0, 1.0) for unit in range(count))


def test_partition_table_needs_no_ranks(text, tmp_path):
    settings = [f"--set={key}={value}" for key, value in text.items()]
    alone = CliRunner().invoke(schedule, [*settings, "--set=parallel.partition=measured"])
    assert alone.exit_code == 0, alone.output
    head, names, *rows = alone.output.splitlines()
    assert head.startswith("stages cut by measured") and "forward ms" in names and len(rows) == 2
    both = CliRunner().invoke(schedule, ["1f1b", "--stages", "2", *settings])
    assert "stages cut by flops" in both.output and "makespan" in both.output
    refused = CliRunner().invoke(schedule, [*settings, "--set=parallel.pipeline=1", "--set=parallel.microbatches=1"])
    assert isinstance(refused.exception, UsageError) and "there is only one stage" in str(refused.exception)
