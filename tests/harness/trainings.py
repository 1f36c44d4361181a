"""Trainings of recipes on ranks: build, step, save and gather them, and compare them with one process.


A recipe is a dictionary of keys over the defaults `SMALL`. Every function that takes a trainer is collective.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from hpcdist.arrays import backend
from hpcdist.arrays.piece import Piece, runs
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.comm.threads.group import RankDeath
from hpcdist.errors import ConfigurationError, NonFiniteError
from hpcdist.models.experts import router
from hpcdist.models.model import Model
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.replica_check import explain_nonfinite
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.training import run_directory
from hpcdist.training.build import fault_injection
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.elastic_job import ElasticJob
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.membership import Membership
from hpcdist.training.run.stop_requests import StopRequests

Keys = dict[str, Any]
State = dict[tuple[str, str], np.ndarray]  # by kind and tensor, flat

NOISE = "kv.bias"  # of "qkv" too: its part for the keys has a true gradient of zero: under Adam it follows the rounding
LAYOUT_KEYS = ("parallel.", "communication.", "zero.", "parameter_server.")  # they must not change a run
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def recipe_keys(text: str) -> Keys:
    """Return the recipe keys in ``text``: "strategy=zero1 zero.gradients=2".


    The section may be omitted if only one section has the key; [lora] does not count.
    """
    sections: dict[str, list[str]] = {}
    for section, kind in get_type_hints(recipes.Recipe).items():
        for field in fields(kind) if is_dataclass(kind) else ():
            sections.setdefault(field.name, []).append(section)
    keys: Keys = {}
    for word in text.split():
        key, _, value = word.partition("=")
        (section,) = (name for name in sections[key] if name != "lora") if "." not in key else [""]
        keys[f"{section}.{key}".removeprefix(".")] = number(value)
    return keys


def number(text: str) -> int | float | str:
    """Return the number in ``text``, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


SMALL: Keys = recipe_keys(
    "layers=1 hidden=16 heads=2 data.context=8 steps=20 global_batch=12 validation_samples=12 optimizer.warmup_steps=2"
)


def abort(code: int) -> None:
    """End a run as fail-fast would."""
    raise SystemExit(code)


def session_of(comm: Communicator) -> Session:
    """Return a session of a rank that was not started by a launcher."""
    return Session(comm, locate(comm, None), "test", abort)


def overrides(keys: Mapping[str, object]) -> list[str]:
    """Return keys in the form of ``--set``."""
    return [f"{key}={value}" for key, value in keys.items()]


def dotted_keys(keys: Mapping[str, object]) -> Keys:
    """Return keys written as arguments, `run__steps`, as recipe keys `run.steps`."""
    return {key.replace("__", "."): value for key, value in keys.items()}


def recipe_of(keys: Mapping[str, object] | Iterable[str]) -> recipes.Recipe:
    """Return the recipe that has only these keys, or "key=value" strings. Raises ConfigurationError."""
    return recipes.load(None, overrides(keys) if isinstance(keys, Mapping) else [*keys], {}).recipe


def assert_rejected(keys: Mapping[str, object] | Iterable[str], match: str | None = None) -> str:
    """Return the reason why a recipe rejects these keys. It must match ``match``, with exit code 78."""
    with pytest.raises(ConfigurationError, match=match) as caught:
        recipe_of(keys)
    assert caught.value.exit_code == 78
    return str(caught.value)


def trainer_of(
    comm: Communicator,
    keys: Mapping[str, object],
    resume: Path | None = None,
    *,
    directory: Path | None = None,
    session: Session | None = None,
    model: Model | None = None,
) -> Trainer:
    """Return the trainer of a recipe of ``keys``. Collective."""
    return assemble(session or session_of(comm), recipe_of(keys), resume, directory=directory, script_model=model)


def small_trainer(
    comm: Communicator, where: Path, keys: Mapping[str, object], resume: Path | None = None, **base: Any
) -> Trainer:
    """Return the trainer of `SMALL` on the text ``where``, or on a text in it, with ``base`` and ``keys`` changed."""
    path = where / "text.txt" if where.is_dir() else where
    return trainer_of(comm, {**SMALL, "data.path": path, **base, **keys}, resume)


