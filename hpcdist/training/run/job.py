"""Training job from start to end: assemble, introduce, train, evaluate, report, exit code."""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hpcdist.arrays import jit
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import exit_file, standard_streams
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.start import Session
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import OK
from hpcdist.models.model import Model
from hpcdist.optim import rates
from hpcdist.reporting.units import counted
from hpcdist.strategies.core.grid import ORDER, rank_map, spread_groups
from hpcdist.telemetry.metrics.step_metrics import MOVED_ATTRIBUTE
from hpcdist.telemetry.provenance import provenance
from hpcdist.training import run_directory
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.state_source import CheckpointSource, StateSource, from_intact_source
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data.entropy import conditional_entropies
from hpcdist.training.observe import figures, step_meters
from hpcdist.training.observe.energy import EnergyRecorder, energy_attributes
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.run.async_loop import loop_class
from hpcdist.training.run.loop import Protect, RunOutcome, TrainingLoop
from hpcdist.training.run.stop_requests import EXIT_CODES, StopRequests
from hpcdist.training.run.summary import LOADED_FIGURE, OVERLAP_FIGURES, catalogue_lines, describe, summarise


@dataclass
class TrainingJob:
    """Training job of this process: the objects that stay the same when the set of training ranks changes."""

    recipe: Recipe
    run: run_directory.RunDirectory
    stop_requests: StopRequests
    lock: RunLock
    as_json: bool
    holder: dict[str, Any] | None = None  # identity of the lock's holder, if other ranks may have to take it over
    lives: list[dict[str, Any]] = field(default_factory=list)  # incarnations after rank failures: see `side_tables`
    entropies: dict[str, float | None] | None = field(default=None, init=False)  # on rank 0, once computed
    script_model: Model | None = None  # model of a script, which also brings the batches
    is_verbose: bool = False  # print the selected algorithms and the proof of the step in the introduction

    def train(self, session: Session, recipe: Recipe, origin: StateSource | None) -> int:
        """Train until the last step or a stop request. Return the exit code. Collective.

        ``session``: communication session of this process. ``origin``: state to start from, or None for step 0.
        """
        loop = self.open(session, recipe, origin)
        return self.finish(loop, *self.steps(loop))

    def open(self, session: Session, recipe: Recipe, origin: StateSource | None) -> TrainingLoop:
        """Prepare the training, and return the training loop. Collective.

        ``session``: communication session of this process. ``origin``: state to resume from, or None for step 0.
        """
        session.record(self.run.path, recipe.communication.deadline_s, spans=recipe.telemetry.trace)
        trainer, _ = self.assemble(session, recipe, origin)
        progress = self.progress(trainer)
        self.introduce(session, trainer, progress)
        return self.loop(session, trainer, progress)

    def assemble(
        self, session: Session, recipe: Recipe, origin: StateSource | None
    ) -> tuple[Trainer, StateSource | None]:
        """Build the trainer and restore its state. Return (trainer, restored `StateSource` or None). Collective.

        ``origin``: state to restore, or None for step 0. A damaged checkpoint is replaced by an earlier checkpoint.
        """
        trainer, used = from_intact_source(
            session.comm,
            self.run.path,
            origin,
            lambda candidate: assemble(session, recipe, candidate, self.script_model, self.run.path),
        )
        # After a recovery from memory, the checkpoint of an earlier start may be gone.
        self.run = replace(self.run, resume_from=used.path if isinstance(used, CheckpointSource) else None)
        return trainer, used

    def described(self, recoveries: int) -> dict[str, Any]:
        """Return a dict of the data that a new process needs to join this job. Local.

        ``recoveries``: number of recoveries of the job, including the current recovery.
        """
        description = {"recipe": self.recipe, "run": self.run, "ends": self.stop_requests.ends, "as_json": self.as_json}
        return description | {"holder": self.holder, "lives": self.lives, "life": recoveries}

    def share_lock(self, everyone: Communicator, leader: int, *, takes: bool) -> None:
        """Let rank ``leader`` of ``everyone`` hold the lock of the run directory. Collective over ``everyone``.

        ``takes``: True only on rank ``leader``, which takes the lock over if the previous holder is dead.
        """
        if takes:
            self.lock.take_over(self.run.path, self.holder)
        self.holder = everyone.broadcast_object(self.lock.identity, root=leader)

    def introduce(self, session: Session, trainer: Trainer, progress: ConsoleProgress) -> None:
        """Print the lines that introduce the run: layout, data, learning rate. Only rank 0 prints.

        ``progress``: console display that prints the lines.
        """
        if session.comm.rank == 0:
            if not session.is_part:  # the notes for `hpcdist run` describe one run
                exit_file.announce_run(self.run.path)
            lines = _introduction(session, trainer, self.run, self._entropies(trainer))
            for line in filter(None, [*lines, *(_details(trainer) if self.is_verbose else ())]):
                progress.say(line)

    def progress(self, trainer: Trainer) -> ConsoleProgress:
        """Return a new console progress display for the steps of ``trainer``. Local."""
        run = trainer.recipe.run
        shown = trainer.comm.rank == 0
        return ConsoleProgress(run.steps, trainer.first_step, run.log_every_s, shown, unit=trainer.speed_unit)

    def _entropies(self, trainer: Trainer) -> dict[str, float | None]:
        if self.entropies is None:
            text = trainer.source.tokens  # None for data that is not text
            self.entropies = {} if text is None else conditional_entropies(text)
        return self.entropies

    def loop(
        self, session: Session, trainer: Trainer, progress: ConsoleProgress, protect: Protect | None = None
    ) -> TrainingLoop:
        """Open the metrics file and energy sensors, and return the training loop. Collective.

        ``protect``: function that copies the state to other ranks, called after each step, or None.
        """
        drain = session.spans.drain if isinstance(session.spans, Spans) else None
        energy = EnergyRecorder(session.comm, trainer.recipe, self.run.resume_from, self.run.path, spans=drain)
        attributes = _metrics_attributes(session, trainer, self.entropies or {}) if session.comm.rank == 0 else {}
        return loop_class(trainer)(
            session, trainer, self.run.path, progress, attributes, self.stop_requests, energy, protect=protect
        )

    def steps(self, loop: TrainingLoop) -> tuple[RunOutcome, float]:
        """Run the remaining steps, then validate. Return (`RunOutcome`, validation loss or NaN). Collective."""
        exit_file.collect_as_usual()  # user modules may make cycles that hold large arrays
        energy = loop.energy
        with energy.monitor:
            try:
                with energy.monitor.window("training"):
                    outcome = loop.run()
            except BaseException:
                loop.streaming.close(normal=False)
                raise
            loop.progress.close()
            val_loss = float("nan")
            if outcome.stop_request is None:
                with loop.instrumentation.phase("validation", "validation"), loop.stop_requests.all_saved():
                    val_loss = loop.validation_loss()
        loop.metrics.flush()
        return outcome, val_loss

    def finish(self, loop: TrainingLoop, outcome: RunOutcome, val_loss: float) -> int:
        """Report the results of the run, free all resources, and return the exit code. Collective.

        ``outcome``, ``val_loss``: results of the method `steps`.
        """
        trainer, comm = loop.trainer, loop.session.comm
        entropies = self._entropies(trainer) if comm.rank == 0 else {}
        summary = summarise(comm, trainer, outcome, self.run.path, val_loss, entropies)
        summary |= loop.energy.figures(outcome.done, trainer.model.tokens_per_sample)
        summary |= {"chaos": self.recipe.chaos.described() or None, "lives": self.lives}
        summary["padding_share"] = trainer.source.padding  # None if samples are not packed
        if comm.rank == 0:
            final = {name: summary[name] for name in (*OVERLAP_FIGURES, LOADED_FIGURE) if summary[name] is not None}
            more = step_meters.noise_figures(trainer.noise, trainer.recipe.run.global_batch)
            more |= figures.consensus_figures(trainer)
            more |= {name: summary[name] for name in ("architecture", "parameters", "peak_bytes_total")}
            moved = summary["bytes_moved_per_step"] or {}
            more |= {MOVED_ATTRIBUTE.format(way): nbytes for way, nbytes in moved.items()}
            more |= {"nodes": loop.session.place.nodes, "pss_bytes_most": summary["pss_bytes"]["most"]}
            final |= {name: figure for name, figure in more.items() if figure is not None}
            loop.metrics.finish(outcome.done, val_loss, **energy_attributes(summary), **final)
            lines = catalogue_lines(self.run.path, self.recipe)
            print(describe(summary, lines), file=sys.stderr if self.as_json else sys.stdout)
            if self.as_json:
                print(json.dumps(summary))
            sys.stdout.flush()
            failure = standard_streams.failure()
            if failure is not None:
                print(
                    f"hpcdist: standard output cannot be written ({failure.strerror}); see `hpcdist report "
                    f"{self.run.path}` for the measurements of the run",
                    file=sys.stderr,
                )
            is_part = loop.session.is_part
            stopped = "" if outcome.stop_request is None else self._how_to_go_on(outcome.done, trainer, is_part)
            if (is_part or not exit_file.announce_completion(stopped)) and stopped:
                print(stopped, file=sys.stderr, flush=True)
        loop.metrics.close()
        loop.energy.close()
        trainer.close()
        self.lock.release()
        return OK if outcome.stop_request is None else EXIT_CODES[outcome.stop_request]

    def _how_to_go_on(self, done: int, trainer: Trainer, is_part: bool = False) -> str:
        stopped = f"stopped at {done} of {trainer.recipe.run.steps} steps, saved; go on with"
        typed = os.environ.get(exit_file.COMMAND)
        if self.script_model is not None and typed and not is_part:
            return f"{stopped} {shlex.join(exit_file.resume_command(shlex.split(typed), self.run.path, script=True))}"
        if self.script_model is not None:
            return f"{stopped} the same script, resume='auto' and out={str(self.run.path)!r}"
        words = shlex.split(typed) if typed else ["hpcdist", *sys.argv[1:]]
        if "train" not in words:
            recipe = self.run.path / RECIPE_FILE
            return f"{stopped} hpcdist train {recipe} --out {self.run.path} --resume auto"
        alone = typed or trainer.comm.size == 1
        launcher = "" if alone else f", on {counted(trainer.comm.size, 'rank')} by the same launcher"
        return f"{stopped} {shlex.join(exit_file.resume_command(words, self.run.path))}{launcher}"


