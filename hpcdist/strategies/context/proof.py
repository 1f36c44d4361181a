"""Proof of the messages within one attention over a context axis, given the lists of all its ranks (local).

The lists are run without computing anything. Posting a message never waits, a WAIT does, also that for a send: for the
other side to be posted (no message is taken to be buffered). The n-th send to a rank with a tag meets its n-th receive,
as in MPI. No rank ever has a choice, so a run that ends here ends always.

What is proven: no ranks wait in a circle; each receive gets the block that it is meant for; no memory is used while a
message of it is under way; own queries see the keys of every rank, within a window if there is one, once; back, the
gradients of each block come home with the part of every other rank that sees it, once. At its end nothing is under way,
so one attention cannot take a message of another: the forwards and backwards of a schedule, which the members of an
axis begin in the same order (`hpcdist.strategies.schedule.verify.deadlock`), stay apart.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

from hpcdist.errors import ScheduleError
from hpcdist.strategies.context.operations import HOME, MEMORY, Action, HeadExchange, Messages, RingOperation

Path: TypeAlias = tuple[int, int, int]  # from, to, tag
Content: TypeAlias = tuple[int, frozenset[int]]  # rank whose block it is, and those who have added to its gradients


def prove_messages(
    lists: Sequence[Messages], ranks: Sequence[int], visited: Sequence[Sequence[int]], *, back: bool
) -> None:
    """Prove that the ``lists``, of the members of an axis, are one attention, forward or ``back``.

    ``ranks`` are their numbers in the job, and ``visited`` the `passes.paths` of their blocks round a ring. Raises
    ScheduleError, which names rank and operation.
    """
    rings = [[op for op in row if isinstance(op, RingOperation)] for row in lists]
    exchanges = [[op for op in row if isinstance(op, HeadExchange)] for row in lists]
    if all(exchanges) and not any(rings):
        _check_exchanges(exchanges, ranks)
    elif any(exchanges):
        raise ScheduleError(
            f"ranks {list(ranks)} share samples, and some pass keys round a ring, others exchange heads; give every "
            "rank the same recipe and the same version"
        )
    else:
        _RingRun(rings, ranks, visited).run(back=back)


def _check_exchanges(lists: Sequence[Sequence[HeadExchange]], ranks: Sequence[int]) -> None:
    """Check that all make as many exchanges, and that each rank gets as many tokens as are sent to it."""
    for number, row in enumerate(zip_longest(*lists)):
        for sender, own in zip(ranks, row, strict=True):
            for receiver, theirs in zip(ranks, row, strict=True):
                if own is None or theirs is None:
                    continue  # of another length, see below
                there, here = own.sends[ranks.index(receiver)], theirs.receives[ranks.index(sender)]
                if there != here:
                    raise ScheduleError(
                        f"exchange {number}: rank {sender} sends {there} tokens to rank {receiver}, which awaits {here}"
                    )
        if None in row:
            missing = ranks[row.index(None)]
            raise ScheduleError(f"rank {missing} makes {number} exchanges of heads, others of its axis more")


class _RingRun:
    """Dry run of the lists of all ranks of a ring; ``names`` are their numbers in the job."""

    def __init__(
        self, lists: Sequence[Sequence[RingOperation]], names: Sequence[int], visited: Sequence[Sequence[int]]
    ) -> None:
        self._lists, self._names, self._visited, self._at = lists, names, visited, [0] * len(lists)
        # Of each rank by memory: what it holds, and the message that uses it with its path and number there.
        self._holds: list[dict[str, Content]] = [{"keys0": (rank, frozenset())} for rank in range(len(lists))]
        self._busy: list[dict[str, tuple[RingOperation, Path, int]]] = [{} for _ in lists]
        self._sent: dict[Path, list[Content]] = {}
        self._awaited: dict[Path, list[RingOperation]] = {}
        self._seen: list[list[int]] = [[] for _ in lists]

    def run(self, *, back: bool) -> None:
        """Run all lists to their end. Raises ScheduleError."""
        moving = True
        while moving:
            moving = False
            for rank, steps in enumerate(self._lists):
                while self._at[rank] < len(steps) and self._step(rank, steps[self._at[rank]]):
                    self._at[rank] += 1
                    moving = True
        for rank, steps in enumerate(self._lists):
            if self._at[rank] < len(steps):
                raise self._refuse(rank, steps[self._at[rank]], "waits for ever: its other side is never posted")
        for rank, busy in enumerate(self._busy):
            for op, _, _ in busy.values():
                raise self._refuse(rank, op, "is never waited for")
            self._check_end(rank, back=back)

    def _check_end(self, rank: int, *, back: bool) -> None:
        due = [source for source, path in enumerate(self._visited) if rank in path]
        if sorted(self._seen[rank]) != due:
            raise ScheduleError(
                f"rank {self._names[rank]}: its queries see the keys of {self._seen[rank]} of its context axis, where "
                f"those of each of {due} are due once"
            )
        home, others = self._holds[rank].get(HOME), frozenset(self._visited[rank][1:])
        if back and others and home != (rank, others):
            raise ScheduleError(f"rank {self._names[rank]}: gradients of its keys do not come home: {home}")

    def _step(self, rank: int, op: RingOperation) -> bool:
        """Run an operation of ``rank`` and return True; return False where it has to wait."""
        if op.action in (Action.SEND, Action.RECEIVE):
            self._post(rank, op)
        elif op.action is Action.WAIT:
            return self._wait(rank, op)
        else:
            self._compute(rank, op)
        return True

    def _post(self, rank: int, op: RingOperation) -> None:
        if op.memory not in MEMORY or op.peer not in range(len(self._lists)) or op.peer == rank:
            raise self._refuse(rank, op, "has no such memory, or no other side")
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
            raise self._refuse(rank, op, "waits for what was not posted")
        begun, path, number = self._busy[rank][op.memory]
        sent, awaited = self._sent.get(path, []), self._awaited.get(path, [])
        if min(len(sent), len(awaited)) <= number:
            return False
        if sent[number][0] != awaited[number].source:
            raise self._refuse(
                path[1], awaited[number], f"gets the block of {sent[number][0]} from rank {self._names[path[0]]}"
            )
        if begun.source != op.source and begun.action is Action.RECEIVE:
            raise self._refuse(rank, op, f"ends {begun}")
        if begun.action is Action.RECEIVE:
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
        into, own = self._content(rank, op, op.into)
        if into != source or own & parts:
            raise self._refuse(rank, op, f"adds to gradients of {into} what has parts of {sorted(parts)}")
        self._holds[rank][op.into] = source, own | parts

    def _content(self, rank: int, op: RingOperation, memory: str) -> Content:
        """Return what ``memory`` holds, which must be the block of ``op``, and have come."""
        held = self._holds[rank].get(memory)
        if held is None or held[0] != op.source:
            what = "nothing that has come" if held is None else f"the block of {held[0]}"
            raise self._refuse(rank, op, f"finds {what} in {memory}")
        return held

    def _check_free(self, rank: int, op: RingOperation, memory: str) -> None:
        if memory in self._busy[rank]:
            raise self._refuse(rank, op, f"overwrites {memory} during {self._busy[rank][memory][0]}, still under way")

    def _refuse(self, rank: int, op: RingOperation, why: str) -> ScheduleError:
        return ScheduleError(f"rank {self._names[rank]}: {op} of its context axis {why}")