def run_steps(trainer: Trainer, last: int, first: int | None = None) -> list[StepResult]:
    """Make the steps after ``first``, or after the completed steps, up to ``last``. Collective."""
    trainer = trainer if first is None else replace(trainer, first_step=first)
    assert trainer.first_step < last, "there is no step to make"
    steps = []
    with trainer.batches(last) as batches:
        for step, batch in enumerate(batches, start=trainer.first_step + 1):
            local_data = trainer.cut(trainer.place(batch)) if trainer.context.computes else []
            steps.append(trainer.step(step, local_data, np.ones(2)))
            assert steps[-1].stop_requests.tolist() == [trainer.comm.size] * 2
    return steps


def losses(trainer: Trainer, last: int, first: int | None = None) -> list[float]:
    """Return the losses of `run_steps`. Collective."""
    return [step.loss for step in run_steps(trainer, last, first)]


def losses_and_norms(trainer: Trainer, last: int, first: int | None = None) -> list[tuple[float, float]]:
    """Return the losses and gradient norms of `run_steps`. Collective."""
    return [(step.loss, step.gradient_norm) for step in run_steps(trainer, last, first)]


def outcomes(trainer: Trainer, last: int, first: int | None = None) -> list[tuple[float, float, bool, float]]:
    """Return the loss, norm, skip flag and loss scale of each of `run_steps`. Collective."""
    return [(step.loss, step.gradient_norm, step.skipped, step.loss_scale) for step in run_steps(trainer, last, first)]


def state(trainer: Trainer) -> State:
    """Return all parameters and optimizer state from the pieces that the ranks save. Collective."""
    return gather_tensors(trainer.comm, trainer.pieces())


def gather_tensors(comm: Communicator, pieces: Iterable[Piece]) -> State:
    """Return whole tensors. Each element must be saved exactly once. Collective."""
    whole: State = {}
    for there in comm.allgather_object([*map(_host, pieces)]):
        for kind, tensor, shape, where, values in there:
            flat = whole.setdefault((kind, tensor), np.full(math.prod(shape), np.nan, values.dtype))
            for start, local, size in zip(where.start, where.local, where.size, strict=True):
                assert np.isnan(flat[start : start + size]).all(), f"{tensor} is saved twice"
                flat[start : start + size] = values[local : local + size]
    assert not any(np.isnan(values).any() for values in whole.values()), "something is not saved"
    return whole


def _host(piece: Piece) -> tuple[object, ...]:
    where = runs(piece.global_shape, piece.box, piece.flat)
    return piece.kind, piece.tensor, piece.global_shape, where, backend.to_host(piece.array.copy())


def state_bits(trainer: Trainer) -> dict[tuple[str, str], bytes]:
    """Return `state` as bits. Collective."""
    return {key: values.tobytes() for key, values in state(trainer).items()}


def digest(trainer: Trainer) -> str:
    """Return a digest of the local parameters and optimizer states."""
    stores = {"parameters": trainer.exchange.parameters, **trainer.exchange.update.slots()}  # type: ignore[attr-defined]
    return hashlib.sha256(b"".join(store.array.tobytes() for store in stores.values())).hexdigest()


def failure_reason(trainer: Trainer, step: int = 1) -> str:
    """Return the reason why ``step`` fails on the first batch of the run, as the trainer reports it. Collective."""
    with trainer.batches(trainer.first_step + 1) as batches:
        batch = trainer.place(next(iter(batches)))
    parts = trainer.cut(batch) if trainer.context.computes else []
    with pytest.raises(NonFiniteError) as failed, np.errstate(all="ignore"):
        trainer.step(step, parts, np.zeros(2))
    with np.errstate(all="ignore"):
        return str(explain_nonfinite(trainer.comm, trainer.executor, trainer.operations, parts, failed.value))


def blamed_ranks(trainer: Trainer, step: int = 1) -> list[int]:
    """Return the ranks named in the reason of `failure_reason`. Collective."""
    why = failure_reason(trainer, step)
    return [rank for rank in range(trainer.comm.size) if f"rank {rank}: " in why]


def local_bits(trainer: Trainer) -> list[tuple[str, bytes]]:
    """Return all data that this rank restores, and its scalars. Collective, because sums may be in flight."""
    trainer.exchange.pieces()
    pieces = [(piece.name, piece.array.copy().tobytes()) for piece in trainer.exchange.wanted()]
    return [*pieces, ("state", repr((trainer.exchange.state(), trainer.executor.loss_scale.state())).encode())]


@dataclass(frozen=True)
class Reference:
    """A run in one process, without any layout."""

    losses: list[float]
    state: State
    validation: float


_references: dict[tuple[object, ...], Reference] = {}  # tests that train on one text may share them