def _metrics_attributes(
    session: Session, trainer: Trainer, entropies: dict[str, float | None]
) -> dict[str, float | str]:
    entropy_nats = {f"{name}_nats": nats for name, nats in entropies.items() if nats is not None}
    made = trainer.recipe.chaos.described()
    chaos = {"chaos": made} if made else {}
    about: dict[str, float | str] = {
        "lock_step": int(trainer.exchange.traits.lock_step),
        "speed_unit": trainer.speed_unit,
        "loss_unit": trainer.loss_unit,
    }
    if trainer.source.padding is not None:
        about["padding_share"] = trainer.source.padding
    return {**provenance(mpi_library=session.library), **entropy_nats, **about, **chaos}


def _introduction(
    session: Session, trainer: Trainer, run: run_directory.RunDirectory, entropies: dict[str, float | None]
) -> Iterator[str]:
    grid, recipe = trainer.grid, trainer.recipe
    axes = " x ".join(f"{axis} {getattr(grid, axis)}" for axis in ORDER if getattr(grid, axis) > 1) or "one replica"
    trained, total = trainer.model.layout.parameters, trainer.model.whole_layout.parameters
    parameters = f"{trained:,} of {total:,} parameters" if trained < total else f"{total:,} parameters"
    yield (
        f"{parameters}, {counted(trainer.comm.size, 'rank')} on "
        f"{counted(session.place.nodes, 'node')}: {axes}; {figures.describe_architecture(trainer)}; "
        f"MPI: {session.library.partition(', ')[0]}"
    )
    if grid.size > grid.data:
        nodes = trainer.comm.nodes().members
        yield from rank_map(grid, nodes)
        yield _labelled("warning", spread_groups(grid, nodes))
    yield _labelled("precision", figures.describe_precision(recipe))
    yield _labelled("warning", figures.warn_of_whole_gathers(trainer))
    yield _labelled("chaos", recipe.chaos.described())
    yield rates.describe_rate(recipe.optimizer, recipe.run.batches)
    yield from trainer.plan.table() if trainer.plan is not None else ()
    yield trainer.compression.described()
    yield f"data: {trainer.source.description}"
    bounds = ", ".join(f"{name} {nats:.3f}" for name, nats in entropies.items() if nats is not None)
    yield _labelled("entropy of the training text in nats a token", bounds)
    yield _labelled("other than in the start before", run.changed)
    yield _changed_rate_text(trainer, run.steps_before)
    yield f"resumed from {run.resume_from} after {trainer.first_step} steps" if run.resume_from is not None else ""
    if jit.is_cold():
        yield "the first step compiles kernels for this processor, once: some seconds (`hpcdist warmup` does it before)"
    yield f"run directory {run.path}"


