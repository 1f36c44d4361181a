"""Matching of sends with receives, and of the calls of one collective, by order and number without any clock.

A collective has a number on its communicator that is the same on all members. Messages have none in common: on each
path (communicator, sender, receiver, tag) the first that is sent is the first that is received, so they are counted
from the beginning of a step, or from the beginning of the run where the records still reach as far.
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
# Collectives after which a member may go on before all have come: what it gets is there before.
ROOTED: Final = ("broadcast", "broadcast_object")


@dataclass(frozen=True)
class MatchedMessage:
    """Send and the receive that took it."""

    send: RecordedCall
    receive: RecordedCall


@dataclass(frozen=True)
class MatchedCollective:
    """Collective: the calls of its members, by rank. ``root`` is None where every member waits for every other."""

    calls: tuple[RecordedCall, ...]
    root: int | None = None

    def released_by(self) -> RecordedCall | None:
        """Return the call for which all others had to wait: that of the last, or of the root."""
        if self.root is not None:
            return next((call for call in self.calls if call.rank == self.root), None)
        return max(self.calls, key=lambda call: call.begin_ns)


@dataclass(frozen=True)
class Matches:
    """Matched messages and collectives, and the number of messages without a counterpart in the records."""

    messages: tuple[MatchedMessage, ...]
    meetings: tuple[MatchedCollective, ...]
    unmatched: int


def match(logs: Mapping[int, RankLog], world: int) -> Matches:
    """Match the messages and collectives in the ``logs`` of a job of ``world`` ranks (local)."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(logs):
        for comm in logs[rank].comms:
            members[comm].append(rank)
    ranks = {comm: _members(comm, seen, sorted(logs), world) for comm, seen in members.items()}
    messages, unmatched = _messages(logs, ranks)
    return Matches(tuple(messages), tuple(_collectives(logs, ranks)), unmatched)


def _members(comm: str, seen: Sequence[int], known: Sequence[int], world: int) -> Sequence[int]:
    """Return the rank of the job behind each rank of ``comm``.

    Records do not have it. Communicators are cut in the order of ranks, so the n-th that is seen in it is its n-th; of
    one that all known ranks are in, those without a record are members, too.
    """
    return range(world) if "/" not in comm or len(seen) == len(known) else seen


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
    for way in {*sent, *received}:
        sends, receives = sent.get(way, []), received.get(way, [])
        if way[1] not in logs or way[2] not in logs:
            continue  # a rank without a record has no counterparts
        pairs = _in_order(sends, receives, logs[way[1]], logs[way[2]])
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
    """Return the pairs of one path (communicator, sender, receiver, tag); [] where they cannot be told apart."""
    if not sender.covered_ns and not receiver.covered_ns:
        return list(zip(sends, receives, strict=False))  # all from the beginning of the run; the last may be under way
    of_steps, in_steps = _by_step(sends), _by_step(receives)
    known = sorted(of_steps.keys() | in_steps.keys())
    whole = [
        step
        for step in known
        if step != NO_STEP
        and sender.steps.get(step, (-1, 0))[0] >= sender.covered_ns
        and receiver.steps.get(step, (-1, 0))[0] >= receiver.covered_ns
    ]
    pairs: list[tuple[RecordedCall, RecordedCall]] = []
    for step in whole:
        a, b = of_steps.get(step, []), in_steps.get(step, [])
        if len(a) != len(b):
            return []  # messages that pass from step to step: counting cannot match them
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
    """Return the pairs of sendrecv calls, whose events have the receiver but not the sender.

    In the n-th such call of a step each rank that takes part receives from exactly one: from the one whose peer it is.
    """
    pairs: list[tuple[RecordedCall, RecordedCall]] = []
    if not any(logs[call.rank].covered_ns for call in calls) and (turns := _turns(calls)):
        groups = [turns]  # all there ever were
    else:
        whole = [
            row for step, row in _by_step(calls).items() if not any(_is_cut(logs[call.rank], step) for call in row)
        ]
        groups = [_turns(row) for row in whole]
    for together in chain.from_iterable(groups):
        by_rank = {call.rank: call for call in together}
        to = [ranks[call.comm][call.peer] for call in together]
        if len(set(to)) == len(to) and set(to) <= by_rank.keys():
            pairs += [(call, by_rank[peer]) for call, peer in zip(together, to, strict=True)]
    return pairs


def _turns(calls: Iterable[RecordedCall]) -> list[tuple[RecordedCall, ...]]:
    """Return the first call of every rank, the second, and so on; nothing where some ranks made more than others."""
    own: dict[int, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        own[call.rank].append(call)
    return list(zip(*own.values(), strict=True)) if len({len(row) for row in own.values()}) == 1 else []


def _is_cut(log: RankLog, step: int) -> bool:
    """Whether some of the calls of ``step`` may no longer be in the records."""
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
