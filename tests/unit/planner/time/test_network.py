"""Costs of collectives match the literature, `collectives.costs`, and the bytes sent by the algorithms."""

import math
from dataclasses import replace

import numpy as np
import pytest

from harness.made_plans import cluster_of
from hpcdist import collectives
from hpcdist.arrays.ranges import split
from hpcdist.collectives.cost_model import CROWDED, NODE, WIRE, LinkParameters, MachineCosts, Topology
from hpcdist.collectives.cost_model import FORMULAS as MEASURED
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import UsageError
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Device, LinkLevel, MeasuredFit
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.time.network import collective, group, message, span

DEVICE = Device(name="d", peak_flops={}, matmul={}, memory_bytes=1e9, memory_bytes_per_s=1e12)
NEAR = LinkLevel(name="near", devices=8, latency_s=2e-6, bytes_per_s=300e9)
FAR = LinkLevel(name="far", devices=0, latency_s=10e-6, bytes_per_s=20e9, alone_bytes_per_s=80e9)
ALPHA, BETA, GAMMA = 3e-6, 1 / 40e9, 0.0


def made(*levels, fits=()):
    return cluster_of(DEVICE, *levels, fits=fits)


FLAT = made(LinkLevel(name="flat", devices=0, latency_s=ALPHA, bytes_per_s=1 / BETA))
DEEP = made(NEAR, FAR)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 64, 1000])
@pytest.mark.parametrize("n", [1.0, 1e5, 1e9])
def test_costs_on_one_level_match_thakur(p, n):
    reach = span(ParallelLayout(data=p), "data", FLAT)
    for operation, passes in (("allreduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        result = collective(operation, n, reach, FLAT, "ring")
        assert result.seconds == pytest.approx(passes * ((p - 1) * ALPHA + (p - 1) / p * n * BETA))
        assert result.nbytes == pytest.approx(passes * (p - 1) / p * n)
    if p & (p - 1) == 0:
        log = math.log2(p)
        doubling = collective("allreduce", n, reach, FLAT, "recursive_doubling")
        assert doubling.seconds == pytest.approx(log * (ALPHA + n * BETA))
        halving = collective("allreduce", n, reach, FLAT, "rabenseifner")
        assert halving.seconds == pytest.approx(2 * log * ALPHA + 2 * (p - 1) / p * n * BETA)
        assert halving.nbytes == pytest.approx(2 * (p - 1) / p * n)
    assert collective("all_to_all", n, reach, FLAT).seconds == pytest.approx((p - 1) * ALPHA + (p - 1) / p * n * BETA)


@pytest.mark.parametrize("p", [2, 4, 16, 1024])
def test_tree_uses_the_best_number_of_segments(p):
    """Sanders et al. 2009: the best number of segments, found by trial, matches the closed form."""
    n, depth = 64e6, math.ceil(math.log2(p))
    turns = [2 * (2 * depth + 2 * k) * (ALPHA + n / (2 * k) * BETA) for k in range(1, 20000)]
    result = collective("allreduce", n, span(ParallelLayout(data=p), "data", FLAT), FLAT, "tree")
    assert result.seconds == pytest.approx(min(turns), rel=1e-4)
    alone = collective("broadcast", n, span(ParallelLayout(data=p), "data", FLAT), FLAT, "tree")
    assert alone.seconds == pytest.approx(min(turns) / 2, rel=1e-4)


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "rabenseifner", "circulant"])
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (5, 1), (8, 1), (8, 2), (8, 8), (4, 16)])
@pytest.mark.parametrize("n", [4096.0, 64e6])
def test_costs_on_two_levels_match_the_algorithm_ranking(name, ranks, nodes, n):
    """Each of ``nodes`` has ``ranks``: NODE inside, WIRE for one message of a node, CROWDED for all ranks at once."""
    near = LinkLevel(name="near", devices=ranks, latency_s=2e-6, bytes_per_s=300e9)
    cluster = made(near, FAR)
    crowded = LinkParameters(FAR.latency_s, 1 / FAR.bytes_per_s)
    wire = LinkParameters(FAR.latency_s, 1 / min(FAR.alone_bytes_per_s, FAR.bytes_per_s * ranks))
    machine = MachineCosts({NODE: LinkParameters(2e-6, 1 / 300e9), WIRE: wire, CROWDED: crowded}, 0.0)
    expected = MEASURED[name](Topology((ranks,) * nodes), n)
    result = collective("allreduce", n, span(ParallelLayout(data=ranks * nodes), "data", cluster), cluster, name)
    assert result.seconds == pytest.approx(expected.seconds(machine))
    if ranks != 5:  # else pairs come first, whose receives are on the path, too
        assert result.nbytes == pytest.approx(expected.nbytes)


