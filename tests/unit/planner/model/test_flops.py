"""Operation counts: the closed forms of the papers and their printed values."""

from dataclasses import replace

import pytest

from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.stage_split import forward_flops, stages, step_flops
from hpcdist.planner.model.transformer import describe, named, names

MEGATRON = [name for name in names() if name.startswith("megatron-")]


def of(name, recompute="none", implementation="megatron-2022", batch=3):
    result = step_flops(
        describe(named(name), name), ParallelLayout(recompute=recompute, implementation=implementation), batch
    )
    return result.model_flops, result.hardware_flops


@pytest.mark.parametrize("name", MEGATRON)
def test_operations_match_the_closed_forms(name):
    # arXiv:2205.05198, appendix A; with full recomputation arXiv:2104.04473, equation 3.
    shape, batch = named(name), 3
    s, h, layers, v = shape.context, shape.hidden, shape.layers, shape.vocabulary
    unit = batch * layers * s * h**2
    head = v / (12 * h * layers)
    model = 72 * unit * (1 + s / (6 * h) + head)
    assert of(name) == pytest.approx((model, model), rel=1e-12)
    assert of(name, "selective")[1] == pytest.approx(72 * unit * (1 + s / (3 * h) + head), rel=1e-12)
    assert of(name, "full")[1] == pytest.approx(96 * unit * (1 + s / (6 * h) + v / (16 * layers * h)), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "mfu", "hfu"), [("megatron-22b", 41.5, 43.7), ("megatron-175b", 51.4, 52.8), ("megatron-530b", 56.0, 57.0)]
)
def test_operation_ratios_match_printed_utilisations(name, mfu, hfu):
    # arXiv:2205.05198, table 5: both use the same seconds, so their ratio is the ratio of the operations.
    model, hardware = of(name, "selective")
    assert hardware / model == pytest.approx(hfu / mfu, abs=0.05 / mfu * 2)


def test_attention_recomputes_scores_and_skips_masked_pairs():
    shape = named("gpt2")
    result = step_flops(describe(shape, "gpt2"), ParallelLayout(), 1)
    seen = shape.context * (shape.context + 1) // 2 * 4 * shape.layers * shape.hidden
    assert result.executed_flops - result.exact_flops == pytest.approx(seen / 2)
    assert result.hardware_flops - result.model_flops == pytest.approx(
        2 * shape.layers * shape.hidden * shape.context**2
    )
    unseen = shape.context * (shape.context - 1) // 2 * 4 * shape.layers * shape.hidden
    assert result.model_flops - result.exact_flops == pytest.approx(3 * unseen)
    everything = step_flops(describe(named("bert-base"), "b"), ParallelLayout(), 1)
    assert everything.model_flops == everything.exact_flops


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_masked_pairs_of_a_long_context_are_not_counted(recompute):
    # Nearly all is attention, and its square is twice the pairs: what is executed is 3.5 (4.5) of 6 parts.
    shape = replace(named("llama-3-8b"), context=2**24)
    result = step_flops(describe(shape, "long"), ParallelLayout(recompute=recompute), 1)
    assert result.exact_flops / result.model_flops == pytest.approx(0.5, rel=0.01)
    parts = 4.5 if recompute == "full" else 3.5
    assert result.executed_flops / result.model_flops == pytest.approx(parts / 6, rel=0.01)
    assert result.hardware_flops / result.model_flops == pytest.approx(parts / 3, rel=0.01)
    # Megatron-LM is counted by the formula that the papers print.
    theirs = step_flops(describe(shape, "long"), ParallelLayout(recompute=recompute, implementation="megatron-2022"), 1)
    assert theirs.executed_flops == theirs.hardware_flops >= theirs.model_flops == result.model_flops


def test_pipelines_recompute_chunks_with_a_late_backward():
    report = describe(named("gpt2"), "gpt2")
    block, head = (forward_flops(unit, exact=True) for unit in report.units[1:])

    def again(**fields):
        full, none = (
            step_flops(report, ParallelLayout(recompute=way, **fields), 1).executed_flops for way in ("full", "none")
        )
        return full - none

    assert again() == pytest.approx(12 * block)
    layout = ParallelLayout(pipeline=4)
    last = sum(share.times for share in stages(report, layout)[-1] if share.unit.name == "block")
    assert again(pipeline=4) == pytest.approx((12 - last) * block)
    assert again(pipeline=4, schedule="gpipe") == pytest.approx(12 * block + head)


def test_experts_count_once_per_selected_expert():
    numbers = {"layers": 1, "hidden": 64, "heads": 4, "vocabulary": 100, "context": 16}
    dense, mixed = (
        step_flops(describe(TransformerShape(**numbers, **more), "x"), ParallelLayout(), 1).exact_flops
        for more in ({}, {"experts": 4, "experts_per_token": 2})
    )
    assert mixed - dense == 6 * 16 * (2 * 64 * 256 + 64 * 4)
