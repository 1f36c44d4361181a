"""The whole plan of a layout combines its parts, and flags unproven assumptions."""

from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.errors import ConfigurationError
from hpcdist.planner import plan as planner_plan
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model import transformer
from hpcdist.planner.model.stage_split import step_flops
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import checkpoint_bytes, energy, peak_of, plan
from hpcdist.planner.time.step import timing

SELENE = toml_file.read("a100-selene")
GPT3 = describe(transformer.named("gpt3-175b"), "gpt3-175b")
LAYOUT = ParallelLayout(
    data=24, pipeline=8, tensor=8, schedule="interleaved", chunks=2, recompute="full", implementation="megatron-2022"
)


@pytest.mark.parametrize("simulate", [False, True])
def test_plan_combines_its_parts(simulate):
    layout = replace(LAYOUT, data=4)
    result = plan(GPT3, layout, SELENE, 96, 1000, simulate=simulate)
    took, did = timing(GPT3, layout, SELENE, 96, simulate=simulate), step_flops(GPT3, layout, 96)
    assert result.timing == took and result.work == did
    assert result.memory == memory(GPT3, layout, SELENE, 96)
    assert result.tokens == 96 * 2048 and result.parameters == GPT3.parameters
    assert result.peak_flops == pytest.approx(256 * 312e12)
    computing_s = sum(took.terms[name] for name in ("forward", "backward", "recompute"))
    joules = energy(took, layout, SELENE, did.executed_flops / (computing_s * 256 * 312e12))
    assert result.energy == joules
    assert result.run == planner_plan.run(1000, took.step_s, joules, checkpoint_bytes(GPT3, layout), layout, SELENE)
    assert result.mfu == pytest.approx(did.model_flops / took.step_s / (256 * 312e12))
    assert result.hfu == pytest.approx(did.hardware_flops / took.step_s / (256 * 312e12))
    assert result.exact_mfu == pytest.approx(did.exact_flops / took.step_s / (256 * 312e12))


def test_utilisation_does_not_exceed_the_kernel_efficiency():
    """With a long context only half of all pairs are visible. Power follows the executed operations."""
    shape = replace(transformer.named("llama-3-8b"), context=2**20)
    layout = ParallelLayout(data=1, context=64, recompute="full", precision="bfloat16")
    result = plan(describe(shape, "long"), layout, SELENE, 1, 10)
    computing_s = sum(result.timing.terms[name] for name in ("forward", "backward", "recompute"))
    reached = result.work.executed_flops / (computing_s * result.peak_flops)
    best = max(share for curve in SELENE.device.matmul.values() for share in curve.shares)
    assert 0.3 < reached <= max(best, SELENE.device.attention_share)
    assert result.exact_mfu < result.exact_hfu < result.mfu < result.hfu
    assert result.energy == energy(result.timing, layout, SELENE, reached)


def test_peak_flops_exclude_servers():
    layout = ParallelLayout(data=8, strategy="parameter_server", servers=2, precision="bfloat16")
    result = plan(describe(transformer.named("bert-large"), "bert-large"), layout, SELENE, 64, 10)
    assert result.peak_flops == pytest.approx(8 * 312e12)


@pytest.mark.parametrize(
    ("precision", "slots", "each"),
    [("bfloat16", 2, 12), ("float16", 1, 8), ("float32", 2, 12), ("float32", 0, 4), ("float64", 2, 24)],
)
def test_checkpoint_bytes_include_master_and_optimizer_state(precision, slots, each):
    layout = replace(LAYOUT, precision=precision, optimizer_slots=slots)
    assert checkpoint_bytes(GPT3, layout) == each * GPT3.parameters


def test_precision_without_device_peak_is_rejected():
    volta = toml_file.read("v100-dgx2")
    with pytest.raises(ConfigurationError, match=r"no peak FLOP rate for bfloat16; choose one of .*float16"):
        peak_of(volta, LAYOUT)
    assert peak_of(volta, replace(LAYOUT, activations="float32")) == volta.device.peak_flops["float32"]


