"""Proof of a whole step: verify the operation lists of all ranks, and return the costs of the step.

Proven before anything runs: every receive matches one send; collectives have the same order on all members of their
axis; no cyclic waits; each micro-batch passes forward and backward through each stage once; gradients are exchanged
once, when complete; started operations are waited for before their results are used; each element is updated by one
owner or by every replica; every rank that keeps parameters ends with new ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import ProcessGrid, ShardingDegrees
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.verify import liveness, rank_checks
from hpcdist.strategies.schedule.verify.deadlock import REPLICAS, DryRun, PeerRanks
from hpcdist.strategies.schedule.verify.liveness import RankProgram


@dataclass(frozen=True)
class Proof:
    """Peak micro-batch counts and message counts of a training step whose operations were verified."""

    # Largest number of micro-batches on each pipeline rank, by state (``live`` to ``both``).
    live: tuple[int, ...]  # after forward, before backward (or its input-gradient half)
    whole: tuple[int, ...]  # live, with activations that were not dropped for recomputation
    held: tuple[int, ...]  # after the input-gradient half of the backward pass, before the weight-gradient half
    both: tuple[int, ...]  # live or held
    gathered: tuple[int, ...]  # each rank's largest number of gathered model units
    messages: int  # point-to-point, of all ranks
    meetings: int  # collectives of all ranks


def verify(
    lists: Sequence[Sequence[Operation]],
    *,
    grid: ProcessGrid,
    units: Mapping[int, Range],
    microbatches: int,
    needs: Mapping[int, Collection[int]] | None = None,
    accumulates: bool = True,
    degrees: ShardingDegrees | None = None,
    placement: StagePlacement | None = None,
    experts: Mapping[int, Range] | None = None,
) -> Proof:
    """Verify the operations of all ranks in a step. Return a `Proof`. Raises ScheduleError for a wrong step. Local.

    ``lists``: list of operations of each rank.
    """
    # ``units``: flat parameter range of each model unit. ``needs``: other units whose parameters a unit uses.
    # ``placement`` None: derived from ``lists``. ``experts``: flat range of each unit's experts, sharded over
    # ``grid.expert`` consecutive replicas.
    neighbours = PeerRanks(grid, len(lists))
    if len(lists) < grid.size:
        raise ScheduleError(
            f"there are {len(lists)} operation lists for the {grid.size} ranks of the grid; give one list per rank"
        )
    owned, placements = _owned(lists, neighbours, units, placement)
    programs = [
        RankProgram(
            rank=rank,
            steps=steps,
            units={unit: units[unit] for unit in owned[rank]},
            place=(placements[rank], neighbours.stage(rank)) if rank < grid.size else None,
            microbatches=microbatches,
            needs=needs or {},
            accumulates=accumulates,
            # Several ranks hold the same gradient shard; the parameter shard is larger than the updated shard.
            combines=degrees is not None and not accumulates and degrees.gradients < grid.replicas,
            refreshes=degrees is not None and degrees.parameters < degrees.optimizer,
            alone=grid.replicas == 1 and not neighbours.servers,
        )
        for rank, steps in enumerate(lists)
    ]
    for program in programs:
        rank_checks.check(program)
    _check_owners(programs, neighbours, grid.replicas // degrees.optimizer if degrees else 1, experts or {})
    (dry_run := DryRun(lists, neighbours, placements)).run()
    stages = [
        [program for program in programs[: grid.size] if program.place is not None and program.place[1] == stage]
        for stage in range(grid.pipeline)
    ]
    peaks = [[liveness.activation_peak(program) for program in stage] for stage in stages]
    return Proof(
        live=tuple(max(peak.live for peak, _ in stage) for stage in peaks),
        whole=tuple(max(whole for _, whole in stage) for stage in peaks),
        held=tuple(max(peak.held for peak, _ in stage) for stage in peaks),
        both=tuple(max(peak.both for peak, _ in stage) for stage in peaks),
        gathered=tuple(max(map(liveness.gathered_peak, stage)) for stage in stages),
        messages=dry_run.messages,
        meetings=dry_run.meetings,
    )


def _owned(
    lists: Sequence[Sequence[Operation]],
    neighbours: PeerRanks,
    units: Mapping[int, Range],
    placement: StagePlacement | None,
) -> tuple[list[list[int]], list[StagePlacement]]:
    owned = [sorted({op.unit for op in steps if op.kind in COMPUTE}) for steps in lists]
    placements = []
    for rank in neighbours.workers:
        pipeline = neighbours.along(("pipeline",), rank)
        stage_of = {unit: stage for stage, member in enumerate(pipeline) for unit in owned[member]}
        computed = sorted(unit for member in pipeline for unit in owned[member])
        if computed != sorted(units) or not all(owned[member] for member in pipeline):
            raise ScheduleError(
                f"the pipeline ranks {list(pipeline)} compute the model units "
                f"{[owned[member] for member in pipeline]}; every rank must compute at least one unit, and every unit "
                f"of {sorted(units)} must be computed once"
            )
        if placement is not None:
            for stage, member in enumerate(pipeline):
                expected = [unit for chunk in placement.of(stage) for unit in chunk]
                if owned[member] != expected:
                    raise ScheduleError(
                        f"rank {member}: its operation list computes the model units {owned[member]}, but the "
                        f"placement assigns the units {expected} to this rank; correct the list or the placement"
                    )
            placements.append(placement)
            continue
        parts = [list(run) for _, run in groupby(computed, key=lambda unit: stage_of[unit])]
        chunks = tuple(range(part[0], part[-1] + 1) for part in parts)
        placements.append(StagePlacement(chunks, tuple(stage_of[part[0]] for part in parts)))
    return owned, placements


def _check_owners(
    programs: Sequence[RankProgram], neighbours: PeerRanks, copies: int, experts: Mapping[int, Range]
) -> None:
    servers = [part for server in neighbours.servers for part in programs[server].ranges(Kind.APPLY)]
    for program in programs[: neighbours.grid.size]:
        data, degree = neighbours.along(REPLICAS, program.rank), neighbours.grid.expert
        replicas = data[data.index(program.rank) % degree :: degree]
        parts = [
            (unit, part, members)
            for unit, whole in program.units.items()
            for part, members in (
                (Range(whole.start, experts[unit].start if unit in experts else whole.stop), data),
                (experts.get(unit, Range(whole.stop, whole.stop)), replicas),
            )
        ]
        applied_by = {
            members: servers + [part for member in members for part in programs[member].ranges(Kind.APPLY)]
            for members in (data, replicas)
        }
        for unit, whole, members in parts:
            applied = applied_by[members]
            for piece, times in coverage(whole, applied):
                if times not in (copies, len(members)):
                    raise ScheduleError(
                        f"rank {program.rank}: parameter range [{piece.start}:{piece.stop}] of unit {unit} is updated "
                        f"by {times} of the {len(members)} ranks that hold this range; it must be updated (APPLY) by "
                        f"{copies} or by all {len(members)} of these ranks"
                    )
