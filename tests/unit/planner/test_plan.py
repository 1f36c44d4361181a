"""The whole answer for a layout is that of its parts, and says where nothing has proven it."""

from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.errors import ConfigurationError
from hpcdist.planner import plan as planner_plan
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.energy import energy
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model import transformer
from hpcdist.planner.model.stage_split import step_flops
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import checkpoint_bytes, peak_of, plan
from hpcdist.planner.time.step import timing

SELENE = toml_file.read("a100-selene")
GPT3 = describe(transformer.named("gpt3-175b"), "gpt3-175b")
LAYOUT = ParallelLayout(
    data=24, pipeline=8, tensor=8, schedule="interleaved", chunks=2, recompute="full", implementation="megatron"
)


@pytest.mark.parametrize("simulate", [False, True])
def test_a_plan_is_that_of_its_parts(simulate):
    layout = replace(LAYOUT, data=4)
    found = plan(GPT3, layout, SELENE, 96, 1000, simulate=simulate)
    took, did = timing(GPT3, layout, SELENE, 96, simulate=simulate), step_flops(GPT3, layout, 96)
    assert found.timing == took and found.work == did
    assert found.memory == memory(GPT3, layout, SELENE, 96)
    assert found.tokens == 96 * 2048 and found.parameters == GPT3.parameters
    assert found.peak_flops == pytest.approx(256 * 312e12)
    computing_s = sum(took.terms[name] for name in ("forward", "backward", "recompute"))
    joules = energy(took, layout, SELENE, did.executed_flops / (computing_s * 256 * 312e12))
    assert found.energy == joules
    assert found.run == planner_plan.run(1000, took.step_s, joules, checkpoint_bytes(GPT3, layout), layout, SELENE)
    assert found.mfu == pytest.approx(did.model_flops / took.step_s / (256 * 312e12))
    assert found.hfu == pytest.approx(did.hardware_flops / took.step_s / (256 * 312e12))
    assert found.exact_mfu == pytest.approx(did.exact_flops / took.step_s / (256 * 312e12))


def test_devices_do_not_reach_more_than_their_kernels_do():
    """With a long context the pairs that are looked at are half of the square: power follows what is executed."""
    shape = replace(transformer.named("llama-3-8b"), context=2**20)
    layout = ParallelLayout(data=1, context=64, recompute="full", precision="bfloat16")
    found = plan(describe(shape, "long"), layout, SELENE, 1, 10)
    computing_s = sum(found.timing.terms[name] for name in ("forward", "backward", "recompute"))
    reached = found.work.executed_flops / (computing_s * found.peak_flops)
    best = max(share for curve in SELENE.device.matmul.values() for share in curve.shares)
    assert 0.3 < reached <= max(best, SELENE.device.attention_share)
    assert found.exact_mfu < found.exact_hfu < found.mfu < found.hfu
    assert found.energy == energy(found.timing, layout, SELENE, reached)


def test_servers_do_not_compute():
    layout = ParallelLayout(data=8, strategy="parameter_server", servers=2, precision="bfloat16")
    found = plan(describe(transformer.named("bert-large"), "bert-large"), layout, SELENE, 64, 10)
    assert found.peak_flops == pytest.approx(8 * 312e12)


@pytest.mark.parametrize(
    ("precision", "slots", "each"),
    [("bfloat16", 2, 12), ("float16", 1, 8), ("float32", 2, 12), ("float32", 0, 4), ("float64", 2, 24)],
)
def test_a_checkpoint_has_the_master_and_the_state_of_the_optimizer(precision, slots, each):
    layout = replace(LAYOUT, precision=precision, optimizer_slots=slots)
    assert checkpoint_bytes(GPT3, layout) == each * GPT3.parameters


def test_a_precision_that_the_device_does_not_have():
    volta = toml_file.read("v100-dgx2")
    with pytest.raises(ConfigurationError, match=r"no peak for bfloat16; choose a precision of .*float16"):
        peak_of(volta, LAYOUT)
    assert peak_of(volta, replace(LAYOUT, activations="float32")) == volta.device.peak_flops["float32"]


