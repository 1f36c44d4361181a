"""Liveness on one rank: gathered parameters exist and are current when used, and activations are freed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from operator import itemgetter
from typing import Final

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.operations import COMPUTE, USES, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.passes import Pass, Passes, Peak, spell

BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
# Passes that may follow a pass of the same micro-batch and chunk.
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
    """Check the ``passes`` of all ranks. Return a list of one `Peak` per rank. Raises ScheduleError for invalid passes.

    ``placement``: assignment of layers to ranks. ``names``: text that names each rank in error messages.
    """
    # Wrong: ranks wait for each other in a cycle, or a micro-batch does not pass exactly once forward and once back
    # through every chunk.
    names = names or [f"rank {rank}" for rank in range(len(passes))]
    assert len(passes) == placement.stages, f"passes of {len(passes)} ranks for {placement.stages}"
    peaks = [
        _of_rank(name, steps, len(placement.of(rank)), microbatches)
        for rank, (name, steps) in enumerate(zip(names, passes, strict=True))
    ]
    _run(passes, placement, names)
    return peaks


def _of_rank(name: str, steps: Passes, chunks: int, microbatches: int) -> Peak:
    done: dict[tuple[int, int], Kind] = {}  # (micro-batch, chunk) -> its last pass
    live = held = 0
    most = Peak(0, 0, 0)
    for step in steps:
        kind, microbatch, chunk = step
        at = microbatch, chunk
        if not (0 <= microbatch < microbatches and 0 <= chunk < chunks):
            raise ScheduleError(
                f"{name}: the pass {spell(step)} is out of range; the micro-batches are 0 to {microbatches - 1}, and "
                f"the chunks of this rank are 0 to {chunks - 1}"
            )
        before = done.get(at)
        if kind not in DUE[before]:
            expected = " or ".join(spell((other, *at)) for other in DUE[before]) or "no more passes of this micro-batch"
            after = f" after {spell((before, *at))}" if before else ""
            raise ScheduleError(f"{name}: found the pass {spell(step)}, expected {expected}{after}; reorder the passes")
        done[at] = kind
        live += (kind is Kind.FORWARD) - (kind in BACK)
        held += (kind is Kind.BACKWARD_INPUT) - (kind is Kind.BACKWARD_WEIGHT)
        most = Peak(max(most.live, live), max(most.held, held), max(most.both, live + held))
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            last = done.get((microbatch, chunk))
            if last not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                missing = {None: "forward", Kind.FORWARD: "backward"}.get(last, "weight gradient (W)")
                raise ScheduleError(
                    f"{name}: micro-batch {microbatch} has no {missing} pass through local chunk {chunk}; add this "
                    "pass to the passes of the rank"
                )
    return most


def _run(passes: Sequence[Passes], placement: StagePlacement, names: Sequence[str]) -> None:
    numbers: list[list[int]] = [[] for _ in passes]  # of a rank's chunks in the model
    for number, rank in enumerate(placement.ranks):
        numbers[rank].append(number)
    done: set[tuple[bool, int, int]] = set()  # (back, micro-batch, chunk of the model)
    waiting: dict[tuple[bool, int, int], int] = {}  # missing pass -> rank that waits for it
    at = [0] * len(passes)
    # Each rank runs until it waits, and again after the awaited pass. Ranks that wait at the end form a cycle.
    ready = list(range(len(passes)))
    while ready:
        rank = ready.pop()
        steps, chunk_numbers = passes[rank], numbers[rank]
        while at[rank] < len(steps):
            kind, microbatch, chunk = steps[at[rank]]
            awaited = _needed(steps[at[rank]], chunk_numbers, placement)
            if awaited is not None and awaited not in done:
                waiting[awaited] = rank
                break
            at[rank] += 1
            if kind is not Kind.BACKWARD_WEIGHT:  # no rank waits for weight gradients
                event = kind is not Kind.FORWARD, microbatch, chunk_numbers[chunk]
                done.add(event)
                if event in waiting:
                    ready.append(waiting.pop(event))
    if waiting:
        raise ScheduleError(_circle(passes, placement, names, at, waiting))


def _needed(step: Pass, chunk_numbers: Sequence[int], placement: StagePlacement) -> tuple[bool, int, int] | None:
    kind, microbatch, chunk = step
    if kind is Kind.FORWARD and chunk_numbers[chunk] > 0:
        return False, microbatch, chunk_numbers[chunk] - 1
    if kind in BACK and chunk_numbers[chunk] + 1 < len(placement.chunks):
        return True, microbatch, chunk_numbers[chunk] + 1
    return None


def _circle(
    passes: Sequence[Passes],
    placement: StagePlacement,
    names: Sequence[str],
    at: Sequence[int],
    waiting: Mapping[tuple[bool, int, int], int],
) -> str:
    chain: list[int] = []
    waits: list[str] = []
    needs = {rank: awaited for awaited, rank in waiting.items()}
    rank = min(needs)
    while rank not in chain:
        back, microbatch, number = needs[rank]
        other = placement.ranks[number]
        local = placement.ranks[:number].count(other)
        kind = next(
            kind for kind, mb, chunk in passes[other] if (mb, chunk) == (microbatch, local) and (kind in BACK) == back
        )
        chain.append(rank)
        waits.append(
            f"{names[rank]} waits before {spell(passes[rank][at[rank]])} for {spell((kind, microbatch, local))} of "
            f"rank {other}"
        )
        rank = other
    return f"a cyclic wait: {'; '.join(waits[chain.index(rank) :])}"


@dataclass(frozen=True)
class RankProgram:
    """Operations of one rank in a step, and data to verify these operations, such as the rank's layers."""

    rank: int
    steps: Sequence[Operation]
    units: Mapping[int, Range]  # parameter ranges of the units that the rank computes
    place: tuple[StagePlacement, int] | None  # pipeline rank, and placement of all units; None on a parameter server
    microbatches: int
    needs: Mapping[int, Collection[int]]  # units whose parameters a unit uses
    accumulates: bool  # gradients are exchanged once per step, not once per micro-batch
    combines: bool  # several ranks have the same gradient shard: COMBINE must follow REDUCE
    refreshes: bool  # a rank updates only a part of its parameter shard: REFRESH must get the rest
    alone: bool  # no exchange is needed: there is no other replica or server

    def where(self, *kinds: Kind) -> list[tuple[int, Operation]]:
        """Return a list of pairs (index, operation) with all operations whose type is in ``kinds``, in list order."""
        entries = [self._by_kind[kind] for kind in dict.fromkeys(kinds) if kind in self._by_kind]
        return list(merge(*entries, key=itemgetter(0)))

    @cached_property
    def _by_kind(self) -> dict[Kind, list[tuple[int, Operation]]]:
        entries: dict[Kind, list[tuple[int, Operation]]] = {}
        for index, op in enumerate(self.steps):
            entries.setdefault(op.kind, []).append((index, op))
        return entries

    def ranges(self, *kinds: Kind) -> list[Range]:
        return [op.range for _, op in self.where(*kinds) if op.range is not None]

    def used_by(self, unit: int) -> set[int]:
        """Return the set of the model layers whose parameters layer ``unit`` uses, including ``unit``."""
        return {unit, *self.needs.get(unit, ())}

    def refuse(self, why: str) -> ScheduleError:
        """Return a ScheduleError that names this rank and the reason ``why``."""
        return ScheduleError(f"rank {self.rank}: {why}")