def test_hierarchical_cost_is_the_sum_of_its_tiers():
    n, reach = 1e9, span(ParallelLayout(data=64), "data", DEEP)
    inside = 7 * NEAR.latency_s + 7 / 8 * n / NEAR.bytes_per_s
    between = 7 * FAR.latency_s + 7 / 8 * n / 8 / FAR.bytes_per_s
    for half in ("reduce_scatter", "all_gather"):
        result = collective(half, n, reach, DEEP, "hierarchical")
        assert result.seconds == pytest.approx(inside + between)
        assert result.nbytes == pytest.approx(63 / 64 * n)
    whole = collective("allreduce", n, reach, DEEP, "hierarchical")
    longest = 2 * 7 / 8 * n / 8 / FAR.bytes_per_s  # tiers overlap but for a segment
    assert longest < whole.seconds < 1.05 * longest + 28 * FAR.latency_s
    short = collective("allreduce", 1e3, reach, DEEP, "hierarchical")  # one segment: they add up
    assert short.seconds == pytest.approx(
        14 * (NEAR.latency_s + FAR.latency_s) + 2 * 7 / 8 * 1e3 * (1 / NEAR.bytes_per_s + 1 / 8 / FAR.bytes_per_s)
    )


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(data=1000),
        ParallelLayout(data=256, tensor=8),
        ParallelLayout(data=64, implementation="megatron-2022"),
    ],
)
@pytest.mark.parametrize("n", [1e3, 1e6, 1e10])
def test_no_allreduce_beats_the_bandwidth_bound(layout, n):
    """Patarasuk and Yuan 2009: 2 (p-1)/p n leave each device, so the fastest link bounds every allreduce."""
    reach, p = span(layout, "data", DEEP), layout.data
    for name in ("auto", "ring", "tree", "hierarchical", "rabenseifner", "recursive_doubling", "circulant"):
        result = collective("allreduce", n, reach, DEEP, name)
        assert result.nbytes >= 2 * (p - 1) / p * n * (1 - 1e-12)
        best = min(min(tier.crowded / tier.lanes, tier.single) for tier in reach.tiers)
        assert result.seconds > 2 * (p - 1) / p * n * best * (1 - 1e-12)
        assert (
            result.seconds >= collective("allreduce", n, reach, DEEP, "auto").seconds
            or layout.implementation != "hpcdist"
        )


def sent_bytes(ranks, call, per_node=None):
    def body(comm):
        buffer = np.ones(64 * 840, np.float64)
        call(comm, buffer)  # communicators are split, scratch memory is taken
        with count_traffic(comm) as traffic:
            call(comm, buffer)
        assert not traffic.unknown
        return traffic.sent_bytes

    return run_threads(ranks, body, per_node)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["ring", "tree", "rabenseifner", "recursive_doubling", "circulant"])
def test_allreduce_bytes_match_the_algorithms(name, p):
    ours = {"tree": "double_tree"}.get(name, name)
    most = max(sent_bytes(p, lambda comm, buffer: collectives.allreduce(comm, buffer, ours)))
    result = collective("allreduce", 64 * 840 * 8, span(ParallelLayout(data=p), "data", FLAT), FLAT, name)
    assert result.nbytes == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize("name", ["ring", "hierarchical", "circulant"])
