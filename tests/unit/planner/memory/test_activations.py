"""Activation memory: the published formulas as printed, and the formulas of hpcdist as its kernels are counted."""

from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import counts
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.activations import recomputed_one_by_one, scratch_of, unit_activations
from hpcdist.planner.memory.device import in_flight
from hpcdist.planner.model.transformer import describe, named, of_config
from hpcdist.strategies.pipeline.costs import TensorSplit, unit_costs
from hpcdist.strategies.pipeline.memory import moments
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.registry import SCHEDULES

MEGATRON = {"implementation": "megatron-2022", "precision": "float16"}
SHAPES = [named("megatron-22b"), named("megatron-175b"), named("megatron-530b"), named("megatron-1t")]


def table_2(shape, tensor, row):
    """Return the bytes of a block for one sample, by table 2 of arXiv:2205.05198."""
    s, h, a, t = shape.context, shape.hidden, shape.heads, tensor
    recompute, by_tokens = row
    if recompute == "full":
        return s * h * 2 / (t if by_tokens else 1)
    scores = 5 * a * s / h if recompute == "none" else 0
    return s * h / t * (34 + scores) if by_tokens else s * h * (10 + 24 / t + scores / t)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activation_bytes_match_table_2(shape, recompute, by_tokens, tensor):
    layout = ParallelLayout(tensor=tensor, recompute=recompute, sequence_parallel=by_tokens, **MEGATRON)
    embedding, block, head = unit_activations(describe(shape, "gpt"), layout)
    assert block.kept == pytest.approx(table_2(shape, tensor, (recompute, by_tokens)), rel=1e-12)
    # What is computed again is there with what was kept, for one block.
    assert block.kept + block.again == pytest.approx(table_2(shape, tensor, ("none", by_tokens)), rel=1e-12)
    # Section 4.3, which has sequence parallelism: the mask of the embedding, and 4 s b h / t (1 + v / h) of the head.
    s, h, v = shape.context, shape.hidden, shape.vocabulary
    assert embedding.kept == pytest.approx(s * h / (tensor if by_tokens else 1), rel=1e-12)
    if by_tokens:
        assert head.kept == pytest.approx(4 * s * h / tensor * (1 + v / h), rel=1e-12)
    # arXiv:2401.10241, table 1: what is left for the gradients of weights.
    if tensor == 1:
        assert block.held == pytest.approx(32 * s * h, rel=1e-12)


def test_activation_bytes_of_other_blocks():
    shape = named("llama-3-8b")
    s, h, a = shape.context, shape.hidden, shape.heads
    kv, f = 8 * 128, 14336
    layout = ParallelLayout(implementation="megatron-2022", recompute="selective")
    # 16 bits, no masks: two norms, two inputs; query, key and value, the projection's input; 3 f of a gated one.
    kept = 2 * (2 * h + 2 * h + (h + 2 * kv) + h + 3 * f)
    assert unit_activations(describe(shape, "x"), layout)[1].kept == s * kept
    # Softmax of scores, which without dropout is kept once.
    whole = replace(layout, recompute="none")
    assert unit_activations(describe(shape, "x"), whole)[1].kept == s * (kept + 2 * a * s)
    # Twice as much in float32; a context axis shares tokens.
    assert unit_activations(describe(shape, "x"), replace(layout, precision="float32"))[1].kept == 2 * s * kept
    assert unit_activations(describe(shape, "x"), replace(layout, context=4))[1].kept == s * kept / 4
    # Two experts per token keep two feed-forwards, two copies of their input, and the input of the router.
    mixed = replace(shape, experts=8, experts_per_token=2)
    assert unit_activations(describe(mixed, "x"), layout)[1].kept == s * (kept + 2 * (2 * h + 3 * f))


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*((name, False) for name in SCHEDULES), *((name, True) for name in ("gpipe", "1f1b", "interleaved"))],
)
def test_closed_forms_match_the_schedules(name, recompute, monkeypatch):
    schedule = SCHEDULES[name]
    monkeypatch.setattr("hpcdist.planner.memory.device.EXACT_RANKS", 0)
    in_flight.cache_clear()
    each = schedule.most or 3
    for ranks in (2, 4, 6) if schedule.pipelines else (1,):
        for microbatches in (ranks, 2 * ranks, 5 * ranks):
            for rank in range(ranks):
                result = in_flight(name, ranks, microbatches, each, rank, recompute=recompute)
                placement = schedule.place([range(unit, unit + 1) for unit in range(ranks * each)], ranks)
                steps = expand(schedule.passes(rank, ranks, microbatches, each), placement, rank, recompute=recompute)
                exact = moments(steps, placement.of(rank))
                # Units that are alike: twice as much is kept as is held, and inputs are small.
                sizes = [
                    max(sum(100 * live.kept + 50 * live.held + live.inputs for live in moment) for moment in some)
                    for some in (result, exact)
                ]
                least = 1.0 if name != "zb-v" else 0.85  # less is held where it has few micro-batches
                assert least - 1e-9 <= sizes[1] / sizes[0] <= 1 + 1e-9, (ranks, microbatches, rank)
    in_flight.cache_clear()


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 2), (8, 3), (35, 3)])
def test_interleaving_increases_memory_by_its_factor(ranks, chunks):
    # arXiv:2205.05198, section 4.2.3: L (1 + (p - 1) / (p m)) blocks on the first rank.
    moment = max(
        in_flight("interleaved", ranks, 4 * ranks, chunks, 0, recompute=False),
        key=lambda moment: sum(live.kept for live in moment),
    )
    blocks = sum(live.kept for live in moment) / (ranks * chunks)
    assert blocks == pytest.approx(1 + (ranks - 1) / (ranks * chunks), rel=1e-12)


