"""Memory of a plan compared with runs of hpcdist, with sums by pipeline rank, and with published devices."""

from dataclasses import replace

import pytest

from harness.made_plans import cluster_of
from harness.marks import cases
from harness.trainings import choose_in_turn, losses, recipe_keys, trainer_of
from hpcdist import models
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Device
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import by_rank, memory
from hpcdist.planner.memory.model_states import buffer_bytes, states
from hpcdist.planner.model.stage_split import chunks
from hpcdist.planner.model.transformer import describe, named, of_config
from hpcdist.planner.time.gradient_payloads import gradient_item_bytes
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.pipeline.memory import StateBytes
from hpcdist.strategies.pipeline.plan import plan
from hpcdist.strategies.schedule.operation_list import generated

CLUSTER = cluster_of(
    Device(name="x", peak_flops={}, matmul={}, memory_bytes=80e9, memory_bytes_per_s=2e12, reserved_bytes=1.5e9),
    devices=4096,
)
BARE = replace(CLUSTER, device=replace(CLUSTER.device, reserved_bytes=0.0))

MODEL = {"layers": 6, "hidden": 64, "heads": 4, "vocabulary": 256}
RUN = {f"model.{key}": value for key, value in MODEL.items()} | recipe_keys(
    "data.context=32 steps=2 global_batch=8 optimizer.name=adamw algorithm=ring"
)
OURS = ParallelLayout(precision="float32", algorithm="ring")
MIXTURE = "experts=4 expert_hidden=128 shared_experts=1"
PAIR, PIPELINE = {"data": 2, "microbatch": 4}, {"pipeline": 2, "microbatch": 2}

