"""The exchange of a plan: volumes of the literature, bytes of the strategies, and the overlap with the backward."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from harness.made_plans import cluster_of
from harness.marks import cases
from harness.rank_run import EXCHANGES, RankRun, optimizer_of
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.compression.casts import BFloat16
from hpcdist.compression.powersgd import wire_bytes
from hpcdist.compression.topk import TopK
from hpcdist.compression.uniform import Blockwise
from hpcdist.errors import UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.planner.cluster.hardware import Device, LinkLevel
from hpcdist.planner.layout import COMPRESSIONS, ParallelLayout
from hpcdist.planner.time.exchange import exchange
from hpcdist.planner.time.gradient_payloads import gradient_item_bytes, payload, summed_item_bytes
from hpcdist.strategies.build import server_exchange
from hpcdist.strategies.parameter_server.config import ParameterServerConfig

RATE, ALPHA = 1e9, 1e-6
CLUSTER = cluster_of(
    Device(
        name="d", peak_flops={"float32": 1e13}, matmul={}, memory_bytes=1e9, memory_bytes_per_s=1e12, memory_share=1.0
    ),
    LinkLevel(name="flat", devices=0, latency_s=ALPHA, bytes_per_s=RATE),
)
N = 1e8  # parameters
MODEL = ModelConfig(layers=2, hidden=64, heads=2, vocabulary=256)
STEPS = 3


def make_layout(strategy="allreduce", p=8, **keys):
    keys = {"precision": "float32", "overlap": 0.0, **keys}
    return replace(ParallelLayout(data=p, strategy=strategy), **keys)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("p", [2, 8, 64])
def test_volumes_match_the_zero_paper(p, m):
    """arXiv:1910.02054, section 7: 2 Psi for stages 0 to 2, 3 Psi for stage 3, here with (p-1)/p and micro-batches."""
    psi = 4 * N * (p - 1) / p
    for strategy, volume in (("allreduce", 2), ("zero1", 2), ("zero2", 1 + m), ("zero3", 3 * m)):
        result = exchange(N, make_layout(strategy, p), CLUSTER, 1.0, m)
        assert result.nbytes == pytest.approx(volume * psi)
        assert result.hidden_s == 0.0
        assert result.exposed_s == pytest.approx(volume * psi / RATE, rel=1e-2)


def counted_run(comm, strategy, microbatches, dedicated, working):
    """Return a small gpt on one rank with counted messages."""
    config, make = None, EXCHANGES.get(strategy)
    if make is None:
        config = ParameterServerConfig(servers=dedicated, placement="dedicated" if dedicated else "colocated")
        make = partial(server_exchange, config=config)
    keys = {"optimizer": optimizer_of(clip_norm=0.0), "working": dtype_of(working) if working else None}
    return RankRun(
        comm, make, config=MODEL, dtype="float32", servers=config, microbatches=microbatches, total_steps=STEPS, **keys
    )


def sent_bytes(ranks, strategy, microbatches, dedicated=0, working=""):
    """Return the bytes of a step by rank, and the parameters of the units."""
    data = np.random.default_rng(3).integers(0, 256, (16, 9)).astype(np.uint8)

    def body(comm):
        run = counted_run(comm, strategy, microbatches, dedicated, working)
        run.step(data)  # communicators are split, scratch memory is taken
        with count_traffic(comm) as traffic:
            run.step(data)
        assert not traffic.unknown
        return traffic.sent_bytes, [sum(spec.size for spec in stage.tensors()) for stage in run.model.stages]

    results = run_threads(ranks, body)
    return [each for each, _ in results], results[0][1]


def planned_exchange(units, layout, microbatches):
    ends = units[0], units[-1]
    return exchange(sum(units), layout, CLUSTER, 1.0, microbatches, units=len(units), ends=ends)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
@pytest.mark.full_except("zero3-1")
def test_planned_bytes_match_the_strategies(strategy, microbatches):
    for p in (2, 4):
        result, units = sent_bytes(p, strategy, microbatches)
        output = planned_exchange(units, make_layout(strategy, p, algorithm="ring"), microbatches)
        assert output.nbytes == pytest.approx(max(result), rel=0.01)


def test_planned_bytes_match_the_parameter_server():
    colocated, units = sent_bytes(4, "parameter_server", 1)
    output = planned_exchange(units, make_layout("parameter_server", 4), 1)
    assert output.nbytes == pytest.approx(max(colocated), rel=0.01)
    for dedicated in (1, 2):
        result, units = sent_bytes(3 + dedicated, "parameter_server", 1, dedicated)
        output = planned_exchange(units, make_layout("parameter_server", 3, servers=dedicated), 1)
        assert output.nbytes == pytest.approx(max(result[:3]), rel=0.01)
        assert output.server_nbytes == pytest.approx(max(result[3:]), rel=0.01)


def test_incast_grows_with_workers_and_falls_with_servers():
    def took(workers, count):
        return exchange(N, make_layout("parameter_server", workers, servers=count), CLUSTER, 0.0).exposed_s

    psi = 4 * N
    sums = 3 / 1e12 * psi
    assert took(64, 1) == pytest.approx(64 * (2 * psi / RATE + sums + 2 * ALPHA))
    assert took(64, 4) == pytest.approx(took(64, 1) / 4, rel=1e-3)
    assert took(640, 4) == pytest.approx(10 * took(64, 4), rel=1e-3)
    # Servers for all: what is left is the worker's own link. Colocated is no slower than as many dedicated ones.
    assert took(64, 64) == pytest.approx(2 * psi / RATE, rel=0.01)
    colocated = exchange(N, make_layout("parameter_server", 64), CLUSTER, 0.0)
    assert colocated.exposed_s == pytest.approx(2 * psi * 63 / 64 / RATE, rel=0.01)


def test_servers_share_the_link_of_their_box():
    near = LinkLevel(name="near", devices=8, latency_s=ALPHA, bytes_per_s=100 * RATE)
    far = LinkLevel(name="far", devices=0, latency_s=ALPHA, bytes_per_s=RATE, alone_bytes_per_s=4 * RATE)
    deep = replace(CLUSTER, levels=(near, far))

    def pulled(count):
        return exchange(N, make_layout("parameter_server", 512, servers=count), deep, 0.0).exposed_s * count

    assert pulled(2) == pytest.approx(pulled(1), rel=1e-3)  # 4 GB/s each
    assert pulled(8) > 3.5 * pulled(1)  # 1 GB/s each, the box has 8


@pytest.mark.parametrize("units", [1, 10])
def test_gradients_overlap_the_last_backward(units):
    whole = exchange(N, make_layout(overlap=0.0), CLUSTER, 1.0, units=units).exposed_s
    for backward_s in (0.0, 0.2 * whole, 10.0):
        for overlap in (0.0, 0.5, 1.0):
            result = exchange(N, make_layout(overlap=overlap), CLUSTER, backward_s, 4, units=units)
            assert result.exposed_s + result.hidden_s == pytest.approx(whole, rel=1e-3)
            hidden_s = min(backward_s, overlap * whole * (units - 1) / units)
            assert result.exposed_s == pytest.approx(whole - hidden_s, rel=1e-3)


def test_bucket_length_grows_with_the_latency():
    """A ring of 10,000 ranks has 20 ms of latency.

    A hundred of them would take longer than the computation that hides them.
    """
    layout = make_layout(p=10_000, overlap=1.0, algorithm="ring")
    whole_s = 2 * 4 * N / RATE + 20e-3
    assert exchange(N, layout, CLUSTER, 1.0, units=100).exposed_s < 0.2 * whole_s
    short = exchange(N, layout, CLUSTER, 0.01, units=100)  # little computation to hide the exchange: a few
    assert short.exposed_s < 1.12 * whole_s and short.bucket_bytes > 0.1 * 4 * N


def test_longer_buckets_are_flagged_and_need_memory():
    """The exposed time, the bucket length and its memory belong to the same plan."""
    layout = make_layout(p=10_000, overlap=1.0, algorithm="ring")
    given = {"units": 100, "forward_s": 0.0}
    result = exchange(N, layout, CLUSTER, 0.1, **given)
    assert result.bucket_bytes > 4 * BUCKET_BYTES
    (flag,) = result.flags
    assert f"set communication.bucket_bytes = {math.ceil(result.bucket_bytes)}," in flag
    whole_s = 2 * 4 * N / RATE + round(4 * N / result.bucket_bytes) * 20e-3
    assert result.exposed_s + result.hidden_s == pytest.approx(whole_s, rel=1e-3)
    # As far as there is memory for them: a ring needs an additional share of the bucket, here a ten thousandth.
    spare = (result.bucket_bytes - BUCKET_BYTES) / 10_000
    assert exchange(N, layout, CLUSTER, 0.1, spare_bytes=spare * 1.001, **given) == result
    less = exchange(N, layout, CLUSTER, 0.1, spare_bytes=spare * 0.999, **given)
    assert less.bucket_bytes < result.bucket_bytes and less.exposed_s > result.exposed_s
    none = exchange(N, layout, CLUSTER, 0.1, spare_bytes=0.0, **given)
    assert none.bucket_bytes <= BUCKET_BYTES and not none.flags
    # All hides: no longer than they are by default, and nothing is asked for.
    calm = exchange(N, make_layout(p=8, overlap=1.0), CLUSTER, 10.0, units=10)
    assert BUCKET_BYTES / 2 < calm.bucket_bytes <= BUCKET_BYTES and not calm.flags
    for strategy in ("zero1", "parameter_server"):
        assert exchange(N, make_layout(strategy), CLUSTER, 1.0).bucket_bytes == 0


def test_each_compressed_bucket_has_a_latency():
    layout = make_layout(p=64, compression="int8")
    slow = replace(CLUSTER, levels=(LinkLevel(name="flat", devices=0, latency_s=1e-3, bytes_per_s=RATE),))
    free = replace(CLUSTER, levels=(LinkLevel(name="flat", devices=0, latency_s=0.0, bytes_per_s=RATE),))
    late, prompt = (exchange(N, layout, cluster, 0.0, spare_bytes=0.0) for cluster in (slow, free))
    assert late.exposed_s - prompt.exposed_s == pytest.approx(math.ceil(4 * N / BUCKET_BYTES) * 2 * 63 * 1e-3)
    assert exchange(N, layout, slow, 0.0).exposed_s < late.exposed_s / 2


def test_zero_overlaps_the_allowed_transfers():
    half_s = 4 * N * 7 / 8 / RATE  # one reduce-scatter, or one all-gather
    keys = {"units": 100, "forward_s": 50.0}
    one = exchange(N, make_layout("zero1", overlap=1.0), CLUSTER, 100.0, 4, **keys)
    assert one.exposed_s == pytest.approx(half_s * 1.01, rel=1e-2), "parameters come after the update"
    two = exchange(N, make_layout("zero2", overlap=1.0), CLUSTER, 100.0, 4, **keys)
    assert two.hidden_s == pytest.approx(4 * half_s * 0.99, rel=1e-2)
    three = exchange(N, make_layout("zero3", overlap=1.0), CLUSTER, 100.0, 4, **keys)
    assert three.hidden_s == pytest.approx(12 * half_s * 0.99, rel=1e-2)
    short = exchange(N, make_layout("zero3", overlap=1.0), CLUSTER, 0.1, 4, units=100, forward_s=0.05)
    assert short.hidden_s == pytest.approx(4 * 0.15)
    assert short.exposed_s == pytest.approx(12 * half_s - 0.6, rel=1e-2)


def test_pipeline_with_recomputation_gathers_parameters_again():
    plain = exchange(N, make_layout("zero3", pipeline=2), CLUSTER, 1.0, 3)
    again = exchange(N, make_layout("zero3", pipeline=2, recompute="full"), CLUSTER, 1.0, 3)
    assert again.nbytes / plain.nbytes == pytest.approx(4 / 3)
    alone = exchange(
        N, make_layout("zero3", recompute="full"), CLUSTER, 1.0, 3
    )  # layer by layer: one use follows the other
    assert alone.nbytes == pytest.approx(plain.nbytes)


def test_published_zero3_sends_tensor_by_tensor():
    ours, published = (
        exchange(1e6, make_layout("zero3", implementation=name, algorithm="ring"), CLUSTER, 0.0, 3, units=10)
        for name in ("hpcdist", "megatron-2022")
    )
    assert published.nbytes == pytest.approx(ours.nbytes)
    assert published.exposed_s - ours.exposed_s == pytest.approx(3 * 3 * 10 * 11 * 7 * ALPHA)


def test_expert_gradients_are_exchanged_between_their_replicas():
    result = exchange(N, make_layout("allreduce", 16, expert=4), CLUSTER, 0.0, expert_parameters=N / 2)
    assert result.nbytes == pytest.approx(2 * 4 * N / 2 * (15 / 16 + 3 / 4))
    folded = make_layout("allreduce", 2, context=8, expert=4)
    assert exchange(N, folded, CLUSTER, 0.0, expert_parameters=N / 2).nbytes == pytest.approx(result.nbytes)
    everyone = make_layout("allreduce", 16, expert=16)
    assert exchange(N, everyone, CLUSTER, 0.0, expert_parameters=N / 2).nbytes == pytest.approx(4 * N * 15 / 16)


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero3", "parameter_server"])
def test_context_ranks_exchange_like_data_ranks(strategy):
    """Their gradients come from other tokens, so they are summed together with the data axis."""
    plain = exchange(N, make_layout(strategy, 32), CLUSTER, 1.0, 2)
    assert exchange(N, make_layout(strategy, 8, context=4), CLUSTER, 1.0, 2) == plain
    assert exchange(N, make_layout(strategy, 1, context=32), CLUSTER, 1.0, 2) == plain


def test_wire_types_follow_the_implementation():
    def of(**keys):
        return gradient_item_bytes(make_layout(**{"precision": "bfloat16", **keys}))

    # Main gradients are Megatron's. To owners of ours 16 bits travel; in an allreduce of ours float32 sums do.
    for name in ("float32", "working"):
        assert of(strategy="zero1", main_gradients=name) == of(strategy="zero3", main_gradients=name) == 2
        assert of(strategy="parameter_server", main_gradients=name) == 2
        assert (
            of(main_gradients=name)
            == summed_item_bytes(make_layout("zero1", precision="bfloat16", main_gradients=name))
            == 4
        )
    for strategy in ("allreduce", "zero1"):
        assert of(strategy=strategy, implementation="megatron-2022") == 4
        assert of(strategy=strategy, implementation="megatron-2022", main_gradients="working") == 2
    assert of(precision="float64") == 8 and of(precision="float32") == 4


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "parameter_server"])
def test_planned_bytes_of_16_bit_gradients_match_a_run(strategy):
    """An allreduce sends float32 sums; owners and servers get 16 bits. The bytes are measured in a run."""
    result, units = sent_bytes(4, strategy, 1, working="bfloat16")
    output = planned_exchange(units, make_layout(strategy, 4, algorithm="ring", precision="bfloat16"), 1)
    assert output.nbytes == pytest.approx(max(result), rel=0.02)
    assert bool(output.flags) == (strategy != "allreduce")  # what does not go by a ring says so


def test_16_bit_gradients_are_sent_to_each_owner():
    half, whole = (
        exchange(1e6, make_layout("zero1", precision=name, algorithm="ring"), CLUSTER, 0.0, units=10)
        for name in ("bfloat16", "float32")
    )
    assert half.algorithm == "pairs + ring" and whole.algorithm == "ring"
    published = make_layout("zero1", precision="bfloat16", algorithm="ring", implementation="megatron-2022")
    assert exchange(1e6, published, CLUSTER, 0.0, units=10).algorithm == "ring"


@cases(
    "strategy, keys",
    ("zero3", {"algorithm": "tree"}),
    ("zero1", {"algorithm": "tree", "implementation": "megatron-2022"}),
    ("parameter_server", {"algorithm": "ring"}),
    ("parameter_server", {"algorithm": "ring", "servers": 2}),
    ("allreduce", {"algorithm": "tree", "compression": "int8"}),
    ("allreduce", {"algorithm": "tree", "compression": "topk"}),
)
def test_unused_algorithm_is_flagged(strategy, keys):
    asked, auto = (
        exchange(N, make_layout(strategy, **{**keys, **more}), CLUSTER, 1.0) for more in ({}, {"algorithm": "auto"})
    )
    messages = [flag for flag in asked.flags if flag.startswith(f"algorithm = {keys['algorithm']}: ")]
    assert messages and not any("algorithm =" in flag for flag in auto.flags)
    assert asked.exposed_s == auto.exposed_s


SHAPES = [(1024, 4096), (4096, 1024), (1024, 3072)]


@pytest.mark.parametrize("name", [name for name in COMPRESSIONS if name != "none"])
def test_planned_payloads_match_the_compressors(name):
    values = sum(a * b for a, b in SHAPES)
    result = payload(name, float(values), 8, matrices=tuple((*shape, 1) for shape in SHAPES))
    assert result is not None
    ours = {
        "bfloat16": lambda: BFloat16().payload_bytes(values),
        "int8": lambda: Blockwise(bits=8).payload_bytes(values),
        "int4": lambda: Blockwise(bits=4).payload_bytes(values),
        "topk": lambda: TopK(density=0.01).payload_bytes(values),
        "powersgd": lambda: wire_bytes(SHAPES, 4),
        "onebit": lambda: values // 8 + 4 * 8,
    }
    assert result.nbytes == pytest.approx(ours[name](), rel=1e-3)


def test_compression_pays_on_slow_links_and_not_on_fast_ones():
    fast = replace(CLUSTER, levels=(LinkLevel(name="flat", devices=0, latency_s=ALPHA, bytes_per_s=900e9),))
    for name, least in (("bfloat16", 1.9), ("int8", 3.5), ("int4", 6.5), ("onebit", 20.0)):
        dense, coded = (exchange(N, make_layout(compression=way), CLUSTER, 0.0).exposed_s for way in ("none", name))
        assert dense / coded > least
    dense, coded = (exchange(N, make_layout(compression=way), fast, 0.0).exposed_s for way in ("none", "bfloat16"))
    assert coded > dense
    assert "square" in exchange(N, make_layout(compression="powersgd"), CLUSTER, 0.0).flags[0]


def test_compression_between_nodes_sums_inside_a_node_first():
    """Between 8 nodes of 8 ranks: float32 sums in a node, an eighth of the payload per rank outside."""
    near = LinkLevel(name="near", devices=8, latency_s=ALPHA, bytes_per_s=300 * RATE)
    deep = replace(CLUSTER, levels=(near, LinkLevel(name="far", devices=0, latency_s=ALPHA, bytes_per_s=RATE)))
    result = exchange(N, make_layout(p=64, compression="bfloat16"), deep, 0.0)
    inside, outside = 2 * 4 * N * 7 / 8, 2 * 2 * N / 8 * 7 / 8
    assert result.algorithm == "bfloat16 owned between nodes"
    assert result.nbytes == pytest.approx(inside + outside)
    coding_s = 32 * N / 8 / 1e12
    assert result.exposed_s == pytest.approx(
        inside / 300 / RATE + outside / RATE + coding_s, rel=0.05
    )  # and latencies of 4 MiB
    for name in ("bfloat16", "int8", "int4", "onebit"):
        dense, coded = (exchange(N, make_layout(p=64, compression=way), deep, 0.0) for way in ("none", name))
        assert coded.exposed_s < dense.exposed_s
    flat = exchange(N, make_layout(p=8, compression="int8"), deep, 0.0)  # one node: nothing is between nodes
    assert flat.algorithm == "int8 owned"


def test_compression_without_effect_is_ignored_and_flagged():
    keys = {"precision": "bfloat16", "main_gradients": "working", "implementation": "megatron-2022"}
    for strategy in ("allreduce", "zero1", "parameter_server"):
        plain, cast = (
            exchange(N, make_layout(strategy, compression=way, **keys), CLUSTER, 1.0) for way in ("none", "bfloat16")
        )
        assert cast._replace(flags=()) == plain
        assert "gradients are sent uncompressed" in cast.flags[0]
    # An allreduce of ours sends float32 sums of 16-bit gradients: there is something to save.
    plain, cast = (
        exchange(N, make_layout(compression=way, precision="bfloat16"), CLUSTER, 1.0) for way in ("none", "bfloat16")
    )
    assert cast.nbytes == pytest.approx(plain.nbytes / 2)


def test_compression_that_costs_time_is_flagged():
    fast = replace(CLUSTER, levels=(LinkLevel(name="flat", devices=0, latency_s=ALPHA, bytes_per_s=9e12),))
    assert "uncompressed gradients" in exchange(N, make_layout(compression="int8"), fast, 0.0).flags[0]


def test_gathered_payloads_grow_with_the_ranks():
    """Every rank gets the payloads of all ranks: 8 bytes of 1 % from each of p-1 others."""
    for p in (2, 8, 128):
        assert exchange(N, make_layout(p=p, compression="topk"), CLUSTER, 0.0).nbytes == pytest.approx(
            (p - 1) * 0.08 * N
        )


def test_one_replica_exchanges_nothing():
    for strategy in ("allreduce", "zero3"):
        assert exchange(N, make_layout(strategy, 1), CLUSTER, 1.0) == (0.0, 0.0, 0.0, "none", (), 0.0, 0.0)
    alone = exchange(N, make_layout("parameter_server", 1, servers=1), CLUSTER, 1.0)
    assert alone.nbytes == 4 * N and alone.server_nbytes == 4 * N


def test_bad_exchange_options_name_the_choices():
    with pytest.raises(UsageError, match="strategy 'zero4'; choose one of allreduce"):
        exchange(N, make_layout("zero4"), CLUSTER, 1.0)
    with pytest.raises(UsageError, match="compression 'zip'; choose one of none"):
        exchange(N, make_layout(compression="zip"), CLUSTER, 1.0)
