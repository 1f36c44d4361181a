"""Messages within one attention over context ranks: the lists are proven, and each way to break them is refused."""

from dataclasses import replace

import pytest

from hpcdist.errors import ScheduleError
from hpcdist.strategies.context.costs import AttentionShare, scratch_elements
from hpcdist.strategies.context.operations import MEMORY, Action, HeadExchange, head_exchanges, ring_operations
from hpcdist.strategies.context.passes import pieces
from hpcdist.strategies.context.proof import prove_messages

MESSAGES = (Action.SEND, Action.RECEIVE)


def rings(ranks, back):
    return [list(ring_operations(ranks, rank, back=back)) for rank in range(ranks)]


def heads(context, ranks):
    placed = pieces(context, ranks)
    return [list(head_exchanges(placed, rank)) for rank in range(ranks)]


def refused(lists, back, match="rank"):
    with pytest.raises(ScheduleError, match=match):
        prove_messages(lists, range(10, 10 + len(lists)), back=back)


@pytest.mark.parametrize("back", [False, True])
def test_rings_are_proven(back):
    for ranks in (1, 2, 3, 4, 5, 8, 16):
        lists = rings(ranks, back)
        prove_messages(lists, range(ranks), back=back)
        for row in lists:
            sent = [op for op in row if op.action is Action.SEND]
            assert len(sent) == (1 + back) * (ranks - 1), "blocks, as `costs.sent_bytes` has them"
    share = AttentionShare(ranks=2, samples=1, tokens=8, heads=1, shared=1, size=4, itemsize=4)
    assert {f"context.{name}" for name in MEMORY} == set(scratch_elements(share, "ring"))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_operation_can_be_left_out_or_done_twice(ranks, back):
    for rank in range(ranks):
        for place, op in enumerate(rings(ranks, back)[rank]):
            less, more = rings(ranks, back), rings(ranks, back)
            del less[rank][place]
            refused(less, back)
            more[rank].insert(place, op)
            refused(more, back)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_wrong_neighbour_block_or_memory_is_found(ranks, back):
    for rank in range(ranks):
        for place, op in enumerate(rings(ranks, back)[rank]):
            changes = [{"source": (op.source + 1) % ranks}]
            changes += [{"memory": other} for other in MEMORY if other != op.memory]
            if op.action in MESSAGES:
                changes += [{"peer": peer} for peer in range(-1, ranks + 1) if peer != op.peer]
            for change in changes:
                if op.action is Action.WAIT and change == {"source": (op.source + 1) % ranks}:
                    continue  # of a send it says only what is free again
                lists = rings(ranks, back)
                lists[rank][place] = replace(op, **change)
                refused(lists, back)


@pytest.mark.parametrize("back", [False, True])
def test_swapped_passes_are_found(back):
    row = rings(4, back)[1]
    for first, op in enumerate(row):
        for second in range(first + 1, len(row)):
            other = row[second]
            if op.action is other.action and op.action in MESSAGES and MEMORY[op.memory] == MEMORY[other.memory]:
                lists = rings(4, back)
                lists[1][first], lists[1][second] = other, op
                refused(lists, back)


def test_waits_in_a_circle_are_found():
    """Ranks that wait for their send before they post the receive: with messages that are not buffered nobody moves."""
    lists = []
    for rank in range(3):
        row = rings(3, back=False)[rank]
        receive = row.pop(0)
        row.insert(1, row.pop(row.index(next(op for op in row if op.action is Action.WAIT and op.memory == "keys0"))))
        row.insert(2, receive)
        lists.append(row)
    refused(lists, False, "rank 10: WAIT.* waits for ever")
    mixed = rings(3, back=False)
    mixed[2] = lists[2]
    prove_messages(mixed, range(3), back=False)  # one such rank waits only for others


def test_one_attention_takes_no_message_of_another():
    lists = rings(3, back=True)
    begun = replace(lists[1][0], memory="gradients1")
    lists[1].append(begun)
    refused(lists, True, "rank 11: RECEIVE.* is never waited for")


def test_exchanges_of_heads_are_proven():
    for context, ranks in ((8, 2), (37, 3), (13, 4)):
        prove_messages(heads(context, ranks), range(ranks), back=False)
    lists = heads(37, 3)
    del lists[1][1]
    refused(lists, True, "rank 11 makes 1 exchanges")
    lists = heads(37, 3)
    lists[2].reverse()
    refused(lists, False, "tokens to rank")
    lists = heads(37, 3)
    lists[0][0] = HeadExchange(lists[0][0].sends, (1, 2, 3))
    refused(lists, False, "exchange 0: rank 1[0-2] sends")
    refused([*heads(37, 3)[:2], rings(3, back=False)[2]], False, "share samples")