OURS = [
    ({"layers": 2, "hidden": 48, "heads": 6, "vocabulary": 70}, {"context": 20}),
    ({"layers": 2, "hidden": 64, "heads": 8, "vocabulary": 70, "kv_heads": 4, "tied": True}, {"context": 130}),
    ({"layers": 2, "hidden": 64, "heads": 4, "activation": "swiglu", "norm": "rms", "bias": False}, {"context": 16}),
    ({"kind": "mlp", "layers": 3, "hidden": 24}, {"features": 10, "classes": 4}),
    ({"kind": "convnet", "layers": 3, "hidden": 4}, {"height": 9, "width": 8, "channels": 3, "classes": 5}),
]


@cases(
    "keys, inputs, split",
    *((*case, TensorSplit()) for case in OURS),
    *((*case, split) for case in OURS[:3] for split in (TensorSplit(ranks=2), TensorSplit(ranks=2, by_tokens=True))),
)
def test_unit_bytes_match_the_costs_of_the_partition(keys, inputs, split):
    config = ModelConfig(**keys)
    result = of_config(config, **inputs)
    layout = ParallelLayout(tensor=split.ranks, sequence_parallel=split.by_tokens, precision="float32", microbatch=3)
    units = [
        bytes_of
        for unit, bytes_of in zip(result.units, unit_activations(result, layout), strict=True)
        for _ in range(unit.count)
    ]
    places = [place for place, unit in enumerate(result.units) for _ in range(unit.count)]
    for number, cost in enumerate(unit_costs(models.build(config, **inputs), 3, split)):
        if config.kind != "mlp" or number < config.layers:  # whose head also keeps a number for its loss
            assert 3 * units[number].kept == cost.kept_bytes, number
        assert 3 * units[number].border == cost.input_bytes, number
        if config.kind != "convnet":
            assert 3 * units[number].held == cost.held_bytes, number
        if config.kind == "gpt":  # costs count a first layer's gradient of the data, and padding
            scratch = scratch_of(result, layout, (places[number],), accumulates=True)
            without = scratch_of(result, layout, (places[number],), accumulates=False)
            assert scratch == sum(cost.scratch.values()), number
            assert scratch - without == cost.scratch["linear.dweight"], number


@pytest.mark.parametrize(("keys", "inputs"), OURS[:3])
def test_recomputed_bytes_match_the_model_counts(keys, inputs):
    config = ModelConfig(**{**keys, "layers": 6})
    result = of_config(config, **inputs)
    layout = ParallelLayout(precision="float32", microbatch=5, recompute="full")
    scratch = scratch_of(result, layout, tuple(range(len(result.units))), accumulates=False)
    expected = counts(config, **inputs).activation_bytes(5, recompute=True)
    assert 5 * recomputed_one_by_one(result, layout) + scratch == expected


@pytest.mark.parametrize("tensor", [1, 2])
def test_context_axis_divides_activations(tensor):
    shape = replace(named("llama-3-8b"), context=65536)
    result, ranks = describe(shape, "long"), 64  # more than heads: they take a ring
    whole = ParallelLayout(tensor=tensor, microbatch=2, precision="float32")
    cut = replace(whole, context=ranks)
    for one, other in zip(unit_activations(result, whole), unit_activations(result, cut), strict=True):
        assert other == pytest.approx([number / ranks for number in one])  # a ring keeps nothing more
    full = replace(whole, recompute="full")
    again = recomputed_one_by_one(result, full)
    assert recomputed_one_by_one(result, replace(full, context=ranks)) == pytest.approx(again / ranks)
    # Scratch of a model with as few tokens; keys, values and their gradients on their way, of one head at a time.
    few = describe(replace(shape, context=shape.context // ranks), "short")
    local_data = scratch_of(few, whole, (0, 1, 2), accumulates=True)
    keys = 5 * 2 * 1024 * 2 * 128 * 4
    assert scratch_of(result, cut, (0, 1, 2), accumulates=True) == pytest.approx(local_data + keys)
    assert scratch_of(result, cut, (2,), accumulates=False) == scratch_of(few, whole, (2,), accumulates=False)
