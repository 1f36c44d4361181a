"""Run the benchmark of training steps: the contenders train the same GPT in turns, and each phase is timed.

All contenders start with the same parameters. In every turn each contender makes a step, in random order. Then the
array libraries multiply large matrices on all ranks at the same time. The fastest product is the peak for the model
flop utilisation. Finally the built-in contenders make steps in which each operation is timed.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.matmul_peak import MatrixProduct, blas
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
from hpcdist.bench.timing import TimedTraining, without_collection
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import counts
from hpcdist.models.model import Model
from hpcdist.models.split_backward import with_recomputation
from hpcdist.models.stage import Operations
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.step import PHASES as PHASE_OF_KIND

# Field of `Operations` -> kind of operation in the report, if the names differ
KINDS: Final = {"linear_column": "matmul", "linear_row": "matmul", "embed": "embedding", "positions": "embedding"}
# Method of an operation -> pass
_PASSES: Final = {name: name.split("_")[0] for name in ("forward", "backward", "backward_input", "backward_weight")}
Seconds = dict[tuple[str, str], float]  # (kind of operation, "forward", "backward" or "step") -> seconds per step
Print = Callable[[str], None]
Multiply = Callable[[], float]  # multiplies once and returns the seconds
SIDES: Final = (512, 1024)  # rows of the matrices: larger matrices are faster on an idle machine
PRODUCT_REPEATS: Final = 3
OPTIMIZER: Final = OptimizerConfig(learning_rate=1e-3, warmup_steps=10)  # AdamW, clipping at 1
BUILT_IN: Final = (OURS, RECOMPUTING)
_NEED_TORCH: Final = (WRAPPED_TORCH, EAGER, COMPILED)


class TimedRun(TimedTraining):
    """Timed data-parallel training of ``model`` on all ranks of ``comm``. Construction is collective."""

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

    def step(self, x: np.ndarray, targets: np.ndarray, barrier_comm: Communicator) -> StepSample:
        """Run a step on local tokens ``x`` and labels ``targets``. Return durations and global loss. Collective."""
        done, _, step_s, cpu_s = self.timed_step([(x, targets)], len(x) * self._comm.size, barrier_comm)
        phases: defaultdict[str, float] = defaultdict(float)
        for operation, (first_s, last_s) in zip(self.operations, self.timer.timed, strict=True):
            phases[_phase(operation)] += last_s - first_s
        return StepSample(loss=done.loss, own_loss=False, step_s=step_s, cpu_s=cpu_s, phases=dict(phases))

    def profile(self, x: np.ndarray, targets: np.ndarray, barrier_comm: Communicator) -> Seconds:
        """Run a step whose operations are timed. Return {(operation kind, pass): seconds on this rank}. Collective.

        ``x``: local tokens. ``targets``: labels. The step starts after a barrier on ``barrier_comm``.
        """
        # Further keys are "clipping" (with the gradient norm), "update", "communication" and "all" (the whole step).
        seconds: Seconds = defaultdict(float)
        before = self.model.operations
        self.model.operations = timed_operations(before, seconds)
        try:
            sample = self.step(x, targets, barrier_comm)
        finally:
            self.model.operations = before
        for phase in ("clipping", "update", "communication"):
            if sample.phases.get(phase):
                seconds[phase, "step"] = sample.phases[phase]
        seconds["all", "step"] = sample.step_s
        return dict(seconds)

    def activation_bytes(self) -> int:
        """Return the maximum size of the activations on this rank since construction, in bytes. Local."""
        return self.ledger.peak["activations"]


def _phase(operation: Operation) -> str:
    if operation.kind is Kind.FORWARD:
        return "backward" if operation.recompute else "forward"
    if operation.kind is Kind.AGREE:
        return "clipping"
    phase = PHASE_OF_KIND.get(operation.kind, "communication")
    return "backward" if phase == "compute" else phase


def timed_operations(table: Operations, seconds: Seconds) -> Operations:
    """Return a copy of ``table`` with timed operations, which add to ``seconds``, {(operation kind, pass): sum}."""
    entries = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(table, **{name: _Timed(entry, KINDS.get(name, name), seconds) for name, entry in entries.items()})


class _Timed:
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
    """Benchmark the implementations in ``request``. Return the results on rank 0, None elsewhere. Collective.

    ``provenance``: attributes of the results file. ``print_line``: function that prints progress.
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
    comm: Communicator, request: StepRequest, config: ModelConfig, folder: Path, print_line: Print
) -> tuple[dict[str, TimedRun | TorchRun], dict[str, str]]:
    left_out: dict[str, str] = {}

    def require(names: Sequence[str], attempt: Callable[[], object]) -> None:
        names = [name for name in names if name in request.names and name not in left_out]
        if not names:
            return
        error = ""
        try:
            attempt()
        except (HpcdistError, RuntimeError, OSError) as raised:
            error = " ".join(str(raised).split())[:200]
        left_out.update({name: text for text in comm.allgather_object(error) if text for name in names})

    require(_NEED_TORCH, contenders.load_torch)  # on every rank, before the collective begin_torch
    require(_NEED_TORCH, lambda: contenders.begin_torch(comm, folder, request.threads))
    require([WRAPPED_JAX], lambda: contenders.begin_jax(request.threads))
    if COMPILED in request.names and COMPILED not in left_out and comm.rank == 0:
        print_line("testing torch.compile, which takes a while")
    require([COMPILED], contenders.try_compile)
    model = models.build(config, "float32", context=request.shape.context)
    initial = FlatStore(model.layout, model.dtype)
    model.initialise(initial, request.seed)
    runs: dict[str, TimedRun | TorchRun] = {}
    for name in request.names:
        if name in left_out:
            continue
        if name in (EAGER, COMPILED):
            module = contenders.torch_twin(request.shape, model, initial)
            runs[name] = TorchRun(comm, name, module, OPTIMIZER, request.num_turns)
        else:
            parameters = initial if name in BUILT_IN else None  # wrapped models bring their parameters
            trained = _model(name, model, initial, request.shape)
            runs[name] = TimedRun(comm, name, trained, OPTIMIZER, request.num_turns, parameters)
    return runs, left_out