def test_reduce_scatter_and_all_gather_bytes_match_the_algorithms(name):
    kind = collectives.SHARDED[name]
    cluster = made(LinkLevel(name="near", devices=2, latency_s=1e-6, bytes_per_s=1e11), FAR)
    reach = span(ParallelLayout(data=4), "data", cluster)

    def scatter(comm, buffer):
        kind.reduce_scatter(comm, buffer, kind.shares(comm, buffer.size, 8))

    def gather(comm, buffer):
        kind.all_gather(comm, buffer, kind.shares(comm, buffer.size, 8))

    for operation, call in (("reduce_scatter", scatter), ("all_gather", gather)):
        result = collective(operation, 64 * 840 * 8, reach, cluster, name)
        assert result.nbytes == pytest.approx(max(sent_bytes(4, call, 2)), rel=0.01)


def test_axis_spans_cross_the_expected_levels():
    """The order is tensor (fastest), context, data, pipeline: 2 x 2 x 16 x 4 on boxes of 8."""
    layout = ParallelLayout(tensor=2, context=2, data=16, pipeline=4)
    assert [(tier.fan, tier.latency_s) for tier in span(layout, "tensor", DEEP).tiers] == [(2, NEAR.latency_s)]
    assert [tier.fan for tier in span(layout, "context", DEEP).tiers] == [2]
    assert [tier.fan for tier in span(layout, "data", DEEP).tiers] == [2, 8]
    (far,) = span(layout, "pipeline", DEEP).tiers
    assert (far.fan, far.single) == (4, 1 / FAR.bytes_per_s)  # all eight devices of a box send to the next stage
    assert [tier.fan for tier in span(layout, "all", DEEP).tiers] == [8, 32]
    experts = ParallelLayout(tensor=2, data=16, expert=4)
    assert [tier.fan for tier in span(experts, "expert", DEEP).tiers] == [4]
    assert [tier.fan for tier in span(experts, "expert_replicas", DEEP).tiers] == [4]
    folded = span(replace(experts, data=4, context=4), "expert", DEEP)  # those on the context axis are neighbours
    assert (folded.size, folded.stride) == (4, 2) and folded == span(experts, "expert", DEEP)
    replicas = span(layout, "replicas", DEEP)  # data and context
    assert (replicas.size, replicas.stride, [tier.fan for tier in replicas.tiers]) == (32, 2, [4, 8])
    with pytest.raises(UsageError, match="axis 'rows'"):
        span(layout, "rows", DEEP)


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
def test_concurrent_groups_share_the_links_of_a_box(stride):
    """``stride`` groups of each box of 8 send one message out of it at a time, at most 80 of its 160 GB/s each."""
    rate = 1 / group(64, stride, 64 * stride, DEEP.levels).tiers[-1].single
    assert rate == pytest.approx(min(80e9, 8 * 20e9 / min(stride, 8)))


@pytest.mark.parametrize("size", [2, 3, 6, 7, 12, 100, 1000, 12500])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_fans_multiply_to_the_size_for_any_box_size(size, stride):
    for total in (size * stride, 4 * size * stride):
        reach = group(
            size, stride, total, (NEAR, LinkLevel(name="row", devices=32, latency_s=5e-6, bytes_per_s=1e10), FAR)
        )
        assert math.prod(tier.fan for tier in reach.tiers) == size
        lanes = 1
        for tier in reach.tiers:
            assert tier.lanes == lanes
            lanes *= tier.fan
    uneven = group(12, 1, 24, DEEP.levels)
    assert [tier.fan for tier in uneven.tiers] == [4, 3]
    assert "do not fill boxes of 8 evenly" in uneven.flags[0]
    assert not group(16, 1, 32, DEEP.levels).flags


def test_channels_use_the_links_of_all_members():
    n = 1e10
    ours = collective("allreduce", n, span(ParallelLayout(data=64), "data", DEEP), DEEP, "ring")
    theirs = collective(
        "allreduce", n, span(ParallelLayout(data=64, implementation="megatron-2022"), "data", DEEP), DEEP, "ring"
    )
    assert ours.seconds == pytest.approx(2 * 63 / 64 * n / 80e9, rel=1e-2)
    assert theirs.seconds == pytest.approx(2 * 63 / 64 * n / 160e9, rel=1e-2)
    borrowed = span(ParallelLayout(data=64, library="nccl"), "data", DEEP)
    assert collective("allreduce", n, borrowed, DEEP, "ring") == theirs
    plain = span(ParallelLayout(data=64, implementation="megatron-2022", library="mpi"), "data", DEEP)
    assert collective("allreduce", n, plain, DEEP, "ring") == ours
    # Hops of a ring of 64 over 8 boxes: 56 inside, 7 between them, and the way once more.
    tiny = collective(
        "allreduce", 1e-3, span(ParallelLayout(data=64, implementation="megatron-2022"), "data", DEEP), DEEP, "ring"
    )
    assert tiny.seconds == pytest.approx(2 * (56 * NEAR.latency_s + 7 * FAR.latency_s))


