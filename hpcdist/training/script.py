"""Training of a user's model from a user's script: the script runs the loop, hpcdist computes every step.

    from hpcdist.training.pytorch import Training, wrap

    with Training(wrap(model, loss), {"parallel.strategy": "zero2", "run.steps": 100}) as training:
        for step in training.steps:
            inputs, targets = batch(step)  # all samples of the step
            loss = training.step(inputs[training.share], targets[training.share])

Recipe keys set strategy, pipeline, optimizer, compression, checkpoints, energy and telemetry.
"""

import atexit
import os
import sys
from collections.abc import Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from hpcdist.adapters.torch.model import DEFAULTS, OptimizerKeys
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.listing import AVERAGES, PARAMETERS
from hpcdist.checkpoint.lock import RunLock
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.comm.failure import failfast
from hpcdist.comm.launch import standard_streams
from hpcdist.comm.launch.environment import RESUME, RUN_DIR
from hpcdist.comm.mpi.world import AnyComm, end_records, is_part, mpi4py_of
from hpcdist.comm.record.spans import now_ns
from hpcdist.comm.start import Session, fail_alike, start
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import Model
from hpcdist.reporting.rules import written
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.schedule.replica_check import check_batch
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.telemetry.step_events import logged_number
from hpcdist.training import run_directory
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.build.trainer import statistic_pieces, statistics_of
from hpcdist.training.data import SampleOrder, own_samples
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import settings
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import EXIT_CODES, StopRequests

COMPARED_FIRST: Final = 3  # number of first steps, and of first evaluations, whose batches are compared in a replica
KIND: Final = "given"  # model.kind in the recipe of a script's run
SAMPLES: Final = "validation_samples"


