"""Elastic job: training that survives the death of its ranks (`hpcdist run --survive`).

An incarnation is the time between two changes of the training ranks. When a rank dies, the other ranks recover
together:

    acknowledge   revoke the communicator, which releases waiting ranks
    meet          shrink to the living ranks; spares or new processes replace the dead, or ranks move up
    recover       use the newest state in the ranks' memory, else a checkpoint
    train         assemble the run in its new layout, and continue

A death in any phase starts the recovery again. The global batch is kept. MPI must have User Level Failure Mitigation
(Bland et al., IJHPCA 27(3), 2013).
"""

import gc
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

from hpcdist.checkpoint.restoring.restore import newest_complete
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.start import Session
from hpcdist.errors import ConfigurationError, TooFewRanksError
from hpcdist.reporting.units import counted
from hpcdist.strategies.config import DEFAULT_PARTITION as PARTITION
from hpcdist.strategies.config import ParallelConfig
from hpcdist.telemetry.metrics import side_tables as table
from hpcdist.telemetry.provenance import pss_bytes
from hpcdist.training.build.state_source import CheckpointSource, StateSource
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe import figures
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.recipe.requirements import grid_and_roles
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.loop import GrowthRequested, TrainingLoop
from hpcdist.training.run.membership import Membership, MembershipChange
from hpcdist.training.run.protection import RankMemory, StateProtection, recover_newest
from hpcdist.training.run.stop_requests import GROW_FILE
from hpcdist.training.run_directory import refuse_restart_over_checkpoints


def refit(recipe: Recipe, ranks: int) -> tuple[Recipe, int] | None:
    """Reduce the parallel sizes in ``recipe`` until the recipe fits on at most ``ranks`` ranks.

    Return (new recipe, number of ranks that the new recipe uses), or None if no sizes fit.
    """
    if _is_runnable(recipe, ranks):
        return recipe, ranks
    parallel = recipe.parallel
    for pipeline in range(parallel.pipeline, 0, -1):
        for tensor in range(parallel.tensor, 0, -1):
            for used in range(ranks, 0, -1):
                refitted = _with_degrees(recipe, pipeline, tensor)
                if refitted is not None and _is_runnable(refitted, used):
                    return refitted, used
    if recipe.run.noise_scale_every_steps:  # a measurement that needs several replicas must not end the run
        return refit(replace(recipe, run=replace(recipe.run, noise_scale_every_steps=0)), ranks)
    return None


def _with_degrees(recipe: Recipe, pipeline: int, tensor: int) -> Recipe | None:
    before = recipe.parallel
    try:
        cut = _with_stages(before, pipeline)
        rows = before.sequence_parallel and tensor > 1
        return replace(recipe, parallel=replace(cut, data=0, tensor=tensor, sequence_parallel=rows))
    except ConfigurationError:
        return None


def _with_stages(parallel: ParallelConfig, pipeline: int) -> ParallelConfig:
    if pipeline == parallel.pipeline:
        return parallel
    of_stages: dict[str, Any] = {"stage_units": (), "stage_speeds": (), "stage_memory_bytes": ()}
    if pipeline == 1:
        of_stages |= {"schedule": "auto", "chunks": 1, "recompute": False, "partition": PARTITION}
    return replace(parallel, pipeline=pipeline, **of_stages)


def _is_runnable(recipe: Recipe, ranks: int) -> bool:
    try:
        grid_and_roles(recipe, ranks, chaos=False)  # faults of missing ranks are removed later
    except ConfigurationError:
        return False
    return True


def describe_change(change: MembershipChange, trainer: Trainer, origin: StateSource | None, seconds: float) -> str:
    """Return a message about the change of the training ranks, the new layout, and the restored state.

    ``origin``: restored state, or None if training restarts at step 0. ``seconds``: duration of the recovery.
    """
    happened = []
    if change.lost:
        happened.append(f"rank{'s' * (len(change.lost) > 1)} {', '.join(map(str, change.lost))} died")
    if change.added:
        happened.append(f"{change.added} new process{'es' if change.added > 1 else ''} started")
    grid, source = trainer.grid, "the beginning" if origin is None else str(origin)
    return (
        f"{' and '.join(happened) or 'the ranks reconnected'}: on {counted(trainer.comm.size, 'rank')}, "
        f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor}; "
        f"{figures.describe_architecture(trainer)}; "
        f"after {trainer.first_step} steps, from {source}, in {seconds:.2f} s"
    )


