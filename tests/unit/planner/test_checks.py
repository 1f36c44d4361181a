"""Each limit rejects its violations with the excess. The limits of hpcdist equal the errors of its recipes."""

from dataclasses import replace
from itertools import product

import pytest

from harness.made_plans import problems
from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.planner import checks
from hpcdist.planner.checks import unsupported
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.transformer import describe, inner, of_config
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.training.recipe.recipe import load

CLUSTER = toml_file.read("a100-selene")
SHAPE = TransformerShape(layers=96, hidden=12288, heads=96, vocabulary=51200, context=2048, dropout=0.1)
MODEL = describe(SHAPE, "GPT-3")
FITS = ParallelLayout(data=16, pipeline=8, tensor=8, recompute="full", implementation="megatron-2022")
OURS = replace(FITS, implementation="hpcdist")
BATCH = 1536


def find_problems(layout, batch=BATCH, model=MODEL, cluster=CLUSTER):
    return problems(model, layout, cluster, batch)


def test_possible_layouts_have_no_problems():
    assert find_problems(FITS) == ()
    assert find_problems(OURS) == ()


@cases(
    "changed, texts",
    ({"tensor": 5, "data": 2}, ("tensor = 5 does not divide the 96 heads: 1 are left over",)),
    ({"tensor": 128, "data": 1, "pipeline": 2}, ("tensor = 128 is 32 more than the 96 heads",)),
    ({"pipeline": 10}, ("pipeline 10 does not divide 96 layers: 6 are left over",)),
    ({"pipeline": 128, "data": 2}, ("128", "32 too few")),
    (
        {"schedule": "interleaved", "chunks": 5},
        ("pipeline 8 x chunks 5 = 40 parts does not divide 96 layers: 16 are left over",),
    ),
    ({"data": 7}, ("data = 7 does not divide the global batch of 1536: 3 are left over", "1533 or 1540")),
    ({"data": 2048, "tensor": 1, "pipeline": 1}, ("512 too few for data = 2048",)),
    ({"microbatch": 5}, ("data 16 x microbatch 5 = 80 samples does not divide", "16 are left over")),
    ({"microbatch": 192}, ("microbatch = 192 is 96 more than the 96 samples",)),
    (
        {"schedule": "interleaved", "chunks": 2, "data": 128, "pipeline": 16, "tensor": 1},
        ("micro-batches: 12, which is 4 too few", "pipeline = 16"),
    ),
    (
        {"schedule": "interleaved", "chunks": 2, "data": 128, "tensor": 1},
        ("12 micro-batches are not a multiple of pipeline = 8", "4 are left over"),
    ),
    ({"data": 64, "tensor": 16}, ("= 8192 devices, 3712 more than the 4480 of",)),
    ({"context": 3, "data": 4}, ("context = 3 does not divide the 2048 tokens of a sample: 2 are left over",)),
    ({"schedule": "zb-h1"}, ("recompute = 'full' with the schedule 'zb-h1'",)),
    ({"schedule": "sequential"}, ("only one pipeline rank computes at a time",)),
    ({"chunks": 2}, ("the schedule '1f1b' has 1 chunk per stage, not 2",)),
    ({"schedule": "interleaved"}, ("has 2 or more chunks per stage, not 1",)),
    ({"pipeline": 1, "chunks": 2, "schedule": "interleaved", "data": 64}, ("chunks = 2 with pipeline = 1",)),
    ({"tensor": 1, "sequence_parallel": True}, ("sequence_parallel with tensor = 1 has no effect",)),
    ({"servers": 4}, ("servers = 4 has no effect with the strategy 'allreduce'",)),
    ({"expert": 2}, ("has no experts",)),
    ({"precision": "float64"}, ("has no peak FLOP rate for float64",)),
)
def test_each_limit_reports_the_excess(changed, texts):
    cluster = replace(CLUSTER, devices=4480)
    if "precision" in changed:
        cluster = replace(cluster, device=replace(cluster.device, peak_flops={"bfloat16": 312e12}))
    result = find_problems(replace(FITS, **changed), cluster=cluster)
    assert len(result) == 1, result
    for text in texts:
        assert text in result[0]


@cases(
    "changed, text",
    ({"data": 0}, "data = 0; it must be at least 1"),
    ({"microbatch": -1}, "microbatch = -1"),
    ({"strategy": "zero4"}, "did you mean 'zero3'"),
    ({"schedule": "1f1"}, "did you mean '1f1b'"),
    ({"overlap": 1.5}, "from 0 to 1"),
    ({"overlap": float("nan")}, "from 0 to 1"),
    ({"tensor_overlap": 5.0}, "tensor_overlap = 5.0; it is a share and must be from 0 to 1"),
    ({"tensor_overlap": -0.1}, "from 0 to 1"),
    ({"servers": -1}, "servers = -1"),
    ({"optimizer_slots": -3}, "optimizer_slots = -3; it must be at least 0"),
    ({"library": "ncl"}, "did you mean 'nccl'? choose one of '', mpi, nccl"),
)
def test_invalid_values_are_reported_alone(changed, text):
    result = find_problems(replace(FITS, tensor=5, **changed))
    assert len(result) == 1
    assert text in result[0]