NOWHERE: Final = Range(0, 0)


def is_covered(whole: Range, parts: Iterable[Range]) -> bool:
    """Return True if the ranges ``parts`` together cover the range ``whole``."""
    return all(times for _, times in coverage(whole, parts))


def range_text(part: Range) -> str:
    """Return the range ``part`` as a text "[start:stop]"."""
    return f"[{part.start}:{part.stop}]"


GATHERS = (Kind.GATHER, Kind.START_GATHER, Kind.WAIT_GATHER)


def check_liveness(program: RankProgram) -> None:
    """Raise ScheduleError if ``program`` uses freed parameters, or ends the step with old parameters."""
    _check_gathers(program)
    _check_residence(program)
    _check_freshness(program)


def gathered_peak(program: RankProgram) -> int:
    """Return the largest number of layers whose parameters are gathered at the same time in ``program``.

    Layers whose parameters are never freed do not count.
    """
    freed = {op.unit for _, op in program.where(Kind.FREE)}
    gathered = most = 0
    for _, op in program.where(Kind.GATHER, Kind.START_GATHER, Kind.FREE):
        gathered += (op.unit in freed) * (-1 if op.kind is Kind.FREE else 1)
        most = max(most, gathered)
    return most


def activation_peak(program: RankProgram) -> tuple[Peak, int]:
    """Return a pair: the `Peak` of ``program``, and the peak number of micro-batches with activations in memory."""
    # The second result excludes micro-batches whose activations were freed and are not recomputed yet.
    chunks = program.place[0].of(program.place[1]) if program.place is not None else ()
    chunk_of = {unit: number for number, units in enumerate(chunks) for unit in units}
    recomputed = {(op.microbatch, chunk_of[op.unit]) for op in program.steps if op.recompute}
    live: set[tuple[int, int]] = set()
    whole: set[tuple[int, int]] = set()
    held: set[tuple[int, int]] = set()
    remaining = Counter(
        {(mb, number): len(units) for mb in range(program.microbatches) for number, units in enumerate(chunks)}
    )
    most, most_whole = Peak(0, 0, 0), 0
    for _, op in program.where(*COMPUTE):
        at = op.microbatch, chunk_of[op.unit]
        if op.kind is Kind.FORWARD:
            live.add(at)
            if op.recompute or at not in recomputed:
                whole.add(at)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            remaining[at] -= 1
            if not remaining[at]:
                held.discard(at)
        elif op.unit == chunks[at[1]].start:  # the backward pass of a chunk ends at its first unit
            live.discard(at)
            whole.discard(at)
            if op.kind is Kind.BACKWARD_INPUT:
                held.add(at)
        most = Peak(max(most.live, len(live)), max(most.held, len(held)), max(most.both, len(live) + len(held)))
        most_whole = max(most_whole, len(whole))
    return most, most_whole


