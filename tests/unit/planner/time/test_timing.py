"""Seconds of a step by category, compared with sums by hand, published volumes, and the simulator."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from harness.made_plans import cluster_of
from harness.marks import cases
from harness.trainings import losses, recipe_keys, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import attention_pairs
from hpcdist.planner.cluster.hardware import Device, EfficiencyCurve, LinkLevel
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model import stage_split
from hpcdist.planner.model.description import ModelDescription, ModelUnit, ProductShape, TransformerShape
from hpcdist.planner.model.transformer import describe, of_config
from hpcdist.planner.report.plot import TIMELINE, timeline
from hpcdist.planner.time import compute
from hpcdist.planner.time.compute import cached, unit_seconds
from hpcdist.planner.time.network import collective, message, span
from hpcdist.planner.time.pipeline import border_message, ranks_of
from hpcdist.planner.time.stage_load import chunk_loads, loads
from hpcdist.planner.time.step import tied_sum, timing, update_bytes_per_parameter, update_s, updated_parameters
from hpcdist.strategies.context.costs import ring_exposed_s
from hpcdist.strategies.context.operations import pairs, pieces
from hpcdist.strategies.schedule.registry import SCHEDULES

CURVE = EfficiencyCurve(sizes=(16.0, 4096.0), shares=(0.1, 0.7))
CLUSTER = cluster_of(
    Device(
        name="of a test",
        peak_flops={"float32": 1e12, "bfloat16": 2e12},
        matmul={"float32": CURVE, "bfloat16": CURVE},
        memory_bytes=1e10,
        memory_bytes_per_s=1e11,
        kernel_s=1e-6,
    ),
    LinkLevel(name="inside", devices=8, latency_s=1e-6, bytes_per_s=1e11),
    LinkLevel(name="outside", devices=0, latency_s=5e-6, bytes_per_s=1e10),
    devices=64,
)
FAST = replace(CLUSTER, levels=(LinkLevel(name="at once", devices=0, latency_s=0.0, bytes_per_s=1e30),))
SHAPE = TransformerShape(layers=8, hidden=256, heads=8, kv_heads=4, vocabulary=1024, context=128)
MODEL = describe(SHAPE, "small")
LAYOUT = ParallelLayout(precision="float32", microbatch=2, schedule="1f1b")
LIKE = ModelUnit(name="layer", count=8, parameters=256 * 256, products=(ProductShape(64, 256, 256),), moved=2e4)
ALIKE = ModelDescription(name="alike", units=(LIKE,), tokens=64, width=256)
TERMS = {
    "forward",
    "backward",
    "recompute",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "bubble",
    "data",
    "rows",
    "update",
    "input",
}
BSH = 2 * 128 * 256 * 4  # bytes of a micro-batch between blocks


def test_step_on_one_device_is_the_sum_of_its_units_and_the_update():
    result = timing(MODEL, LAYOUT, CLUSTER, 6)
    assert set(result.terms) == TERMS
    each = [(unit.count, unit_seconds(unit, LAYOUT, CLUSTER)) for unit in MODEL.units]
    assert result.terms["forward"] == pytest.approx(3 * sum(count * took.forward_s for count, took in each))
    back_s = 3 * sum(count * (took.input_s + took.weight_s) for count, took in each)
    add_s = 2 * sum(count * took.add_s for count, took in each)
    assert result.terms["backward"] == pytest.approx(back_s + add_s), "the first micro-batch adds to nothing"
    assert result.terms["update"] == pytest.approx(update_s(MODEL.parameters, LAYOUT, CLUSTER))
    rest = TERMS - {"forward", "backward", "update"}
    assert {name: result.terms[name] for name in rest} == dict.fromkeys(rest, 0.0)
    assert result.step_s == pytest.approx(sum(result.terms.values()))
    assert (result.bubble, result.hidden_s, result.bytes) == (0.0, 0.0, {"data": 0.0})


@pytest.mark.parametrize(("recompute", "often"), [("none", 4), ("full", 6)])
def test_tensor_axis_volume_matches_megatron(recompute, often):
    """arXiv:2104.04473, section 3.2: four allreduces of b s h per block, six with recomputation."""
    layout = replace(LAYOUT, tensor=4, recompute=recompute)
    result = timing(MODEL, layout, CLUSTER, 4)
    one = collective("allreduce", BSH, span(layout, "tensor", CLUSTER), CLUSTER)
    ends = 2  # the embedding forward, the head back
    loss = collective("allreduce", 2 * 128 * 4, span(layout, "tensor", CLUSTER), CLUSTER)
    assert result.bytes["tensor"] == pytest.approx(2 * (8 * often + ends) * one.nbytes + 2 * 3 * loss.nbytes)
    assert result.terms["tensor"] == pytest.approx(2 * (8 * often + ends) * one.seconds + 2 * 3 * loss.seconds)
    assert one.nbytes >= 2 * 3 / 4 * BSH


def test_sequence_parallel_volume_matches_megatron():
    """arXiv:2205.05198, section 4.2.2: an allreduce is a reduce-scatter and an all-gather."""
    layout = replace(LAYOUT, tensor=4, sequence_parallel=True)
    result = timing(MODEL, layout, CLUSTER, 2)
    allreduces = 8 * 4 + 2  # the embedding and the head: one each
    again = 8 * 2 + 1
    group = span(layout, "tensor", CLUSTER)
    loss = 3 * collective("allreduce", 2 * 128 * 4, group, CLUSTER).nbytes
    uncut = sum(unit.count * (unit.parameters - unit.cut_parameters) for unit in MODEL.units)
    norms = collective("allreduce", uncut * 4, group, CLUSTER).nbytes
    assert result.bytes["tensor"] == pytest.approx((2 * allreduces + again) * 3 / 4 * BSH + loss + norms)


def test_replicated_rows_are_summed_once_per_step():
    layout = replace(LAYOUT, tensor=4, sequence_parallel=True)
    one, many = (timing(MODEL, layout, CLUSTER, samples).terms for samples in (2, 8))
    uncut = sum(unit.count * (unit.parameters - unit.cut_parameters) for unit in MODEL.units)
    once = collective("allreduce", uncut * 4, span(layout, "tensor", CLUSTER), CLUSTER)
    assert one["rows"] == many["rows"] == pytest.approx(once.seconds)
    assert many["tensor"] == pytest.approx(4 * one["tensor"]), "which is inside of micro-batches alone"
    assert timing(MODEL, replace(layout, sequence_parallel=False), CLUSTER, 2).terms["rows"] == 0.0


def test_tensor_overlap_is_limited_by_the_computation():
    layout = replace(LAYOUT, tensor=4)
    exposed = timing(MODEL, layout, CLUSTER, 2).terms["tensor"]
    hidden = timing(MODEL, replace(layout, tensor_overlap=1.0), CLUSTER, 2).terms["tensor"]
    slow = replace(CLUSTER, levels=(LinkLevel(name="slow", devices=0, latency_s=1e-2, bytes_per_s=1e6),))
    bound = timing(MODEL, replace(layout, tensor_overlap=1.0), slow, 2).terms["tensor"]
    whole = timing(MODEL, layout, slow, 2).terms["tensor"]
    one_s = collective("allreduce", BSH, span(layout, "tensor", CLUSTER), CLUSTER).seconds
    assert exposed - hidden == pytest.approx((8 * 2 + 1) * one_s), "all that goes back"
    ((load, _),) = loads(MODEL, layout, CLUSTER)
    assert whole - bound == pytest.approx(load.cover_s), "as much as there is to compute"


def test_reported_algorithm_is_the_one_with_the_most_bytes():
    """It is not the algorithm of the three sums of the loss, which come last."""
    layout = replace(LAYOUT, tensor=8, microbatch=4)
    group = span(layout, "tensor", CLUSTER)
    blocks, loss = (collective("allreduce", nbytes, group, CLUSTER).algorithm for nbytes in (2 * BSH, 2 * 2 * 128 * 4))
    assert blocks != loss
    assert timing(MODEL, layout, CLUSTER, 8).algorithms["tensor"] == blocks


@pytest.mark.parametrize("context", [1, 4])
def test_attention_time_follows_the_window(context):
    """On a ring, which 6 heads over 4 ranks need, the rank with the most pairs determines the time."""
    placed = pieces(4096, context)

    def forward_s(window):
        block = describe(replace(SHAPE, hidden=384, heads=6, kv_heads=0, context=4096, window=window), "gpt").units[1]
        return unit_seconds(block, replace(LAYOUT, context=context), CLUSTER).forward_s

    def most(window):
        return max(pairs(placed, rank, causal=True, window=window) for rank in range(context))

    assert forward_s(4096) == forward_s(0)
    flops = 4 * 2 * 384 * (most(0) - most(512))
    saved_s = flops / (1e12 * CLUSTER.device.attention_share)
    assert forward_s(0) - forward_s(512) == pytest.approx(saved_s)
    assert context == 1 or most(512) > 1.02 * attention_pairs(4096, causal=True, window=512) / context


def test_context_axis_gathers_keys_and_values():
    result = timing(MODEL, replace(LAYOUT, context=2), CLUSTER, 2)
    keys_and_values = 2 * 128 * 2 * 4 * 32 * 4  # samples, tokens, both, heads, numbers, bytes
    assert result.bytes["context"] == pytest.approx(8 * 3 * keys_and_values / 2)  # round a ring again for gradients
    assert result.terms["context"] > 0


def test_ring_sends_only_pieces_inside_the_window():
    """Pieces have 48 tokens on 4 ranks: a rank gets no pieces, the pieces of both neighbours, or all pieces."""

    def sent(window):
        model = describe(replace(SHAPE, heads=7, kv_heads=0, hidden=448, context=384, window=window), "gpt")
        return timing(model, replace(LAYOUT, context=4), CLUSTER, 8).bytes.get("context", 0.0)

    assert [sent(window) / sent(0) for window in (1, 2, 48, 384)] == pytest.approx([0, 2 / 3, 2 / 3, 1])


@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ring_passes_overlap_with_attention_tiles(context, recompute):
    layout = replace(LAYOUT, context=context, recompute=recompute)
    model = describe(replace(SHAPE, heads=7, kv_heads=0, hidden=448, context=384), "gpt")  # no heads to exchange
    ((stage, _),) = ranks_of(model, layout, CLUSTER, 1)
    gathered = collective("all_gather", 2 * 384 * 2 * 448 * 4, span(layout, "context", CLUSTER), CLUSTER).seconds
    tiles_s = [took / context for took in unit_seconds(model.units[1], layout, CLUSTER).attention_s]
    there_s, back_s = (
        ring_exposed_s(context, own_s, gathered / (context - 1), back=back) for back, own_s in enumerate(tiles_s)
    )
    waits = (stage.sent.forward_s, stage.sent.back_s, stage.sent.again_s)
    again_s = there_s if recompute == "full" else 0.0
    assert [wait.get("context", 0.0) for wait in waits] == pytest.approx([8 * there_s, 8 * back_s, 8 * again_s])
    often = 4 if recompute == "full" else 3
    assert stage.sent.hidden_s == pytest.approx(8 * (often * gathered - there_s - back_s - again_s))
    result = timing(model, layout, CLUSTER, 2)
    assert result.terms["context"] == pytest.approx(8 * (there_s + back_s + again_s))
    assert result.hidden_s >= stage.sent.hidden_s > 0
    at_once = timing(model, layout, FAST, 2)
    assert at_once.terms["context"] < 1e-9 * at_once.step_s


def test_expert_axis_sends_tokens_to_experts_and_back():
    routed = describe(replace(SHAPE, experts=4, experts_per_token=2), "routed")
    result = timing(routed, replace(LAYOUT, data=4, expert=4, implementation="megatron-2022"), CLUSTER, 8)
    assert result.bytes["expert"] == pytest.approx(8 * 4 * 2 * BSH * 3 / 4), "two experts a token, three of four away"


def test_uneven_batch_takes_the_time_of_its_largest_share():
    layout = replace(LAYOUT, data=4)
    six, eight, seven = (timing(MODEL, layout, CLUSTER, samples) for samples in (12, 16, 13))
    assert six.terms["forward"] == pytest.approx(3 / 4 * eight.terms["forward"]), "two micro-batches, of 2 and 1"
    assert seven.terms["forward"] == pytest.approx(eight.terms["forward"]), "one replica has four samples"


def test_stage_messages_have_the_size_of_activations():
    layout = replace(LAYOUT, pipeline=4)
    two = replace(LAYOUT, pipeline=2)
    assert timing(MODEL, two, CLUSTER, 8).bytes["pipeline"] == 4 * BSH, "a rank sends activations, the other gradients"
    assert timing(MODEL, replace(two, schedule="zb-v"), CLUSTER, 8).bytes["pipeline"] == 2 * 4 * BSH
    assert timing(MODEL, layout, CLUSTER, 8).bytes["pipeline"] == 2 * 4 * BSH
    assert timing(MODEL, replace(layout, schedule="interleaved", chunks=2), CLUSTER, 8).bytes["pipeline"] == 4 * 4 * BSH
    assert border_message(MODEL, LAYOUT, CLUSTER).seconds == 0.0


def test_megatron_stage_messages_are_split_over_tensor_ranks():
    layout = replace(LAYOUT, pipeline=2, tensor=4)
    ours, theirs = (
        border_message(MODEL, layout.but(implementation=name), CLUSTER) for name in ("hpcdist", "megatron-2022")
    )
    assert (ours.nbytes, theirs.nbytes) == (BSH, BSH / 4)
    parts = border_message(MODEL, replace(layout, sequence_parallel=True, implementation="megatron-2022"), CLUSTER)
    channels = span(replace(layout, implementation="megatron-2022"), "tensor", CLUSTER)
    gathered_s = collective("all_gather", BSH, channels, CLUSTER).seconds
    assert theirs.seconds == pytest.approx(parts.seconds + gathered_s)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("implementation", ["hpcdist", "megatron-2022"])
def test_closed_forms_match_the_simulator_for_equal_stages(schedule, implementation):
    chunks = 2 if schedule == "interleaved" else 1
    layout = replace(LAYOUT, pipeline=4, schedule=schedule, chunks=chunks, implementation=implementation)
    # Those of zero bubble wait for messages nearly as long as is said; see test_planner_pipeline.
    cluster = FAST if schedule.startswith("zb") else CLUSTER
    closed, simulated = (timing(ALIKE, layout, cluster, 16, simulate=on) for on in (False, True))
    # The span of a rank, and so where the next step may begin, is a little longer where W is more than F.
    is_span = schedule == "zb-h2"
    assert closed.step_s == pytest.approx(simulated.step_s, rel=0.02 if is_span else 1e-6)
    assert closed.bubble == pytest.approx(simulated.bubble, abs=0.02 if is_span else 1e-6)
    assert closed.terms["bubble"] > 0 or schedule == "zb-h2"


def test_simulator_accounts_for_unequal_stages():
    layout = replace(LAYOUT, pipeline=3, schedule="gpipe")
    closed, simulated = (timing(MODEL, layout, CLUSTER, 16, simulate=on) for on in (False, True))
    assert simulated.step_s != closed.step_s
    assert simulated.step_s == pytest.approx(closed.step_s, rel=0.1)


def test_bubble_shrinks_with_more_micro_batches():
    layout = replace(LAYOUT, pipeline=4)
    assert timing(ALIKE, layout, FAST, 8).bubble == pytest.approx(3 / 7)
    assert timing(ALIKE, layout, FAST, 64).bubble == pytest.approx(3 / 35)
    assert timing(ALIKE, layout, CLUSTER, 64).bubble > 3 / 35, "messages take time"


def test_recomputation_excludes_the_ends_of_the_model():
    took = timing(MODEL, replace(LAYOUT, recompute="full"), CLUSTER, 2).terms
    block = unit_seconds(MODEL.units[1], LAYOUT, CLUSTER)
    assert took["recompute"] == pytest.approx(8 * block.forward_s)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_pipelines_recompute_whole_chunks(schedule, chunks):
    """This includes the ends of the model. The last rank of 1f1b recomputes nothing."""
    layout = replace(LAYOUT, pipeline=4, schedule=schedule, chunks=chunks, recompute="full")
    closed, simulated = (timing(ALIKE, layout, FAST, 24, simulate=on) for on in (False, True))
    assert closed.step_s == pytest.approx(simulated.step_s)
    assert closed.terms["recompute"] == pytest.approx(closed.terms["forward"])
    whole_s = closed.terms["forward"] + closed.terms["backward"] + closed.terms["recompute"]
    assert closed.terms["bubble"] < 3 / chunks * whole_s / 12, "as long as a bubble is that does nothing"
    of_ranks = [stage.ahead_s for stage, often in ranks_of(MODEL, layout, FAST, 12) for _ in range(often)]
    assert (min(of_ranks) == 0.0) is (schedule == "1f1b")


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_heavy_head_is_recomputed_as_in_the_simulator(schedule, chunks):
    heavy = describe(replace(SHAPE, layers=30, vocabulary=32768), "heavy")
    layout = replace(LAYOUT, pipeline=2, schedule=schedule, chunks=chunks, recompute="full")
    closed, simulated = (timing(heavy, layout, FAST, 96, simulate=on) for on in (False, True))
    assert closed.step_s == pytest.approx(simulated.step_s, rel=2e-3)
    head_s = unit_seconds(heavy.units[-1], layout, FAST).forward_s
    with_head = [stage.ahead_s > head_s for stage, _ in ranks_of(heavy, layout, FAST, 48) if stage.load.uncut]
    assert all(with_head) is (schedule == "gpipe")


def test_tied_tensor_is_summed_over_both_ends_of_a_pipeline():
    layout = replace(LAYOUT, pipeline=2)
    loose = describe(replace(SHAPE, tied=False), "loose")
    tied, apart = (timing(model, layout, CLUSTER, 8) for model in (MODEL, loose))
    assert tied.bytes["data"] == 1024 * 256 * 4
    assert apart.bytes["data"] == 0.0
    assert tied.terms["data"] > apart.terms["data"] == 0.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_tied_tensor_on_one_rank_is_not_sent(schedule):
    """A folded pipeline has the embedding and the head on rank 0."""
    layout = replace(LAYOUT, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule].least)
    of_ends = {chunk.rank for chunk in (stage_split.chunks(MODEL, layout)[0], stage_split.chunks(MODEL, layout)[-1])}
    result = timing(MODEL, layout, CLUSTER, 8)
    assert (result.bytes["data"] > 0) is (result.terms["data"] > 0) is (len(of_ends) > 1)
    assert (len(of_ends) == 1) is SCHEDULES[schedule].folded


def test_tied_tensor_is_sent_to_its_owner_and_back():
    half = replace(LAYOUT, pipeline=2, precision="bfloat16")
    ours, theirs = (
        tied_sum(MODEL, replace(half, implementation=name), CLUSTER) for name in ("hpcdist", "megatron-2022")
    )
    one_way = message(1024 * 256 * 2, half, "pipeline", CLUSTER)
    assert (ours.seconds, ours.nbytes) == (pytest.approx(2 * one_way.seconds), one_way.nbytes)
    assert theirs == message(1024 * 256 * 4, half, "pipeline", CLUSTER)  # a sum of main gradients


def test_gradients_overlap_the_last_backward_if_allowed():
    layout = replace(LAYOUT, data=8)
    shown, hidden = (timing(MODEL, replace(layout, overlap=share), CLUSTER, 16) for share in (0.0, 1.0))
    assert shown.hidden_s == 0.0
    assert shown.terms["data"] > 0
    assert hidden.hidden_s > 0
    assert hidden.terms["data"] + hidden.hidden_s == pytest.approx(shown.terms["data"])
    assert shown.bytes["data"] == pytest.approx(2 * 7 / 8 * MODEL.parameters * 4)


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
def test_hidden_time_is_at_most_the_computation(strategy):
    slow = replace(CLUSTER, levels=(LinkLevel(name="slow", devices=0, latency_s=1e-3, bytes_per_s=1e6),))
    layout = replace(LAYOUT, data=4, tensor=2, sequence_parallel=True, strategy=strategy, recompute="full")
    result = timing(MODEL, layout, slow, 16)
    computed_s = sum(result.terms[name] for name in ("forward", "backward", "recompute"))
    assert 0 < result.hidden_s <= computed_s
    assert result.terms["tensor"] > computed_s, "which is as long as messages of another axis take"


def test_slow_input_determines_the_step_time():
    assert timing(MODEL, LAYOUT, CLUSTER, 2).terms["input"] == 0.0
    slow = replace(CLUSTER, storage=replace(CLUSTER.storage, node_read_bytes_per_s=10.0))
    result = timing(MODEL, LAYOUT, slow, 2)
    assert result.step_s == pytest.approx(2 * 128 * 4 / 10.0), "a step is as long as its data takes"


def test_input_bytes_of_pictures_and_features():
    """224 x 224 pixels of three colours are 602,112 bytes as float32, and features take four bytes each."""
    slow = replace(CLUSTER, storage=replace(CLUSTER.storage, node_read_bytes_per_s=1e3))
    pictures = of_config(ModelConfig(kind="convnet", hidden=8), height=224, width=224, channels=3, classes=10)
    assert timing(pictures, LAYOUT, slow, 2).step_s == pytest.approx(2 * 224 * 224 * 3 * 4 / 1e3)
    features = of_config(ModelConfig(kind="mlp", hidden=8), features=4096, classes=10)
    assert timing(features, LAYOUT, slow, 2).step_s == pytest.approx(2 * 4096 * 4 / 1e3)


def test_more_devices_than_the_cluster_are_flagged():
    assert any("128 devices" in flag for flag in timing(MODEL, replace(LAYOUT, data=128), CLUSTER, 256).flags)
    assert not any("devices, and" in flag for flag in timing(MODEL, replace(LAYOUT, data=64), CLUSTER, 256).flags)


def test_impossible_schedules_are_rejected():
    with pytest.raises(ConfigurationError, match="a schedule from a file"):
        timing(MODEL, replace(LAYOUT, pipeline=2, schedule="file"), CLUSTER, 8)
    with pytest.raises(ConfigurationError, match="interleaved"):
        timing(MODEL, replace(LAYOUT, pipeline=4, schedule="interleaved", chunks=2), CLUSTER, 2)


@cases(
    "layout, nbytes",
    (LAYOUT, 4 + 28),
    (replace(LAYOUT, optimizer_slots=1), 4 + 20),
    (replace(LAYOUT, precision="bfloat16"), 2 + 2 + 24 + 2),
    (replace(LAYOUT, precision="bfloat16", implementation="megatron-2022"), 8 + 4 + 8 + 4 + 24 + 2 + 4),
    (
        replace(LAYOUT, precision="float16", implementation="megatron-2022", main_gradients="working"),
        6 + 8 + 4 + 8 + 4 + 24 + 2 + 2,
    ),
)
def test_update_moves_states_and_gradients(layout, nbytes):
    assert update_bytes_per_parameter(layout) == nbytes


def test_zero_and_servers_update_a_share():
    assert updated_parameters(1200, replace(LAYOUT, data=4), 4) == 1200
    assert updated_parameters(1200, replace(LAYOUT, data=4, strategy="zero1"), 4) == 300
    assert updated_parameters(1200, replace(LAYOUT, data=4, strategy="parameter_server"), 4) == 300
    assert updated_parameters(1200, replace(LAYOUT, data=4, strategy="parameter_server", servers=2), 4) == 600


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (4, 1), (2, 2)])
def test_dedicated_servers_share_the_update_of_the_whole_model(pipeline, tensor):
    """This holds for any pipeline split: the largest stage has more than its share."""
    layout = replace(LAYOUT, strategy="parameter_server", servers=4, pipeline=pipeline, tensor=tensor)
    norm_s = collective("allreduce", 4, span(layout, "all", CLUSTER), CLUSTER).seconds
    moves_s = MODEL.parameters / 4 * update_bytes_per_parameter(layout) / (1e11 * 0.8)
    assert timing(MODEL, layout, CLUSTER, 8).terms["update"] == pytest.approx(moves_s + norm_s)


@cases(
    "layout",
    replace(LAYOUT, data=2, recompute="full"),
    replace(LAYOUT, data=2, pipeline=4),
    replace(LAYOUT, pipeline=4, schedule="gpipe", implementation="megatron-2022", tensor=2),
    replace(LAYOUT, pipeline=2, schedule="interleaved", chunks=2, strategy="zero2", data=2),
    replace(LAYOUT, pipeline=4, recompute="full"),
    replace(LAYOUT, pipeline=2, schedule="interleaved", chunks=2, recompute="full"),
    replace(LAYOUT, pipeline=2, schedule="gpipe", recompute="full", implementation="megatron-2022"),
    replace(LAYOUT, tensor=2, sequence_parallel=True),
    replace(LAYOUT, pipeline=4, schedule="zb-h1"),
    replace(LAYOUT, pipeline=4, schedule="zb-v"),
)
def test_timeline_has_every_pass_once_and_ends_with_the_step(layout):
    m = layout.microbatches(32)
    result = timeline(MODEL, layout, CLUSTER, 32)
    assert result.stages == layout.pipeline
    assert result.end_s == pytest.approx(timing(MODEL, layout, CLUSTER, 32, simulate=True).step_s)
    assert {bar.kind for bar in result.bars} <= set(TIMELINE)
    chunks = len(chunk_loads(MODEL, layout, CLUSTER)) if layout.pipeline > 1 else 1
    passes = [(bar.kind, bar.microbatch, bar.chunk) for bar in result.bars if bar.kind == "forward"]
    assert sorted(passes) == sorted(("forward", one, chunk) for one in range(m) for chunk in range(chunks))
    for stage in range(result.stages):
        local_values = [bar for bar in result.bars if bar.stage == stage and bar.kind != "exchange"]
        assert all(
            before.end_s <= bar.begin_s + 1e-12 for before, bar in zip(local_values, local_values[1:], strict=False)
        )


def test_cached_values_of_a_cluster_end_with_it():
    cluster = replace(CLUSTER)
    before = dict(vars(cluster))
    first = timing(MODEL, LAYOUT, cluster, 8).step_s
    assert vars(cluster) == before, "nothing is hidden in it"
    mine, at = cached(cluster, "loads"), id(cluster)
    assert mine and cached(CLUSTER, "loads") is not mine
    assert timing(MODEL, LAYOUT, replace(cluster, device=replace(cluster.device, kernel_s=1.0)), 8).step_s > first
    assert at in compute._KNOWN
    del cluster
    gc.collect()
    assert at not in compute._KNOWN


def test_cached_values_are_not_shared_between_layouts():
    base = timing(MODEL, LAYOUT, CLUSTER, 8).step_s
    others = [
        replace(LAYOUT, microbatch=1),
        replace(LAYOUT, tensor=2),
        replace(LAYOUT, pipeline=2),
        replace(LAYOUT, recompute="full"),
        replace(LAYOUT, precision="bfloat16"),
        replace(LAYOUT, implementation="megatron-2022"),
    ]
    assert len({base, *(timing(MODEL, layout, CLUSTER, 8).step_s for layout in others)}) == 7


def test_expert_rows_are_sent_and_returned_in_both_directions():
    """Loads are even, as `tests/ranks/strategies/test_experts.py` counts in a run."""
    mixture = ModelConfig(layers=6, hidden=64, heads=4, experts=4, experts_per_token=2, expert_hidden=128)
    model, layout = of_config(mixture, context=32), replace(LAYOUT, data=4, expert=2, algorithm="ring")
    rows, counts = 2 * 32 * layout.microbatch, 8 * 4
    assert timing(model, layout, CLUSTER, 8).bytes["expert"] == 6 * (4 * rows * 64 * 4 + counts) / 2
    whole = timing(model, replace(layout, tensor=2, sequence_parallel=True), CLUSTER, 8).bytes["expert"]
    assert whole == 6 * (4 * rows * 64 * 4 + counts) / 2, "each tensor rank routes all tokens"


@pytest.mark.full
def test_planned_rows_on_context_ranks_match_a_run():
    """The sums are over all ranks, for any loads.

    Each rank sends its rows, and gathers the counts of chosen experts.
    """
    sizes = "layers=2 hidden=16 heads=2 experts=4 expert_hidden=8 data.context=24 global_batch=8 precision.mode=float32"
    keys = recipe_keys(f"{sizes} parallel.context=2 expert=4 microbatches=2 recompute=true algorithm=ring")

    def body(comm):
        trainer = trainer_of(comm, keys)
        rows, counts = [], []
        travel, axis = trainer.model.operations.experts.travel.axis, trainer.context.context_axis
        exchange, gather, count = travel.exchange, axis.all_gather, travel.counts
        travel.exchange = lambda *args: (rows.append(args[0].nbytes), exchange(*args))
        travel.counts = lambda sent: rows.append(sent.nbytes) or count(sent)
        axis.all_gather = lambda local_data: counts.append((result := gather(local_data)).nbytes) or result
        losses(trainer, 1)
        return sum(rows), sum(counts)

    result = np.array(run_threads(4, body))
    layout = replace(LAYOUT, data=2, context=2, recompute="full", algorithm="ring")
    mixed, dense = (
        timing(of_config(ModelConfig(layers=2, hidden=16, heads=2, **keys), context=24), layout, CLUSTER, 8).bytes
        for keys, layout in (({"experts": 4, "expert_hidden": 8}, replace(layout, expert=4)), ({}, layout))
    )
    assert mixed["expert"] * 4 / 3 == result[:, 0].mean(), "of which one in four stays, where loads are even"
    assert set(result[:, 1] / 2) == {mixed["context"] - dense["context"]}