def test_absurd_sizes_are_rejected_immediately():
    result = find_problems(FITS, 1 << 41)
    assert len(result) == 1
    assert "a global batch of 2199023255552" in result[0]
    deep = replace(MODEL, shape=replace(SHAPE, layers=10**6))
    assert "layers = 1000000, 990000 more than the 10000" in find_problems(FITS, model=deep)[0]


def test_all_problems_are_reported():
    result = find_problems(replace(FITS, tensor=5, pipeline=7, data=11))
    assert [sum(word in text for text in result) for word in ("heads", "layers", "global batch")] == [1, 1, 1]


def test_tensor_axis_wider_than_the_key_heads_is_rejected():
    model = describe(replace(SHAPE, kv_heads=4), "grouped")
    result = find_problems(FITS, model=model)
    assert len(result) == 1
    assert "tensor = 8 is 4 more than the 4 heads of keys and values" in result[0]
    assert find_problems(replace(FITS, tensor=4, data=8, pipeline=16), model=model) == ()


def test_feed_forward_columns_match_the_model():
    """A gated feed-forward of unspecified width is 8/3 as wide as the model, rounded up, not 4 times."""
    model = describe(replace(SHAPE, layers=8, hidden=1024, heads=128, gated=True), "gated")
    columns = inner(model.shape)
    assert columns < 4 * 1024
    left = columns % 128
    assert left
    wide = replace(FITS, tensor=128, data=1, pipeline=1, microbatch=1)
    result = find_problems(wide, 16, model)
    assert len(result) == 1
    assert f"does not divide the {columns} columns of the feed-forward: {left} are left over" in result[0]
    assert find_problems(replace(wide, tensor=64), 16, model) == ()


def test_expert_axis_must_divide_the_experts():
    model = describe(replace(SHAPE, layers=8, hidden=1024, heads=16, experts=8, experts_per_token=2), "experts")
    layout = replace(FITS, data=16, pipeline=1, tensor=1)
    assert find_problems(replace(layout, expert=8), model=model) == ()
    assert any(
        "does not divide the 8 experts: 2 are left over" in text
        for text in find_problems(replace(layout, data=48, expert=3), model=model)
    )
    assert any(
        "expert = 8 does not divide data 12 x context 1, the devices that experts are sharded over: 4 are left over"
        in text
        for text in find_problems(replace(layout, data=12, expert=8), model=model)
    )
    for implementation in ("hpcdist", "megatron-2022"):
        both = replace(layout, data=12, context=2, expert=8, implementation=implementation)
        assert find_problems(both, model=model) == (), "neighbours on the context axis, and three groups of them"


def test_hpcdist_allows_uneven_stages_and_batches():
    assert find_problems(replace(OURS, pipeline=7, data=8)) == (), "98 units in 7 parts; 192 samples a replica"
    assert "units are 2 too few" in find_problems(replace(OURS, pipeline=100, data=2))[0]
    alone = replace(OURS, pipeline=1, tensor=96, data=5)
    assert find_problems(alone, 1536) == (), "a weighted mean"
    assert "1 too few for data = 5" in find_problems(alone, 4)[0]
    assert any(
        "do not divide the global batch of 14" in text
        for text in find_problems(replace(OURS, data=2, microbatch=3), 14)
    )


def test_memory_problem_comes_last_with_the_missing_bytes():
    layout = replace(FITS, recompute="none", microbatch=8)
    needed = memory(MODEL, layout, CLUSTER, BATCH)
    (text,) = find_problems(layout)
    assert f"{(needed.bytes - CLUSTER.device.memory_bytes) / 1e9:.2f} GB too much" in text
    assert needed.largest_term in text
    assert len(find_problems(replace(layout, tensor=5))) == 1, "what cannot be needs no memory"
    problem = checks.memory_problem(needed, 1e9)
    assert problem is not None
    assert "device of 1.00 GB" in problem.text
    assert checks.memory_problem(memory(MODEL, FITS, CLUSTER, BATCH)) is None


def test_tensor_axis_beyond_a_node_is_possible_and_flagged():
    wide = replace(FITS, tensor=16, data=8)
    assert find_problems(wide) == ()
    assert "wider than a node of 8" in checks.flags(wide, CLUSTER)[0]
    assert checks.flags(FITS, CLUSTER) == ()