def test_unproven_plans_are_flagged():
    ours = plan(GPT3, replace(LAYOUT, implementation="hpcdist", recompute="none"), SELENE, 1536, 10)
    assert any("never measured on this device (A100-SXM4-80GB)" in flag for flag in ours.flags)
    shares = {kind: replace(curve, shares=(0.95,) * len(curve.shares)) for kind, curve in SELENE.device.matmul.items()}
    quick = replace(SELENE, device=replace(SELENE.device, name="quick", matmul=shares, best_mfu=0.0))
    fast = plan(GPT3, replace(LAYOUT, recompute="none", sequence_parallel=True), quick, 1536, 10)
    slow = plan(GPT3, LAYOUT, SELENE, 1536, 10)
    assert fast.mfu > 0.57 > slow.mfu
    assert any("is more than 57%" in flag for flag in fast.flags)
    limited = plan(GPT3, fast.layout, replace(quick, device=replace(quick.device, best_mfu=0.57)), 1536, 10)
    assert limited.mfu == pytest.approx(0.57, rel=1e-12) and limited.modelled_mfu == fast.mfu
    assert any(flag.startswith("MFU is limited to 57.0%") for flag in limited.flags)
    assert limited.energy.joules > fast.energy.joules and limited.run.wall_s > fast.run.wall_s
    assert not any("is more than 57%" in flag or "never measured" in flag for flag in slow.flags)
    calibrated = plan(GPT3, replace(LAYOUT, implementation="hpcdist"), replace(SELENE, calibrated="here"), 1536, 10)
    assert not any("never measured" in flag for flag in calibrated.flags)


@cases(
    "context, more, output",
    (512, {}, None),
    (4096, {}, "keeps"),
    (4096, {"recompute": "selective"}, None),
    (8192, {"recompute": "full"}, "makes"),
    (32768, {"context": 16}, "keeps"),
    (32768, {"implementation": "hpcdist"}, None),
)
def test_attention_over_all_pairs_is_flagged_if_significant(context, more, output):
    llama = describe(replace(transformer.named("llama-2-7b"), context=context), "llama")
    layout = replace(ParallelLayout(implementation="megatron-2022"), **more)
    lines = [flag for flag in plan(llama, layout, SELENE, 16, 10).flags if "pairs of tokens" in flag]
    start = f"the attention of megatron-2022 {output} the scores of all pairs of tokens (no FlashAttention); "
    start += "use --implementation"
    assert (lines[0].startswith(start) and len(lines) == 1) if output else not lines


def test_assumed_overlap_is_flagged_if_significant():
    layout = ParallelLayout(data=512, strategy="zero3", microbatch=1, sequence_parallel=False, overlap=1.0)
    result = plan(GPT3, layout, SELENE, 1024, 10)
    none = plan(GPT3, replace(layout, overlap=0.0), SELENE, 1024, 10)
    assert result.timing.hidden_s > 0.05 * result.step_s
    assert any("hide during computation (overlap = 1)" in flag for flag in result.flags)
    assert none.timing.hidden_s == 0 and not any("hide" in flag for flag in none.flags)
    assert result.timing.modelled_s + result.timing.hidden_s == pytest.approx(none.timing.modelled_s, rel=0.02)

    def flags(share):
        device = replace(SELENE.device, memory_bytes=result.memory.bytes / share)
        return " ".join(plan(GPT3, layout, replace(SELENE, device=device), 1024, 10).flags)

    assert "memory is 97.0% full" in flags(0.97)
    assert "full:" not in flags(0.9) and "full:" not in flags(1.1)


def test_buckets_of_the_timing_are_in_the_memory():
    """Long buckets hide the latencies of a large ring.

    Float32 sums of 16-bit gradients need more than twice their bytes.
    """
    layout = ParallelLayout(data=4096, microbatch=8, algorithm="ring")
    bert = describe(transformer.named("bert-large"), "bert-large")
    bare = memory(bert, layout, SELENE, 32768)
    result = plan(bert, layout, SELENE, 32768, 10)
    longer = result.timing.bucket_bytes - BUCKET_BYTES
    assert longer > 0 and any("communication.bucket_bytes" in flag for flag in result.flags)
    assert result.memory.bytes - bare.bytes == pytest.approx(2 * longer * (1 + 1 / 4096))
    # Where memory, or what is wanted of it, is short of a byte of that, they are shorter and the step is longer.
    for tight, limit in (
        (replace(SELENE, device=replace(SELENE.device, memory_bytes=result.memory.bytes - 1)), 0.0),
        (SELENE, result.memory.bytes - 1),
    ):
        less = plan(bert, layout, tight, 32768, 10, limit_bytes=limit)
        assert less.memory.bytes < result.memory.bytes and less.step_s > result.step_s
    none = plan(bert, layout, SELENE, 32768, 10, limit_bytes=bare.bytes)
    assert none.memory == bare and not any("communication.bucket_bytes" in flag for flag in none.flags)