def test_what_nothing_has_proven_is_said():
    ours = plan(GPT3, replace(LAYOUT, implementation="hpcdist", recompute="none"), SELENE, 1536, 10)
    assert any("no training of this toolkit on A100-SXM4-80GB" in flag for flag in ours.flags)
    shares = {kind: replace(curve, shares=(0.95,) * len(curve.shares)) for kind, curve in SELENE.device.matmul.items()}
    quick = replace(SELENE, device=replace(SELENE.device, matmul=shares, best_mfu=0.0))
    fast = plan(GPT3, replace(LAYOUT, recompute="none", sequence_parallel=True), quick, 1536, 10)
    slow = plan(GPT3, LAYOUT, SELENE, 1536, 10)
    assert fast.mfu > 0.57 > slow.mfu
    assert any("more than the 57%" in flag for flag in fast.flags)
    limited = plan(GPT3, fast.layout, replace(quick, device=replace(quick.device, best_mfu=0.57)), 1536, 10)
    assert limited.mfu == pytest.approx(0.57, rel=1e-12) and limited.modelled_mfu == fast.mfu
    assert any(flag.startswith("MFU is limited to 57.0%") for flag in limited.flags)
    assert limited.energy.joules > fast.energy.joules and limited.run.wall_s > fast.run.wall_s
    assert not any("more than the 57%" in flag or "no training" in flag for flag in slow.flags)
    calibrated = plan(GPT3, replace(LAYOUT, implementation="hpcdist"), replace(SELENE, calibrated="here"), 1536, 10)
    assert not any("no training" in flag for flag in calibrated.flags)


@cases(
    "context, more, said",
    (512, {}, None),
    (4096, {}, "keeps"),
    (4096, {"recompute": "selective"}, None),
    (8192, {"recompute": "full"}, "makes"),
    (32768, {"context": 16}, "keeps"),
    (32768, {"implementation": "hpcdist"}, None),
)
def test_scores_of_all_pairs_are_told_where_they_decide(context, more, said):
    llama = describe(replace(transformer.named("llama-2-7b"), context=context), "llama")
    layout = replace(ParallelLayout(implementation="megatron"), **more)
    told = [flag for flag in plan(llama, layout, SELENE, 16, 10).flags if "pairs of tokens" in flag]
    start = f"the attention of megatron {said} the scores of all pairs of tokens (no FlashAttention): --implementation"
    assert (told[0].startswith(start) and len(told) == 1) if said else not told


def test_what_an_answer_hangs_on_is_said():
    layout = ParallelLayout(data=512, strategy="zero3", microbatch=1, sequence_parallel=False, overlap=1.0)
    found = plan(GPT3, layout, SELENE, 1024, 10)
    none = plan(GPT3, replace(layout, overlap=0.0), SELENE, 1024, 10)
    assert found.timing.hidden_s > 0.05 * found.step_s
    assert any("hide behind computation (overlap = 1)" in flag for flag in found.flags)
    assert none.timing.hidden_s == 0 and not any("hide behind" in flag for flag in none.flags)
    assert found.timing.modelled_s + found.timing.hidden_s == pytest.approx(none.timing.modelled_s, rel=0.02)

    def flags(share):
        device = replace(SELENE.device, memory_bytes=found.memory.bytes / share)
        return " ".join(plan(GPT3, layout, replace(SELENE, device=device), 1024, 10).flags)

    assert "memory is 97.0% full" in flags(0.97)
    assert "full:" not in flags(0.9) and "full:" not in flags(1.1)


def test_the_buckets_of_its_time_are_in_its_memory():
    """Long ones hide latencies of a large ring; float32 sums of 16-bit gradients take twice their bytes, and more."""
    layout = ParallelLayout(data=4096, microbatch=8, algorithm="ring")
    bert = describe(transformer.named("bert-large"), "bert-large")
    bare = memory(bert, layout, SELENE, 32768)
    found = plan(bert, layout, SELENE, 32768, 10)
    longer = found.timing.bucket_bytes - BUCKET_BYTES
    assert longer > 0 and any("communication.bucket_bytes" in flag for flag in found.flags)
    assert found.memory.bytes - bare.bytes == pytest.approx(2 * longer * (1 + 1 / 4096))
    # Where memory, or what is wanted of it, is short of a byte of that, they are shorter and the step is longer.
    for tight, limit in (
        (replace(SELENE, device=replace(SELENE.device, memory_bytes=found.memory.bytes - 1)), 0.0),
        (SELENE, found.memory.bytes - 1),
    ):
        less = plan(bert, layout, tight, 32768, 10, limit_bytes=limit)
        assert less.memory.bytes < found.memory.bytes and less.step_s > found.step_s
    none = plan(bert, layout, SELENE, 32768, 10, limit_bytes=bare.bytes)
    assert none.memory == bare and not any("communication.bucket_bytes" in flag for flag in none.flags)