@dataclass(frozen=True)
class Incarnation:
    """Session, training loop and state protection of this process, valid until the training ranks change."""

    session: Session
    loop: TrainingLoop | None = None
    protection: StateProtection | None = None


class ElasticJob:
    """One process of a job that continues after rank failures."""

    # ``number``: number of earlier recoveries. ``change``: last change of the training ranks, or None. After each
    # change, the process creates a new session and training loop.
    def __init__(
        self,
        job: TrainingJob,
        session: Session,
        team: Membership,
        number: int = 0,
        change: MembershipChange | None = None,
    ) -> None:
        self._job, self._session, self._team = job, session, team
        self._number, self._change = number, change
        self._life: Incarnation | None = None
        self._memories: list[RankMemory] = []
        self._rows: list[Any] = []  # metrics rows that may not be in the file
        self._rows_of = 0  # number of ranks that made these rows
        self._growth = 0  # number of additional ranks requested
        self._lost_at = 0.0  # `time.monotonic` at which this rank saw the failure
        self._broken = False  # True if the communicator of everyone is revoked

    def run(self, origin: StateSource | None = None) -> None:
        """Train from the state ``origin`` or, if it is None, from step 0. Exit with the job's exit code. Collective."""
        code = self.train(origin)
        replace(self._session, comm=self._team.everyone).leave(code)  # after `agree` nothing may need all ranks

    def train(self, origin: StateSource | None = None) -> int:
        """Train from the state ``origin`` or, if it is None, from step 0, and recover from rank failures. Collective.

        Return the job's exit code.
        """
        while True:
            code: int | None = None
            try:
                if self._broken:
                    self._meet()
                code = self._live(origin)
            except GrowthRequested as growth:
                self._growth = growth.ranks
                self._acknowledge(growth)
            except Exception as error:
                if not is_rank_failure(error, self._team.everyone):
                    raise
                self._acknowledge(error)
            # A finished rank must not leave while others recover: they may need its state. `agree` also works on a
            # revoked communicator, and returns the same on all living ranks.
            if self._team.everyone.agree(code is not None) and code is not None:
                return code
            self._broken = True

    def _acknowledge(self, error: Exception) -> None:
        if not self._broken:
            self._lost_at = time.monotonic()
        self._broken = True
        life, self._life = self._life, None
        self._team.everyone.revoke()
        if life is not None:
            if life.loop is not None:
                self._rows += life.loop.metrics.unsaved()
                self._rows_of = self._rows_of or life.session.comm.size
                life.loop.saver.abandon()
                life.loop.streaming.close(normal=False)
                life.loop.progress.close()
            if life.protection is not None:
                self._memories.append(life.protection.memory())
            life.session.stop_recording()
        _drop_frames(error)
        del life
        gc.collect()  # free the old incarnation's state now: the new state must fit in addition to what is kept

    def _meet(self) -> None:
        # Choose training ranks and spares among the living ranks. Collective over these ranks.
        team = self._team
        trained = team.place is not None
        change = team.meet()
        # A failure may have interrupted the last meeting after only some ranks had its result. So all ranks exchange
        # their values; the highest incarnation, the smallest unreported change and the most ranks win.
        report = self._number, team.wanted, self._growth, self._change if trained else None
        reports = team.everyone.allgather_object(report)
        self._number = max(number for number, *_ in reports) + 1
        # A change stays unreported if its incarnation never started.
        unreported = min(
            (earlier for *_, earlier in reports if earlier is not None),
            key=lambda earlier: len(earlier.lost),
            default=MembershipChange(),
        )
        # Some ranks may not have seen a request to grow, or may have granted it before the failure.
        target = max(before + more for _, before, more, _ in reports)
        grows = target > min(before for _, before, *_ in reports)
        change = MembershipChange(unreported.lost + change.lost, unreported.added, unreported.grown or grows)
        team.wanted, self._growth = target, 0
        if self._job.recipe.run.device == "cpu" and (team.mode == "replace" or grows):
            change = team.fill(change, self._job.described(self._number))
        else:
            team.close_up()
        self._change, self._broken = change, False

    def _live(self, origin: StateSource | None) -> int:
        team, job = self._team, self._job
        recipe = self._fitted()
        world = team.world()
        job.share_lock(team.everyone, team.leader, takes=world is not None and world.rank == 0)
        recalled = recover_newest(team.everyone, self._memories) if self._number else None
        if world is None:
            if recalled is not None:
                # Filling is collective: a spare that trained before may hold pieces that others need.
                recalled.fill(team.everyone, (), ())
                recalled = None
            job.stop_requests.begun()  # the training ranks decide how the job ends
            return team.wait()
        session = self._session.survive(world)
        self._life = Incarnation(session)
        session.record(job.run.path, recipe.communication.deadline_s, spans=recipe.telemetry.trace)
        if self._number:
            origin = recalled or self._stored(session)
        trainer, origin = job.assemble(session, recipe, origin)
        progress = job.progress(trainer)
        protection = StateProtection(trainer, self._number, recipe.survival, self._memories)
        self._life = Incarnation(session, protection=protection)
        loop = job.loop(session, trainer, progress, protection.keep)
        self._life = Incarnation(session, loop, protection)
        self._say(loop, protection, origin)
        recalled = origin = None  # they hold the arrays of the last incarnation, which can be freed now
        code = job.finish(loop, *job.steps(loop))
        session.stop_recording()
        self._life = None
        if world.rank == 0:
            team.dismiss(code)
        return code

    def _fitted(self) -> Recipe:
        team, least = self._team, self._job.recipe.survival.least_ranks
        refitted = refit(self._job.recipe, team.size)
        if refitted is None or team.size < least:
            reason = f"survival.least_ranks = {least}" if team.size < least else "no layout of the recipe fits"
            self._session.survive(team.everyone)  # so that the error is printed once
            raise TooFewRanksError(
                f"only {counted(team.size, 'rank')} left, but {reason}; start the job again with --resume auto, which "
                "continues from the newest checkpoint"
            )
        recipe, used = refitted
        team.keep(used)
        return replace(recipe, chaos=recipe.chaos.within(used)) if self._number else recipe

    def _stored(self, session: Session) -> StateSource | None:
        path = newest_complete(self._job.run.path, session.comm)
        if path is None:
            refuse_restart_over_checkpoints(self._job.run.path)
        return None if path is None else CheckpointSource(path)

    def _say(self, loop: TrainingLoop, protection: StateProtection, origin: StateSource | None) -> None:
        trainer, progress = loop.trainer, loop.progress
        if self._change is None:
            self._job.introduce(loop.session, trainer, progress)
            progress.say(f"survives the death of ranks ({self._team.mode}): the state is {protection.described}")
        else:
            loop.metrics.carry(self._rows, trainer.first_step, self._rows_of)
            self._rows, self._rows_of = [], 0
            since = time.monotonic() - self._lost_at if self._lost_at else 0.0  # 0 in a new process
            reports = trainer.comm.allgather_object((since, pss_bytes(), self._job.lives))
            seconds, held = (max(figures) for figures in list(zip(*reports, strict=True))[:2])
            earlier = max((lives for _, _, lives in reports), key=len)  # a spare has no lives
            progress.say(describe_change(self._change, trainer, origin, seconds))
            self._lost_at = 0.0
            row = {"step": trainer.first_step, "died": len(self._change.lost), "added": self._change.added}
            row |= {"world": trainer.comm.size, "seconds": seconds, "pss_bytes": held}
            self._job.lives = [*earlier, row]
            loop.metrics.put(table.LIVES, **row)
            if loop.starts is not None:
                loop.starts.survived(len(self._change.lost))
        if trainer.comm.rank == 0:
            self._job.stop_requests.grow_file = self._job.run.path / GROW_FILE
            if self._change is not None and self._change.grown:
                self._job.stop_requests.grown()
        self._change = MembershipChange()
        protection.keep(trainer.first_step, True)


def _drop_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # The frames would keep the old state in memory.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
