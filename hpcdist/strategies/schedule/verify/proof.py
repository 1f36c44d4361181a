"""Proof of a whole step: verify the operation lists of all ranks together, and return what the step costs.

What is proven, before anything runs: every receive is matched by one send of the same micro-batch in the same
direction; collectives come in the same order on all members of their axis; no rank waits in a circle (see
`deadlock`); each micro-batch goes through each stage of the model once and comes back once; gradients are exchanged
when they are complete, and once; payloads (COMPRESS) travel once all have agreed, and before the update; what is
started is waited for before it is needed; each element is updated by one owner or by every replica; and every rank
that keeps parameters ends with new ones. The executor runs the same lists.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.verify import liveness, rank_checks
from hpcdist.strategies.schedule.verify.deadlock import REPLICAS, DryRun, PeerRanks
from hpcdist.strategies.schedule.verify.liveness import RankProgram
from hpcdist.strategies.zero.config import ShardingDegrees


@dataclass(frozen=True)
class Proof:
    """Costs of a proven step.

    For each rank of a pipeline, the most micro-batches at once, counted for each chunk that they are in: ``live``
    between forward and backward, or its first half where it is split; ``whole`` those of them whose activations are all
    kept, fewer where they are computed again; ``held`` between the halves, for the gradients of weights; ``both`` live
    or held. ``gathered``: the most units that are whole, or on their way, at once, of those that are gathered and
    freed. ``messages`` between ranks, and ``meetings`` of collectives, of all ranks together.
    """

    live: tuple[int, ...]
    whole: tuple[int, ...]
    held: tuple[int, ...]
    both: tuple[int, ...]
    gathered: tuple[int, ...]
    messages: int
    meetings: int


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
    """Return the proof of one step, given the list of every rank (local).

    ``units`` are the ranges of all stages of the model, and ``needs`` maps each to those whose parameters it uses
    besides its own. Lists beyond the size of ``grid`` are those of parameter servers. ``accumulates`` says that
    gradients are exchanged once a step, not after every micro-batch; ``degrees`` over how many replicas parameters,
    gradients and optimizer state are cut, where all do not step everything. ``placement`` says which rank of a pipeline
    has which chunks; without it chunks are taken to be as long as they can be. ``experts`` are the parts of units of
    which each of ``grid.expert`` consecutive replicas has its own. Raises ScheduleError, which names rank and
    operation.
    """
    neighbours = PeerRanks(grid, len(lists))
    if len(lists) < grid.size:
        raise ScheduleError(f"there are {len(lists)} lists for the {grid.size} ranks of the grid; give one for each")
    owned, places = _owned(lists, neighbours, units, placement)
    shares = [
        RankProgram(
            rank=rank,
            steps=steps,
            units={unit: units[unit] for unit in owned[rank]},
            place=(places[rank], neighbours.stage(rank)) if rank < grid.size else None,
            microbatches=microbatches,
            needs=needs or {},
            accumulates=accumulates,
            # Several ranks hold the same shard of gradients; the shard of parameters is larger than the own cut.
            combines=degrees is not None and not accumulates and degrees.gradients < grid.replicas,
            refreshes=degrees is not None and degrees.parameters < degrees.optimizer,
            alone=grid.replicas == 1 and not neighbours.servers,
        )
        for rank, steps in enumerate(lists)
    ]
    for share in shares:
        rank_checks.check(share)
    _check_owners(shares, neighbours, grid.replicas // degrees.optimizer if degrees else 1, experts or {})
    (dry_run := DryRun(lists, neighbours, places)).run()
    stages = [
        [share for share in shares[: grid.size] if share.place is not None and share.place[1] == stage]
        for stage in range(grid.pipeline)
    ]
    peaks = [[liveness.activation_peak(share) for share in stage] for stage in stages]
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
    given: StagePlacement | None,
) -> tuple[list[list[int]], list[StagePlacement]]:
    """Return the units that each rank computes, and the placement in its pipeline, which must compute each once."""
    owned = [sorted({op.unit for op in steps if op.kind in COMPUTE}) for steps in lists]
    places = []
    for rank in neighbours.workers:
        pipeline = neighbours.along(("pipeline",), rank)
        stage_of = {unit: stage for stage, member in enumerate(pipeline) for unit in owned[member]}
        computed = sorted(unit for member in pipeline for unit in owned[member])
        if computed != sorted(units) or not all(owned[member] for member in pipeline):
            raise ScheduleError(
                f"rank {rank}: the stages of its pipeline compute units {[owned[member] for member in pipeline]}; "
                f"together they must be {sorted(units)}, with at least one each"
            )
        if given is not None:
            for stage, member in enumerate(pipeline):
                due = [unit for chunk in given.of(stage) for unit in chunk]
                if owned[member] != due:
                    raise ScheduleError(
                        f"rank {member}: it computes units {owned[member]}; the chunks of its place have {due}"
                    )
            places.append(given)
            continue
        parts = [list(run) for _, run in groupby(computed, key=lambda unit: stage_of[unit])]
        chunks = tuple(range(part[0], part[-1] + 1) for part in parts)
        places.append(StagePlacement(chunks, tuple(stage_of[part[0]] for part in parts)))
    return owned, places


def _check_owners(
    shares: Sequence[RankProgram], neighbours: PeerRanks, copies: int, experts: Mapping[int, Range]
) -> None:
    """Check that each element is updated by exactly ``copies`` ranks, or by all that hold it.

    With ZeRO p / d_o replicas own the same cut of the optimizer, and all of them update it. What is at one place of
    ``experts`` is another expert on each of the ranks that share them out: those that hold it are its replicas.
    """
    servers = [part for server in neighbours.servers for part in shares[server].ranges(Kind.APPLY)]
    for share in shares[: neighbours.grid.size]:
        data, degree = neighbours.along(REPLICAS, share.rank), neighbours.grid.expert
        replicas = data[data.index(share.rank) % degree :: degree]
        parts = [
            (unit, part, members)
            for unit, whole in share.units.items()
            for part, members in (
                (Range(whole.start, experts[unit].start if unit in experts else whole.stop), data),
                (experts.get(unit, Range(whole.stop, whole.stop)), replicas),
            )
        ]
        applied_by = {
            members: servers + [part for member in members for part in shares[member].ranges(Kind.APPLY)]
            for members in (data, replicas)
        }
        for unit, whole, members in parts:
            applied = applied_by[members]
            for piece, times in coverage(whole, applied):
                if times not in (copies, len(members)):
                    raise ScheduleError(
                        f"rank {share.rank}: [{piece.start}:{piece.stop}] of unit {unit} is stepped by {times} of the "
                        f"{len(members)} ranks that share it; {copies} APPLY, or one on each, is a step"
                    )
