"""Run a benchmark of training steps: contenders train the same gpt in turns, and each phase is timed.

All begin with the same parameters. In every turn each contender makes a step, in a new order, and then the array
libraries multiply large matrices, all ranks at once: the fastest product is the peak for the utilisations. Afterwards
the built-in models make steps whose operations are timed one by one. `TimedRun` is the built-in gpt, or a wrapped one,
in training, with its phases and kinds of operation timed.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.matmul_peak import MatrixProduct, blas
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step import contenders
from hpcdist.bench.step.contenders import TorchRun
from hpcdist.bench.step.request import (
    COMPILED,
    EAGER,
    OURS,
    PHASES,
    RECOMPUTING,
    WRAPPED_JAX,
    WRAPPED_TORCH,
    StepRequest,
    StepShape,
)
from hpcdist.bench.step.results import StepCase, StepResults, StepSample, batches
from hpcdist.bench.step.timed_training import TimedTraining
from hpcdist.bench.timing import without_collection
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import counts
from hpcdist.models.model import Model
from hpcdist.models.runtime.split_backward import with_recomputation
from hpcdist.models.stage import Operations
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule import observers
from hpcdist.strategies.schedule.operations import Kind, Operation

# What the entries of the table of operations are called in a report.
KINDS: Final = {"linear_column": "matmul", "linear_row": "matmul", "embed": "embedding", "positions": "embedding"}
_WAYS: Final = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
}
Seconds = dict[tuple[str, str], float]  # (kind of operation, "forward" or "backward") -> in one step
Say = Callable[[str], None]
Multiply = Callable[[], float]  # once; returns the seconds
FLOAT32: Final[np.dtype[Any]] = np.dtype(np.float32)
SIDES: Final = (512, 1024)  # of the matrices: the larger are quicker where nobody interrupts
PRODUCT_REPEATS: Final = 3
OPTIMIZER: Final = OptimizerConfig(learning_rate=1e-3, warmup_steps=10)  # AdamW, clipping at 1
BUILT_IN: Final = (OURS, RECOMPUTING)
_NEED_TORCH: Final = (WRAPPED_TORCH, EAGER, COMPILED)


class TimedRun(TimedTraining):
    """A model in training, replicated over the ranks of ``comm``. Building one is collective.

    ``initial`` are its first parameters, on the host; None: those that it has itself. ``on`` is where it computes.
    """

    def __init__(
        self,
        comm: Communicator,
        name: str,
        model: Model,
        optimizer: OptimizerConfig,
        total_steps: int,
        initial: FlatStore | None,
        on: str = "cpu",
    ) -> None:
        self.name, self.model, self.ledger, self._comm = name, model, Ledger(), comm
        # Both are collective: whether ranks can share memory is asked of all.
        shares = comm.size > 1 and shared_memory.is_available(comm)
        context = RankContext(
            world=comm,
            data=comm,
            pipeline=solo(),
            model=model,
            optimizer=optimizer,
            total_steps=total_steps,
            algorithm="node_shared" if shares else "native",
            on=on,
            ledger=self.ledger,
        )
        super().__init__(context, ParallelConfig(), initial)

    def step(self, x: np.ndarray, targets: np.ndarray, together: Communicator) -> StepSample:
        """Make a step on this rank's samples, from a barrier on. Collective over ``together``."""
        done, _, step_s, cpu_s = self.timed_step([(x, targets)], len(x) * self._comm.size, together)
        phases: defaultdict[str, float] = defaultdict(float)
        for operation, (first_s, last_s) in zip(self.operations, self.timer.timed, strict=True):
            phases[_phase(operation)] += last_s - first_s
        return StepSample(loss=done.loss, own_loss=False, step_s=step_s, cpu_s=cpu_s, phases=dict(phases))

    def profile(self, x: np.ndarray, targets: np.ndarray, together: Communicator) -> Seconds:
        """Make a step whose operations are timed one by one, which costs some microseconds each. Collective.

        The update of the step is in there, too, and clipping with the norm that it needs; "all" is the step.
        """
        seconds: Seconds = defaultdict(float)
        before = self.model.operations
        self.model.operations = timed_operations(before, seconds)
        try:
            sample = self.step(x, targets, together)
        finally:
            self.model.operations = before
        for phase in ("clipping", "update", "communication"):
            if sample.phases.get(phase):
                seconds[phase, "step"] = sample.phases[phase]
        seconds["all", "step"] = sample.step_s
        return dict(seconds)

    def activation_bytes(self) -> int:
        """Return the most that activations have taken so far on this rank (local)."""
        return self.ledger.peak["activations"]


def _phase(operation: Operation) -> str:
    """Return the phase, by its name in `hpcdist.bench.step.request.PHASES`, that an operation belongs to."""
    if operation.kind is Kind.FORWARD:
        return "backward" if operation.recompute else "forward"
    if operation.kind is Kind.AGREE:
        return "clipping"
    phase = observers.PHASES.get(operation.kind, "communication")
    return "backward" if phase == "compute" else phase


