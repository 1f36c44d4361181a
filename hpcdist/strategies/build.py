"""From the names in a recipe to the exchange, the copies and the operations of one rank."""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from hpcdist.errors import ScheduleError
from hpcdist.models.arena import Arena
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.grid import Grid
from hpcdist.strategies.pipeline import Copies, ties
from hpcdist.strategies.schedule.behind import polled, prefetched, started
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.generators import compute, gathered, interleave
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.pipelines import Passes
from hpcdist.strategies.schedule.verify import Proof, verify
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero import ZeroExchange
from hpcdist.strategies.zero_config import Degrees

PROVEN_RANKS: Final = 64  # the lists of all ranks meet on one
IN_FLIGHT: Final = 2  # whole layers of gradients that are reduced behind a backward, where they are freed afterwards
EXCHANGES: Final[dict[str, Callable[[Seat], Exchange]]] = {
    "allreduce": AllreduceExchange,
    "zero1": partial(ZeroExchange, stage=1),
    "zero2": partial(ZeroExchange, stage=2),
    "zero3": partial(ZeroExchange, stage=3),
}


def build_executor(seat: Seat, exchange: Exchange, kind: Callable[..., Executor] = Executor) -> Executor:
    """Return what runs the steps of the rank in ``seat``. Collective over the pipeline: all build alike.

    ``kind`` is `Executor`, or takes the same arguments.
    """
    found = ties(seat.model, seat.placed)
    return kind(seat, exchange, Copies(seat, found, exchange), Arena(seat.ledger, seat.on), seat.optimizer.clip_norm)


def operations(
    seat: Seat,
    exchange: Exchange,
    copies: Copies,
    parallel: ParallelConfig,
    schedule: Sequence[Passes] | None = None,
) -> list[Operation]:
    """Return the step of the rank in ``seat`` (local). ``schedule`` may have the passes of all pipeline ranks."""
    steps: list[Operation] = []
    if seat.computes:
        place = seat.placed, seat.pipeline.rank
        steps = compute(schedule or parallel.order, parallel.microbatches, *place, recompute=parallel.recompute)
    if exchange.gathers:
        steps = gathered(steps, exchange.gathers, keep=exchange.keeps_parameters)
    steps += copies.after_backward()
    plan = exchange.plan()
    if parallel.sequence_parallel:
        plan.insert(plan.index(Operation(Kind.AGREE)), Operation(Kind.SUM_ROWS))
    whole = interleave(steps, plan, seat.ranges, every_microbatch=not exchange.accumulates)
    if exchange.overlap is not None:
        most = None if exchange.accumulates else IN_FLIGHT
        whole = prefetched(started(whole, seat.ranges, seat.model.needs, most), exchange.ahead)
    if Kind.MIX_START in exchange.carries_out or (exchange.overlap is not None and exchange.overlap.polls):
        whole = polled(whole)
    return whole + copies.after_update()


def prove(
    seat: Seat,
    grid: Grid,
    steps: list[Operation],
    microbatches: int,
    *,
    accumulates: bool,
    degrees: Degrees | None = None,
) -> Proof | None:
    """Return the proof that the lists of all ranks are one step, None for more than `PROVEN_RANKS`. Collective.

    Raises ScheduleError on every rank, before anything has run. It takes a quarter of a second for 64 ranks
    and 32 micro-batches, a second with four chunks on each under zero3; 3 s for 64 ranks and 1024 micro-batches, 11 s
    with four chunks.
    """
    if seat.world.size > PROVEN_RANKS:
        return None
    written = seat.world.allgather_object(pickle.dumps(steps))  # read by one rank: there can be millions
    verdict: Proof | ScheduleError | None = None
    if seat.world.rank == 0:
        units = {unit: seat.layout.units[stage.layer] for unit, stage in enumerate(seat.model.stages)}
        try:
            verdict = verify(
                list(map(pickle.loads, written)),
                grid=grid,
                units=units,
                microbatches=microbatches,
                needs=seat.model.needs,
                placement=seat.placed,
                accumulates=accumulates,
                degrees=degrees,
            )
        except ScheduleError as error:
            verdict = error
    verdict = seat.world.broadcast_object(verdict)
    if isinstance(verdict, ScheduleError):
        raise verdict
    return verdict