def run_single_process(keys: Mapping[str, object], steps: int) -> Reference:
    """Return the run of ``keys`` in one process, without their layout. Local."""
    plain = {key: value for key, value in keys.items() if not key.startswith(LAYOUT_KEYS)}
    name = (steps, *sorted((key, str(value)) for key, value in plain.items()))
    if name not in _references:
        trainer = trainer_of(solo(), plain)
        _references[name] = Reference(losses(trainer, steps), state(trainer), mean_validation_loss(trainer))
    return _references[name]


def choose_in_turn(monkeypatch: pytest.MonkeyPatch, experts: int) -> None:
    """Let routers choose the ``experts`` in turn, so that loads are even, as plans assume."""
    choose = router.choose

    def in_turn(logits: Any, bias: Any, config: Any, chosen: Any, gates: Any) -> None:
        choose(logits, bias, config, chosen, gates)
        chosen[...] = np.arange(chosen.size, dtype=chosen.dtype).reshape(chosen.shape) % experts

    monkeypatch.setattr(router, "choose", in_turn)


def difference(mine: Trainer | State, theirs: State) -> float:
    """Return the norm of the difference of two models, relative to the second. Collective for a trainer."""
    mine = state(mine) if isinstance(mine, Trainer) else mine
    weights = [key for key in theirs if key[0] == "parameters" and not key[1].endswith(NOISE)]
    differences = [np.linalg.norm(mine[key].astype(np.float64) - theirs[key]) for key in weights]
    return float(np.linalg.norm(differences) / np.linalg.norm([np.linalg.norm(theirs[key]) for key in weights]))


def check_training(trainer: Trainer, expected: Reference, steps: int, bound: float) -> None:
    """Train, and compare the losses, the validation and, with 10 * ``bound``, the model. Collective."""
    np.testing.assert_allclose(losses(trainer, steps), expected.losses, rtol=bound)
    np.testing.assert_allclose(mean_validation_loss(trainer), expected.validation, rtol=bound)
    assert difference(trainer, expected.state) <= 10 * bound


# Trainings that are made on the CPU and on a GPU, real or double.
STEPS = 4
SETTINGS: Keys = recipe_keys(
    f"layers=2 hidden=16 heads=2 tied=true data.context=8 steps={STEPS} global_batch=7 "
    "validation_samples=5 optimizer.warmup_steps=2 optimizer.clip_norm=0.5 algorithm=ring"
)
TWO = {"parallel.microbatches": 2}
PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 3, "run.global_batch": 12}


def residuals_of(exchange: Any) -> FlatStore | None:
    """Return the error-feedback residuals of an exchange with one set of them, or None without error feedback."""
    residuals = exchange.reducer.feedback.residuals
    return residuals[0].feedback.residuals if residuals else None


SERVER = {"parallel.strategy": "parameter_server", **TWO}
# An architecture: the numbers of ranks that it runs on, and its keys.
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "allreduce": ((1, 2, 4), {"parallel.strategy": "allreduce", "communication.bucket_bytes": 4096, **TWO}),
    "zero1": ((1, 2, 4), {"parallel.strategy": "zero1", **TWO}),
    "zero2": ((1, 2, 4), {"parallel.strategy": "zero2", **TWO}),
    "zero3": ((1, 2, 4), {"parallel.strategy": "zero3", **TWO}),
    "zero2, lamb": ((2,), {"parallel.strategy": "zero2", "optimizer.name": "lamb", **TWO}),
    "gpipe": ((2, 4), {"parallel.schedule": "gpipe", **PIPELINE}),
    "1f1b": ((2, 4), {"parallel.schedule": "1f1b", **PIPELINE}),
    "1f1b, recomputing": ((2, 4), {"parallel.schedule": "1f1b", "parallel.recompute": "true", **PIPELINE}),
    "gpipe, recomputing": ((2,), {"parallel.schedule": "gpipe", "parallel.recompute": "true", **PIPELINE}),
    "1f1b x zero1": ((4,), {"parallel.strategy": "zero1", **PIPELINE}),
    "pipeline of 4": ((4,), {**PIPELINE, "parallel.pipeline": 4}),
    "a server": ((2, 4), {**SERVER, "parameter_server.servers": 1}),
    "two servers": ((4,), {**SERVER, "parameter_server.servers": 2}),
    "servers that work": ((2,), {**SERVER, "parameter_server.placement": "colocated"}),
}
TRAININGS = [(name, ranks) for name, (sizes, _) in LAYOUTS.items() for ranks in sizes]


