"""Trainings of several recipes in one job that alternate step by step: times, bytes, memory and weights.

A step is timed from a barrier, after its batch is read, until its end on the slowest rank.
"""

import resource
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from hpcdist.arrays.piece import runs
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.start import Session
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe import recipe as recipes

WARM_UP: Final = 3
SAME: Final = 1e-4  # largest norm of a weight difference, relative to the norm of the weights
STATES: Final = ("parameters", "gradients", "optimizer")
FIGURES: Final = ("step_s", "communication_s", "exposed_s", "busy_s")  # the last two: `BackgroundCollectives.taken`
SIZES: Final = ("sent", "states", "activations")  # figures of `Training.bytes`
Keys = Mapping[str, Any]


def texts(keys: Keys | Sequence[str]) -> list[str]:
    """Format recipe keys as ``--set`` arguments. A sequence of strings is copied."""
    if not isinstance(keys, Mapping):
        return list(keys)
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]


def gpt_keys(options: Any, **more: Any) -> dict[str, Any]:
    """Return the recipe keys of a byte GPT with the sizes in ``options``, by default with 64 columns per head."""
    heads = getattr(options, "heads", None) or max(1, options.hidden // 64)
    shape = {"model.layers": options.layers, "model.hidden": options.hidden, "model.heads": heads}
    return {**shape, "data.context": options.context, "optimizer.learning_rate": 1e-4, **more}


class Training:
    """A training that runs step by step. Building it is collective over the world of ``session``."""

    def __init__(self, session: Session, keys: Keys | Sequence[str], steps: int) -> None:
        self.recipe = recipes.load(None, [*texts(keys), f"run.steps={steps}"], {}).recipe
        self.trainer: Trainer = assemble(session, self.recipe)
        self.number, self._reader = 0, self.trainer.batches(steps)
        self._batches = iter(self._reader.__enter__())

    def next_step(self, numbers: np.ndarray | None = None) -> Callable[[], StepResult]:
        """Read the next batch and return a function that runs the step: placement, passes, exchange, update.

        The step sums ``numbers`` over the ranks, which a background save requires.
        """
        batch, summed_numbers = next(self._batches), np.zeros(2) if numbers is None else numbers
        self.number += 1

        def step() -> StepResult:
            parts = self.trainer.cut(self.trainer.place(batch))
            return self.trainer.step(self.number, parts, summed_numbers)

        return step

    def figures(self, comm: Communicator) -> list[float]:
        """Run a step after a barrier and return its `FIGURES` on this rank. Collective over ``comm``."""
        step = self.next_step()
        done: list[StepResult] = []
        step_s = harness.seconds(lambda: done.append(step()), comm)
        overlap = self.trainer.exchange.background
        return [step_s, done[0].seconds["communication_s"], *(overlap.taken() if overlap else (np.nan, np.nan))]

    def bytes(self, comm: Communicator) -> list[float]:
        """Run a step; return this rank's sent bytes, and its bytes of states and activations. Collective."""
        with count_traffic(comm) as traffic:
            self.next_step()()
        peak = self.trainer.ledger.peak
        return [float(traffic.sent_bytes), float(sum(peak[kind] for kind in STATES)), float(peak["activations"])]

    def end_reading(self) -> None:
        """Stop the thread that prefetches batches; no step may follow. Local."""
        self._reader.__exit__(None, None, None)

    def close(self) -> None:
        self.end_reading()
        self.trainer.close()


@contextmanager
def cap(nbytes: int) -> Iterator[None]:
    """Limit the private memory of this process to its current size plus ``nbytes``."""
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous)


def peaks(session: Session, keys: Keys) -> tuple[float, float]:
    """Return the ledger's peaks of activations and of all bytes in a step, maxima over the ranks. Collective."""
    with closing(Training(session, keys, 1)) as training:
        training.next_step()()
        ledger = training.trainer.ledger
    most = np.array([ledger.peak["activations"], ledger.peak_total], np.float64)
    session.comm.allreduce(most, "max")
    return float(most[0]), float(most[1])


def fits(session: Session, keys: Keys, nbytes: int) -> bool:
    """Return True if a training can run a step under a `cap` of ``nbytes`` on every rank. Collective."""
    is_fitting = True
    try:
        with cap(nbytes), closing(Training(session, keys, 1)) as training:
            training.next_step()()
    except MemoryError:
        is_fitting = False
    return all(session.comm.allgather_object(is_fitting))