def test_float32_on_gpus_with_faster_16_bit_products_is_flagged():
    wide = replace(FITS, precision="float32")
    (text,) = checks.flags(wide, CLUSTER)
    peaks = CLUSTER.device.peak_flops
    assert f"{peaks['bfloat16'] / peaks['float32']:.0f} times" in text and "precision.activations = 'working'" in text
    alike = replace(CLUSTER, device=replace(CLUSTER.device, peak_flops={**peaks, "bfloat16": peaks["float32"]}))
    assert checks.flags(wide, alike) == ()
    without = replace(CLUSTER, device=replace(CLUSTER.device, peak_flops={"float32": 1e12}))
    assert checks.flags(wide, without) == ()


def test_tensor_axis_without_a_transformer_is_rejected():
    mlp = of_config(ModelConfig(kind="mlp", layers=3, hidden=64), features=32, classes=10)
    plain = ParallelLayout(data=2, precision="float32")
    assert find_problems(plain, 8, mlp) == ()
    assert "no heads" in find_problems(replace(plain, tensor=2), 8, mlp)[0]
    assert "no tokens to shard" in find_problems(replace(plain, context=2), 8, mlp)[0]


def test_unsupported_layouts_are_checked_for_hpcdist_only():
    assert unsupported(OURS) == ()
    assert unsupported(replace(OURS, context=2)) == ()
    served = unsupported(replace(OURS, context=2, strategy="parameter_server"))
    assert any("with parallel.context = 2 is not built" in reason for reason in served)
    assert "expert" in unsupported(replace(OURS, expert=2))[0]
    assert "selective" in unsupported(replace(OURS, recompute="selective"))[0]
    assert unsupported(replace(FITS, context=2)) == ()


def _settings(layout, model):
    """Return the recipe of a layout in the form of `--set`."""
    named = {
        "model.layers": model.layers,
        "model.hidden": model.hidden,
        "model.heads": model.heads,
        "run.global_batch": 24,
        "run.steps": 100,
        "data.context": 32,
        "parallel.data": layout.data,
        "parallel.pipeline": layout.pipeline,
        "parallel.tensor": layout.tensor,
        "parallel.context": layout.context,
        "parallel.strategy": layout.strategy,
        "parallel.schedule": layout.schedule if layout.pipeline > 1 else "auto",
        "parallel.chunks": layout.chunks,
        "parallel.microbatches": layout.microbatches(24),
        "parallel.recompute": str(layout.recompute == "full").lower(),
        "parallel.sequence_parallel": str(layout.sequence_parallel).lower(),
        "precision.mode": layout.precision,
        "communication.compression": layout.compression,
    }
    if layout.overlap and layout.data > 1:
        named["communication.overlap"] = "thread"
    if layout.strategy == "parameter_server":
        named["parameter_server.placement"] = "colocated"
    if layout.compression == "onebit":
        named["compression.warmup_steps"] = 10
    return [f"{name}={value}" for name, value in named.items()]


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero3", "parameter_server"])
@pytest.mark.full_except("allreduce")
def test_supported_layouts_equal_valid_recipes(strategy):
    """The verdict on each layout equals the verdict of the recipe that would train it."""
    config = ModelConfig(layers=4, hidden=32, heads=4)
    model = of_config(config, context=32)
    cluster = replace(CLUSTER, devices=64)
    counts = {True: 0, False: 0}
    orders = [(name, row.most or chunks) for name, row in SCHEDULES.items() if row.pipelines for chunks in (2, 3)]
    for pipeline, tensor, (schedule, chunks), recompute, parallel, compression, precision, overlap in product(
        (1, 2),
        (1, 2),
        dict.fromkeys(orders),
        ("none", "full"),
        (False, True),
        ("none", "int8", "powersgd", "onebit"),
        ("float32", "bfloat16"),
        (0.0, 1.0),
    ):
        if pipeline == 1 and schedule != "1f1b":
            continue
        layout = ParallelLayout(
            data=2,
            pipeline=pipeline,
            tensor=tensor,
            schedule=schedule,
            chunks=chunks,
            recompute=recompute,
            sequence_parallel=parallel,
            compression=compression,
            precision=precision,
            strategy=strategy,
            overlap=overlap,
            microbatch=2,
        )
        refused = tuple(checks.shape_problems(model, layout, cluster, 24)) or unsupported(layout)
        try:
            load(None, _settings(layout, config), environment={})
            runs = True
        except ConfigurationError as error:
            runs, why = False, error
        assert bool(refused) == (not runs), (layout, refused, None if runs else why)
        counts[runs] += 1
    assert min(counts.values()) > 20