def assemble_trainer(
    comm: Communicator,
    settings: Mapping[str, object],
    resume: Path | None = None,
    directory: Path | None = None,
    session: Session | None = None,
) -> Trainer:
    """Return the trainer of `SETTINGS` with some keys changed. Collective."""
    return trainer_of(comm, {**SETTINGS, **settings}, resume, directory=directory, session=session)


class Trained:
    """The results of one rank after all steps: the losses, the validation loss, and its share of the state."""

    def __init__(
        self,
        comm: Communicator,
        settings: dict[str, object],
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.trainer = assemble_trainer(comm, settings)
        trainer, self.losses = self.trainer, []
        with trainer.batches(trainer.recipe.run.steps) as batches:
            for step, batch in enumerate(batches, start=1):
                before_step()
                result = trainer.step(step, trainer.cut(trainer.place(batch)), np.zeros(2))
                after_step()
                self.losses.append(result.loss)
        self.validation = mean_validation_loss(trainer)
        pieces = trainer.exchange.pieces()
        self.state = {(p.kind, p.tensor, p.flat.start): backend.to_host(p.array).copy() for p in pieces}


def with_pointers(comm: Communicator) -> None:
    """Let messages of ``comm``, and of communicators derived from it, access device memory directly."""
    comm.handover = Handover(device_pointers=True)  # type: ignore[attr-defined]


def check_same(host: list[Trained], device: list[Trained], bound: float, leave_out: Iterable[str] = ()) -> None:
    """Check for the same losses, and for state that differs by at most ``10 * bound`` of its norm, by kind.


    The split over ranks may differ, because stages may be split by measured times.
    """
    for ours, theirs in zip(device, host, strict=True):
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=bound)
        np.testing.assert_allclose(ours.validation, theirs.validation, rtol=bound)
    got, want = (
        sorted(((key, values) for one in side for key, values in one.state.items()), key=lambda row: row[0])
        for side in (device, host)
    )
    assert [key for key, _ in got] == [key for key, _ in want]
    for kind in {kind for (kind, _, _), _ in want}:
        there, here = (
            np.concatenate(
                [values for (of, tensor, _), values in rows if of == kind and not tensor.endswith(tuple(leave_out))]
            )
            for rows in (got, want)
        )
        assert np.linalg.norm(there - here) <= 10 * bound * np.linalg.norm(here), kind


# Jobs of thread ranks that are killed by chaos, and the metrics that they leave.


class Quiet(Session):
    """A session of threads, without recorder, watchdog or processes that could leave."""

    def record(self, directory: Path, deadline_s: float, *, spans: bool = False) -> None:
        """Do nothing."""

    def stop_recording(self) -> None:
        """Do nothing: there is no recorder."""

    def survive(self, comm: Communicator) -> Session:
        """Return the session of the surviving ranks."""
        return Quiet(comm, locate(comm, None), "threads", self.abort)

    def leave(self, code: int) -> None:
        """End the thread."""


def survive(
    size: int,
    out: Path,
    path: Path,
    keys: Keys,
    spares: int = 0,
    ranks_per_node: int | None = None,
    resume: str = "never",
    together: int = 1,
) -> step_metrics.MetricsData:
    """Train on ``size`` threads, some of which chaos may kill. Return the metrics of the survivors.


    A thread that is to be killed waits until ``together`` threads are to be killed. Otherwise the others could repair
    the run before the second death.
    """
    recipe = recipe_of({**SMALL, "run.steps": 10, "energy.sources": "none", "data.path": path, **keys})
    mode = "replace" if spares else "shrink"

    def body(comm: Communicator) -> int:
        session = Quiet(comm, locate(comm, None), "threads", abort)
        lock = RunLock({})
        run = run_directory.prepare_run_directory(comm, recipe, out, resume, lock)
        team = Membership.begin(comm, mode, spares)
        job = TrainingJob(
            recipe, run, StopRequests(), lock, as_json=False, holder=lock.identity
        )  # threads are one process
        return ElasticJob(job, session, team).train(
            None if run.resume_from is None else CheckpointSource(run.resume_from)
        )

    dying = threading.Barrier(together)

    def die() -> None:
        dying.wait(LIMIT_S)
        raise RankDeath

    before, fault_injection.kill_process = fault_injection.kill_process, die
    try:
        codes = run_threads(size + spares, body, deadline_s=LIMIT_S, fault_tolerant=True, ranks_per_node=ranks_per_node)
    finally:
        fault_injection.kill_process = before
    assert {code for code in codes if code is not None} == {0}
    return step_metrics.read(out / "metrics.h5")