# (ranks, keys of the recipe, fields of the layout): 4 samples on each of two replicas, or what is said.
RUNS = {
    "one rank": (1, "", dict(microbatch=8)),
    "accumulation": (1, "microbatches=4", dict(microbatch=2)),
    "recomputation": (1, "recompute=true", dict(microbatch=8, recompute="full")),
    "tied": (1, "tied=true", dict(microbatch=8)),
    "allreduce": (2, "", PAIR),
    "zero1": (2, "strategy=zero1", dict(PAIR, strategy="zero1")),
    "zero2": (2, "strategy=zero2", dict(PAIR, strategy="zero2")),
    "zero3": (2, "strategy=zero3", dict(PAIR, strategy="zero3")),
    "bfloat16": (
        2,
        "precision.mode=bfloat16 strategy=zero1",
        dict(PAIR, strategy="zero1", precision="bfloat16", activations="float32"),
    ),
    "server": (
        2,
        "strategy=parameter_server placement=dedicated",
        dict(data=1, microbatch=8, strategy="parameter_server", servers=1),
    ),
    "int8": (2, "communication.compression=int8", dict(PAIR, compression="int8")),
    "top k": (2, "compression=topk strategy=zero3", dict(PAIR, compression="topk", strategy="zero3")),
    "one bit": (
        2,
        "compression=onebit compression.warmup_steps=1 optimizer.warmup_steps=1",
        dict(PAIR, compression="onebit"),
    ),
    "four ranks": (
        4,
        "pipeline=2 microbatches=4 strategy=zero2",
        dict(PIPELINE, data=2, microbatch=1, strategy="zero2"),
    ),
    "gpipe": (2, "schedule=gpipe", dict(PIPELINE, schedule="gpipe")),
    "1f1b": (2, "schedule=1f1b", PIPELINE),
    "1f1b, computed again": (2, "recompute=true", dict(PIPELINE, recompute="full")),
    "interleaved": (2, "schedule=interleaved chunks=2", dict(PIPELINE, schedule="interleaved", chunks=2)),
    "zb-h1": (2, "schedule=zb-h1", dict(PIPELINE, schedule="zb-h1")),
    "zb-v": (2, "schedule=zb-v", dict(PIPELINE, schedule="zb-v")),
    "tensor": (2, "tensor=2", dict(tensor=2, microbatch=8)),
    "experts": (1, MIXTURE, dict(microbatch=8)),
    "expert": (2, f"expert=2 {MIXTURE}", dict(PAIR, expert=2)),
    "expert x zero1": (4, f"expert=2 strategy=zero1 {MIXTURE}", dict(data=4, microbatch=2, expert=2, strategy="zero1")),
    "expert x tensor": (4, f"expert=2 tensor=2 {MIXTURE}", dict(PAIR, expert=2, tensor=2)),
    "experts x context": (2, f"parallel.context=2 {MIXTURE}", dict(context=2, microbatch=8)),
    "expert x context": (4, f"parallel.context=2 expert=4 {MIXTURE}", dict(PAIR, context=2, expert=4)),
    "sequence": (2, "tensor=2 sequence_parallel=true", dict(tensor=2, microbatch=8, sequence_parallel=True)),
    "context by exchange": (2, "parallel.context=2", dict(context=2, microbatch=8)),
    "context by a ring": (3, "parallel.context=3", dict(context=3, microbatch=8)),  # does not divide the heads
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.full
@pytest.mark.matrix_except(
    "one rank", "recomputation", "zero2", "zero3", "server", "four ranks", "1f1b", "tensor", "context by a ring"
)
def test_planned_memory_matches_a_run(name, monkeypatch):
    choose_in_turn(monkeypatch, 4)
    ranks, keys, fields = RUNS[name]
    if "pipeline" in fields and "pipeline" not in keys:
        keys += " pipeline=2 microbatches=4"

    def body(comm):
        trainer = trainer_of(comm, RUN | recipe_keys(keys))
        losses(trainer, 2)
        return trainer.ledger.peak_total

    measured = max(run_threads(ranks, body))
    mixture = {key.removeprefix("model."): value for key, value in recipe_keys(MIXTURE).items()}
    config = ModelConfig(**MODEL, tied=name == "tied", **(mixture if "expert" in name else {}))
    planned = memory(of_config(config, context=32), replace(OURS, **fields), BARE, 8)
    assert planned.bytes == pytest.approx(measured, rel=0.05)
    assert planned.fits and planned.terms["reserved"] == 0


@pytest.mark.parametrize("tensor", [1, 2])
@cases(
    "schedule, recompute",
    *((name, False) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")),
    *((name, True) for name in ("gpipe", "1f1b", "interleaved")),  # what goes back in one pass
)
def test_memory_of_each_pipeline_rank_matches_its_table(schedule, tensor, recompute):
    config = ModelConfig(layers=11, hidden=64, heads=4, vocabulary=300, tied=True)
    result, each = of_config(config, context=24), 2 if schedule in ("interleaved", "zb-v") else 1
    layout = ParallelLayout(
        pipeline=3,
        tensor=tensor,
        schedule=schedule,
        chunks=each,
        microbatch=2,
        precision="float32",
        recompute="full" if recompute else "none",
    )
    units = [sum(share.times for share in chunk.shares) for chunk in chunks(result, layout)]
    parallel = ParallelConfig(
        pipeline=3,
        tensor=tensor,
        microbatches=6,
        schedule=schedule,
        chunks=each,
        recompute=recompute,
        stage_units=tuple(units),
    )
    written = generated(parallel.order, 3, 6, each)
    made = plan(models.build(config, context=24), parallel, written, StateBytes(per_parameter=16, itemsize=4), 2)
    for rank, (row, terms) in enumerate(zip(made.rows, by_rank(result, layout, BARE, 12), strict=True)):
        states = terms["parameters"] + terms["gradients"] + terms["optimizer"]
        assert states == pytest.approx(row.bytes["states"], rel=1e-3), rank  # padding
        assert terms["activations"] == row.bytes["activations"], rank
        # A border between two chunks of one rank has no message, which the table counts all the same.
        assert terms["messages"] == row.bytes["messages"], rank
        assert terms["scratch"] == row.bytes["scratch"], rank
    fullest = max(sum(terms.values()) for terms in by_rank(result, layout, BARE, 12))
    assert memory(result, layout, BARE, 12).bytes == fullest


def test_message_bytes_match_the_stage_border():
    config = ModelConfig(kind="mlp", layers=5, hidden=64)
    result = of_config(config, features=32, classes=1000)
    parallel = ParallelConfig(pipeline=2, microbatches=4, stage_units=(3, 3))
    written = generated("1f1b", 2, 4, 1)
    made = plan(
        models.build(config, features=32, classes=1000), parallel, written, StateBytes(per_parameter=16, itemsize=4), 3
    )
    layout = ParallelLayout(pipeline=2, microbatch=3, precision="float32")
    for row, terms in zip(made.rows, by_rank(result, layout, BARE, 12), strict=True):
        assert terms["messages"] == row.bytes["messages"] == 2 * 3 * 64 * 4


def test_context_axis_divides_all_activations():
    report = describe(named("llama-3-8b"), "llama-3-8b")
    for implementation in ("hpcdist", "megatron-2022"):
        for recompute in ("none", "full"):
            layout = ParallelLayout(implementation=implementation, recompute=recompute, precision="float32")
            one, many = (memory(report, replace(layout, context=context), BARE, 1).terms for context in (1, 64))
            assert many["activations"] == pytest.approx(one["activations"] / 64, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "ranks", "each"), [("megatron-175b", 8, 3), ("megatron-530b", 35, 3), ("megatron-1t", 64, 1)]
)
def test_memory_of_the_first_stage_matches_the_paper(name, ranks, each):
    # arXiv:2205.05198, section 4.2.3 and 4.3, with its table 3: sequence parallelism and selective recomputation.
    shape = named(name)
    s, h, layers = shape.context, shape.hidden, shape.layers
    layout = ParallelLayout(
        pipeline=ranks,
        tensor=8,
        chunks=each,
        schedule="interleaved" if each > 1 else "1f1b",
        sequence_parallel=True,
        recompute="selective",
        implementation="megatron-2022",
    )
    result = memory(describe(shape, name), layout, CLUSTER, 64 * ranks)
    deeper = 1 + (ranks - 1) / (ranks * each) if each > 1 else 1
    # The mask of the embedding is there for each micro-batch of the first chunk, up to twice the ranks.
    masks = s * h / 8
    blocks = 34 * s * h / 8 * layers * deeper
    assert result.stage == 0
    assert blocks + ranks * masks <= result.terms["activations"] <= blocks + 2 * ranks * masks
    assert result.terms["reserved"] == 1.5e9
    parameters = layers / ranks * (12 * h * h / 8 + 7 * h / 8 + 6 * h) + shape.vocabulary * h / 8 + s * h
    states = result.terms["parameters"] + result.terms["gradients"] + result.terms["optimizer"]
    assert states == pytest.approx(18 * parameters, rel=1e-12)


def test_plan_that_does_not_fit_names_the_largest_term():
    report = describe(named("llama-3-8b"), "llama-3-8b")
    alone = memory(report, ParallelLayout(implementation="megatron-2022", recompute="full"), CLUSTER, 1)
    assert not alone.fits and alone.largest_term == "optimizer" and alone.limit_bytes == 80e9
    cut = memory(
        report, ParallelLayout(implementation="megatron-2022", recompute="full", data=64, strategy="zero1"), CLUSTER, 64
    )
    assert cut.fits and "6 + 12/d" in cut.rule
    all_kept = memory(report, ParallelLayout(implementation="megatron-2022", data=64, strategy="zero3"), CLUSTER, 64)
    assert not all_kept.fits and all_kept.largest_term == "activations"


def test_expert_axis_divides_expert_parameters():
    report = describe(named("mixtral-8x7b"), "mixtral-8x7b")
    layout = ParallelLayout(implementation="megatron-2022", data=64, strategy="zero1", recompute="full")
    one, eight = (memory(report, replace(layout, expert=expert), CLUSTER, 64).terms for expert in (1, 8))
    experts = 32 * 8 * 3 * 4096 * 14336
    assert one["parameters"] - eight["parameters"] == pytest.approx(2 * experts * 7 / 8)
    # Their optimizer is cut over 64 ranks in both: 64 copies of all of them, or 8 of an eighth.
    assert one["optimizer"] == pytest.approx(eight["optimizer"])


def test_buckets_include_experts_unless_they_are_distributed():
    """A ring needs an additional share of the bucket: of all gradients, or of a layer's experts on their replicas."""
    mixture = ModelConfig(**MODEL, experts=4, expert_hidden=128)
    result, layout = of_config(mixture, context=32), replace(OURS, data=4, microbatch=2)
    assert memory(result, layout, BARE, 8).terms["messages"] == result.parameters * 4 / 4 < 4 << 20
    block = result.units[1].expert_parameters
    assert memory(result, replace(layout, expert=2), BARE, 8).terms["messages"] == block / 2 * 4 / 2
    dense = max(unit.parameters - unit.expert_parameters for unit in result.units)  # here the embedding
    assert memory(result, replace(layout, expert=4), BARE, 8).terms["messages"] == dense * 4 / 4


def test_dedicated_server_can_have_the_highest_memory():
    result = of_config(ModelConfig(**MODEL), context=1)
    layout = ParallelLayout(data=4, servers=1, strategy="parameter_server", precision="float32")
    alone = memory(result, layout, BARE, 4)
    assert alone.terms["activations"] == 0 and alone.terms["optimizer"] == 8 * result.parameters
    several = memory(result, replace(layout, servers=4), BARE, 4)
    assert several.terms["activations"] > 0 and several.terms["optimizer"] == 0


# arXiv:2205.05198, table 3: tensor and pipeline ranks, chunks, micro-batch.
PAPER = {
    "megatron-22b": (8, 1, 1, 4),
    "megatron-175b": (8, 8, 3, 1),
    "megatron-530b": (8, 35, 3, 1),
    "megatron-1t": (8, 64, 1, 1),
}


@pytest.mark.parametrize("name", PAPER)
def test_layouts_of_the_paper_fit_and_its_baseline_does_not(name):
    # Its figure 1: tensor parallelism alone is beyond the 80 GB of an A100 in all four, both techniques are below.
    tensor, ranks, each, samples = PAPER[name]
    layout = ParallelLayout(
        tensor=tensor,
        pipeline=ranks,
        chunks=each,
        microbatch=samples,
        schedule="interleaved" if each > 1 else "1f1b",
        implementation="megatron-2022",
    )
    report = describe(named(name), name)
    assert not memory(report, layout, BARE, 8 * ranks).fits
    assert memory(report, replace(layout, sequence_parallel=True, recompute="selective"), CLUSTER, 8 * ranks).fits


@cases(
    "fields, message",
    ({"schedule": "file"}, "cannot compute the activation memory of the schedule 'file'"),
    ({"schedule": "sequential"}, "only one pipeline rank computes at a time"),
    ({"schedule": "interleaved", "chunks": 2, "microbatch": 4}, "needs at least 2 micro-batches"),
    ({"schedule": "1f1b", "chunks": 3}, "parallel.chunks = 3"),
    ({"pipeline": 9}, "a pipeline of 9 ranks"),
)
def test_impossible_pipelines_are_rejected(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        memory(of_config(ModelConfig(), context=8), replace(ParallelLayout(pipeline=2), **fields), BARE, 4)


def test_16_bit_buckets_need_float32_sums():
    half = ParallelLayout(data=4, precision="bfloat16", algorithm="ring")
    assert buffer_bytes(replace(half, precision="float32"), 1e9, 1e6) == 2**20  # a quarter of 4 MiB arrives
    # 4 MiB of 16-bit numbers are 8 MiB in float32, and a quarter of those arrives.
    assert buffer_bytes(half, 1e9, 1e6) == 2**23 + 2**21
    assert buffer_bytes(half, 100.0, 100.0) == 400 + 100
    assert gradient_item_bytes(half) == 4 and states(half).gradient == 2
    # Main gradients are Megatron's: they change neither what is sent nor what is kept.
    narrow = replace(half, main_gradients="working")
    assert buffer_bytes(narrow, 1e9, 1e6) == 2**23 + 2**21
    assert gradient_item_bytes(narrow) == 4 and states(narrow).gradient == 2


def test_reserved_memory_counts():
    cluster = toml_file.read("h100-hgx")
    description, layout = describe(named("gpt2"), "gpt2"), ParallelLayout()
    used = sum(by_rank(description, layout, cluster, 1)[0].values())

    def fits(memory_bytes, reserved):
        device = replace(cluster.device, memory_bytes=memory_bytes, reserved_bytes=reserved)
        result = memory(description, layout, replace(cluster, device=device), 1)
        assert result.terms["reserved"] == reserved and result.bytes == used + reserved
        return result.fits

    assert fits(used, 0) and not fits(used - 1, 0)
    assert fits(used + 1e9, 1e9) and not fits(used + 1e9 - 1, 1e9)
