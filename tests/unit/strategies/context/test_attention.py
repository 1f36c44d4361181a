"""Attention over context ranks: the visible pairs of each rank; numbers, masks and bytes of the whole attention."""

import time

import numpy as np
import pytest

from harness.marks import cases
from harness.models.documents import documents_of, random_places
from hpcdist.comm.record.spans import SpanSink
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.stage import Draw
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.context.costs import AttentionShare, kept_elements, scratch_elements, sent_bytes
from hpcdist.strategies.context.model import METHODS
from hpcdist.strategies.context.operations import pairs, paths, pieces, tokens, visits
from hpcdist.strategies.context.ring import RingAttention


def places(local_data):
    return [place + row - start for start, end, place in local_data for row in range(start, end)]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_tokens_are_split_over_ranks_without_overlap(ranks, rng):
    for context in {4 * ranks, int(rng.integers(4 * ranks, 99)), 128}:
        placed = pieces(context, ranks)
        assert sorted(place for local_data in placed for place in places(local_data)) == list(range(context))
        assert all(place % 4 == 0 for local_data in placed for start, end, place in local_data if end > start)
        for causal in (True, False):
            seen = np.zeros((context, context), int)
            for rank, local_data in enumerate(placed):
                mine = np.array(places(local_data))
                assert (np.diff(mine) > 0).all(), "rows are in the order of their places"
                seen[np.ix_(mine, mine)] += mine[:, None] >= mine if causal else 1
                for step, visit in enumerate(visits(placed, rank, causal=causal), 1):
                    assert visit.source == (rank - step) % ranks
                    seen[np.ix_(mine[visit.from_row :], places(visit.keys))] += 1
            whole = np.ones((context, context), int)
            np.testing.assert_array_equal(seen, np.tril(whole) if causal else whole)
            for rank, local_data in enumerate(placed):
                assert pairs(placed, rank, causal=causal) == seen[places(local_data)].sum()
        window = int(rng.integers(1, context + 9))
        seen = np.tri(context, dtype=int) - np.tri(context, k=-window, dtype=int)
        for rank, local_data in enumerate(placed):
            assert pairs(placed, rank, causal=True, window=window) == seen[places(local_data)].sum()
        for source, path in enumerate(paths(placed, window)):
            steps = [(rank - source) % ranks for rank in path]
            assert steps == sorted(steps) and path[0] == source, "in the order of the ring"
            for rank in set(range(ranks)) - {source}:
                looks = seen[np.ix_(places(placed[rank]), places(placed[source]))].any()
                assert rank in path if looks else rank not in path or context % (8 * ranks), "or pieces are uneven"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_causal_work_is_balanced(ranks):
    placed = pieces(4096, ranks)
    work = [pairs(placed, rank, causal=True) for rank in range(ranks)]
    assert max(work) <= 1.03 * sum(work) / ranks


def attention(inputs, dy, size, options, draw, make, cut=lambda x: x, documents=None):
    saved = Arena().saved(3)
    saved.draw, saved.documents = draw, documents
    qkv, kv = (None if x is None else cut(x) for x in inputs)
    y = make().forward(qkv, size, saved, kv=kv, **options).copy()
    result = make().backward(cut(dy), saved)
    return [y, *(result if kv is not None else (result,))]


