"""Run the benchmark of training steps: the contenders train the same GPT in turns, and each phase is timed.

All contenders start with the same parameters. In every turn each contender makes a step, in random order. Then the
array libraries multiply large matrices on all ranks at the same time. The fastest product is the peak for the model
flop utilisation. Finally the built-in contenders make steps in which each operation is timed.
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

# Field of `Operations` -> kind of operation in the report, if the names differ
KINDS: Final = {"linear_column": "matmul", "linear_row": "matmul", "embed": "embedding", "positions": "embedding"}
_PASSES: Final = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
}
Seconds = dict[tuple[str, str], float]  # (kind of operation, "forward", "backward" or "step") -> seconds per step
Print = Callable[[str], None]
Multiply = Callable[[], float]  # multiplies once and returns the seconds
SIDES: Final = (512, 1024)  # rows of the matrices: larger matrices are faster on an idle machine
PRODUCT_REPEATS: Final = 3
OPTIMIZER: Final = OptimizerConfig(learning_rate=1e-3, warmup_steps=10)  # AdamW, clipping at 1
BUILT_IN: Final = (OURS, RECOMPUTING)
_NEED_TORCH: Final = (WRAPPED_TORCH, EAGER, COMPILED)


class TimedRun(TimedTraining):
    """The contender ``name``: ``model`` in training, replicated on all ranks of ``comm``. Building it is collective.

    ``total_steps`` determines the learning rates. ``initial``: initial parameters on the host, or None to let the model
    initialise them. ``on``: "cpu" or "gpu", the device that computes.
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
        shares = comm.size > 1 and shared_memory.is_available(comm)  # collective
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
        """Run a step after a barrier of ``together``, and return its times and the global loss. Collective over it.

        ``x`` and ``targets`` are this rank's input and target tokens, of shape (samples, context).
        """
        done, _, step_s, cpu_s = self.timed_step([(x, targets)], len(x) * self._comm.size, together)
        phases: defaultdict[str, float] = defaultdict(float)
        for operation, (first_s, last_s) in zip(self.operations, self.timer.timed, strict=True):
            phases[_phase(operation)] += last_s - first_s
        return StepSample(loss=done.loss, own_loss=False, step_s=step_s, cpu_s=cpu_s, phases=dict(phases))

    def profile(self, x: np.ndarray, targets: np.ndarray, together: Communicator) -> Seconds:
        """Run `step` with timed operations, and return the seconds of each kind of operation. Collective.

        The timer costs some microseconds per operation. The result includes the phases "clipping" (with the gradient
        norm), "update" and "communication", and the whole step as "all".
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
        """Return the peak size of the activations on this rank so far, in bytes. Local."""
        return self.ledger.peak["activations"]


def _phase(operation: Operation) -> str:
    if operation.kind is Kind.FORWARD:
        return "backward" if operation.recompute else "forward"
    if operation.kind is Kind.AGREE:
        return "clipping"
    phase = observers.PHASES.get(operation.kind, "communication")
    return "backward" if phase == "compute" else phase


def timed_operations(table: Operations, seconds: Seconds) -> Operations:
    """Return a copy of ``table`` with a timer around each operation. Each call adds its time to ``seconds``."""
    entries = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(table, **{name: _Timed(entry, KINDS.get(name, name), seconds) for name, entry in entries.items()})


class _Timed:
    """The operation ``inner`` with a timer around each forward and backward pass."""

    def __init__(self, inner: Any, kind: str, seconds: Seconds) -> None:
        self._inner, self._kind, self._seconds = inner, kind, seconds

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._measured(attribute, (self._kind, _PASSES[name])) if name in _PASSES else attribute

    def _measured(self, call: Callable[..., Any], key: tuple[str, str]) -> Callable[..., Any]:
        def measured(*arguments: Any, **named: Any) -> Any:
            begin_s = time.perf_counter()
            result = call(*arguments, **named)
            array = next(filter(backend.is_device, (*arguments, result)), None)
            if array is not None:  # wait for the GPU kernels
                backend.synchronise(array)
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - begin_s
            return result

        return measured


def run(comm: Communicator, request: StepRequest, provenance: dict[str, Any], print_line: Print) -> StepResults | None:
    """Measure all contenders of ``request``. Return the results on rank 0, None elsewhere. Collective over ``comm``.

    The results contain ``provenance``. Rank 0 calls ``print_line`` with each progress message. Raises UsageError if no
    contender can run here.
    """
    config = model_config(request.shape)
    with tempfile.TemporaryDirectory() as folder:  # for the rendezvous of PyTorch's ranks
        runs, left_out = _contenders(comm, request, config, Path(folder), print_line)
        if not runs:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise UsageError(f"no contender in --only can run here: {reasons}")
        if comm.rank == 0:
            print_line(f"{request.num_turns} turns of {', '.join(runs)}")
        with without_collection():
            samples, rates = _turns(comm, request, runs)
            profiles = _profiles(comm, request, runs)
    cases = [_case(comm, request, run, samples[name], profiles.get(name, [])) for name, run in runs.items()]
    products = {library: np.array(comm.allgather_object(speeds)).T for library, speeds in rates.items()}
    if comm.rank:
        return None
    numbers = counts(config, context=request.shape.context)
    return StepResults(
        provenance={
            **provenance,
            **{name: value for name, value in asdict(request).items() if name not in ("shape", "names")},
            "parameters": numbers.parameters,
            "forward_flops": numbers.forward_flops,
            "backward_flops": numbers.backward_flops,
            "optimizer": "AdamW, clipped at 1",
            "blas": blas(),
        },
        shape=request.shape,
        matmul_flops_per_s=products,
        cases=tuple(cases),
        left_out=left_out,
    )


def model_config(shape: StepShape) -> ModelConfig:
    """Return the model configuration of a GPT with this ``shape``."""
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
