"""Recomputation in a plan, compared with the executed passes, the wrapped model stages, and the memory."""

from collections import Counter
from dataclasses import replace

import pytest

from hpcdist.models import build
from hpcdist.models.config import ModelConfig
from hpcdist.models.split_backward import RecomputedStage, with_recomputation
from hpcdist.planner.cluster.toml_file import read
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.stage_split import chunks, forward_flops, recomputed, step_flops
from hpcdist.planner.model.transformer import describe, of_config
from hpcdist.planner.time.step import timing
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.registry import SCHEDULES

MLP = ModelConfig(kind="mlp", layers=5, hidden=512)
LAYERS = of_config(MLP, features=512, classes=10)
BLOCKS = describe(TransformerShape(layers=14, hidden=64, heads=4, vocabulary=512, context=32), "blocks")
FULL = ParallelLayout(recompute="full", precision="float32", schedule="1f1b")
M = 12


def units_of(shares):
    return sum(share.times for share in shares)


@pytest.mark.parametrize(("schedule", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("model", [BLOCKS, LAYERS], ids=lambda model: model.name)
def test_recomputed_units_of_pipelines_match_their_passes(model, schedule, each):
    ranks = 2
    layout = replace(FULL, pipeline=ranks, schedule=schedule, chunks=each)
    sizes, bounds = [units_of(chunk.shares) for chunk in chunks(model, layout)], [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    spans = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    placement = SCHEDULES[schedule].place(spans, ranks)
    ran = Counter()
    for rank in range(ranks):
        steps = expand(SCHEDULES[schedule].passes(rank, ranks, M, each), placement, rank, recompute=True)
        again = Counter(step.unit for step in steps if step.recompute)
        ran.update({number: again[units.start] for number, units in enumerate(spans)})
    for number, (size, chunk) in enumerate(zip(sizes, recomputed(model, layout), strict=True)):
        assert units_of(chunk.shares) == (size if ran[number] else 0)
        assert ran[number] in (0, M - 1, M), "gpipe's last micro-batch may go back at once"


def test_recomputed_units_match_the_wrapped_stages():
    wrapped = [
        isinstance(stage, RecomputedStage) for stage in with_recomputation(build(MLP, features=512, classes=10)).stages
    ]
    ((_, shares),) = recomputed(LAYERS, FULL)
    assert units_of(shares) == sum(wrapped) == 4
    ((_, shares),) = recomputed(BLOCKS, FULL)
    assert [(share.unit.name, share.times) for share in shares] == [("block", 14)]


@pytest.mark.parametrize("model", [BLOCKS, LAYERS], ids=lambda model: model.name)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_time_operations_and_memory_agree_on_recomputation(model, pipeline):
    cluster, full = read("workstation"), replace(FULL, pipeline=pipeline, microbatch=64)
    none = replace(full, recompute="none")
    shares = [share for chunk in recomputed(model, full) for share in chunk.shares]
    seen, every = (
        512 * sum(share.times * forward_flops(share.unit, exact=exact) for share in shares) for exact in (True, False)
    )
    assert seen > 0
    more = step_flops(model, full, 512).hardware_flops - step_flops(model, none, 512).hardware_flops
    assert seen * (1 - 1e-9) <= more <= every * (1 + 1e-9), "which are the same without attention"
    takes_s = [timing(model, layout, cluster, 512).terms["recompute"] for layout in (full, none)]
    assert takes_s[0] > 0 == takes_s[1]
    needs = [memory(model, layout, cluster, 512).terms["activations"] for layout in (full, none)]
    assert needs[0] < needs[1]


def test_model_of_two_units_recomputes_nothing():
    model = of_config(replace(MLP, layers=1), features=512, classes=10)
    assert not any(chunk.shares for chunk in recomputed(model, FULL))
    assert timing(model, FULL, read("workstation"), 8).terms["recompute"] == 0.0
    assert step_flops(model, FULL, 8) == step_flops(model, replace(FULL, recompute="none"), 8)


def test_selective_recomputes_only_attention_of_megatron():
    layout = replace(FULL, recompute="selective")
    assert not any(chunk.shares for chunk in recomputed(BLOCKS, layout))
    for pipeline in (1, 2):
        theirs = recomputed(BLOCKS, replace(layout, implementation="megatron-2022", pipeline=pipeline))
        assert sum(units_of(chunk.shares) for chunk in theirs) == 14


@pytest.mark.parametrize("pipeline", [1, 2])
def test_megatron_recomputes_blocks(pipeline):
    theirs = recomputed(BLOCKS, replace(FULL, implementation="megatron-2022", pipeline=pipeline))
    assert {share.unit.name for chunk in theirs for share in chunk.shares} == {"block"}
    assert sum(units_of(chunk.shares) for chunk in theirs) == 14
