"""Training programs: each assumption of a class changes the plan as its formula says."""

import math
from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.planner import checks
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.kernels import ENOUGH, KERNELS, modern_program
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.stage_split import stages
from hpcdist.planner.model.transformer import describe, named
from hpcdist.planner.plan import plan
from hpcdist.planner.time.compute import unit_seconds

A100, H100 = toml_file.read("a100-selene"), toml_file.read("h100-hgx")
LLAMA = describe(replace(named("llama-3-8b"), context=8192), "llama-3-8b")
LARGE = describe(replace(named("llama-3-405b"), context=8192), "llama-3-405b")
BLOCK = LLAMA.units[1]
FSDP = ParallelLayout(data=64, strategy="zero3", implementation="fsdp2")


def estimate(layout, cluster=A100, model=LLAMA, batch=64):
    return plan(model, layout, cluster, batch, 1)


def test_full_recomputation_of_fsdp_omits_the_last_product():
    seconds = unit_seconds(BLOCK, replace(FSDP, recompute="full"), A100)
    last = BLOCK.products[-1]
    flops = 2 * last.rows * last.inner * last.columns
    omitted_s = seconds.forward_s - seconds.again_s
    assert 0.5 * 312e12 < flops / omitted_s < 0.8 * 312e12


def test_selective_recomputation_of_fsdp2_is_between_none_and_full():
    steps = [estimate(replace(FSDP, recompute=name)) for name in ("none", "selective", "full")]
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    assert steps[0].memory.bytes > steps[1].memory.bytes > steps[2].memory.bytes


def test_eager_elementwise_kernels_take_longer_than_compiled_kernels():
    eager, compiled = (
        unit_seconds(BLOCK, replace(FSDP, implementation=name), A100).forward_s for name in ("fsdp2", "fsdp2-compiled")
    )
    moved_s = BLOCK.moved * 2 / (A100.device.memory_bytes_per_s * A100.device.memory_share)
    assert eager - compiled == pytest.approx(0.95 * moved_s, rel=1e-9)


@pytest.mark.parametrize("nodes", [2, 16, 288])
def test_stragglers_grow_with_the_root_of_the_logarithm_of_nodes(nodes):
    layout = ParallelLayout(data=8 * nodes, strategy="zero1", implementation="megatron-core")
    terms = dict(estimate(layout, H100, batch=8 * nodes).timing.terms)
    waited_s, _ = terms.pop("stragglers"), terms.pop("input")
    assert waited_s == pytest.approx(0.005 * math.sqrt(2 * math.log(nodes)) * sum(terms.values()))
    alone = estimate(replace(layout, data=8), H100, batch=8)
    assert "stragglers" not in alone.timing.terms


def test_fused_attention_stores_no_scores():
    layout = ParallelLayout(data=8, strategy="zero1", implementation="megatron-core")
    fused, stored = (
        estimate(replace(layout, implementation=name), H100).memory.terms["activations"]
        for name in ("megatron-core", "megatron-2022")
    )
    scores = 32 * 32 * 8192 * 8192 * 2  # blocks, heads, pairs of tokens, bytes
    assert stored - fused == pytest.approx(scores, rel=1e-6)


@cases(
    "pipeline, chunks, implementation, possible",
    (16, 4, "megatron-core", True),  # 126 blocks, embedding and head: two for each of 64 parts
    (16, 8, "megatron-core", True),
    (16, 1, "megatron-core", True),
    (16, 3, "megatron-core", False),
    (16, 1, "megatron-2022", False),
    (9, 2, "megatron-core", True),
)
def test_ends_count_as_pipeline_layers_of_megatron_core(pipeline, chunks, implementation, possible):
    layout = ParallelLayout(data=1, tensor=8, pipeline=pipeline, chunks=chunks, implementation=implementation)
    layout = replace(layout, schedule="interleaved" if chunks > 1 else "1f1b")
    problems = [problem.limit for problem in checks.shape_problems(LARGE, layout, H100, 4 * pipeline)]
    assert problems == ([] if possible else ["layers"])
    if possible and pipeline == 16:
        counts = [sum(share.times for share in shares) for shares in stages(LARGE, layout)]
        assert counts == [8] * 16


def test_messages_of_zero_slow_computation_even_if_they_overlap():
    fit = KERNELS["fsdp2"].fit(A100.device.name)
    exchange = estimate(FSDP).timing.terms["data"]
    sent = estimate(FSDP).timing.bytes["data"]
    slowed_s = (1 - fit.overlap) * sent / A100.levels[0].bytes_per_s
    assert exchange == pytest.approx(slowed_s, rel=0.05)


def test_fp8_products_are_faster_and_need_a_device_with_fp8():
    layout = ParallelLayout(data=8, tensor=8, sequence_parallel=True, strategy="zero1", implementation="megatron-core")
    narrow = replace(layout, implementation="megatron-core-fp8")
    assert 1.2 < estimate(layout, H100).step_s / estimate(narrow, H100).step_s < 2.0
    with pytest.raises(ConfigurationError, match="float8"):
        estimate(narrow, A100)


@cases(
    "alone, fused, expected",
    (True, True, "fsdp2"),
    (False, True, "megatron-core"),
    (True, False, "megatron-2022"),
    (False, False, "megatron-2022"),
)
def test_default_program_follows_layout_and_device(alone, fused, expected):
    assert modern_program(is_data_parallel=alone, has_fused_attention=fused) == expected


def test_fitted_programs_have_a_range_and_other_programs_say_so():
    fitted, other = estimate(FSDP), estimate(FSDP, H100)
    fit = KERNELS["fsdp2"].fit(A100.device.name)
    assert fit.rows >= ENOUGH
    assert fitted.step_range_s == pytest.approx((fit.fastest * fitted.step_s, fit.slowest * fitted.step_s))
    assert any("was compared with 6 published steps" in flag for flag in fitted.flags)
    assert other.step_range_s is None and any(flag.startswith("uncalibrated: fsdp2") for flag in other.flags)
