"""Training of a user's model from a user's script: the script has the loop, hpcdist makes every step.

    from hpcdist.training.pytorch import Training, wrap

    with Training(wrap(model, loss), {"parallel.strategy": "zero2", "run.steps": 100}) as training:
        for step in training.steps:
            inputs, targets = batch(step)  # all samples of the step
            loss = training.step(inputs[training.share], targets[training.share])

Every key of a recipe can be used: strategy, pipeline, optimizer, compression, checkpoints, energy, telemetry. The run
has a directory like any other, which `hpcdist report`, `trace` and `checkpoint` read.
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

from hpcdist.adapters.torch.model import DEFAULTS
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.lock import RunLock
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.comm.failure import failfast
from hpcdist.comm.launch import standard_streams
from hpcdist.comm.launch.environment import RESUME, RUN_DIR
from hpcdist.comm.mpi.world import end_records
from hpcdist.comm.record.spans import now_ns
from hpcdist.comm.start import Session, fail_alike, start
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import Model
from hpcdist.reporting.rules import written
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.core.replica_check import check_batch
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.training import run_directory
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.data import SampleOrder, own_samples
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import settings
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import EXIT_CODES, StopRequests

COMPARED_FIRST: Final = 3  # steps, and evaluations, whose batches are compared along a replica
KIND: Final = "given"  # what the recipe of such a run has as model.kind
SAMPLES: Final = "validation_samples"


class Training:
    """Training that a script makes step by step, on every rank alike. A context manager; all of it is collective.

    ``recipe`` is a TOML file, or keys and values (``{"run.steps": 100}``, or tables of them); HPCDIST_SET__RUN__STEPS
    and the like in the environment win over both. ``model`` and ``data`` are the script's. ``out`` is the run
    directory; ``resume`` is "auto" (go on from its newest checkpoint) or "never". The variables HPCDIST_RUN_DIR and
    HPCDIST_RESUME of `hpcdist run` and `hpcdist submit` win over both, for the first Training of a script. After
    ``time_limit_s`` seconds the run is saved and stops; in a Slurm job its end is known. Raises ConfigurationError for
    a recipe that cannot be run, or does not go with the model.
    """

    def __init__(
        self,
        model: Model,
        recipe: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        resume: str = "never",
        time_limit_s: float | None = None,
    ) -> None:
        standard_streams.tolerate()
        fail_alike()
        out, resume = _where(out, resume, os.environ)
        self.recipe = _recipe_of(recipe, model)
        self._model = model
        lock = RunLock()
        self._stop_requests = StopRequests.listening(time_limit_s, lock.release, failfast.note_end)
        try:
            self._begin(model, out, resume, lock)
        except BaseException:
            self._stop_requests.ignore()
            raise
        for name in (RUN_DIR, RESUME):  # the launcher means the first Training of the script
            os.environ.pop(name, None)

    def _begin(self, model: Model, out: str | os.PathLike[str] | None, resume: str, lock: RunLock) -> None:
        """Start MPI, build the run and open its files. Collective."""
        communication = self.recipe.communication
        path = None if out is None else Path(out)

        def begin() -> tuple[Session, run_directory.RunDirectory]:
            session = start(self.recipe.run.device, communication.ranks_per_node or None, communication.checked)
            return session, run_directory.prepare_run_directory(session.comm, self.recipe, path, resume, lock)

        self._session, run = end_records(begin)  # the records of this training come into the same directory
        self._job = TrainingJob(self.recipe, run, self._stop_requests, lock, as_json=False, script_model=model)
        origin = None if run.resume_from is None else CheckpointSource(run.resume_from)
        self._loop = self._job.open(self._session, self.recipe, origin)
        self._trainer = self._loop.trainer
        self._open = ExitStack()
        self._open.enter_context(self._loop.energy.monitor)
        self._open.enter_context(self._loop.energy.monitor.window("training"))
        self._loop.begin()
        self._done, self._ended, self._evaluations = self._trainer.first_step, False, 0
        self._left_ns = now_ns()
        if self._trainer.exchange.gathers or self._trainer.grid.pipeline > 1:
            for stage in model.stages:
                if hasattr(stage, "guard"):
                    stage.guard("this rank has its parameters within a step only; use `training.evaluate`")
        self._pid = os.getpid()
        atexit.register(self._forgotten)

    @property
    def rank(self) -> int:
        """The rank of this process in the world (local)."""
        return self._session.comm.rank

    @property
    def world(self) -> int:
        """The number of ranks (local)."""
        return self._session.comm.size

    @property
    def data_rank(self) -> int:
        """The number of this rank's replica of the model: ranks of one replica bring the same samples (local)."""
        return self._trainer.data_axis.rank

    @property
    def data_size(self) -> int:
        """The number of replicas, each with samples of its own (local)."""
        return self._trainer.data_axis.size

    @property
    def path(self) -> Path:
        """The run directory (local)."""
        return self._job.run.path

    @property
    def done(self) -> int:
        """The number of steps that are done, those before a resume included (local)."""
        return self._done

    @property
    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 0: the script makes one each (local)."""
        while self._done < self.recipe.run.steps:
            before = self._done
            yield before
            if self._done == before:
                raise UsageError(f"step {before} was not made: call Training.step once in each turn of the loop")

    @property
    def share(self) -> slice:
        """The samples of the ``run.global_batch`` of the coming step that this rank brings (local)."""
        return self._share().slice

    def sampler(self, dataset: Sized, *, shuffle: bool = True) -> "ReplicaSampler":
        """Return the ``batch_sampler`` of a DataLoader of PyTorch for the samples of this rank's replica.

        It yields the indices of its share of each step that is left, drawn from the seed of the run alone: the same on
        all ranks of a replica, and after a resume. Each epoch takes every sample of ``dataset`` once, in an order of
        its own with ``shuffle``. Local.
        """
        if self._trainer.shares is not None:
            raise UsageError(
                "data.shares = 'measured' shares a batch only when its step comes, and a DataLoader reads ahead; take "
                "rows `training.share` of each batch, or set data.shares = 'even'"
            )
        return ReplicaSampler(self, len(dataset), shuffle)

    def step(self, inputs: Any, targets: Any) -> float:
        """Make a step on this rank's share of its samples; return the mean loss over all of them.

        ``inputs`` and ``targets`` have a sample a row: arrays or tensors, on the host or on the GPU. All ranks of a
        replica bring its share, the same values on each: in a pipeline its ends use it. The values are compared in the
        first steps, and whenever replicas are compared (``run.sentinel_every_steps``); DataError names ranks that
        differ. A model of PyTorch also takes tuples and dicts of them: its first module gets the inputs as arguments,
        positional or by name, its loss the targets as they are. On a request to stop (a signal, the job's time),
        everything is saved and this process exits with code 75 or 130. Raises UsageError after the last step of the
        recipe, or where a share has another size than `share`.
        """
        if self._ended or self._done >= self.recipe.run.steps:
            self.close()
            raise UsageError(
                f"all of run.steps = {self.recipe.run.steps} are made, those before a resume included, and saved in "
                f"{self.path}; loop over `training.steps`, which has those that are left, or set more"
            )
        x, y, expected = *self._adopted(inputs, targets), self._share().size
        if not len(x) == len(y) == expected:
            raise UsageError(
                f"step {self._done + 1}: rank {self.rank} got {len(x)} inputs and {len(y)} targets, and its share of "
                f"{self._trainer.samples(self._done + 1)} samples is {expected}; give rows `training.share` of the "
                "step's samples"
            )
        self._compare(f"step {self._done + 1}", x, y, self._done - self._trainer.first_step, self._done + 1)
        self._loop.instrumentation.waited(self._left_ns)  # the time of the script between its steps is time for data
        self._loop.step(self._done + 1, (x, y))
        self._done += 1
        self._left_ns = now_ns()
        if self._loop.outcome.stop_request is not None:
            self.close()
            stop_request = self._loop.outcome.stop_request  # `end` has cleared it where this was the last step
            if stop_request is not None:
                self._session.leave(EXIT_CODES[stop_request])
        return self._loop.outcome.loss

    def evaluate(self, inputs: Any, targets: Any) -> float:
        """Return the mean loss of the samples of all replicas under the present parameters; NaN for none.

        Every rank calls it with its own part of them, which may be empty and of any size; the ranks of a pipeline with
        the same. Nothing is dropped, and modules are in evaluation mode. The run's metrics keep it as validation loss.
        """
        trainer = self._trainer
        trainer.flush()
        x, y = self._adopted(inputs, targets)
        self._compare(f"evaluation {self._evaluations + 1}", x, y, self._evaluations, self._evaluations + 1)
        self._evaluations += 1
        batch = trainer.place((x, y))
        loss = trainer.evaluate([[batch] if trainer.context.computes else []])
        self._loop.metrics.evaluated(self._done, loss)
        return loss

    def close(self) -> None:
        """End the run: save, report, close its files. No more steps can be made."""
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
        self._stop_requests.ignore()
        self._session.comm.barrier()  # files are whole before any rank looks at them

    def parameters(self) -> dict[str, np.ndarray]:
        """Return a copy of every tensor by name, ``LAYER.NAME``, at the end of the run, which `close` ends first.

        Collective before `close`, local after it: each rank reads them from the last checkpoint.
        """
        self.close()
        path = self._loop.outcome.checkpoint
        assert path is not None, "the end of a run saves"
        model = self._trainer.model
        store = FlatStore(model.layout, self._trainer.context.master_dtype)
        restore(path, pieces_of({"parameters": store}, store.parts))
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
            if self.world == 1:  # else the others may still write, and the error ends the job
                self._session.stop_recording()
                self._job.lock.release()

    def _forgotten(self) -> None:
        """Print at the end of the script that it has not ended the run."""
        if not self._ended and self.rank == 0 and self._pid == os.getpid():  # not in a forked child
            print(
                f"hpcdist: {self._done - self._trainer.first_step} steps were made in {self.path}, and the last of "
                "them are not saved: call training.close() or training.parameters() at the end, or use `with "
                "Training(...) as training:`",
                file=sys.stderr,
            )

    def _share(self) -> Range:
        return own_samples(self.recipe, self._trainer.data_axis, self._done, self._trainer.shares)

    def _adopted(self, inputs: Any, targets: Any) -> MicroBatch:
        """Return a batch as arrays (local). Raises UsageError for several of them where the model takes one."""
        x, y = backend.as_array(inputs), backend.as_array(targets)
        for several, taker, what in ((x, self._model.stages[0], "input"), (y, self._model.loss, "target")):
            if isinstance(several, backend.ArrayGroup) and not getattr(taker, "takes_several", False):
                raise UsageError(
                    f"got {len(several.arrays)} arrays as {what}, and {type(taker).__name__} takes one; models of "
                    "hpcdist.adapters.torch.model take a tuple or a dict, others one array or tensor"
                )
        return x, y

    def _compare(self, what: str, x: Array, y: Array, before: int, number: int) -> None:
        """Compare the batch with those of the other ranks of the replica, where it is due. Collective then."""
        trainer, every = self._trainer, self.recipe.run.sentinel_every_steps
        if trainer.grid.size == trainer.grid.data:
            return
        if before < COMPARED_FIRST or (every and number % every == 0):
            looks = trainer.context.computes and (trainer.last_stage or trainer.context.units[0] == 0)
            check_batch(trainer.comm, self.data_rank, x, y, what, looks=looks)


class ReplicaSampler:
    """Sampler of the indices of a replica in each step that is left, for a DataLoader of PyTorch."""

    def __init__(self, training: Training, samples: int, shuffle: bool) -> None:
        if not samples:
            raise UsageError("the dataset has no samples; a sampler needs at least one")
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


def _where(out: str | os.PathLike[str] | None, resume: str, environment: Mapping[str, str]) -> tuple[Any, str]:
    """Return the run directory and the resume mode: those of the launcher, else the arguments. Raises UsageError."""
    resumed = environment.get(RESUME)
    out, resume = environment.get(RUN_DIR) or out, resumed or resume
    if resume not in ("auto", "never"):
        raise UsageError(f"{RESUME if resumed else 'resume'} = {resume!r}; choose 'auto' or 'never'")
    if resume == "auto" and out is None:
        if resumed:
            raise UsageError(
                f"{RESUME}=auto, and nobody says where the run is: the script has no out. Set {RUN_DIR} to the run "
                "directory as well, or start the script by `hpcdist run --out DIR --resume auto`"
            )
        raise UsageError("resume = 'auto' needs out: the directory of the run that goes on")
    return out, resume


def _recipe_of(recipe: Mapping[str, Any] | str | os.PathLike[str] | None, model: Model) -> recipes.Recipe:
    """Return the recipe of a file or of keys, for the ``model`` of the script (local).

    Keys that follow from the model, as those of `hpcdist.adapters.torch.recipe_of`, give way to all others.
    """
    fixed = settings.Settings({"model.kind": KIND}, {"model.kind": "the script's model"})
    if not isinstance(recipe, Mapping):
        return _checked(recipes.load(recipe, fixed).recipe)
    known, explicit = recipes.defaults(), {key: value for key, value in recipe.items() if key != DEFAULTS}
    keys = settings.Settings()
    if DEFAULTS in recipe:
        keys = settings.table(recipe[DEFAULTS](model), "the optimizer given to recipe_of", known, Path())
    own = settings.table(explicit, "the keys given to Training", known, Path())
    keys.values |= own.values
    keys.origin |= own.origin
    return _checked(recipes.load(keys, fixed).recipe)


def _checked(recipe: recipes.Recipe) -> recipes.Recipe:
    """Return ``recipe`` without validation, which the script does itself.

    Raises ConfigurationError for keys of the data, which the script brings, and where workers go at their own pace.
    """
    known = recipes.defaults()
    for section, but in ((recipe.data, ("shares",)), (recipe.run, tuple(vars(recipe.run).keys() - {SAMPLES}))):
        name = "data" if section is recipe.data else "run"
        for key, value in vars(section).items():
            if key not in but and value != known[f"{name}.{key}"]:
                raise ConfigurationError(
                    f"{name}.{key} = {written(value)} has no effect where a script brings the batches, and looks at "
                    "its own validation data; leave it out"
                )
    if recipe.parallel.strategy == "parameter_server" and not recipe.parameter_server.lock_step:
        raise ConfigurationError(
            "a script makes its steps together with all ranks, and this parameter server lets each go at its own pace; "
            "set parameter_server.consistency = 'bsp' without backup workers, or give `hpcdist train` the model, with "
            "model.kind = 'import'"
        )
    return replace(recipe, data=replace(recipe.data, validation_fraction=0.0))
