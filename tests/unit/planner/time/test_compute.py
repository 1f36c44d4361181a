"""Seconds of a micro-batch in a unit, compared with published formulas and with counts by hand."""

from dataclasses import replace

import numpy as np
import pytest

from harness.made_plans import cluster_of
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.errors import ConfigurationError
from hpcdist.planner.calibrate import device_fits
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Device, EfficiencyCurve, LinkLevel
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import AttentionShape, ModelUnit, ProductShape, TransformerShape
from hpcdist.planner.model.stage_split import attention_flops, matrix_flops
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.time.compute import local_experts, local_parameters, peak_share_of, unit_seconds

PEAK, MOVES = 1e12, 1e11
FLAT = EfficiencyCurve(sizes=(1.0, 1e6), shares=(0.5, 0.5))
DEVICE = Device(
    name="of a test",
    peak_flops={"float32": PEAK, "bfloat16": 2 * PEAK},
    matmul={"float32": FLAT, "bfloat16": FLAT},
    memory_bytes=1e10,
    memory_bytes_per_s=MOVES,
    memory_share=1.0,
    attention_share=0.25,
)
CLUSTER = cluster_of(DEVICE, LinkLevel(name="links", devices=0, latency_s=1e-6, bytes_per_s=1e10), devices=8)
LAYOUT = ParallelLayout(precision="float32", microbatch=2)
SHAPE = TransformerShape(layers=3, hidden=256, heads=4, vocabulary=1000, context=128)
_, BLOCK, HEAD = describe(SHAPE, "small").units


def cluster_with(**changes):
    return replace(CLUSTER, device=replace(DEVICE, **changes))


def free_memory(**changes):
    """Return a device whose memory takes no time, so that only operations count."""
    return cluster_with(memory_bytes_per_s=1e30, **changes)


def test_product_time_is_operations_over_the_share_of_peak():
    took = unit_seconds(BLOCK, LAYOUT, free_memory())
    scores_s = 2 * attention_flops(BLOCK, exact=True) / (PEAK * 0.25)
    linear_s = 2 * matrix_flops(BLOCK) / (PEAK * 0.5)
    assert took.forward_s == pytest.approx(linear_s + scores_s)
    assert took.input_s == pytest.approx(linear_s + 2.5 * scores_s), "scores are computed again"
    assert took.weight_s == pytest.approx(linear_s), "attention has no weights"


