"""A whole job: start, train, evaluate, report, leave. What `hpcdist train` calls."""

import json
import os
import sys
import time
from pathlib import Path

from hpcdist.arrays.sizes import counted
from hpcdist.checkpoint.lock import Lock
from hpcdist.comm.start import Session, start
from hpcdist.errors import OK
from hpcdist.strategies.grid import rank_map, spread_groups
from hpcdist.telemetry.provenance import provenance
from hpcdist.training import architecture, consensus, directory, entropy
from hpcdist.training.asynchronous import loop_of
from hpcdist.training.energy import Energy, energy_attributes
from hpcdist.training.evaluation import mean_validation_loss
from hpcdist.training.pace import end_of_job
from hpcdist.training.progress import Progress
from hpcdist.training.recipe import Recipe
from hpcdist.training.summary import LOADED_FIGURE, OVERLAP_FIGURES, describe, summarise
from hpcdist.training.survival import EXIT_CODES, StopWishes
from hpcdist.training.trainer import Trainer, assemble


def train(recipe: Recipe, out: Path | None, resume: str, as_json: bool, limit_s: float | None = None) -> None:
    """Train ``recipe`` on all ranks that the launcher started, and leave with the agreed exit code. Collective.

    Before ``limit_s`` seconds are over, or the job is by Slurm's word, the run is saved and stops.
    """
    wishes = StopWishes(ends=end_of_job(limit_s, time.time(), os.environ))
    wishes.listen()  # a signal that comes while the job starts is answered after the first step
    communication = recipe.communication
    session = start(recipe.run.device, communication.ranks_per_node or None, communication.checked)
    rank0 = session.comm.rank == 0
    lock = Lock()
    run = directory.prepare(session.comm, recipe, out, resume, lock)
    session.record(run.path, recipe.communication.deadline_s)
    trainer = assemble(session, recipe, run.resume_from)
    progress = Progress(recipe.run.steps, trainer.first_step, recipe.run.log_every_s, rank0)
    entropies = entropy.of(trainer.source) if rank0 else {}
    if rank0:
        _introduce(progress, session, trainer, run, entropies)
    energy = Energy(session.comm, recipe, run.resume_from, run.path)
    attributes = _attributes(session, trainer, entropies) if rank0 else {}
    loop = loop_of(trainer)(session, trainer, run.path, progress, attributes, wishes, energy)
    with energy.monitor:
        with energy.window("training"):
            outcome = loop.run()
        progress.close()
        val_loss = float("nan")
        if outcome.wish is None:
            with energy.window("validation"):
                val_loss = mean_validation_loss(trainer)
    loop.metrics.flush()
    summary = summarise(session.comm, trainer, outcome, run.path, val_loss, entropies)
    summary |= energy.figures(outcome.done)
    if rank0:
        overlapped = {name: summary[name] for name in (*OVERLAP_FIGURES, LOADED_FIGURE) if summary[name] is not None}
        overlapped |= {name: found for name, found in consensus.figures(trainer).items() if found is not None}
        loop.metrics.finish(outcome.done, val_loss, **energy_attributes(summary), **overlapped)
        print(describe(summary), file=sys.stderr if as_json else sys.stdout)
        if as_json:
            print(json.dumps(summary), flush=True)
    trainer.close()
    lock.release()
    session.leave(OK if outcome.wish is None else EXIT_CODES[outcome.wish])


def _attributes(session: Session, trainer: Trainer, entropies: dict[str, float | None]) -> dict[str, float | str]:
    """Return what the metrics file says of its run beside the rows."""
    known = {f"{name}_nats": nats for name, nats in entropies.items() if nats is not None}
    made = trainer.recipe.chaos.described()
    chaos = {"chaos": made} if made else {}
    return {**provenance(mpi_library=session.library), **known, "lock_step": int(trainer.exchange.lock_step), **chaos}


def _introduce(
    progress: Progress,
    session: Session,
    trainer: Trainer,
    run: directory.RunDirectory,
    entropies: dict[str, float | None],
) -> None:
    grid, model = trainer.grid, trainer.model
    progress.say(
        f"{model.layout.parameters:,} parameters, {counted(trainer.comm.size, 'rank')} on "
        f"{counted(session.place.nodes, 'node')}: "
        f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor} x context {grid.context}; "
        f"{architecture.described(trainer)}; MPI: {session.library}"
    )
    if grid.size > grid.data:
        nodes = trainer.comm.nodes().members
        for line in rank_map(grid, nodes):
            progress.say(line)
        warning = spread_groups(grid, nodes)
        if warning:
            progress.say(f"warning: {warning}")
    if trainer.recipe.chaos.on:
        progress.say(f"chaos: {trainer.recipe.chaos.described()}")
    for line in trainer.plan.table() if trainer.plan is not None else ():
        progress.say(line)
    chosen = trainer.selection.described()
    if chosen:
        progress.say(chosen)
    if trainer.proof is not None and trainer.comm.size > 1:
        progress.say(
            f"step proven: {trainer.proof.messages} messages between stages, {trainer.proof.meetings} collectives, "
            "no circle of waiting, nothing lost or done twice"
        )
    progress.say(f"data: {trainer.source.description}")
    known = [f"{name} {nats:.3f}" for name, nats in entropies.items() if nats is not None]
    if known:
        progress.say(f"entropy of the training split in nats a token: {', '.join(known)}")
    if run.changed:
        progress.say(f"other than in the start before: {run.changed}")
    if run.resume_from is not None:
        progress.say(f"resumed from {run.resume_from} after {trainer.first_step} steps")
    progress.say(f"run directory {run.path}")