def _check_gathers(program: RankProgram) -> None:
    in_flight: dict[int, Operation] = {}
    for _, op in program.where(*GATHERS, Kind.FREE, *USES, Kind.APPLY):
        if op.kind is Kind.WAIT_GATHER:
            if in_flight.pop(op.unit, None) is None:
                raise program.refuse(
                    f"{op} waits for a gather that was not started, or for which another WAIT_GATHER has already "
                    f"waited; put one START_GATHER of unit {op.unit} before each WAIT_GATHER of this unit"
                )
        elif op.kind in USES:
            early = sorted(program.used_by(op.unit) & in_flight.keys())
            if early:
                raise program.refuse(
                    f"{op} uses unit {early[0]} while the gather of this unit is in flight; put the WAIT_GATHER of "
                    f"unit {early[0]} before {op}"
                )
        elif op.kind is Kind.APPLY:
            for unit, start in in_flight.items():
                if op.touches(program.units.get(unit, NOWHERE)):
                    raise program.refuse(
                        f"{op} changes parameters that {start} is still sending; put the WAIT_GATHER of unit {unit} "
                        f"before {op}"
                    )
        elif op.unit in in_flight:
            raise program.refuse(
                f"{op} comes while {in_flight[op.unit]} is in flight; put a WAIT_GATHER of unit {op.unit} between "
                "these two operations"
            )
        elif op.kind is Kind.START_GATHER:
            in_flight[op.unit] = op
    for start in in_flight.values():
        raise program.refuse(f"{start} is never completed; put a WAIT_GATHER of unit {start.unit} after {start}")


def _check_residence(program: RankProgram) -> None:
    freed = {op.unit for _, op in program.where(Kind.FREE)}
    resident: set[int] = set()
    for op in program.steps:
        if op.kind in GATHERS and op.unit in freed:
            if op.unit in resident:
                raise program.refuse(
                    f"{op} gathers unit {op.unit}, which is already gathered; put a FREE of unit {op.unit} before "
                    f"{op}, or remove {op}"
                )
            if op.kind is not Kind.START_GATHER:
                resident.add(op.unit)
        elif op.kind is Kind.FREE:
            if op.unit not in resident:
                raise program.refuse(
                    f"{op} frees unit {op.unit}, which is not gathered; put a GATHER or WAIT_GATHER of unit {op.unit} "
                    f"before {op}, or remove {op}"
                )
            resident.remove(op.unit)
        elif op.kind in USES or (op.kind is Kind.COPY_VALUE and op.unit in program.units):
            used = program.used_by(op.unit) if op.kind in USES else {op.unit}
            absent = sorted((used & freed) - resident)
            if absent:
                raise program.refuse(
                    f"{op} uses unit {absent[0]}, which is not gathered at this point; put a GATHER or WAIT_GATHER of "
                    f"unit {absent[0]} before {op}"
                )
        elif op.kind is Kind.APPLY:
            stale = [unit for unit in resident if op.touches(program.units.get(unit, NOWHERE))]
            if stale:
                raise program.refuse(
                    f"{op} updates unit {stale[0]} while old parameters of this unit are gathered; put a FREE of unit "
                    f"{stale[0]} before {op}"
                )
    if resident:
        raise program.refuse(
            f"unit {min(resident)} is gathered, but never freed; put a FREE of unit {min(resident)} after the last "
            "operation that uses it"
        )


def _check_freshness(program: RankProgram) -> None:
    freed = {op.unit for _, op in program.where(Kind.FREE)}
    for unit, whole in program.units.items():
        if unit in freed and not program.refreshes:
            continue
        # The last event that makes values old: the unit's APPLY, or the agreement if other ranks update the unit.
        touching = [i for i, op in program.where(Kind.AGREE, Kind.APPLY) if op.kind is Kind.AGREE or op.touches(whole)]
        brings = (Kind.REFRESH,) if unit in freed else (Kind.GATHER, Kind.START_GATHER, Kind.COMMIT)
        brought = [i for i, op in program.where(*brings) if op.unit == unit or op.kind is Kind.COMMIT]
        if brought and brought[-1] > max(touching, default=-1):
            continue
        if unit in freed:
            raise program.refuse(
                f"the parameter shard of unit {unit} has old values at the end of the step, because no REFRESH follows "
                f"the update; add a REFRESH of unit {unit} after the last APPLY of this unit"
            )
        if not is_covered(whole, program.ranges(Kind.APPLY, Kind.PULL)):
            raise program.refuse(
                f"unit {unit} has old parameters at the end of the step; add an APPLY or a PULL of the parameter range "
                f"{range_text(whole)}, or a GATHER of unit {unit} after its update"
            )