def measure(
    session: Session, contenders: Mapping[str, Keys], common: Keys, steps: int
) -> tuple[dict[str, Training], np.ndarray]:
    """Time steps of all contenders. Return trainings and `FIGURES` (contenders, figures, ranks, steps). Collective."""
    trainings = {name: Training(session, {**common, **keys}, WARM_UP + steps + 1) for name, keys in contenders.items()}
    calls = {name: lambda training=training: training.figures(session.comm) for name, training in trainings.items()}
    values = harness.alternate(calls, steps, warm_up=WARM_UP)  # type: ignore[arg-type]
    return trainings, harness.of_ranks(session.comm, values).transpose(0, 3, 2, 1)


def measured(
    chosen: Any, session: Session, contenders: Mapping[str, Keys], same: Iterable[str] = ()
) -> harness.Results:
    """Measure times and bytes of ``contenders``, as GPTs with the sizes in ``chosen``. Collective.

    The contenders in ``same`` (default: all) must have equal weights afterwards.
    """
    comm = session.comm
    jobs, times = measure(session, contenders, gpt_keys(chosen, **{"run.global_batch": chosen.samples}), chosen.steps)
    check_weights(comm, {name: jobs[name] for name in same or jobs})
    sizes = np.array(comm.allgather_object([training.bytes(comm) for training in jobs.values()]))
    for training in jobs.values():
        training.close()
    dims = {"time_s": "contenders, (step, waits for messages), ranks, steps"}
    dims["bytes"] = f"ranks, contenders, ({', '.join(SIZES)})"
    about = {"ranks": comm.size, "contenders": "; ".join(jobs)}
    return harness.Results({"time_s": times[:, :2], "bytes": sizes}, dims, about)


def megabytes(results: harness.Results, *names: str) -> dict[str, list[str]]:
    """Return the table columns ``names`` (of `SIZES`) in MB, of the rank with the most."""
    most = results.arrays["bytes"].max(axis=0) / 1e6
    return {f"{name} MB": [f"{value:.1f}" for value in most[:, SIZES.index(name)]] for name in names}


def slowest(results: harness.Results) -> np.ndarray:
    times = results.arrays["time_s"]
    return (times[:, 0] if times.ndim == 4 else times).max(axis=1)


def ratios(results: harness.Results) -> harness.Ratios:
    return harness.over_base(slowest(results), results.names())


def weights(training: Training, comm: Communicator) -> dict[str, np.ndarray]:
    local_parameters = [
        (piece.tensor, int(np.prod(piece.global_shape)), runs(piece.global_shape, piece.box, piece.flat),
         np.array(piece.array))
        for piece in training.trainer.exchange.pieces()
        if piece.kind == "parameters"
    ]  # fmt: skip
    tensors: dict[str, np.ndarray] = {}
    for tensor, size, places, values in (entry for rank in comm.allgather_object(local_parameters) for entry in rank):
        target = tensors.setdefault(tensor, np.full(size, np.nan, values.dtype))
        for first, local, count in zip(places.start, places.local, places.size, strict=True):
            target[first : first + count] = values[local : local + count]
    return tensors


def check_weights(comm: Communicator, trainings: Mapping[str, Training]) -> None:
    """Exit unless all trainings have the same weights within rounding. Collective."""
    first = next(iter(trainings))
    expected = weights(trainings[first], comm)
    norm = np.linalg.norm([np.linalg.norm(values) for values in expected.values()])
    for name, training in trainings.items():
        tensors = weights(training, comm)
        difference = np.linalg.norm([np.linalg.norm(tensors[key] - expected[key]) for key in expected]) / norm
        if not difference <= SAME:
            raise SystemExit(f"{name}: weights differ by {difference:.1e} of their norm from the weights of {first}")


def check_bits(rank: int, trainings: Mapping[str, Training], group_of: Mapping[str, Hashable]) -> None:
    """Exit unless all trainings of a group have bitwise equal weights. Local."""
    expected: dict[Hashable, bytes] = {}
    for name, training in trainings.items():
        bits = training.trainer.exchange.parameters.array.tobytes()  # type: ignore[attr-defined]
        if expected.setdefault(group_of[name], bits) != bits:
            raise SystemExit(f"rank {rank}: the weights of {name} are not bitwise equal to those of {group_of[name]}")