def _details(trainer: Trainer) -> Iterator[str]:
    yield trainer.selection.described()
    if trainer.proof is not None and trainer.comm.size > 1:
        collectives = counted(trainer.proof.meetings, "collective")
        yield f"step proven free of deadlock: {trainer.proof.messages} messages between stages, {collectives}"


def _labelled(label: str, text: str) -> str:
    return text and f"{label}: {text}"


def _changed_rate_text(trainer: Trainer, steps_before: int | None) -> str:
    optimizer, steps = trainer.context.optimizer, trainer.recipe.run.steps
    step = max(trainer.first_step, math.ceil(optimizer.warmup_steps)) + 1  # the rates of the warm-up do not change
    if steps_before is None or step > steps:
        return ""
    update = step - trainer.executor.loss_scale.skipped
    before, now = (rates.learning_rate(optimizer, update, total) for total in (steps_before, steps))
    text = f"run.steps was {steps_before} and is {steps}, and optimizer.decay = {optimizer.decay!r} ends there"
    if before != now:
        return f"{text}: the learning rate of step {step} is {now:.3g} instead of {before:.3g}"
    if not optimizer.decay_steps or steps == steps_before:
        return ""
    first, start = (max(0, total - optimizer.decay_steps) for total in (steps_before, steps))
    return f"{text}: its {optimizer.decay_steps} steps begin after step {start} instead of step {first}"