def _model(name: str, model: Model, initial: FlatStore, shape: StepShape) -> Model:
    if name == WRAPPED_TORCH:
        from hpcdist.adapters.torch.model import wrap

        module, example = contenders.torch_twin(shape, model, initial), np.zeros((1, shape.context), np.int64)
        return wrap(module, contenders.cross_entropy, example=example, tokens_per_sample=shape.context)
    if name == WRAPPED_JAX:
        return contenders.wrapped_jax(shape, model, initial)
    built = models.build(model_config(shape), "float32", context=shape.context)
    return with_recomputation(built) if name == RECOMPUTING else built


def _turns(
    comm: Communicator, request: StepRequest, runs: dict[str, TimedRun | TorchRun]
) -> tuple[dict[str, list[StepSample]], dict[str, list[float]]]:
    order = np.random.default_rng([request.seed, 2])
    names = list(runs)
    libraries: dict[str, list[Multiply]] = {
        "numpy": [MatrixProduct(np.dtype(np.float32), side=side).run for side in SIDES]
    }
    if any(isinstance(run, TorchRun) for run in runs.values()):
        libraries["torch"] = [contenders.torch_product(side) for side in SIDES]
    samples: dict[str, list[StepSample]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in libraries}
    for number, (x, targets) in enumerate(_local_batches(comm, request, request.num_turns)):
        for turn in order.permutation(len(names)).tolist():
            samples[names[turn]].append(runs[names[turn]].step(x, targets, comm))
        for library, products in libraries.items():
            comm.barrier()
            best = max(
                2 * side**3 / multiply()
                for side, multiply in zip(SIDES, products, strict=True)
                for _ in range(PRODUCT_REPEATS)
            )
            if number >= request.warmup:
                rates[library].append(best)
    return samples, rates


def _local_batches(comm: Communicator, request: StepRequest, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first = comm.rank * request.shape.samples
    for tokens in batches(request, steps):
        local_tokens = tokens[first : first + request.shape.samples]
        yield local_tokens[:, :-1], local_tokens[:, 1:]


def _profiles(
    comm: Communicator, request: StepRequest, runs: dict[str, TimedRun | TorchRun]
) -> dict[str, list[Seconds]]:
    built_in = {name: run for name, run in runs.items() if isinstance(run, TimedRun) and name in BUILT_IN}
    profiles: dict[str, list[Seconds]] = {name: [] for name in built_in}
    for x, targets in _local_batches(comm, request, request.profiled):
        for name, run in built_in.items():
            profiles[name].append(run.profile(x, targets, comm))
    return profiles


def _case(
    comm: Communicator,
    request: StepRequest,
    run: TimedRun | TorchRun,
    samples: Sequence[StepSample],
    profiles: Sequence[Seconds],
) -> StepCase:
    rows = [
        [sample.step_s, sample.cpu_s, *(sample.phases.get(name, np.nan) for name in PHASES)]
        for sample in samples[request.warmup :]
    ]
    times = np.array(comm.allgather_object(rows)).transpose(1, 0, 2)  # (steps, ranks, times)
    losses = np.array(comm.allgather_object([sample.loss for sample in samples]))
    peak, closed = None, None
    if isinstance(run, TimedRun) and run.name in BUILT_IN:  # the ledger does not count allocations of PyTorch or JAX
        peak = max(comm.allgather_object(run.activation_bytes()))
        numbers = counts(model_config(request.shape), context=request.shape.context)
        closed = numbers.activation_bytes(request.shape.samples, recompute=run.name == RECOMPUTING)
    names = list(dict.fromkeys(key for row in profiles for key in row))
    return StepCase(
        name=run.name,
        step_s=times[:, :, 0],
        cpu_s=times[:, :, 1],
        phase_s=times[:, :, 2:],
        loss=losses.mean(axis=0) if samples[0].own_loss else losses[0],
        operation_s={key: np.array([row.get(key, 0.0) for row in profiles]) for key in names},
        activation_bytes=peak,
        activation_closed_bytes=closed,
    )