@cases(
    "method, ranks, context, heads, shared, causal, dropout, window",
    ("ring", 2, 40, 4, 0, True, 0.0, 0),
    ("ring", 2, 1400, 2, 1, True, 0.2, 0),  # tiles of 512 within a piece
    ("ring", 3, 131, 4, 2, True, 0.3, 0),
    ("ring", 3, 50, 2, 0, False, 0.3, 0),
    ("ring", 4, 150, 4, 1, False, 0.0, 0),
    ("ring", 4, 13, 2, 2, True, 0.1, 0),  # ranks without a tail
    ("ring", 8, 200, 2, 0, True, 0.2, 0),
    ("ring", 2, 40, 4, 0, True, 0.0, 5),
    ("ring", 3, 131, 4, 2, True, 0.3, 20),  # tails whose rows see nothing of the head; blocks that some ranks do not
    ("ring", 4, 150, 4, 1, True, 0.0, 1),  # nobody sees another rank's
    ("ring", 8, 200, 2, 0, True, 0.2, 17),
    ("ring", 2, 1400, 2, 1, True, 0.2, 300),
    ("all_to_all", 4, 37, 8, 1, True, 0.3, 9),
    ("all_to_all", 2, 40, 4, 0, True, 0.2, 0),
    ("all_to_all", 3, 131, 6, 3, False, 0.0, 0),
    ("all_to_all", 4, 13, 4, 2, True, 0.1, 0),  # two ranks need the same keys
    ("all_to_all", 4, 37, 8, 1, True, 0.3, 0),
)
def test_context_attention_matches_whole_samples(method, ranks, context, heads, shared, causal, dropout, window, rng):
    size, batch, width = 4, 2, 4 * heads
    qkv = 2 * rng.standard_normal((batch, context, width if shared else 3 * width))
    kv = rng.standard_normal((batch, context, 2 * shared * size)) if shared else None
    dy, draw = rng.standard_normal((batch, context, width)), Draw(7, 2, 5)
    options = {"causal": causal, "dropout": dropout, "part": (1, heads + 2), "window": window}
    expected = attention((qkv, kv), dy, size, options, draw, LocalAttention)

    def body(comm):
        axis = ContextAxis(comm, context, method, window=window)
        with count_traffic(comm) as traffic:
            got = attention((qkv, kv), dy, size, options, draw, lambda: METHODS[method](axis), axis.cut)
        for one, want in zip(got, expected, strict=True):
            want = axis.cut(want)
            assert one.shape == want.shape
            assert np.abs(one - want).max() <= 1e-13 * (1 + np.abs(want).max())
        assert not axis.taken_s() < 0
        return traffic.sent_bytes, tokens(axis.own)

    together = run_threads(ranks, body)
    token = batch * size * 8  # bytes of a head
    shared = shared or heads
    # Keys and values forward, and with their gradients backward, of each block to the ranks that see it.
    placed = pieces(context, ranks)
    visitors = [len(path) - 1 for path in paths(placed, window if method == "ring" else 0)]
    assert window or visitors == [ranks - 1] * ranks
    sent = 6 * shared * sum(tokens(local_data) * count for local_data, count in zip(placed, visitors, strict=True))
    if method == "all_to_all":
        # Output and gradient, and a product of their rows for each head; queries, keys, values, and their gradients.
        sent = (4 * context * (heads + max(shared, ranks)) + context * heads / size) * (ranks - 1) / ranks
    assert sum(bytes_sent for bytes_sent, _ in together) == sent * token
    sizes = {"samples": batch, "tokens": context, "heads": heads, "shared": shared, "size": size, "itemsize": 8}
    sizes["window"] = window
    planned = sum(sent_bytes(AttentionShare(ranks=ranks, **sizes), method))
    assert planned * ranks == pytest.approx(sent * token, rel=1e-12)
    assert sum(local_data for _, local_data in together) == context


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ranks", "heads", "shared"), [(2, 4, 0), (3, 6, 3), (4, 8, 2), (4, 4, 0)])
def test_kept_bytes_of_a_rank_match_the_plan(method, ranks, heads, shared, rng):
    """The bound is relative to attention of the same tokens alone: no second copy of the output, and scratch."""
    size, batch, local_data, width = 4, 2, 8 * int(rng.integers(2, 9)), 4 * heads
    qkv = rng.standard_normal((batch, ranks * local_data, width if shared else 3 * width))
    kv = rng.standard_normal((batch, ranks * local_data, 2 * shared * size)) if shared else None
    sizes = {"samples": batch, "tokens": ranks * local_data, "heads": heads, "shared": shared or heads, "size": size}
    share = AttentionShare(ranks=ranks, itemsize=8, **sizes)

    def kept_bytes(operation, cut):
        arena = Arena()
        saved = arena.saved(3)
        qkv_, kv_ = (None if x is None else cut(x) for x in (qkv, kv))
        y = operation.forward(qkv_, size, saved, kv=kv_)
        nbytes = sum(block.nbytes for block, uses in zip(arena._blocks, arena._uses, strict=True) if uses)
        operation.backward(y.copy(), saved)
        return nbytes, {name: block.nbytes for name, block in arena._scratch.items() if name.startswith("context.")}

    def body(comm):
        axis = ContextAxis(comm, ranks * local_data, method)
        return kept_bytes(METHODS[method](axis), axis.cut)

    assert not kept_elements(share, method) or shared in range(1, ranks), "keys that several ranks get"
    alone, _ = kept_bytes(LocalAttention(), lambda x: np.ascontiguousarray(x[:, :local_data]))
    for nbytes, scratch in run_threads(ranks, body):
        assert nbytes == pytest.approx(alone + 8 * kept_elements(share, method), abs=256), "but for its alignment"
        planned = {name: 8 * elements for name, elements in scratch_elements(share, method).items()}
        assert scratch == pytest.approx(planned, abs=64)


