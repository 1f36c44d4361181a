"""Matching of sends with receives, and of the calls of a collective, by order and number, without clocks.

A collective has the same number on all members of its communicator. Messages with equal communicator, sender, receiver
and tag are received in the order of sending.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from hpcdist.telemetry.trace.rank_log import NO_STEP, RankLog, RecordedCall

SENDS: Final = frozenset({"send", "isend"})
RECEIVES: Final = frozenset({"recv", "irecv", "probe"})
MESSAGES: Final = SENDS | RECEIVES | {"sendrecv"}
# Collectives that a member may leave before all members have entered.
ROOTED: Final = ("broadcast", "broadcast_object")


@dataclass(frozen=True)
class MatchedMessage:
    """A send and the receive that got the message."""

    send: RecordedCall
    receive: RecordedCall


@dataclass(frozen=True)
class MatchedCollective:
    """Calls of the same collective on different ranks. ``root``: root rank, or None for a collective without root."""

    calls: tuple[RecordedCall, ...]
    root: int | None = None

    def released_by(self) -> RecordedCall | None:
        """Return the call that the other calls waited for: the root's call, else the latest call. None if unknown."""
        if self.root is not None:
            return next((call for call in self.calls if call.rank == self.root), None)
        return max(self.calls, key=lambda call: call.begin_ns)


@dataclass(frozen=True)
class Matches:
    """Matched messages and collectives of a run, and the number of unmatched sends and receives."""

    messages: tuple[MatchedMessage, ...]
    meetings: tuple[MatchedCollective, ...]
    unmatched: int


def match(logs: Mapping[int, RankLog], world: int) -> Matches:
    """Match sends with receives, and the calls of each collective. ``logs``: {rank: log}. ``world``: rank count."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(logs):
        for comm in logs[rank].comms:
            members[comm].append(rank)
    ranks = {comm: _members(comm, seen, sorted(logs), world) for comm, seen in members.items()}
    messages, unmatched = _messages(logs, ranks)
    return Matches(tuple(messages), tuple(_collectives(logs, ranks)), unmatched)


def _members(comm: str, seen: Sequence[int], recorded: Sequence[int], world: int) -> Sequence[int]:
    # ``recorded``: world ranks that have a log. ``seen``: world ranks whose log contains calls on ``comm``.
    return range(world) if "/" not in comm or len(seen) == len(recorded) else seen


def _messages(logs: Mapping[int, RankLog], ranks: Mapping[str, Sequence[int]]) -> tuple[list[MatchedMessage], int]:
    sent: dict[tuple[str, int, int, int], list[RecordedCall]] = defaultdict(list)
    received: dict[tuple[str, int, int, int], list[RecordedCall]] = defaultdict(list)
    both: dict[tuple[str, int], list[RecordedCall]] = defaultdict(list)
    lost = 0
    for log in logs.values():
        for call in log.calls:
            if call.collective:
                continue
            if not 0 <= call.peer < len(ranks[call.comm]):
                lost += call.op in SENDS or call.op in RECEIVES
                continue
            peer = ranks[call.comm][call.peer]
            if call.op in SENDS:
                sent[call.comm, log.rank, peer, call.tag].append(call)
            elif call.op in RECEIVES:
                received[call.comm, peer, log.rank, call.tag].append(call)
            elif call.op == "sendrecv":
                both[call.comm, call.tag].append(call)
    matched: list[MatchedMessage] = []
    for path in {*sent, *received}:
        sends, receives = sent.get(path, []), received.get(path, [])
        if path[1] not in logs or path[2] not in logs:
            continue  # no counterparts for a rank without a record
        pairs = _in_order(sends, receives, logs[path[1]], logs[path[2]])
        matched += [MatchedMessage(send, receive) for send, receive in pairs]
        lost += max(len(sends), len(receives)) - len(pairs)
    for calls in both.values():
        pairs = _rounds(calls, logs, ranks)
        matched += [MatchedMessage(send, receive) for send, receive in pairs]
        lost += len(calls) - len(pairs)
    return matched, lost


def _in_order(
    sends: Sequence[RecordedCall], receives: Sequence[RecordedCall], sender: RankLog, receiver: RankLog
) -> list[tuple[RecordedCall, RecordedCall]]:
    if not sender.covered_ns and not receiver.covered_ns:
        return list(zip(sends, receives, strict=False))  # complete records; the last message may be in flight
    of_steps, in_steps = _by_step(sends), _by_step(receives)
    steps = sorted(of_steps.keys() | in_steps.keys())
    complete_steps = [
        step
        for step in steps
        if step != NO_STEP
        and sender.steps.get(step, (-1, 0))[0] >= sender.covered_ns
        and receiver.steps.get(step, (-1, 0))[0] >= receiver.covered_ns
    ]
    pairs: list[tuple[RecordedCall, RecordedCall]] = []
    for step in complete_steps:
        a, b = of_steps.get(step, []), in_steps.get(step, [])
        if len(a) != len(b):
            return []  # messages that cross steps cannot be matched by counting
        pairs += zip(a, b, strict=True)
    return pairs


def _by_step(calls: Iterable[RecordedCall]) -> dict[int, list[RecordedCall]]:
    by_step: dict[int, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        by_step[call.step].append(call)
    return by_step


def _rounds(
    calls: Sequence[RecordedCall], logs: Mapping[int, RankLog], ranks: Mapping[str, Sequence[int]]
) -> list[tuple[RecordedCall, RecordedCall]]:
    # Pair each sendrecv call with the call of the rank to which it sends: the n-th call of one matches the n-th call of
    # the other. All calls have the same communicator and tag. ``ranks``: world ranks of each communicator's members.
    pairs: list[tuple[RecordedCall, RecordedCall]] = []
    if not any(logs[call.rank].covered_ns for call in calls) and (turns := _turns(calls)):
        groups = [turns]  # complete records
    else:
        complete_rows = [
            row for step, row in _by_step(calls).items() if not any(_is_cut(logs[call.rank], step) for call in row)
        ]
        groups = [_turns(row) for row in complete_rows]
    for together in chain.from_iterable(groups):
        by_rank = {call.rank: call for call in together}
        to = [ranks[call.comm][call.peer] for call in together]
        if len(set(to)) == len(to) and set(to) <= by_rank.keys():
            pairs += [(call, by_rank[peer]) for call, peer in zip(together, to, strict=True)]
    return pairs


def _turns(calls: Iterable[RecordedCall]) -> list[tuple[RecordedCall, ...]]:
    rows: dict[int, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        rows[call.rank].append(call)
    return list(zip(*rows.values(), strict=True)) if len({len(row) for row in rows.values()}) == 1 else []


def _is_cut(log: RankLog, step: int) -> bool:
    return log.covered_ns > 0 if step == NO_STEP else log.steps.get(step, (-1, 0))[0] < log.covered_ns


def _collectives(logs: Mapping[int, RankLog], ranks: Mapping[str, Sequence[int]]) -> Iterable[MatchedCollective]:
    by_number: dict[tuple[str, int], list[RecordedCall]] = defaultdict(list)
    for log in logs.values():
        for call in log.calls:
            if call.collective:
                by_number[call.comm, call.sequence].append(call)
    for (comm, _), calls in by_number.items():
        if len(calls) < 2 or len({call.op for call in calls}) > 1:
            continue
        root = None
        if calls[0].op.endswith(ROOTED):
            root = ranks[comm][calls[0].peer] if 0 <= calls[0].peer < len(ranks[comm]) else -1
        yield MatchedCollective(tuple(calls), root)