def test_measured_fits_take_precedence():
    piecewise = MeasuredFit(
        operation="allreduce",
        ranks=4,
        until_bytes=(1e3, 1e6),
        latency_s=(1e-6, 5e-6),
        s_per_byte=(1e-9, 2e-9),
        from_bytes=64,
    )
    beside = MeasuredFit(
        operation="message", ranks=2, until_bytes=(1e6,), latency_s=(7e-6,), s_per_byte=(3e-9,), from_bytes=1
    )
    cluster = made(NEAR, FAR, fits=(piecewise, beside))
    reach = span(ParallelLayout(data=4), "data", cluster)
    for nbytes, seconds in ((500.0, 1.5e-6), (1e5, 2.05e-4)):
        result = collective("allreduce", nbytes, reach, cluster)
        assert (result.seconds, result.nbytes) == (pytest.approx(seconds), pytest.approx(1.5 * nbytes))
        assert result.algorithm == "measured auto" and not result.flags
    assert "extrapolated" in collective("allreduce", 1e7, reach, cluster).flags[0]
    assert collective("allreduce", 500.0, reach, cluster, "ring").algorithm == "ring"
    assert "measured" not in collective("all_gather", 500.0, reach, cluster).algorithm
    assert (
        "measured"
        not in collective("allreduce", 500.0, span(ParallelLayout(data=8), "data", cluster), cluster).algorithm
    )
    apart = span(ParallelLayout(data=4, tensor=2), "data", cluster)  # not neighbours
    assert "measured" not in collective("allreduce", 500.0, apart, cluster).algorithm
    assert message(1e3, ParallelLayout(pipeline=2), "pipeline", cluster).seconds == pytest.approx(1e-5)
    assert message(1e3, ParallelLayout(pipeline=2, data=8), "pipeline", cluster).algorithm == "message"


def test_fits_apply_to_links_of_their_level():
    fit = MeasuredFit(
        operation="allreduce",
        ranks=16,
        until_bytes=(1e9,),
        latency_s=(1.0,),
        s_per_byte=(0.0,),
        algorithm="ring",
        level="far",
    )
    cluster = made(NEAR, FAR, fits=(fit,))
    assert collective("allreduce", 1e6, span(ParallelLayout(data=16), "data", cluster), cluster, "ring").seconds == 1.0
    assert collective("allreduce", 1e6, span(ParallelLayout(data=16), "data", cluster), cluster).seconds < 1.0
    wide = made(LinkLevel(name="near", devices=16, latency_s=1e-6, bytes_per_s=1e11), FAR, fits=(fit,))
    assert collective("allreduce", 1e6, span(ParallelLayout(data=16), "data", wide), wide, "ring").seconds < 1.0


def test_small_messages_use_the_formula():
    """A measurement of megabytes with a long startup does not apply to a kilobyte."""
    blocking = MeasuredFit(
        operation="message",
        ranks=2,
        until_bytes=(30e6,),
        latency_s=(200e-6,),
        s_per_byte=(16.4e-12,),
        level="near",
        from_bytes=10e6,
    )
    cluster, layout = made(NEAR, FAR, fits=(blocking,)), ParallelLayout(pipeline=2)
    inside = message(20e6, layout, "pipeline", cluster)
    assert inside.seconds == pytest.approx(200e-6 + 20e6 * 16.4e-12) and not inside.flags
    small = message(1e3, layout, "pipeline", cluster)
    assert small.seconds == message(1e3, layout, "pipeline", DEEP).seconds < 3e-6
    assert small.algorithm == "message" and "extrapolated by formula" in small.flags[0]
    assert "extrapolated" in message(1e9, layout, "pipeline", cluster).flags[0]