def timed_operations(table: Operations, into: Seconds) -> Operations:
    """Return ``table`` with operations that add the seconds of each of their calls to ``into``, by kind and way."""
    entries = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(
        table, **{name: _Timed(operation, KINDS.get(name, name), into) for name, operation in entries.items()}
    )


class _Timed:
    """One operation, with a clock around each of its passes."""

    def __init__(self, inner: Any, kind: str, into: Seconds) -> None:
        self._inner, self._kind, self._into = inner, kind, into

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._measured(attribute, (self._kind, _WAYS[name])) if name in _WAYS else attribute

    def _measured(self, call: Callable[..., Any], key: tuple[str, str]) -> Callable[..., Any]:
        def measured(*given: Any, **named: Any) -> Any:
            begin_s = time.perf_counter()
            result = call(*given, **named)
            for array in (*given, result):
                if backend.is_device(array):  # what it computes is waited for
                    backend.synchronise(array)
                    break
            self._into[key] = self._into.get(key, 0.0) + time.perf_counter() - begin_s
            return result

        return measured


def run(comm: Communicator, wanted: StepRequest, provenance: dict[str, Any], say: Say) -> StepResults | None:
    """Measure all that is ``wanted`` and return it on rank 0; ``say`` is called there. Collective over ``comm``."""
    config = model_config(wanted.shape)
    with tempfile.TemporaryDirectory() as folder:  # where PyTorch's ranks find each other
        runs, left_out = _contenders(comm, wanted, config, Path(folder), say)
        if not runs:
            raise UsageError("nobody can take part: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
        if comm.rank == 0:
            say(f"{wanted.every} turns of {', '.join(runs)}")
        with without_collection():
            samples, rates = _turns(comm, wanted, runs)
            profiles = _profiles(comm, wanted, runs)
    cases = [_case(comm, wanted, contender, samples[name], profiles.get(name, [])) for name, contender in runs.items()]
    products = {library: np.array(comm.allgather_object(own)).T for library, own in rates.items()}
    if comm.rank:
        return None
    numbers = counts(config, context=wanted.shape.context)
    return StepResults(
        provenance={
            **provenance,
            **{name: value for name, value in asdict(wanted).items() if name not in ("shape", "names")},
            "parameters": numbers.parameters,
            "forward_flops": numbers.forward_flops,
            "backward_flops": numbers.backward_flops,
            "optimizer": "AdamW, clipped at 1",
            "blas": blas(),
        },
        shape=wanted.shape,
        matmul_flops_per_s=products,
        cases=tuple(cases),
        left_out=left_out,
    )


def model_config(shape: StepShape) -> ModelConfig:
    """Return the configuration of the gpt that is trained."""
    return ModelConfig(layers=shape.layers, hidden=shape.hidden, heads=shape.heads, vocabulary=shape.vocabulary)


def _contenders(
    comm: Communicator, wanted: StepRequest, config: ModelConfig, folder: Path, say: Say
) -> tuple[dict[str, TimedRun | TorchRun], dict[str, str]]:
    """Return the contenders that take part, and why others do not. Collective: all ranks agree."""
    model = models.build(config, "float32", context=wanted.shape.context)
    initial = FlatStore(model.layout, model.dtype)
    model.initialise(initial, wanted.seed)
    left_out = {}
    if any(name in wanted.names for name in _NEED_TORCH):
        # To begin is collective: no rank does before all can.
        missing = _on_all(comm, contenders.load_torch)
        missing = missing or _on_all(comm, lambda: contenders.begin_torch(comm, folder, wanted.threads))
        left_out = {name: missing for name in wanted.names if name in _NEED_TORCH and missing}
    if WRAPPED_JAX in wanted.names:
        missing = _on_all(comm, lambda: contenders.begin_jax(wanted.threads))
        left_out |= {WRAPPED_JAX: missing} if missing else {}
    if COMPILED in wanted.names and COMPILED not in left_out:
        if comm.rank == 0:
            say("torch.compile is tried: that takes a while")
        why = _on_all(comm, contenders.try_compile)
        left_out |= {COMPILED: why} if why else {}
    runs: dict[str, TimedRun | TorchRun] = {}
    for name in wanted.names:
        if name in left_out:
            continue
        if name in (EAGER, COMPILED):
            runs[name] = TorchRun(comm, name, wanted.shape, model, initial, OPTIMIZER, wanted.every)
            continue
        made, start = _model(name, model, initial, wanted.shape)
        runs[name] = TimedRun(comm, name, made, OPTIMIZER, wanted.every, start)
    return runs, left_out


def _model(name: str, model: Model, initial: FlatStore, shape: StepShape) -> tuple[Model, FlatStore | None]:
    """Return the model of a contender trained by hpcdist, and its initial parameters where it brings none itself."""
    if name == WRAPPED_TORCH:
        from hpcdist.adapters.torch.model import wrap

        module = contenders.torch_twin(shape, model, initial)
        example = np.zeros((1, shape.context), np.int64)
        return wrap(module, contenders.cross_entropy, example=example, tokens_per_sample=shape.context), None
    if name == WRAPPED_JAX:
        return contenders.wrapped_jax(shape, model, initial), None
    built = models.build(model_config(shape), "float32", context=shape.context)
    return with_recomputation(built) if name == RECOMPUTING else built, initial


def _on_all(comm: Communicator, attempt: Callable[[], object]) -> str:
    """Return why ``attempt`` fails on any of the ranks, "" where it does on none. Collective."""
    why = ""
    try:
        attempt()
    except (HpcdistError, RuntimeError, OSError) as error:
        why = " ".join(str(error).split())[:200]
    return next((reason for reason in comm.allgather_object(why) if reason), "")


def _turns(
    comm: Communicator, wanted: StepRequest, runs: dict[str, TimedRun | TorchRun]
) -> tuple[dict[str, list[StepSample]], dict[str, list[float]]]:
    """Return the samples of this rank, of every turn, and the rates of matrix products, by library. Collective."""
    order = np.random.default_rng([wanted.seed, 2])
    names = list(runs)
    libraries: dict[str, list[Multiply]] = {"numpy": [MatrixProduct(FLOAT32, side=side).run for side in SIDES]}
    if any(isinstance(contender, TorchRun) for contender in runs.values()):
        libraries["torch"] = [contenders.torch_product(side) for side in SIDES]
    samples: dict[str, list[StepSample]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in libraries}
    for number, tokens in enumerate(batches(wanted, wanted.every)):
        x, targets = _own(comm, wanted, tokens)
        for turn in order.permutation(len(names)).tolist():
            samples[names[turn]].append(runs[names[turn]].step(x, targets, comm))
        for library, products in libraries.items():
            comm.barrier()
            best = max(
                2 * side**3 / multiply()
                for side, multiply in zip(SIDES, products, strict=True)
                for _ in range(PRODUCT_REPEATS)
            )
            if number >= wanted.warmup:
                rates[library].append(best)
    return samples, rates


def _own(comm: Communicator, wanted: StepRequest, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's inputs and targets."""
    own = tokens[comm.rank * wanted.shape.samples : (comm.rank + 1) * wanted.shape.samples]
    return own[:, :-1], own[:, 1:]


def _profiles(
    comm: Communicator, wanted: StepRequest, runs: dict[str, TimedRun | TorchRun]
) -> dict[str, list[Seconds]]:
    """Return the seconds of each kind of operation, of so many more steps of the built-in models. Collective."""
    built_in = {
        name: timed_run for name, timed_run in runs.items() if isinstance(timed_run, TimedRun) and name in BUILT_IN
    }
    profiles: dict[str, list[Seconds]] = {name: [] for name in built_in}
    for tokens in batches(wanted, wanted.profiled):
        for name, timed_run in built_in.items():
            profiles[name].append(timed_run.profile(*_own(comm, wanted, tokens), comm))
    return profiles


def _case(
    comm: Communicator,
    wanted: StepRequest,
    contender: TimedRun | TorchRun,
    samples: Sequence[StepSample],
    profiles: Sequence[Seconds],
) -> StepCase:
    """Return the figures of a contender. Collective."""
    timed = samples[wanted.warmup :]
    rows = [[each.step_s, each.cpu_s, *(each.phases.get(name, np.nan) for name in PHASES)] for each in timed]
    times = np.array(comm.allgather_object(rows)).transpose(1, 0, 2)  # (steps, ranks, times)
    losses = np.array(comm.allgather_object([each.loss for each in samples]))
    loss = losses.mean(axis=0) if samples[0].own_loss else losses[0]
    peak, closed = None, None
    if isinstance(contender, TimedRun) and contender.name in BUILT_IN:  # what PyTorch takes, the ledger does not see
        peak = max(comm.allgather_object(contender.activation_bytes()))
        numbers = counts(model_config(wanted.shape), context=wanted.shape.context)
        closed = numbers.activation_bytes(wanted.shape.samples, recompute=contender.name == RECOMPUTING)
    names = list(dict.fromkeys(key for row in profiles for key in row))
    return StepCase(
        name=contender.name,
        step_s=times[:, :, 0],
        cpu_s=times[:, :, 1],
        phase_s=times[:, :, 2:],
        loss=loss,
        operation_s={key: np.array([row.get(key, 0.0) for row in profiles]) for key in names},
        activation_bytes=peak,
        activation_closed_bytes=closed,
    )