class Training:
    """Training run whose script calls each step. A context manager; all ranks must make the same calls.

    ``recipe``: TOML file, or dict such as ``{"run.steps": 100}``. ``out``: run directory. ``resume``: "auto" (from the
    newest checkpoint) or "never". ``time_limit_s``: seconds until the run saves and stops. ``comm``: the ranks that
    train, as for `hpcdist.allreduce`; None means all ranks. Other ranks are never waited for, except in MPI_Finalize.
    """

    # The run also stops at the end of its Slurm job. Environment variables override ``recipe``; HPCDIST_RUN_DIR and
    # HPCDIST_RESUME override ``out`` and ``resume`` of the first Training. HPCDIST_RUN_DIR names the directory of one
    # run, so it does not apply to a part of the ranks.
    def __init__(
        self,
        model: Model,
        recipe: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        resume: str = "never",
        time_limit_s: float | None = None,
        comm: AnyComm = None,
    ) -> None:
        standard_streams.tolerate()
        fail_alike()
        part = mpi4py_of(comm)
        self._is_part = is_part(part)
        if self._is_part and out is None:
            raise UsageError("Training on a part of the ranks needs out; set out to a directory of its own")
        out, resume = _where(out, resume, {RESUME: os.environ.get(RESUME, "")} if self._is_part else os.environ)
        self.recipe = _recipe_of(recipe, model)
        self._model = model
        self._optimizer: OptimizerKeys | None = recipe.get(DEFAULTS) if isinstance(recipe, Mapping) else None
        lock = RunLock()
        # If a rank of a part exits at once, the launcher ends the other ranks, which may have something to save.
        callbacks = () if self._is_part else (lock.release, failfast.note_end)
        self._stop_requests = StopRequests.listening(time_limit_s, *callbacks)
        try:
            self._begin(model, out, resume, lock, comm)
        except BaseException:
            self._stop_requests.ignore()
            raise
        for name in () if self._is_part else (RUN_DIR, RESUME):  # they apply to the first Training of the script only
            os.environ.pop(name, None)

    def _begin(
        self, model: Model, out: str | os.PathLike[str] | None, resume: str, lock: RunLock, comm: AnyComm
    ) -> None:
        communication = self.recipe.communication
        path = None if out is None else Path(out)

        def begin() -> tuple[Session, run_directory.RunDirectory]:
            per_node, part = communication.ranks_per_node or None, mpi4py_of(comm)
            session = start(self.recipe.run.device, per_node, communication.checked, part=part)
            return session, run_directory.prepare_run_directory(session.comm, self.recipe, path, resume, lock)

        self._session, run = end_records(begin, comm)  # the flight recorder of this training uses the same directory
        self._share_untrained(model)
        self._job = TrainingJob(self.recipe, run, self._stop_requests, lock, as_json=False, script_model=model)
        origin = None if run.resume_from is None else CheckpointSource(run.resume_from)
        self._loop = self._job.open(self._session, self.recipe, origin)
        self._trainer = self._loop.trainer
        self._open = ExitStack()
        self._open.enter_context(self._loop.energy.monitor)
        self._open.enter_context(self._loop.energy.monitor.window("training"))
        self._loop.begin()
        self._done, self._ended, self._evaluations = self._trainer.first_step, False, 0
        if self._optimizer is not None:
            self._optimizer.advance(self._done)
        self._left_ns = now_ns()
        if self._trainer.exchange.traits.gathers or self._trainer.grid.pipeline > 1:
            for stage in self._trainer.model.stages:  # which may be copies of the script's stages
                if hasattr(stage, "guard"):
                    stage.guard("this rank holds its parameters only during a step; use `training.evaluate`")
        self._pid = os.getpid()
        atexit.register(self._forgotten)

    def _share_untrained(self, model: Model) -> None:
        comm, recipe = self._session.comm, self.recipe
        stages: list[Any] = [stage for stage in model.stages if hasattr(stage, "share_untrained")]
        shapes = [[(key, tuple(one.shape), str(one.dtype)) for key, one in s.untrained().items()] for s in stages]
        shapes += [stage.synchronised() for stage in stages]
        if any(other != shapes for other in comm.allgather_object(shapes)):
            raise UsageError(
                "the ranks have buffers, frozen parameters or SyncBatchNorm modules of different names, shapes or types"
            )
        for stage in stages:
            stage.share_untrained(comm.broadcast)
        again = recipe.parallel.recompute or recipe.run.recomputes or recipe.parallel.partition == "measured"
        if again and any(stage.statistics() for stage in stages):
            raise ConfigurationError(
                "parallel.recompute, parallel.partition = 'measured', run.recompute_every_steps and "
                "run.suspicious_factor run forward passes again, which would change the running statistics of "
                "BatchNorm; remove these keys"
            )

    @property
    def rank(self) -> int:
        """Rank of this process among the ranks that train. Local."""
        return self._session.comm.rank

    @property
    def world(self) -> int:
        """Number of ranks that train. Local."""
        return self._session.comm.size

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica. All ranks of a replica must pass the same samples to `step`. Local."""
        return self._trainer.data_axis.rank

    @property
    def data_size(self) -> int:
        """Number of replicas. Each replica trains on different samples. Local."""
        return self._trainer.data_axis.size

    @property
    def path(self) -> Path:
        """Path of the run directory. Local."""
        return self._job.run.path

    @property
    def done(self) -> int:
        """Number of completed steps, including the steps made before a resume. Local."""
        return self._done

    @property
    def steps(self) -> Iterator[int]:
        """Iterator over the indices of the remaining steps, counted from 0. Call `step` once for each index. Local."""
        while self._done < self.recipe.run.steps:
            before = self._done
            yield before
            if self._done == before:
                raise UsageError(f"step {before} was not made: call Training.step once in each iteration of the loop")

    @property
    def share(self) -> slice:
        """Slice of the next global batch (``run.global_batch`` samples) that this rank must pass to `step`. Local."""
        return self._share().slice

    def sampler(self, dataset: Sized, *, shuffle: bool = True) -> "ReplicaSampler":
        """Return a ``batch_sampler`` for a PyTorch DataLoader. It yields lists of this replica's sample indices. Local.

        Each epoch has every sample of ``dataset`` once, in random order if ``shuffle`` is True.
        """
        # One list of indices per remaining step, which depends only on the run's seed.
        if self._trainer.shares is not None:
            raise UsageError(
                "data.shares = 'measured' decides the samples of each replica just before a step, but a DataLoader "
                "reads ahead; pass the rows `training.share` of each global batch to `step`, or set data.shares = "
                "'even'"
            )
        return ReplicaSampler(self, len(dataset), shuffle)

    def step(self, inputs: Any, targets: Any) -> float:
        """Make one step on this rank's samples, and return the mean loss over all replicas. Collective.

        ``inputs``, ``targets``: arrays or tensors with one row per sample, or for PyTorch models tuples or dicts of
        them. After a stop request, the run is saved, and the process exits with code 75 or 130.
        """
        # Tuples and dicts are arguments of the first module, and of the loss. DataError: the ranks of a replica
        # pass different values. UsageError: after the last step, or the number of rows differs from `share`.
        if self._ended or self._done >= self.recipe.run.steps:
            self.close()
            raise UsageError(
                f"all run.steps = {self.recipe.run.steps} steps are done and saved in {self.path}, including the steps "
                "before a resume; loop over `training.steps`, which yields the remaining steps, or increase run.steps"
            )
        x, y, expected = *self._adopted(inputs, targets), self._share().size
        if not len(x) == len(y) == expected:
            raise UsageError(
                f"step {self._done + 1}: rank {self.rank} got {len(x)} inputs and {len(y)} targets, expected "
                f"{expected}; pass the rows `training.share` of the {self._trainer.samples(self._done + 1)} samples of "
                "the step"
            )
        self._compare(f"step {self._done + 1}", x, y, self._done - self._trainer.first_step, self._done + 1)
        self._set_rate()
        self._loop.instrumentation.waited(self._left_ns)  # the script's time between steps counts as time for data
        self._loop.step(self._done + 1, (x, y))
        self._done += 1
        if self._optimizer is not None:
            self._optimizer.advance()
        self._left_ns = now_ns()
        if self._loop.outcome.stop_request is not None:
            self.close()
            stop_request = self._loop.outcome.stop_request  # `end` clears the request if this was the last step
            if stop_request is not None:
                self._session.leave(EXIT_CODES[stop_request])
        return self._loop.outcome.loss

    def evaluate(self, inputs: Any, targets: Any) -> float:
        """Return the mean loss over the samples of all replicas, or NaN without samples. Collective.

        ``inputs``, ``targets``: as in `step`. All ranks of a replica must pass the same samples. Replicas may
        pass different numbers of samples.
        """
        # The metrics store the result as validation loss.
        trainer = self._trainer
        trainer.flush()
        x, y = self._adopted(inputs, targets)
        self._compare(f"evaluation {self._evaluations + 1}", x, y, self._evaluations, self._evaluations + 1)
        self._evaluations += 1
        batch = trainer.place((x, y))
        loss = trainer.evaluate([[batch] if trainer.context.computes else []])
        self._loop.metrics.evaluated(self._done, loss)
        return loss

    def log(self, *, samples: float = 1.0, **values: Any) -> None:
        """Record ``values`` by name, such as ``accuracy=0.9``, for the last completed step. Local.

        The run stores the mean over the ranks that log a value, with the weights ``samples``. Values are numbers, or
        tensors with one element. Raises UsageError for other values, and after the end of the run.
        """
        weight = logged_number("samples", samples)
        if self._ended or not 0 <= weight < float("inf"):
            fault = "the run has ended" if self._ended else f"samples = {samples}, expected a number of at least 0"
            raise UsageError(f"log: {fault}; call training.log after a step, and before training.close")
        self._loop.metrics.log(self._done, weight, {name: logged_number(name, one) for name, one in values.items()})

    def close(self) -> None:
        """Save a checkpoint, report the results, and close the files. Do not call `step` afterwards. Collective."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._forgotten)
        outcome = self._loop.end()
        self._loop.progress.close()
        self._open.close()
        self._loop.metrics.flush()
        self._job.finish(self._loop, outcome, float("nan"))
        self._session.stop_recording()
        if not self._is_part:  # otherwise other ranks may still have to save: a signal must not end this process
            self._stop_requests.ignore()
        self._session.comm.barrier()  # all files are complete before any rank reads them

    def parameters(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
        """Close the training. Return {"LAYER.NAME": copy of the final parameter}. Collective; local after `close`.

        ``averaged``: True for the moving average of the parameters. Raises UsageError without ``optimizer.ema_decay``.
        The running statistics of BatchNorm are restored in the modules.
        """
        if averaged and not self.recipe.optimizer.ema_decay:
            raise UsageError("the run keeps no moving average of the parameters; set optimizer.ema_decay above 0")
        self.close()
        path = self._loop.outcome.checkpoint
        assert path is not None, "close() saves a checkpoint"
        model = self._trainer.model
        store = FlatStore(model.layout, self._trainer.context.master_dtype)
        pieces = statistic_pieces(statistics_of(model.stages))
        restore(path, [*pieces_of({AVERAGES if averaged else PARAMETERS: store}, store.parts), *pieces])
        return {segment.key: store.view(segment.key).copy() for segment in model.layout.segments}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._ended:
            self._ended = True
            atexit.unregister(self._forgotten)
            self._loop.streaming.close(normal=False)
            self._open.close()
            self._stop_requests.ignore()
            if self.world == 1:  # with more ranks, others may still write, and the error ends the job
                self._session.stop_recording()
                self._job.lock.release()

    def _forgotten(self) -> None:
        if not self._ended and self.rank == 0 and self._pid == os.getpid():  # not in a forked child
            print(
                f"hpcdist: {self._done - self._trainer.first_step} steps were made in {self.path}, but the last "
                "steps are not saved: call training.close() or training.parameters() at the end, or use `with "
                "Training(...) as training:`",
                file=sys.stderr,
            )

    def _share(self) -> Range:
        return own_samples(self.recipe, self._trainer.data_axis, self._done, self._trainer.shares)

    def _adopted(self, inputs: Any, targets: Any) -> MicroBatch:
        x, y = backend.as_array(inputs), backend.as_array(targets)
        for arrays, taker, what in ((x, self._model.stages[0], "input"), (y, self._model.loss, "target")):
            if isinstance(arrays, backend.ArrayGroup) and not getattr(taker, "takes_several", False):
                raise UsageError(
                    f"got {len(arrays.arrays)} arrays as {what}, but {type(taker).__name__} takes one array; only "
                    "models of hpcdist.adapters.torch.model take a tuple or a dict"
                )
        return x, y

    def _set_rate(self) -> None:
        if self._optimizer is None:
            return
        factor, exchange, step = self._optimizer.rate_factor(), self._trainer.exchange, self._done + 1
        if factor != 1 and exchange.traits.alternates:
            raise UsageError(
                f"step {step}: the optimizer's learning rate has changed, but communication.delayed applies a gradient "
                "one step late; set communication.delayed = false, or optimizer.decay instead of the scheduler"
            )
        if _are_compared(self.recipe, self._done - self._trainer.first_step, step):
            bounds = np.array([factor, -factor])
            self._session.comm.allreduce(bounds, "max")
            if bounds[0] != -bounds[1]:
                raise UsageError(
                    f"step {step}: the ranks have different learning rates, {-bounds[1]:g} to {bounds[0]:g} times the "
                    "rate of the recipe; call the scheduler on all ranks, with values that are equal on all ranks"
                )
        exchange.rate_factor = factor

    def _compare(self, what: str, x: Array, y: Array, before: int, number: int) -> None:
        trainer = self._trainer
        if trainer.grid.size > trainer.grid.data and _are_compared(self.recipe, before, number):
            compares = trainer.context.computes and (trainer.last_stage or trainer.context.computed_units[0] == 0)
            check_batch(trainer.comm, self.data_rank, x, y, what, looks=compares)


class ReplicaSampler:
    """Batch sampler for a PyTorch DataLoader. It yields a list of this replica's sample indices for each step."""

    def __init__(self, training: Training, samples: int, shuffle: bool) -> None:
        if not samples:
            raise UsageError("the dataset has no samples; a sampler needs at least one sample")
        self._training, self._samples, self._shuffle = training, samples, shuffle

    def __len__(self) -> int:
        return self._training.recipe.run.steps - self._training.done

    def __iter__(self) -> Iterator[list[int]]:
        training = self._training
        recipe, batches, trainer = training.recipe, training.recipe.run.batches, training._trainer
        order = SampleOrder(recipe.run.seed, self._samples, trainer.sample_order)
        for step in range(training.done, recipe.run.steps):
            part = own_samples(recipe, trainer.data_axis, step)
            first = batches.samples_before(step) + part.start
            if self._shuffle:
                yield order.indices(first, part.size)
            else:
                yield [index % self._samples for index in range(first, first + part.size)]


def _are_compared(recipe: recipes.Recipe, before: int, number: int) -> bool:
    every = recipe.run.sentinel_every_steps
    return before < COMPARED_FIRST or bool(every and number % every == 0)


def _where(out: str | os.PathLike[str] | None, resume: str, environment: Mapping[str, str]) -> tuple[Any, str]:
    resumed = environment.get(RESUME)
    out, resume = environment.get(RUN_DIR) or out, resumed or resume
    if resume not in ("auto", "never"):
        raise UsageError(f"{RESUME if resumed else 'resume'} = {resume!r}; choose 'auto' or 'never'")
    if resume == "auto" and out is None:
        if resumed:
            raise UsageError(
                f"{RESUME}=auto is set, but the script sets no ``out``. Set {RUN_DIR} to the run directory as well, or "
                "start the script by `hpcdist run --out DIR --resume auto`"
            )
        raise UsageError("resume = 'auto' needs out; set out to the directory of the run to resume")
    return out, resume


def _recipe_of(recipe: Mapping[str, Any] | str | os.PathLike[str] | None, model: Model) -> recipes.Recipe:
    fixed = settings.Settings({"model.kind": KIND}, {"model.kind": "the script's model"})
    if not isinstance(recipe, Mapping):
        return _checked(recipes.load(recipe, fixed).recipe)
    declared, explicit = recipes.known_keys(), {key: value for key, value in recipe.items() if key != DEFAULTS}
    keys = settings.Settings()
    if DEFAULTS in recipe:
        keys = settings.table(recipe[DEFAULTS](model), "the optimizer given to recipe_of", declared, Path())
    script_keys = settings.table(explicit, "the keys given to Training", declared, Path())
    keys.values |= script_keys.values
    keys.origin |= script_keys.origin
    return _checked(recipes.load(keys, fixed).recipe)


def _checked(recipe: recipes.Recipe) -> recipes.Recipe:
    defaults = recipes.defaults()
    for section, allowed in ((recipe.data, ("shares",)), (recipe.run, tuple(vars(recipe.run).keys() - {SAMPLES}))):
        name = "data" if section is recipe.data else "run"
        for key, value in vars(section).items():
            if key not in allowed and value != defaults[f"{name}.{key}"]:
                raise ConfigurationError(
                    f"{name}.{key} = {written(value)} has no effect, because the script provides the batches and "
                    "calls the validation; remove this key"
                )
    if recipe.parallel.strategy == "parameter_server" and not recipe.parameter_server.lock_step:
        raise ConfigurationError(
            "all ranks of a script must step together, but with this parameter server each rank steps at its own pace; "
            "set parameter_server.consistency = 'bsp' and parameter_server.backup_workers = 0, or use `hpcdist train` "
            "with model.kind = 'import'"
        )
    # The script validates.
    return replace(recipe, data=replace(recipe.data, validation_fraction=0.0))
