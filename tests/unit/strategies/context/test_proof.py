"""Messages within one attention over context ranks: the lists are proven, and each violation is rejected."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from hpcdist.errors import ScheduleError
from hpcdist.strategies.context.costs import AttentionShare, ring_exposed_s, scratch_elements
from hpcdist.strategies.context.operations import (
    MEMORY,
    Action,
    HeadExchange,
    head_exchanges,
    paths,
    pieces,
    ring_operations,
)
from hpcdist.strategies.context.proof import prove_messages
from hpcdist.strategies.core.operations import MESSAGES as MESSAGES_OF_STAGES
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.schedule import simulated_program as program
from hpcdist.strategies.schedule.operation_list import compute_operations
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.strategies.schedule.verify.deadlock import OVER_CONTEXT, RECEIVES

MESSAGES = (Action.SEND, Action.RECEIVE)
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2}  # schedule -> chunks of a rank


def visited(ranks, window=0):
    """Return the ranks that each block of 4 tokens visits."""
    return paths(pieces(8 * ranks, ranks), window)


def rings(ranks, back, window=0):
    return [list(ring_operations(visited(ranks, window), rank, back=back)) for rank in range(ranks)]


def heads(context, ranks, back=False):
    placed = pieces(context, ranks)
    return [list(head_exchanges(placed, rank, back=back)) for rank in range(ranks)]


def assert_rejected(lists, back, match="rank", window=0):
    with pytest.raises(ScheduleError, match=match):
        prove_messages(lists, range(10, 10 + len(lists)), visited(len(lists), window), back=back)


@pytest.mark.parametrize("back", [False, True])
def test_ring_lists_are_proven(back):
    for ranks in (1, 2, 3, 4, 5, 8, 16):
        lists = rings(ranks, back)
        prove_messages(lists, range(ranks), visited(ranks), back=back)
        for row in lists:
            sent = [op for op in row if op.action is Action.SEND]
            assert len(sent) == (1 + back) * (ranks - 1), "blocks, as `costs.sent_bytes` has them"
        used = {f"context.{memory}" for op in row for memory in (op.memory, op.into) if memory}
        share = AttentionShare(ranks=ranks, samples=1, tokens=8 * ranks, heads=1, shared=1, size=4, itemsize=4)
        assert not back or ranks == 1 or used == set(scratch_elements(share, "ring"))


@pytest.mark.parametrize("back", [False, True])
def test_ring_lists_with_a_window_are_proven(back, rng):
    """For any window length, blocks visit only ranks that see them, and there is no deadlock."""
    for ranks in (2, 3, 4, 5, 7, 8, 12):
        for context in (8 * ranks, int(rng.integers(4 * ranks, 16 * ranks))):
            placed = pieces(context, ranks)
            for window in {1, 2, context, *rng.integers(1, context, 9).tolist()}:
                visits = paths(placed, window)
                lists = [ring_operations(visits, rank, back=back) for rank in range(ranks)]
                prove_messages(lists, range(ranks), visits, back=back)
                sent = sum(op.action is Action.SEND for row in lists for op in row)
                assert sent == (1 + back) * (sum(map(len, visits)) - ranks)
    assert paths(pieces(64, 4), 4) == ((0, 1), (1, 2, 0), (2, 3, 1), (3, 2)), "pieces of 8 see one piece before them"


RINGS = [(2, 0), (3, 0), (4, 0), (4, 4), (5, 9)]  # ranks, window


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("ranks", "window"), RINGS)
def test_missing_or_repeated_operations_are_rejected(ranks, window, back):
    for rank in range(ranks):
        for place, op in enumerate(rings(ranks, back, window)[rank]):
            less, more = rings(ranks, back, window), rings(ranks, back, window)
            del less[rank][place]
            assert_rejected(less, back, window=window)
            more[rank].insert(place, op)
            assert_rejected(more, back, window=window)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("ranks", "window"), RINGS)
def test_wrong_neighbour_block_or_memory_is_rejected(ranks, window, back):
    for rank in range(ranks):
        for place, op in enumerate(rings(ranks, back, window)[rank]):
            changes = [{"source": (op.source + 1) % ranks}]
            changes += [{"memory": other} for other in MEMORY if other != op.memory]
            if op.action in MESSAGES:
                changes += [{"peer": peer} for peer in range(-1, ranks + 1) if peer != op.peer]
            for change in changes:
                if op.action is Action.WAIT and change == {"source": (op.source + 1) % ranks}:
                    continue  # of a send it says only what is free again
                lists = rings(ranks, back, window)
                lists[rank][place] = replace(op, **change)
                assert_rejected(lists, back, window=window)


@pytest.mark.parametrize("back", [False, True])
def test_swapped_passes_are_rejected(back):
    row = rings(4, back)[1]
    for first, op in enumerate(row):
        for second in range(first + 1, len(row)):
            other = row[second]
            if op.action is other.action and op.action in MESSAGES and MEMORY[op.memory] == MEMORY[other.memory]:
                lists = rings(4, back)
                lists[1][first], lists[1][second] = other, op
                assert_rejected(lists, back)


def test_circular_waits_are_rejected():
    """Ranks wait for their send before they post the receive. Without buffered messages this is a deadlock."""
    lists = []
    for rank in range(3):
        row = rings(3, back=False)[rank]
        receive = row.pop(0)
        row.insert(1, row.pop(row.index(next(op for op in row if op.action is Action.WAIT and op.memory == "keys0"))))
        row.insert(2, receive)
        lists.append(row)
    assert_rejected(lists, False, "rank 10: WAIT.* waits for ever")
    mixed = rings(3, back=False)
    mixed[2] = lists[2]
    prove_messages(mixed, range(3), visited(3), back=False)  # one such rank waits only for others


def test_message_of_another_attention_is_rejected():
    lists = rings(3, back=True)
    begun = replace(lists[1][0], memory="gradients0")
    lists[1].append(begun)
    assert_rejected(lists, True, "rank 11: RECEIVE.* is never waited for")


def test_head_exchange_lists_are_proven():
    for context, ranks in ((8, 2), (37, 3), (13, 4)):
        for back in (False, True):
            prove_messages(heads(context, ranks, back), range(ranks), visited(ranks), back=back)
    for back in (False, True):
        lists = heads(24, 3, back)
        del lists[1][1]
        assert_rejected(lists, back, f"rank 11 calls {1 + back} all-to-alls")
    lists = heads(37, 3)
    lists[2].reverse()
    assert_rejected(lists, False, "tokens to rank")
    lists = heads(37, 3)
    lists[0][0] = HeadExchange(lists[0][0].sends, (1, 2, 3))
    assert_rejected(lists, False, "rank 1[0-2] sends .* in all-to-all number 0")
    assert_rejected([*heads(37, 3)[:2], rings(3, back=False)[2]], False, "share samples")


def simulate_ring(ranks, back, tile_s, pass_s):
    """Return the simulated times of the lists, and (message, next entry) of each wait for a send."""
    code, target, starts, sends, numbers = [], [], [0], [], {}
    for rank, row in enumerate(rings(ranks, back)):
        under_way, sent, received = {}, Counter(), Counter()
        for op in row:
            tag = MEMORY[op.memory]
            if op.action is Action.RECEIVE:
                under_way[op.memory] = (op.peer, tag, received[tag]), True
                received[tag] += 1
            elif op.action is Action.SEND:
                under_way[op.memory] = (rank, tag, sent[tag]), False
                sent[tag] += 1
            if op.action is Action.WAIT and not under_way[op.memory][1]:
                sends.append((under_way[op.memory][0], len(code), rank))
            elif op.action in (Action.SEND, Action.TILES, Action.WAIT):
                kind = {Action.SEND: program.SEND, Action.TILES: program.WORK, Action.WAIT: program.RECV}[op.action]
                code.append(kind)
                message = under_way.get(op.memory, ((), True))[0]
                target.append(-1 if kind == program.WORK else numbers.setdefault(message, len(numbers)))
        starts.append(len(code))
    seconds = [tile_s if kind == program.WORK else 0.0 for kind in code]
    made = program.Program(
        starts=np.array(starts),
        code=np.array(code, np.int8),
        target=np.array(target),
        seconds=np.array(seconds),
        work=np.full(len(code), program.OTHER, np.int8),
        microbatch=np.full(len(code), -1),
        chunk=np.full(len(code), -1),
        links=np.array([sender for sender, *_ in numbers], np.int64),  # each rank sends to the next one alone
        link=program.LinkCost(carries_s=pass_s),
    )
    waits = [(numbers[message], entry) for message, entry, rank in sends if entry < starts[rank + 1]]
    return program.run(made), waits


@pytest.mark.parametrize("back", [False, True])
def test_pass_times_match_the_simulator(back, rng):
    """No send is waited for before a tile: neither keys nor gradients of other ranks delay the computation."""
    for ranks in (2, 3, 4, 5, 8):
        for tile_s in (0.0, *rng.uniform(0.1, 5.0, 4), 2.0, 1.0):
            times, waits = simulate_ring(ranks, back, tile_s, 1.0)
            whole_s = ranks * tile_s + ring_exposed_s(ranks, tile_s, 1.0, back=back)
            assert times.end_s.max() == pytest.approx(whole_s)
            assert all(times.arrival_s[message] <= times.begin_s[entry] + 1e-12 for message, entry in waits)
    assert ring_exposed_s(1, 1.0, 1.0, back=back) == 0.0


def expand_passes(schedule, stages, ranks, microbatches):
    """Return the lists of ``stages`` x ``ranks`` with the ring passes inserted: (Program entry, message)."""
    placement = SCHEDULES[schedule].place([range(n, n + 1) for n in range(stages * CHUNKS[schedule])], stages)
    for stage in range(stages):
        steps = compute_operations(schedule, microbatches, placement, stage)
        for rank in range(ranks):
            row = []
            for op in steps:
                if op.kind in MESSAGES_OF_STAGES:
                    send = RECEIVES[op.kind][0] if op.kind in RECEIVES else op.kind
                    row.append(
                        (program.RECV if op.kind in RECEIVES else program.SEND, (send, op.microbatch, op.unit, rank))
                    )
                elif op.kind in OVER_CONTEXT:
                    row += passes_of(stage, rank, ranks, op)
                else:
                    row.append((program.WORK, None))
            yield row


def passes_of(stage, rank, ranks, op):
    """Return the entries of one attention. A receive is identified by its intended block."""
    receives = {}
    for step in ring_operations(visited(ranks), rank, back=op.kind is not Kind.FORWARD):
        name = op.kind, op.microbatch, op.unit, step.source
        if step.action is Action.SEND:
            receives.pop(step.memory, None)
            yield program.SEND, ((stage, rank, MEMORY[step.memory]), name)
        elif step.action is Action.RECEIVE:
            receives[step.memory] = (stage, step.peer, MEMORY[step.memory]), name
        elif step.action is Action.WAIT and step.memory in receives:
            yield program.RECV, receives.pop(step.memory)


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize(("stages", "ranks"), [(1, 3), (2, 2), (2, 3), (3, 4)])
def test_attentions_of_a_schedule_do_not_mix_messages(schedule, stages, ranks):
    """The axis never synchronises in these lists.

    There is no deadlock, and each pass matches the intended attention.
    """
    rows = list(expand_passes(schedule, stages, ranks, 2 * stages))
    sent, received = defaultdict(list), defaultdict(list)
    numbers, code, target = {}, [], []
    for row in rows:
        counts = Counter()
        for kind, message in row:
            if kind != program.WORK and isinstance(message[0], tuple):  # the n-th that is sent is the n-th received
                path, name = message
                (sent if kind == program.SEND else received)[path].append(name)
                counts[kind, path] += 1
                message = path, counts[kind, path]
            code.append(kind)
            target.append(-1 if kind == program.WORK else numbers.setdefault(message, len(numbers)))
    assert sent == received and sent
    nothing = np.full(len(code), -1)
    program.run(
        program.Program(
            starts=np.cumsum([0, *map(len, rows)]),
            code=np.array(code, np.int8),
            target=np.array(target),
            seconds=np.ones(len(code)),
            work=nothing.astype(np.int8),
            microbatch=nothing,
            chunk=nothing,
            links=np.arange(len(numbers)),
            link=program.LinkCost(1.0, 2.0),
        )
    )
