"""Liveness on one rank: gathered parameters are there and fresh when used, and activations are freed.

`RankProgram` is the operation list of a rank with its context, which all checks of the verifier look at. The checks
here follow what is in memory: units that are gathered and freed, and micro-batches from forward to backward;
`gathered_peak` and `activation_peak` return the most at once. They look at one rank, and no other.

`prove` checks the order of passes of all ranks, before there are units: each micro-batch goes once forward and once
back through every chunk, and no ranks wait for each other in a circle. Schedule files are read with it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from operator import itemgetter
from typing import Final

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.errors import ScheduleError
from hpcdist.strategies.schedule.generate.passes import Pass, Passes, Peak, spell
from hpcdist.strategies.schedule.operations import COMPUTE, USES, Kind, Operation, StagePlacement

BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
# What may follow, for the same micro-batch and chunk.
DUE: Final[dict[Kind | None, tuple[Kind, ...]]] = {
    None: (Kind.FORWARD,),
    Kind.FORWARD: BACK,
    Kind.BACKWARD_INPUT: (Kind.BACKWARD_WEIGHT,),
    Kind.BACKWARD: (),
    Kind.BACKWARD_WEIGHT: (),
}


def prove(
    passes: Sequence[Passes], placement: StagePlacement, microbatches: int, names: Sequence[str] | None = None
) -> list[Peak]:
    """Return the peak of each rank, given the ``passes`` of all of them.

    Raises ScheduleError, which names rank, as ``names`` do, and pass, where a micro-batch does not go once forward and
    once back through every chunk, or ranks wait for each other in a circle.
    """
    names = names or [f"rank {rank}" for rank in range(len(passes))]
    assert len(passes) == placement.stages, f"passes of {len(passes)} ranks for {placement.stages}"
    peaks = [
        _of_rank(name, steps, len(placement.of(rank)), microbatches)
        for rank, (name, steps) in enumerate(zip(names, passes, strict=True))
    ]
    _run(passes, placement, names)
    return peaks


def _of_rank(name: str, steps: Passes, chunks: int, microbatches: int) -> Peak:
    """Return the peak of one rank, whose micro-batches go forward and then back through each of its chunks."""
    done: dict[tuple[int, int], Kind] = {}  # (micro-batch, chunk) -> its last pass
    live = held = 0
    most = Peak(0, 0, 0)
    for step in steps:
        way, microbatch, chunk = step
        at = microbatch, chunk
        if not (0 <= microbatch < microbatches and 0 <= chunk < chunks):
            raise ScheduleError(
                f"{name}: {spell(step)} is beyond its {microbatches} micro-batches, 0 to {microbatches - 1}, or "
                f"its chunks, 0 to {chunks - 1}"
            )
        before = done.get(at)
        if way not in DUE[before]:
            wanted = " or ".join(spell((other, *at)) for other in DUE[before]) or "nothing more of the micro-batch"
            behind = f", behind {spell((before, *at))}" if before else ""
            raise ScheduleError(f"{name}: {spell(step)} comes where {wanted} is due{behind}")
        done[at] = way
        live += (way is Kind.FORWARD) - (way in BACK)
        held += (way is Kind.BACKWARD_INPUT) - (way is Kind.BACKWARD_WEIGHT)
        most = Peak(max(most.live, live), max(most.held, held), max(most.both, live + held))
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            last = done.get((microbatch, chunk))
            if last not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                missing = {None: "forward", Kind.FORWARD: "back"}.get(last, "to the gradients of its weights (W)")
                raise ScheduleError(
                    f"{name}: micro-batch {microbatch} never goes {missing} through chunk {chunk} of the rank"
                )
    return most


def _run(passes: Sequence[Passes], placement: StagePlacement, names: Sequence[str]) -> None:
    """Run the passes of all ranks, each as soon as the passes that it waits for are done."""
    numbers: list[list[int]] = [[] for _ in passes]  # of a rank's chunks in the model
    for number, rank in enumerate(placement.ranks):
        numbers[rank].append(number)
    done: set[tuple[bool, int, int]] = set()  # (back, micro-batch, chunk of the model)
    waiting: dict[tuple[bool, int, int], int] = {}  # what is not done -> the rank that has stopped for it
    at = [0] * len(passes)
    # Each rank runs until it waits; the pass that it waits for makes it ready again. So every pass is looked at once or
    # twice, and ranks that still wait when nobody is ready wait for each other.
    ready = list(range(len(passes)))
    while ready:
        rank = ready.pop()
        steps, own = passes[rank], numbers[rank]
        while at[rank] < len(steps):
            way, microbatch, chunk = steps[at[rank]]
            needed = _needed(steps[at[rank]], own, placement)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            at[rank] += 1
            if way is not Kind.BACKWARD_WEIGHT:  # nobody waits for the gradients of weights
                event = way is not Kind.FORWARD, microbatch, own[chunk]
                done.add(event)
                if event in waiting:
                    ready.append(waiting.pop(event))
    if waiting:
        raise ScheduleError(_circle(passes, placement, names, at, waiting))


def _needed(step: Pass, own: Sequence[int], placement: StagePlacement) -> tuple[bool, int, int] | None:
    """Return the pass of another chunk that a pass waits for."""
    way, microbatch, chunk = step
    if way is Kind.FORWARD and own[chunk] > 0:
        return False, microbatch, own[chunk] - 1
    if way in BACK and own[chunk] + 1 < len(placement.chunks):
        return True, microbatch, own[chunk] + 1
    return None


def _circle(
    passes: Sequence[Passes],
    placement: StagePlacement,
    names: Sequence[str],
    at: Sequence[int],
    waiting: Mapping[tuple[bool, int, int], int],
) -> str:
    """Return the circle of waits in words."""
    chain: list[int] = []
    waits: list[str] = []
    needs = {rank: needed for needed, rank in waiting.items()}
    rank = min(needs)
    while rank not in chain:
        back, microbatch, number = needs[rank]
        other = placement.ranks[number]
        local = placement.ranks[:number].count(other)
        way = next(
            way for way, mb, chunk in passes[other] if (mb, chunk) == (microbatch, local) and (way in BACK) == back
        )
        chain.append(rank)
        waits.append(
            f"{names[rank]} waits before {spell(passes[rank][at[rank]])} for {spell((way, microbatch, local))} of rank "
            f"{other}"
        )
        rank = other
    return f"a cyclic wait: {'; '.join(waits[chain.index(rank) :])}"


@dataclass(frozen=True)
class RankProgram:
    """Operation list of a rank, and ``units``, the range of each stage of the model that it computes.

    A parameter server has no units, and no ``place``: which rank of which pipeline this is. ``needs`` maps a unit to
    all units whose parameters it uses. ``accumulates``: gradients are exchanged once a step, not after every
    micro-batch; ``alone``: there is nobody to exchange with.
    ``combines``: a REDUCE does not sum over all replicas, and a COMBINE has to; ``refreshes``: what is kept of a unit
    that is gathered and freed is more than this rank steps, and a REFRESH has to bring the rest.
    """

    rank: int
    steps: Sequence[Operation]
    units: Mapping[int, Range]
    place: tuple[StagePlacement, int] | None
    microbatches: int
    needs: Mapping[int, Collection[int]]
    accumulates: bool
    combines: bool
    refreshes: bool
    alone: bool

    def where(self, *kinds: Kind) -> list[tuple[int, Operation]]:
        """Return (position, operation) of ``kinds``, in their order."""
        entries = [self._by_kind[kind] for kind in dict.fromkeys(kinds) if kind in self._by_kind]
        return list(merge(*entries, key=itemgetter(0)))

    @cached_property
    def _by_kind(self) -> dict[Kind, list[tuple[int, Operation]]]:
        entries: dict[Kind, list[tuple[int, Operation]]] = {}
        for index, op in enumerate(self.steps):
            entries.setdefault(op.kind, []).append((index, op))
        return entries

    def ranges(self, *kinds: Kind) -> list[Range]:
        """Return the ranges of all operations of ``kinds``."""
        return [op.range for _, op in self.where(*kinds) if op.range is not None]

    def refuse(self, why: str) -> ScheduleError:
        """Return the error for this rank, with the reason ``why``."""
        return ScheduleError(f"rank {self.rank}: {why}")


NOWHERE: Final = Range(0, 0)


def is_covered(whole: Range, parts: Iterable[Range]) -> bool:
    """Whether ``parts`` together are all of ``whole``."""
    return all(times for _, times in coverage(whole, parts))


def range_text(part: Range) -> str:
    """Return the range as errors show it."""
    return f"[{part.start}:{part.stop}]"


GATHERS = (Kind.GATHER, Kind.START_GATHER, Kind.WAIT_GATHER)


def check_liveness(share: RankProgram) -> None:
    """Raise ScheduleError for units of ``share`` that are used while freed, or left with old values."""
    _check_gathers(share)
    _check_residence(share)
    _check_freshness(share)


def gathered_peak(share: RankProgram) -> int:
    """Return the largest number of units that are whole, or on their way, at once, of those that are freed."""
    freed = {op.unit for _, op in share.where(Kind.FREE)}
    there = most = 0
    for _, op in share.where(Kind.GATHER, Kind.START_GATHER, Kind.FREE):  # units that are never freed do not count
        there += (op.unit in freed) * (-1 if op.kind is Kind.FREE else 1)
        most = max(most, there)
    return most


def activation_peak(share: RankProgram) -> tuple[Peak, int]:
    """Return the peak of begun micro-batches by chunk, and that of micro-batches with all activations.

    The second is smaller where activations are dropped and computed again.
    """
    chunks = share.place[0].of(share.place[1]) if share.place is not None else ()
    chunk_of = {unit: number for number, units in enumerate(chunks) for unit in units}
    again = {(op.microbatch, chunk_of[op.unit]) for op in share.steps if op.recompute}
    live: set[tuple[int, int]] = set()
    whole: set[tuple[int, int]] = set()
    held: set[tuple[int, int]] = set()
    left = Counter(
        {(mb, number): len(units) for mb in range(share.microbatches) for number, units in enumerate(chunks)}
    )
    most, most_whole = Peak(0, 0, 0), 0
    for _, op in share.where(*COMPUTE):
        at = op.microbatch, chunk_of[op.unit]
        if op.kind is Kind.FORWARD:
            live.add(at)
            if op.recompute or at not in again:
                whole.add(at)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            left[at] -= 1
            if not left[at]:
                held.discard(at)
        elif op.unit == chunks[at[1]].start:  # the backward of a chunk ends at its first unit
            live.discard(at)
            whole.discard(at)
            if op.kind is Kind.BACKWARD_INPUT:
                held.add(at)
        most = Peak(max(most.live, len(live)), max(most.held, len(held)), max(most.both, len(live) + len(held)))
        most_whole = max(most_whole, len(whole))
    return most, most_whole


def _check_gathers(share: RankProgram) -> None:
    """Check that a started gather is waited for once, and its unit neither used, gathered nor updated before."""
    under_way: dict[int, Operation] = {}
    for _, op in share.where(*GATHERS, Kind.FREE, *USES, Kind.APPLY):
        if op.kind is Kind.WAIT_GATHER:
            if under_way.pop(op.unit, None) is None:
                raise share.refuse(f"{op} waits for what was not started, or was waited for before")
        elif op.kind in USES:
            early = sorted({op.unit, *share.needs.get(op.unit, ())} & under_way.keys())
            if early:
                raise share.refuse(f"{op} uses unit {early[0]}, which is not gathered then: no WAIT_GATHER before it")
        elif op.kind is Kind.APPLY:
            for unit, begun in under_way.items():
                if op.touches(share.units.get(unit, NOWHERE)):
                    raise share.refuse(f"{op} changes what {begun}, still under way, sends")
        elif op.unit in under_way:
            raise share.refuse(f"{op} comes while {under_way[op.unit]} is under way")
        elif op.kind is Kind.START_GATHER:
            under_way[op.unit] = op
    for begun in under_way.values():
        raise share.refuse(f"{begun} is never waited for")


def _check_residence(share: RankProgram) -> None:
    """Check that units that are gathered and freed are there when they are used, and new when gathered."""
    freed = {op.unit for _, op in share.where(Kind.FREE)}
    there: set[int] = set()
    for op in share.steps:
        if op.kind in GATHERS and op.unit in freed:
            if op.unit in there:
                raise share.refuse(f"{op} gathers a unit that is there already")
            if op.kind is not Kind.START_GATHER:
                there.add(op.unit)
        elif op.kind is Kind.FREE:
            if op.unit not in there:
                raise share.refuse(f"{op} frees a unit that is not there")
            there.remove(op.unit)
        elif op.kind in USES or (op.kind is Kind.COPY_VALUE and op.unit in share.units):
            used = {op.unit, *share.needs.get(op.unit, ())} if op.kind in USES else {op.unit}
            absent = sorted((used & freed) - there)
            if absent:
                raise share.refuse(f"{op} uses unit {absent[0]}, which is not gathered then")
        elif op.kind is Kind.APPLY:
            stale = [unit for unit in there if op.touches(share.units.get(unit, NOWHERE))]
            if stale:
                raise share.refuse(f"{op} leaves old values in unit {stale[0]}, which is still gathered")
    if there:
        raise share.refuse(f"unit {min(there)} is gathered, but never freed")


def _check_freshness(share: RankProgram) -> None:
    """Check that all units of a rank end with new values: updated here, gathered after that, or pulled."""
    freed = {op.unit for _, op in share.where(Kind.FREE)}
    for unit, whole in share.units.items():
        if unit in freed and not share.refreshes:
            continue
        # The last event that makes values old: the unit's APPLY, or the agreement where others update it.
        touching = [i for i, op in share.where(Kind.AGREE, Kind.APPLY) if op.kind is Kind.AGREE or op.touches(whole)]
        brings = (Kind.REFRESH,) if unit in freed else (Kind.GATHER, Kind.START_GATHER, Kind.COMMIT)
        brought = [i for i, op in share.where(*brings) if op.unit == unit or op.kind is Kind.COMMIT]
        if brought and brought[-1] > max(touching, default=-1):
            continue
        if unit in freed:
            raise share.refuse(f"the shard of unit {unit} keeps old values: no REFRESH after its APPLY")
        if not is_covered(whole, share.ranges(Kind.APPLY, Kind.PULL)):
            raise share.refuse(
                f"unit {unit} keeps old values: no APPLY, PULL or later GATHER covers {range_text(whole)}"
            )
