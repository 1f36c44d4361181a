"""Proof of the messages within one attention over a context axis, given the lists of all its ranks. Local.

Posting a message never waits; a WAIT, also for a send, waits until the peer has posted its side. The n-th send to a
rank with a tag matches its n-th receive, as in MPI. No operation has a choice, so one run proves all.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

from hpcdist.errors import ScheduleError
from hpcdist.strategies.context.operations import HOME, MEMORY, Action, HeadExchange, Messages, RingOperation

Path: TypeAlias = tuple[int, int, int]  # sender, receiver, tag
Content: TypeAlias = tuple[int, frozenset[int]]  # rank that owns the block, ranks that added to its gradients


def prove_messages(
    lists: Sequence[Messages], ranks: Sequence[int], visited: Sequence[Sequence[int]], *, back: bool
) -> None:
    """Raise ScheduleError unless ``lists`` execute one pass of context-parallel attention correctly.

    ``lists``: operations of each rank in ``ranks``. ``visited``: for each rank r, the ranks that use the keys of r.
    """
    # Proven: messages match without deadlock; no buffer is used while its message is in flight; each rank uses each
    # needed block of keys once; complete gradients return to the owner of the keys.
    rings = [[op for op in row if isinstance(op, RingOperation)] for row in lists]
    exchanges = [[op for op in row if isinstance(op, HeadExchange)] for row in lists]
    if all(exchanges) and not any(rings):
        _check_exchanges(exchanges, ranks)
    elif any(exchanges):
        raise ScheduleError(
            f"ranks {list(ranks)} share samples, but some use ring attention and others all-to-all attention; give "
            "every rank the same recipe and the same version"
        )
    else:
        _RingRun(rings, ranks, visited).run(back=back)


def _check_exchanges(lists: Sequence[Sequence[HeadExchange]], ranks: Sequence[int]) -> None:
    for number, row in enumerate(zip_longest(*lists)):
        for sender, source in zip(ranks, row, strict=True):
            for receiver, target in zip(ranks, row, strict=True):
                if source is None or target is None:
                    continue  # reported below
                sent, expected = source.sends[ranks.index(receiver)], target.receives[ranks.index(sender)]
                if sent != expected:
                    raise ScheduleError(
                        f"rank {sender} sends {sent} tokens to rank {receiver}, which expects {expected} tokens, in "
                        f"all-to-all number {number} of the attention heads; give both ranks the same recipe"
                    )
        if None in row:
            missing = ranks[row.index(None)]
            raise ScheduleError(
                f"rank {missing} calls {number} all-to-alls of attention heads, but other ranks of the context axis "
                "call more; give every rank the same recipe and version"
            )


class _RingRun:
    def __init__(
        self, lists: Sequence[Sequence[RingOperation]], names: Sequence[int], visited: Sequence[Sequence[int]]
    ) -> None:
        self._lists, self._names, self._visited, self._at = lists, names, visited, [0] * len(lists)
        # By rank and memory: its content, and the message that uses it, with path and message number.
        self._holds: list[dict[str, Content]] = [{"keys0": (rank, frozenset())} for rank in range(len(lists))]
        self._busy: list[dict[str, tuple[RingOperation, Path, int]]] = [{} for _ in lists]
        self._sent: dict[Path, list[Content]] = {}
        self._awaited: dict[Path, list[RingOperation]] = {}
        self._seen: list[list[int]] = [[] for _ in lists]

    def run(self, *, back: bool) -> None:
        moving = True
        while moving:
            moving = False
            for rank, steps in enumerate(self._lists):
                while self._at[rank] < len(steps) and self._step(rank, steps[self._at[rank]]):
                    self._at[rank] += 1
                    moving = True
        for rank, steps in enumerate(self._lists):
            if self._at[rank] < len(steps):
                raise self._refuse(
                    rank, steps[self._at[rank]], "waits for ever: the peer never posts the matching send or receive"
                )
        for rank, busy in enumerate(self._busy):
            for op, _, _ in busy.values():
                raise self._refuse(rank, op, "is never waited for")
            self._check_end(rank, back=back)

    def _check_end(self, rank: int, *, back: bool) -> None:
        expected = [source for source, path in enumerate(self._visited) if rank in path]
        if sorted(self._seen[rank]) != expected:
            raise ScheduleError(
                f"rank {self._names[rank]}: the local queries see the keys of ranks {self._seen[rank]} of the context "
                f"axis, expected the keys of each of the ranks {expected} exactly once"
            )
        home, others = self._holds[rank].get(HOME), frozenset(self._visited[rank][1:])
        if back and others and home != (rank, others):
            raise ScheduleError(
                f"rank {self._names[rank]}: the buffer {HOME} must contain the gradients of the local attention keys "
                f"from all ranks that used these keys, (owner, other ranks) = {(rank, others)}, but contains {home} "
                "(ranks of the context axis)"
            )

    def _step(self, rank: int, op: RingOperation) -> bool:
        # Returns False if ``op`` waits for a message that has not been posted yet.
        if op.action in (Action.SEND, Action.RECEIVE):
            self._post(rank, op)
        elif op.action is Action.WAIT:
            return self._wait(rank, op)
        else:
            self._compute(rank, op)
        return True

    def _post(self, rank: int, op: RingOperation) -> None:
        if op.memory not in MEMORY or op.peer not in range(len(self._lists)) or op.peer == rank:
            raise self._refuse(rank, op, "has an unknown buffer, or an invalid peer")
        self._check_free(rank, op, op.memory)
        if op.action is Action.SEND:
            path = rank, op.peer, MEMORY[op.memory]
            row: list[Content] = self._sent.setdefault(path, [])
            row.append(self._content(rank, op, op.memory))
            number = len(row)
        else:
            path = op.peer, rank, MEMORY[op.memory]
            self._awaited.setdefault(path, []).append(op)
            number = len(self._awaited[path])
            self._holds[rank].pop(op.memory, None)
        self._busy[rank][op.memory] = op, path, number - 1

    def _wait(self, rank: int, op: RingOperation) -> bool:
        if op.memory not in self._busy[rank]:
            raise self._refuse(rank, op, "waits for a message that was not posted")
        started, path, number = self._busy[rank][op.memory]
        sent, awaited = self._sent.get(path, []), self._awaited.get(path, [])
        if min(len(sent), len(awaited)) <= number:
            return False
        if sent[number][0] != awaited[number].source:
            raise self._refuse(
                path[1], awaited[number], f"receives the block of {sent[number][0]} from rank {self._names[path[0]]}"
            )
        if started.source != op.source and started.action is Action.RECEIVE:
            raise self._refuse(rank, op, f"does not match {started}, the receive in flight")
        if started.action is Action.RECEIVE:
            self._holds[rank][op.memory] = sent[number]
        del self._busy[rank][op.memory]
        return True

    def _compute(self, rank: int, op: RingOperation) -> None:
        source, parts = self._content(rank, op, op.memory)
        if op.action is Action.TILES:
            self._seen[rank].append(source)
        if not op.into:
            return
        self._check_free(rank, op, op.into)
        if op.action is Action.TILES:
            self._holds[rank][op.into] = source, frozenset({rank})
            return
        into, contributors = self._content(rank, op, op.into)
        if into != source or contributors & parts:
            raise self._refuse(
                rank,
                op,
                f"adds gradients of block {source} from ranks {sorted(parts)} to gradients of block {into} from ranks "
                f"{sorted(contributors)}; the blocks must be equal, and each rank may contribute once",
            )
        self._holds[rank][op.into] = source, contributors | parts

    def _content(self, rank: int, op: RingOperation, memory: str) -> Content:
        held = self._holds[rank].get(memory)
        if held is None or held[0] != op.source:
            what = "nothing received" if held is None else f"the block of {held[0]}"
            raise self._refuse(rank, op, f"finds {what} in the buffer {memory}")
        return held

    def _check_free(self, rank: int, op: RingOperation, memory: str) -> None:
        if memory in self._busy[rank]:
            raise self._refuse(rank, op, f"overwrites {memory} during {self._busy[rank][memory][0]}, still in flight")

    def _refuse(self, rank: int, op: RingOperation, why: str) -> ScheduleError:
        return ScheduleError(f"rank {self._names[rank]}: {op} of its context axis {why}")
