"""A whole job: start, train, evaluate, report, leave. What `hpcdist train` calls."""

import codecs
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.checkpoint.restore import newest
from hpcdist.comm.start import Session, start, start_alone
from hpcdist.errors import OK, StorageError, UsageError
from hpcdist.strategies.config import ParallelConfig
from hpcdist.telemetry.provenance import provenance
from hpcdist.training import directory, entropy
from hpcdist.training import recipe as recipes
from hpcdist.training.asynchronous import loop_of
from hpcdist.training.energy import Energy, energy_attributes
from hpcdist.training.evaluation import mean_validation_loss
from hpcdist.training.generation import generate
from hpcdist.training.progress import Progress
from hpcdist.training.recipe import Recipe
from hpcdist.training.summary import describe, summarise
from hpcdist.training.survival import EXIT_CODES, StopWishes
from hpcdist.training.trainer import Trainer, assemble


def train(recipe: Recipe, out: Path | None, resume: str, as_json: bool) -> None:
    """Train ``recipe`` on all ranks that the launcher started, and leave with the agreed exit code. Collective."""
    wishes = StopWishes()
    wishes.listen()  # a signal that comes while the job starts is answered after the first step
    session = start(recipe.run.device, recipe.communication.ranks_per_node or None)
    rank0 = session.comm.rank == 0
    run = directory.prepare(session.comm, recipe, out, resume)
    session.record(run.path, recipe.communication.deadline_s)
    trainer = assemble(session, recipe, run.resume_from)
    progress = Progress(recipe.run.steps, trainer.first_step, recipe.run.log_every_s, rank0)
    entropies = entropy.of(trainer.source) if rank0 else {}
    if rank0:
        _introduce(progress, session, trainer, run, entropies)
    energy = Energy(session.comm, recipe, run.resume_from)
    attributes = _attributes(session, entropies) if rank0 else {}
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
        loop.metrics.finish(outcome.done, val_loss, **energy_attributes(summary))
        print(describe(summary), file=sys.stderr if as_json else sys.stdout)
        if as_json:
            print(json.dumps(summary), flush=True)
    session.leave(OK if outcome.wish is None else EXIT_CODES[outcome.wish])


def _attributes(session: Session, entropies: dict[str, float | None]) -> dict[str, float | str]:
    """Return what the metrics file says of its run beside the rows."""
    known = {f"{name}_nats": nats for name, nats in entropies.items() if nats is not None}
    return {**provenance(mpi_library=session.library), **known}


def _introduce(
    progress: Progress,
    session: Session,
    trainer: Trainer,
    run: directory.RunDirectory,
    entropies: dict[str, float | None],
) -> None:
    grid, model = trainer.grid, trainer.model
    progress.say(
        f"{model.layout.parameters:,} parameters, {trainer.comm.size} ranks on {session.place.nodes} node(s): "
        f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor} x context {grid.context}; "
        f"{trainer.recipe.parallel.strategy}, {trainer.exchange.algorithm}; MPI: {session.library}"
    )
    progress.say(f"data: {trainer.source.description}")
    known = [f"{name} {nats:.3f}" for name, nats in entropies.items() if nats is not None]
    if known:
        progress.say(f"entropy of the training split in nats a token: {', '.join(known)}")
    if run.resume_from is not None:
        progress.say(f"resumed from {run.resume_from} after {trainer.first_step} steps")
    progress.say(f"run directory {run.path}")


def reopen(path: Path, alone: bool = False) -> tuple[Session, Trainer]:
    """Assemble the run in ``path`` from its newest valid checkpoint. Collective, unless ``alone`` (this process only).

    Raises StorageError when ``path`` holds no run or no checkpoint that verifies.
    """
    resolved = recipes.load_stored(path / directory.RECIPE_FILE)
    session = start_alone() if alone else start(resolved.run.device)
    found = newest(path, session.comm)
    if found is None:
        raise StorageError(f"{path} holds no valid checkpoint; train it first (a run saves one at its end)")
    # Any number of ranks may look at a run: the layout that trained it does not bind them.
    free = dataclasses.replace(resolved, parallel=ParallelConfig())
    return session, assemble(session, free, found)


def evaluate(trainer: Trainer) -> dict[str, Any]:
    """Return the validation loss and the step of a reopened run. Collective."""
    return {"steps": trainer.first_step, "val_loss": mean_validation_loss(trainer)}


def sample(path: Path, prompt: str, tokens: int, *, temperature: float, top_k: int, seed: int) -> Iterator[str]:
    """Yield the text with which the model in ``path`` continues ``prompt``, as it is drawn (local).

    Raises UsageError for a model that does not read bytes, or an empty prompt.
    """
    _, trainer = reopen(path, alone=True)
    recipe = trainer.recipe
    if recipe.model.kind != "gpt" or recipe.model.vocabulary != 256:
        raise UsageError(
            f"{path} holds a {recipe.model.kind} over {recipe.model.vocabulary} tokens; only a gpt on bytes writes text"
        )
    start_of = np.frombuffer(prompt.encode(), np.uint8)
    if not start_of.size:
        raise UsageError("the prompt is empty; give at least one character with --prompt")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    drawn = generate(
        trainer.logits, start_of, tokens, recipe.data.context, temperature=temperature, top_k=top_k, seed=seed
    )
    for token in drawn:
        yield decoder.decode(bytes([token]))
    yield decoder.decode(b"", final=True)
