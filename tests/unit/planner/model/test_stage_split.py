"""The units of each pipeline rank: as Megatron-LM distributes them, and as hpcdist splits stages."""

from itertools import pairwise

import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import DocumentPairs
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model import stage_split
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.stage_split import chunks, stages
from hpcdist.planner.model.transformer import describe, named, of_config
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.pipeline.costs import unit_costs
from hpcdist.strategies.pipeline.memory import StateBytes
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.pipeline.plan import plan
from hpcdist.strategies.schedule.operation_list import generated


def blocks(layers, layout):
    """Return the blocks of each chunk, in model order."""
    shape = TransformerShape(layers=layers, hidden=64, heads=4, vocabulary=512, context=32)
    return [
        sum(share.times for share in chunk.shares if share.unit.name == "block")
        for chunk in chunks(describe(shape, "x"), layout)
    ]


@cases(
    "layers, parts, expected",
    (96, 8, [12] * 8),
    (105, 35, [3] * 35),
    (22, 8, [2, *[3] * 6, 2]),
    (30, 8, [3, *[4] * 6, 3]),
    (46, 16, [2, *[3] * 14, 2]),
    (62, 32, [1, *[2] * 30, 1]),
    (126, 16, [7, *[8] * 14, 7]),
)
def test_megatron_distributes_blocks_evenly(layers, parts, expected):
    # arXiv:2104.04473, table 1; arXiv:2401.10241, section 5.1; arXiv:2407.21783, section 3.3.2
    layout = ParallelLayout(pipeline=parts, implementation="megatron-2022")
    assert blocks(layers, layout) == expected
    local_data = stages(
        describe(TransformerShape(layers=layers, hidden=64, heads=4, vocabulary=512, context=32), "x"), layout
    )
    assert local_data[0][0].unit.name == "embedding" and local_data[-1][-1].unit.name == "head"
    assert sum(share.times for shares in local_data for share in shares) == layers + 2


def test_interleaved_chunks_alternate_between_ranks():
    layout = ParallelLayout(pipeline=8, chunks=3, schedule="interleaved", implementation="megatron-2022")
    assert blocks(22, layout) == [0, *[1] * 22, 0]  # 24 chunks for 24 units
    result = chunks(describe(named("megatron-175b"), "x"), layout)
    assert [chunk.rank for chunk in result] == [*range(8)] * 3
    local_data = stages(describe(named("megatron-175b"), "x"), layout)
    assert [[share.times for share in shares] for shares in local_data[:2]] == [[1, 12], [12]]


def test_folded_chunks_go_forward_and_back():
    result = chunks(
        describe(named("megatron-175b"), "x"),
        ParallelLayout(pipeline=4, schedule="zb-v", implementation="megatron-2022"),
    )
    assert [chunk.rank for chunk in result] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("documents", [None, DocumentPairs(every=1000.0, seen=530.5)])
@pytest.mark.parametrize(("layers", "vocabulary"), [(8, 64), (8, 4000), (13, 1000), (5, 20000)])
@pytest.mark.parametrize(("schedule", "ranks", "each"), [("1f1b", 2, 1), ("gpipe", 3, 1), ("interleaved", 2, 2)])
def test_stage_split_matches_a_run(layers, vocabulary, schedule, ranks, each, documents):
    config = ModelConfig(layers=layers, hidden=64, heads=4, vocabulary=vocabulary)
    parallel = ParallelConfig(pipeline=ranks, microbatches=6, schedule=schedule, chunks=each)
    written = generated(parallel.order, ranks, 6, each)
    model = models.build(config, context=96)
    states = StateBytes(per_parameter=16, itemsize=4)
    made = plan(model, parallel, written, states, 2, documents=documents).placement
    layout = ParallelLayout(pipeline=ranks, schedule=schedule, chunks=each)
    result = chunks(of_config(config, context=96, documents=documents), layout)
    assert tuple(chunk.rank for chunk in result) == made.ranks
    flops = [
        cost.forward_flop + cost.input_flop + cost.weight_flop for cost in unit_costs(model, 2, documents=documents)
    ]
    sizes = [sum(share.times for share in chunk.shares) for chunk in result]
    ours = [range(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
    slowest = [
        max(
            sum(flops[unit] for chunk, owner in zip(cut, made.ranks, strict=True) if owner == rank for unit in chunk)
            for rank in range(ranks)
        )
        for cut in (ours, made.chunks)
    ]
    # Others may be as fast: a run takes the one of them that needs least memory.
    assert slowest[0] == slowest[1]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("ends", [(0.0, 0.0), (1.0, 20.0), (300.0, 40.0), (0.0, 900.0)])
def test_filled_parts_are_as_even_as_possible(parts, ends):
    for inner in ([7.0] * 41, [float(3 + number * number % 11) for number in range(60)]):
        weights = [ends[0], *inner, ends[1]]
        bounds = stage_split._filled(weights, parts)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), parts + 1)
        assert all(start < stop for start, stop in pairwise(bounds)), "nobody is without a unit"
        best = partition(weights, range(parts), StageDevices.alike(parts), None)
        assert best is not None
        assert max(sum(weights[start:stop]) for start, stop in pairwise(bounds)) == pytest.approx(best.largest)


def test_huge_models_are_split_in_linear_time(monkeypatch):
    # The programme over all pairs of 10,000 units would take a minute and gigabytes.
    monkeypatch.setattr("hpcdist.planner.model.stage_split.partition", None)
    assert blocks(10_000, ParallelLayout()) == [10_000]
    result = blocks(10_000, ParallelLayout(pipeline=8))
    assert sum(result) == 10_000 and max(result) - min(result) <= 2 * len(result)


def test_fewer_units_than_parts_are_rejected():
    for implementation in ("hpcdist", "megatron-2022"):
        with pytest.raises(ConfigurationError, match=r"a pipeline of 6 ranks .* has 5"):
            blocks(3, ParallelLayout(pipeline=6, implementation=implementation))