@cases(
    "method, ranks, context, heads, shared, causal, dropout, most, window",
    ("ring", 2, 40, 4, 0, True, 0.0, 12, 0),
    ("ring", 3, 131, 4, 2, True, 0.3, 0, 0),
    ("ring", 3, 131, 4, 2, True, 0.3, 90, 20),
    ("ring", 4, 13, 2, 2, False, 0.1, 5, 0),
    ("ring", 4, 150, 4, 1, False, 0.0, 40, 0),
    ("all_to_all", 2, 40, 4, 0, True, 0.2, 9, 4),
    ("all_to_all", 4, 37, 8, 1, False, 0.3, 0, 0),
)
def test_context_attention_in_documents_matches_whole_samples(
    method, ranks, context, heads, shared, causal, dropout, most, window, rng
):
    size, batch, width = 4, 3, 4 * heads
    qkv = 2 * rng.standard_normal((batch, context, width if shared else 3 * width))
    kv = rng.standard_normal((batch, context, 2 * shared * size)) if shared else None
    dy, draw = rng.standard_normal((batch, context, width)), Draw(7, 2, 5)
    options = {"causal": causal, "dropout": dropout, "window": window}
    documents = documents_of(random_places(rng, batch, context, most))
    expected = attention((qkv, kv), dy, size, options, draw, LocalAttention, documents=documents)

    def body(comm):
        axis = ContextAxis(comm, context, method)
        make = (lambda: METHODS[method](axis), axis.cut)
        for one, want in zip(attention((qkv, kv), dy, size, options, draw, *make, documents), expected, strict=True):
            want = axis.cut(want)
            assert np.abs(one - want).max() <= 1e-13 * (1 + np.abs(want).max())

    run_threads(ranks, body)


def test_waiting_for_a_ring_pass_records_a_span(rng):
    """The others wait for a late rank, and their spans show it. Data that arrives in time leaves no span."""
    qkv, draw = rng.standard_normal((1, 16, 24)), Draw(7, 2, 5)

    class Kept(SpanSink):
        def __init__(self):
            self.spans = []

        def add(self, phase, name, step, begin_ns, end_ns, microbatch=-1, unit=-1):
            self.spans.append((phase, name, end_ns - begin_ns))

    def body(comm):
        kept = Kept()
        axis = ContextAxis(comm, 16, "ring", spans=kept)
        for late_s in (0.0, 0.2):  # the first time kernels are compiled
            saved = Arena().saved(3)
            saved.draw = draw
            comm.barrier()
            kept.spans.clear()
            time.sleep(late_s * comm.rank)
            RingAttention(axis).forward(axis.cut(qkv), 4, saved)
        return kept.spans, axis.taken_s()

    (waited, waited_s), (late, _) = run_threads(2, body)
    assert [(phase, name) for phase, name, ns in waited if ns > 1e8] == [("communication", "WAIT keys")]
    assert waited_s >= sum(ns for *_, ns in waited) / 1e9
    assert all(ns < 1e8 for *_, ns in late)