def test_product_time_is_at_least_the_memory_time():
    rows, inner, columns = 4, 1000, 1000
    unit = ModelUnit(
        name="layer", count=1, parameters=inner * columns, products=(ProductShape(rows // 2, inner, columns),)
    )
    took = unit_seconds(unit, LAYOUT, CLUSTER)
    assert took.forward_s == pytest.approx((rows * inner + inner * columns + rows * columns) * 4 / MOVES)
    assert took.forward_s > 2 * rows * inner * columns / (PEAK * 0.5)


def test_elementwise_time_is_the_memory_time():
    unit = ModelUnit(name="layer", count=1, parameters=0, moved=1000.0)
    took = unit_seconds(unit, LAYOUT, CLUSTER)
    assert took.forward_s == pytest.approx(2 * 1000 * 4 / MOVES)
    assert took.input_s == pytest.approx(1.5 * took.forward_s)
    assert took.weight_s == 0.0
    half = unit_seconds(unit, replace(LAYOUT, precision="bfloat16"), CLUSTER)
    assert half.forward_s == pytest.approx(took.forward_s / 2)


def test_float32_activations_compute_in_float32():
    wide = replace(LAYOUT, precision="bfloat16", activations="float32")
    assert unit_seconds(BLOCK, wide, CLUSTER)[:4] == unit_seconds(BLOCK, LAYOUT, CLUSTER)[:4]


@pytest.mark.parametrize(("cut", "inner", "columns"), [("columns", 64, 32), ("inner", 32, 64), ("", 64, 64)])
def test_tensor_axis_divides_the_declared_extent(cut, inner, columns):
    unit = ModelUnit(name="layer", count=1, parameters=64 * 64, products=(ProductShape(100, 64, 64, cut),))
    took = unit_seconds(unit, replace(LAYOUT, tensor=2), free_memory())
    assert took.forward_s == pytest.approx(2 * 200 * inner * columns / (PEAK * 0.5))


def test_sequence_parallelism_divides_the_remaining_operations():
    unit = ModelUnit(name="layer", count=1, parameters=0, moved=1000.0, moved_cut=400.0)
    whole = unit_seconds(unit, LAYOUT, CLUSTER).forward_s
    cut = unit_seconds(unit, replace(LAYOUT, tensor=4), CLUSTER).forward_s
    tokens = unit_seconds(unit, replace(LAYOUT, tensor=4, sequence_parallel=True), CLUSTER).forward_s
    assert cut == pytest.approx(whole * (0.6 + 0.4 / 4))
    assert tokens == pytest.approx(whole / 4)


def test_context_axis_divides_rows_and_pairs():
    whole, half = (unit_seconds(BLOCK, replace(LAYOUT, context=n), free_memory()) for n in (1, 2))
    assert half.forward_s == pytest.approx(whole.forward_s / 2)


def test_expert_time_counts_selected_experts_for_any_expert_axis():
    dense = ModelUnit(name="block", count=1, parameters=0, products=(ProductShape(100, 64, 64),))
    routed = ModelUnit(
        name="block", count=1, parameters=0, products=(ProductShape(100, 64, 64, experts=8, share=2 / 8),)
    )
    plain, two = (unit_seconds(unit, LAYOUT, free_memory()).forward_s for unit in (dense, routed))
    assert two == pytest.approx(2 * plain), "two experts see each token"
    far = unit_seconds(routed, replace(LAYOUT, data=4, expert=4), free_memory()).forward_s
    assert far == pytest.approx(two), "as many tokens come as go"
    small = cluster_with(
        memory_bytes_per_s=1e30, matmul={"float32": EfficiencyCurve(sizes=(1.0, 1e3), shares=(0.01, 1.0))}
    )
    assert (
        unit_seconds(routed, replace(LAYOUT, data=4, expert=4), small).forward_s
        < unit_seconds(routed, LAYOUT, small).forward_s
    ), "products of more rows are faster"


def test_first_unit_computes_no_input_gradient():
    unit = ModelUnit(name="layer", count=1, parameters=64, products=(ProductShape(1, 8, 8),), moved=16.0, first=True)
    took = unit_seconds(unit, LAYOUT, CLUSTER)
    inside = unit_seconds(replace(unit, first=False), LAYOUT, CLUSTER)
    assert took.input_s == 0.0
    assert took.weight_s == pytest.approx(inside.weight_s + (inside.input_s - inside.weight_s))


@pytest.mark.parametrize("implementation", ["hpcdist", "megatron-2022"])
def test_recomputation_repeats_a_forward_or_its_attention(implementation):
    of = {
        name: unit_seconds(BLOCK, replace(LAYOUT, recompute=name, implementation=implementation), CLUSTER)
        for name in ("none", "selective", "full")
    }
    assert of["none"].again_s == 0.0
    assert of["full"].again_s == of["full"].forward_s
    if implementation == "hpcdist":
        assert of["selective"].again_s == 0.0, "tiles compute their scores again anyway"
    else:
        without = unit_seconds(replace(BLOCK, attention=None), replace(LAYOUT, implementation="megatron-2022"), CLUSTER)
        assert of["selective"].again_s == pytest.approx(of["none"].forward_s - without.forward_s)


def test_unfused_scores_move_9_bytes_forward_and_11_backward():
    """16 bits, forward: softmax 2 + 2, dropout 2 + 2 + 1.

    Backward: dropout 2 + 2 + 1, softmax 4 + 2 (arXiv:2205.05198, 4.1).
    """
    slow = cluster_with(peak_flops={"bfloat16": 1e30})
    unit = ModelUnit(name="block", count=1, parameters=0, attention=AttentionShape(4, 4, 1, 128, 128 * 128))
    took = unit_seconds(unit, replace(LAYOUT, precision="bfloat16", implementation="megatron-2022"), slow)
    scores = 2 * 4 * 128 * 128
    products = 2 * scores * 2  # written, and read again
    assert took.forward_s == pytest.approx((9 * scores + products) / MOVES)
    assert took.input_s == pytest.approx((11 * scores + 2 * products) / MOVES)


def test_unfused_scores_compute_all_pairs():
    ours = unit_seconds(BLOCK, LAYOUT, free_memory(attention_share=0.5))
    theirs = unit_seconds(BLOCK, replace(LAYOUT, implementation="megatron-2022"), free_memory(attention_share=0.5))
    unseen = attention_flops(BLOCK) - attention_flops(BLOCK, exact=True)
    assert theirs.forward_s - ours.forward_s == pytest.approx(2 * unseen / (PEAK * 0.5))


def test_float32_loss_of_megatron_is_counted():
    theirs = unit_seconds(
        HEAD, replace(LAYOUT, implementation="megatron-2022"), cluster_with(peak_flops={"float32": 1e30})
    )
    words = 2 * 128 * 1000
    wide = 2 * (HEAD.moved - HEAD.moved_cut) * 4
    product = (2 * 128 * (256 + 1000) + 256 * 1000) * 4
    assert theirs.forward_s == pytest.approx((38 * words + wide + product) / MOVES)
    assert theirs.input_s == pytest.approx((14 * words + 1.5 * wide + product) / MOVES)


def test_gaps_between_kernels_are_counted():
    gaps = cluster_with(kernel_s=1e-3)
    none, some = unit_seconds(BLOCK, LAYOUT, CLUSTER), unit_seconds(BLOCK, LAYOUT, gaps)
    assert some.forward_s - none.forward_s == pytest.approx(BLOCK.kernels * 1e-3)
    assert some.input_s - none.input_s == pytest.approx(BLOCK.kernels * 1e-3)


@pytest.mark.parametrize(("main_gradients", "item"), [("float32", 4), ("working", 2)])
def test_gradient_sums_use_the_stored_gradient_type(main_gradients, item):
    assert unit_seconds(BLOCK, LAYOUT, CLUSTER).add_s == pytest.approx(3 * BLOCK.parameters * 4 / MOVES)
    half = replace(LAYOUT, precision="bfloat16", implementation="megatron-2022", gradient_fusion=False)
    beside = unit_seconds(BLOCK, replace(half, main_gradients=main_gradients), CLUSTER)
    assert beside.add_s == pytest.approx(3 * BLOCK.parameters * item / MOVES)


def test_gradient_fusion_saves_the_time_of_sums():
    fused = replace(LAYOUT, precision="bfloat16", implementation="megatron-2022")
    assert unit_seconds(BLOCK, fused, free_memory()).add_s < 1e-20
    slow = cluster_with(peak_flops={"bfloat16": 1e30})  # nothing but memory counts
    result = unit_seconds(BLOCK, fused, slow).add_s
    assert 0.0 < result < unit_seconds(BLOCK, replace(fused, gradient_fusion=False), slow).add_s


def test_local_parameters_are_whole_tensors_and_tensor_shards():
    unit = ModelUnit(name="block", count=1, parameters=1000, cut_parameters=800, expert_parameters=600)
    assert local_parameters(unit, LAYOUT) == 1000
    assert local_parameters(unit, replace(LAYOUT, tensor=2)) == 200 + 400
    both = replace(LAYOUT, tensor=2, data=4, expert=4)
    assert local_experts(unit, both) == 600 / 2 / 4
    assert local_parameters(unit, both) == 200 + 100 + 600 / 2 / 4


def test_efficiency_curve_is_log_linear_between_its_points():
    curve = EfficiencyCurve(sizes=(100.0, 1000.0), shares=(0.2, 0.8))
    assert peak_share_of(curve, 100.0) == (pytest.approx(0.2), "")
    assert peak_share_of(curve, 100.0 * 10**0.5) == (pytest.approx(0.5), "")
    assert peak_share_of(curve, 1000.0) == (pytest.approx(0.8), "")


def test_sizes_beyond_the_curve_are_flagged():
    curve = EfficiencyCurve(sizes=(100.0, 1000.0), shares=(0.2, 0.8))
    share, output = peak_share_of(curve, 50.0)
    assert share == pytest.approx(0.1) and "smaller than 100" in output
    share, output = peak_share_of(curve, 2000.0)
    assert share == pytest.approx(0.8) and "larger than 1000" in output
    few = cluster_with(matmul={"float32": curve})
    assert unit_seconds(HEAD, LAYOUT, few).flags == ()
    tiny = ModelUnit(name="layer", count=1, parameters=4, products=(ProductShape(1, 2, 2),))
    output = "float32 products smaller than 100, the smallest on the curve: extrapolated"
    assert unit_seconds(tiny, LAYOUT, few).flags == (output,)


def test_dtype_without_a_curve_is_rejected_by_name():
    with pytest.raises(ConfigurationError, match=r"float16.*bfloat16, float32.*device\.flops"):
        unit_seconds(BLOCK, replace(LAYOUT, precision="float16"), CLUSTER)


def test_cached_times_are_not_shared_between_clusters():
    slow = cluster_with(peak_flops={"float32": PEAK / 2, "bfloat16": PEAK})
    fast_s, slow_s = (unit_seconds(HEAD, LAYOUT, one).weight_s for one in (free_memory(), slow))
    assert slow_s > fast_s
    assert unit_seconds(HEAD, LAYOUT, slow).weight_s == slow_s


def test_fitted_curve_gives_the_share_that_a_plan_uses():
    """This includes sizes below its smallest size, where the share falls with the size."""
    curve = EfficiencyCurve(sizes=(100.0, 1000.0), shares=(0.2, 0.8))
    for size, share in ((10.0, 0.02), (100.0, 0.2), (100.0 * 10**0.5, 0.5), (1000.0, 0.8), (5000.0, 0.8)):
        product = device_fits.MeasuredProduct(m=size, k=size, n=size, seconds=1.0)
        fitted = device_fits.FittedCurve(peak_flops=1e12, curve=curve, unseen=(), errors=())
        assert device_fits.product_seconds(fitted, product) == pytest.approx(product.flops / 1e12 / share)
        assert peak_share_of(curve, size)[0] == pytest.approx(share)


@pytest.mark.parametrize("kind", ITEM_BYTES)
def test_item_bytes_match_the_dtypes(kind):
    foreign = {"bfloat16": BFLOAT16.itemsize, "float8": 1}
    assert ITEM_BYTES[kind] == (foreign[kind] if kind in foreign else np.dtype(kind).itemsize)