def test_smaller_messages_take_no_longer_than_measured_ones():
    quick = MeasuredFit(
        operation="allreduce", ranks=4, until_bytes=(1e6,), latency_s=(1e-6,), s_per_byte=(1e-12,), from_bytes=1e4
    )
    cluster = made(NEAR, FAR, fits=(quick,))
    reach = span(ParallelLayout(data=4), "data", cluster)
    small = collective("allreduce", 8.0, reach, cluster)
    assert small.seconds == collective("allreduce", 1e4, reach, cluster).seconds < _formula(8.0)
    assert small.flags and "measured" not in small.algorithm


def _formula(nbytes):
    return collective("allreduce", nbytes, span(ParallelLayout(data=4), "data", DEEP), DEEP).seconds


@pytest.mark.parametrize(("library", "holds"), [("mpi", "mpi"), ("nccl", "nccl"), ("", "both")])
def test_fits_apply_to_their_library(library, holds):
    slow = dict(ranks=2, until_bytes=(1e9,), latency_s=(1.0,), s_per_byte=(0.0,), library=library)
    cluster = made(
        NEAR, FAR, fits=(MeasuredFit(operation="message", **slow), MeasuredFit(operation="allreduce", **slow))
    )
    layouts = {"mpi": ParallelLayout(pipeline=2), "nccl": ParallelLayout(pipeline=2, implementation="megatron-2022")}
    for name, layout in layouts.items():
        assert (message(1e6, layout, "pipeline", cluster).seconds == 1.0) == (holds in (name, "both")), name
    for name in layouts:
        reach = span(ParallelLayout(data=2, library=name), "data", cluster)
        assert (collective("allreduce", 1e6, reach, cluster).seconds == 1.0) == (holds in (name, "both")), name


def test_published_pytorch_wait_does_not_apply_to_mpi():
    selene = toml_file.read("a100-selene")
    theirs = message(20e6, ParallelLayout(pipeline=2, implementation="megatron-2022"), "pipeline", selene)
    ours = message(20e6, ParallelLayout(pipeline=2), "pipeline", selene)
    assert theirs.algorithm == "measured" and ours.algorithm == "message"
    assert ours.seconds < 0.5 * theirs.seconds


def test_algorithm_missing_for_an_operation_is_flagged():
    reach = span(ParallelLayout(data=16), "data", DEEP)
    for operation in ("reduce_scatter", "all_gather", "all_to_all"):
        asked, best = (collective(operation, 1e6, reach, DEEP, name) for name in ("tree", "auto"))
        assert asked._replace(flags=()) == best and not best.flags
        assert asked.flags == (f"algorithm = tree: {operation} does not have this algorithm and uses {best.algorithm}",)
    assert not collective("allreduce", 1e6, reach, DEEP, "tree").flags


def test_group_of_one_or_zero_bytes_cost_nothing():
    assert collective("allreduce", 1e9, span(ParallelLayout(), "data", DEEP), DEEP).seconds == 0.0
    assert collective("all_gather", 0.0, span(ParallelLayout(data=8), "data", DEEP), DEEP).nbytes == 0.0
    assert message(1e9, ParallelLayout(), "pipeline", DEEP).seconds == 0.0


def test_bad_collective_options_name_the_choices():
    reach = span(ParallelLayout(data=8), "data", DEEP)
    with pytest.raises(UsageError, match="collective 'gather'; choose one of allreduce"):
        collective("gather", 1.0, reach, DEEP)
    with pytest.raises(UsageError, match="algorithm 'rings'; choose one of .*hierarchical"):
        collective("allreduce", 1.0, reach, DEEP, "rings")
    with pytest.raises(UsageError, match="16 devices, but the link levels of the cluster join only 8"):
        span(ParallelLayout(data=16), "data", made(NEAR))


def test_shards_have_the_sizes_that_the_costs_assume():
    """The shards of a reduce-scatter have n/p elements, rounded to a cache line."""
    assert max(share.size for share in split(64 * 840, 7, 8)) - 64 * 840 / 7 < 8
