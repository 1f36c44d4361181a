"""Expert rows in a plan compared with a run of the same recipe: route, bytes by axis, memory, and copies."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from harness.made_plans import cluster_of
from harness.marks import cases
from harness.trainings import choose_in_turn, losses, recipe_keys, recipe_of, trainer_of
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.planner.cluster.hardware import ClusterNode, Device, EfficiencyCurve, LinkLevel
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.time.expert_rows import RowRoute, node_traffic, published_bytes, row_route, row_turn
from hpcdist.planner.time.step import timing
from hpcdist.training.build import assemble
from hpcdist.training.use_cases.plan import subject_of_recipe

CURVE, MOVES = EfficiencyCurve(sizes=(16.0, 4096.0), shares=(0.1, 0.7)), 1e11
NEAR = LinkLevel(name="inside", devices=8, latency_s=1e-6, bytes_per_s=4e10)
FAR = LinkLevel(name="outside", devices=0, latency_s=5e-6, bytes_per_s=1e10)
CLUSTER = cluster_of(
    Device(
        name="a core",
        peak_flops={"float32": 1e12},
        matmul={"float32": CURVE},
        memory_bytes=1e10,
        memory_bytes_per_s=MOVES,
        memory_share=1.0,
    ),
    *(NEAR, FAR),
)
PAIRS_OF_NODES = replace(CLUSTER, node=ClusterNode(devices=2), levels=(replace(NEAR, devices=2), FAR))
GPUS = replace(CLUSTER, device=replace(CLUSTER.device, peak_flops={"float32": 60e12}))
RUN = recipe_keys(
    "layers=4 hidden=64 heads=4 vocabulary=256 experts=4 expert_hidden=128 balance_loss=0.1 data.context=64 "
    "global_batch=8 steps=2 optimizer.name=adamw algorithm=ring"
)
PACKED = "parallel.context=2 packed=true document_end=10"
# name -> ranks, keys, the way of the rows in the run, the algorithm of the plan for which they go so, and the nodes
WAYS = {
    "one node": (2, "expert=2", "node_shared", "auto", CLUSTER),
    "messages": (2, "expert=2 microbatches=2", "pairwise", "ring", CLUSTER),
    "messages of four, recomputing": (4, "expert=4 recompute=true", "pairwise", "ring", CLUSTER),
    "between nodes": (4, "expert=4", "hierarchical", "hierarchical", PAIRS_OF_NODES),
    "one node x context": (2, "expert=2 parallel.context=2", "node_shared", "auto", CLUSTER),
    "messages x context": (4, "expert=4 parallel.context=2 microbatches=2", "pairwise", "ring", CLUSTER),
    "packed contexts": (2, f"expert=2 {PACKED}", "pairwise", "ring", CLUSTER),
    "packed contexts, one node": (
        2,
        f"expert=2 {PACKED}",
        "node_shared",
        "auto",
        CLUSTER,
    ),
}


@pytest.fixture
def documents(tmp_path):
    """A text of documents of 33 bytes. Two of them fill a context of 64, because targets have one position less."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"%031d.\n" % (7**n % 10**31) for n in range(200)))
    return path


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.full_except("one node", "packed contexts")
def test_expert_rows_of_a_run_match_its_plan(name, documents, monkeypatch):
    """Loads are even: each token goes to the next two experts.

    Bytes of the expert axis are equal, memory agrees to 3 %.
    """
    ranks, changed, way, algorithm, on = WAYS[name]
    keys = RUN | {"data.path": documents, "parallel.data": ranks // (2 if "context" in changed else 1)}
    keys |= recipe_keys(changed)
    choose_in_turn(monkeypatch, 4)
    monkeypatch.setattr(assemble, "algorithm_for", lambda *_, **__: way)

    def body(comm):
        trainer, rows = trainer_of(comm, keys), []
        losses(trainer, 1)
        axis = trainer.model.operations.experts.travel.axis
        with count_traffic(comm) as traffic:

            def counted(call, *arguments):
                before = traffic.sent_bytes
                result = call(*arguments)
                rows.append(traffic.sent_bytes - before)
                return result

            axis.exchange, axis.counts = partial(counted, axis.exchange), partial(counted, axis.counts)
            losses(trainer, 2, 1)
        return sum(rows), traffic.sent_bytes, trainer.ledger.peak_total

    per_node = 2 if on is PAIRS_OF_NODES else None
    rows, sent, held = np.array(run_threads(ranks, body, ranks_per_node=per_node), np.float64).T
    subject = subject_of_recipe(recipe_of(keys), "mixture")
    layout = replace(subject.layout, algorithm=algorithm)
    planned = timing(subject.description, layout, on, subject.global_batch)
    assert rows.mean() == pytest.approx(planned.bytes["expert"], rel=1e-12)
    assert bool(rows.any()) == (way != "node_shared")
    assert sent.mean() == pytest.approx(sum(planned.bytes.values()), rel=2e-3)
    needed = memory(subject.description, layout, on, subject.global_batch)
    assert needed.bytes == pytest.approx(held.max(), rel=0.03)


@cases(
    "fields, on, route",
    ({}, CLUSTER, RowRoute()),
    ({"expert": 4}, CLUSTER, RowRoute("node memory", 1, 4)),
    ({"expert": 4}, GPUS, RowRoute("pairs", 1, 4)),
    ({"expert": 4, "algorithm": "ring"}, CLUSTER, RowRoute("pairs", 1, 4)),
    ({"expert": 4, "algorithm": "hierarchical"}, CLUSTER, RowRoute("pairs", 1, 4)),
    ({"expert": 4, "implementation": "megatron-2022"}, CLUSTER, RowRoute("pairs", 1, 4)),
    ({"expert": 4, "tensor": 4, "data": 8}, CLUSTER, RowRoute("hierarchical", 2, 2)),
    ({"expert": 16, "data": 16}, GPUS, RowRoute("hierarchical", 2, 8)),
    ({"expert": 16, "data": 16, "algorithm": "ring"}, CLUSTER, RowRoute("pairs", 2, 8)),
    ({"expert": 8, "context": 8, "data": 2}, CLUSTER, RowRoute("node memory", 1, 8)),
)
def test_planned_row_route_matches_a_run(fields, on, route):
    assert row_route(ParallelLayout(**{"data": 4, **fields}), on) == route


def test_rows_read_in_place_take_the_time_of_their_copies():
    """n bytes take five copies and as many turns. Sent rows take the leaving bytes and four copies."""
    subject = subject_of_recipe(recipe_of(RUN | recipe_keys("parallel.data=2 expert=2")), "mixture")
    layout, n = replace(subject.layout, algorithm="auto"), 4 * 64 * 2 * 64 * 4
    result = timing(subject.description, layout, CLUSTER, 8)
    assert result.bytes["expert"] == 0 and result.algorithms["expert"] == "node memory"
    assert any("expert loads are assumed to be balanced" in flag for flag in result.flags)
    assert result.terms["expert"] == pytest.approx(4 * (5 * NEAR.latency_s + 5 * 2 * n / MOVES))
    ring = timing(subject.description, replace(layout, algorithm="ring"), CLUSTER, 8)
    assert ring.bytes["expert"] == 4 * (4 * n + 8 * 4) / 2
    sent_s = 5 * NEAR.latency_s + (4 * n + 8 * 4) / 2 / NEAR.bytes_per_s
    assert ring.terms["expert"] == pytest.approx(4 * (sent_s + 4 * 2 * n / MOVES))
    shared, apart = (
        memory(subject.description, replace(layout, algorithm=name), CLUSTER, 8).terms for name in ("auto", "ring")
    )
    # Memory of the node, and the gradients that come, in the place of each block's rows, and of four arrays of scratch.
    assert shared["messages"] - apart["messages"] == published_bytes(n) + n
    assert apart["activations"] - shared["activations"] == apart["scratch"] - shared["scratch"] == 4 * n


def test_hierarchical_rows_send_one_message_per_node_pair():
    """There are 16 ranks on two nodes. One rank per node communicates, and sends half of the data of eight ranks."""
    layout = ParallelLayout(data=16, expert=16, precision="float32")
    n = 1e6
    result = row_turn("results", n, layout, CLUSTER)
    traffic = node_traffic(n, 2, 8)
    assert traffic == (n / 2, 7 / 8 * 1.5 * n, 1, 4 * n, n + 16 * n)
    assert result.nbytes == traffic.between + traffic.inside and result.algorithm == "hierarchical"
    # Alone it has the links of all eight, up to `alone_bytes_per_s`: no more than together with the others.
    between_s = FAR.latency_s + 4 * n / FAR.bytes_per_s
    inside_s = 7 * NEAR.latency_s + traffic.inside / NEAR.bytes_per_s
    assert result.seconds == pytest.approx(between_s + inside_s + 2 * n / MOVES)
    fast = replace(CLUSTER, levels=(NEAR, replace(FAR, alone_bytes_per_s=4 * FAR.bytes_per_s)))
    assert row_turn("results", n, layout, fast).seconds == pytest.approx(result.seconds - 3 * n / FAR.bytes_per_s)
