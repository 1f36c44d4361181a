"""Trainings of several recipes in one job that make a step each in turn: times, bytes, memory, weights.

A step is timed from a barrier, its batch already read, until its end on the slowest rank. Contenders that are the same
training must have the same weights afterwards: `check_weights`.
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
SAME: Final = 1e-4  # norm of the difference of weights over their norm
STATES: Final = ("parameters", "gradients", "optimizer")
FIGURES: Final = ("step_s", "communication_s", "exposed_s", "busy_s")  # the last two: `BackgroundCollectives.taken`
SIZES: Final = ("sent", "states", "activations")  # of `Training.bytes`
Keys = Mapping[str, Any]


def texts(keys: Keys | Sequence[str]) -> list[str]:
    """Return ``keys`` of a recipe as ``--set`` takes them; those that are texts already as they are."""
    if not isinstance(keys, Mapping):
        return list(keys)
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]


def gpt_keys(options: Any, **more: Any) -> dict[str, Any]:
    """Return the keys of a byte GPT of the sizes in ``options``, with 64 columns a head where none are given."""
    heads = getattr(options, "heads", None) or max(1, options.hidden // 64)
    shape = {"model.layers": options.layers, "model.hidden": options.hidden, "model.heads": heads}
    return {**shape, "data.context": options.context, "optimizer.learning_rate": 1e-4, **more}


class Training:
    """A recipe in training, step by step. Building one is collective over the world of ``session``."""

    def __init__(self, session: Session, keys: Keys | Sequence[str], steps: int) -> None:
        self.recipe = recipes.load(None, [*texts(keys), f"run.steps={steps}"], {}).recipe
        self.trainer: Trainer = assemble(session, self.recipe)
        self.number, self._reader = 0, self.trainer.batches(steps)
        self._batches = iter(self._reader.__enter__())

    def next_step(self, numbers: np.ndarray | None = None) -> Callable[[], StepResult]:
        """Read the next batch and return what makes the step: placement of the batch, passes, exchange, update.

        The ranks sum ``numbers`` in it, which a save in the background asks for.
        """
        batch, own = next(self._batches), np.zeros(2) if numbers is None else numbers
        self.number += 1

        def step() -> StepResult:
            parts = self.trainer.cut(self.trainer.place(batch))
            return self.trainer.step(self.number, parts, own)

        return step

    def figures(self, comm: Communicator) -> list[float]:
        """Make a step from a barrier on and return its `FIGURES` on this rank. Collective over ``comm``."""
        step = self.next_step()
        done: list[StepResult] = []
        step_s = harness.seconds(lambda: done.append(step()), comm)
        overlap = self.trainer.exchange.overlap
        return [step_s, done[0].seconds["communication_s"], *(overlap.taken() if overlap else (np.nan, np.nan))]

    def bytes(self, comm: Communicator) -> list[float]:
        """Make a step; return what this rank sends in it, and keeps of states and activations. Collective."""
        with count_traffic(comm) as traffic:
            self.next_step()()
        peak = self.trainer.ledger.peak
        return [float(traffic.sent_bytes), float(sum(peak[kind] for kind in STATES)), float(peak["activations"])]

    def end_reading(self) -> None:
        """End the thread that reads ahead (local): no step can be made afterwards."""
        self._reader.__exit__(None, None, None)

    def close(self) -> None:
        """End reading, and free what the exchange holds. Collective."""
        self.end_reading()
        self.trainer.close()


@contextmanager
def cap(nbytes: int) -> Iterator[None]:
    """Let this process take ``nbytes`` more of private memory than it has now."""
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def peaks(session: Session, keys: Keys) -> tuple[float, float]:
    """Return the peaks of activations and of all bytes in the ledger, of the rank with most, in a step. Collective."""
    with closing(Training(session, keys, 1)) as training:
        training.next_step()()
        ledger = training.trainer.ledger
    most = np.array([ledger.peak["activations"], ledger.peak_total], np.float64)
    session.comm.allreduce(most, "max")
    return float(most[0]), float(most[1])


def fits(session: Session, keys: Keys, nbytes: int) -> bool:
    """Return whether a training with ``keys`` takes a step under a `cap` of ``nbytes`` on all ranks. Collective."""
    here = True
    try:
        with cap(nbytes), closing(Training(session, keys, 1)) as training:
            training.next_step()()
    except MemoryError:
        here = False
    return all(session.comm.allgather_object(here))


def measure(
    session: Session, contenders: Mapping[str, Keys], common: Keys, steps: int
) -> tuple[dict[str, Training], np.ndarray]:
    """Return the trainings, and their `FIGURES` (contenders, figures, ranks, steps). Collective."""
    made = {name: Training(session, {**common, **keys}, WARM_UP + steps + 1) for name, keys in contenders.items()}
    calls = {name: lambda training=training: training.figures(session.comm) for name, training in made.items()}
    values = harness.alternate(calls, steps, warm_up=WARM_UP)  # type: ignore[arg-type]
    return made, harness.of_ranks(session.comm, values).transpose(0, 3, 2, 1)


def measured(
    chosen: Any, session: Session, contenders: Mapping[str, Keys], same: Iterable[str] = ()
) -> harness.Results:
    """Return times and bytes of ``contenders`` with a GPT of the sizes in ``chosen``. Collective.

    The weights of those that are the ``same`` training (default: all) are compared.
    """
    comm = session.comm
    made, times = measure(session, contenders, gpt_keys(chosen, **{"run.global_batch": chosen.samples}), chosen.steps)
    check_weights(comm, {name: made[name] for name in same or made})
    sizes = np.array(comm.allgather_object([training.bytes(comm) for training in made.values()]))
    for training in made.values():
        training.close()
    dims = {"time_s": "contenders, (step, waits for messages), ranks, steps"}
    dims["bytes"] = f"ranks, contenders, ({', '.join(SIZES)})"
    about = {"ranks": comm.size, "contenders": "; ".join(made)}
    return harness.Results({"time_s": times[:, :2], "bytes": sizes}, dims, about)


def megabytes(results: harness.Results, *names: str) -> dict[str, list[str]]:
    """Return the columns ``names`` (of `SIZES`) of a table, of the rank that has most."""
    most = results.arrays["bytes"].max(axis=0) / 1e6
    return {f"{name} MB": [f"{value:.1f}" for value in most[:, SIZES.index(name)]] for name in names}


def slowest(results: harness.Results) -> np.ndarray:
    """Return the seconds of the steps, (contenders, steps), of the slowest rank each."""
    times = results.arrays["time_s"]
    return (times[:, 0] if times.ndim == 4 else times).max(axis=1)


def ratios(results: harness.Results) -> harness.Ratios:
    """Return the time of each step over that of the first contender in the same turn."""
    return harness.over_base(slowest(results), results.names())


def weights(training: Training, comm: Communicator) -> dict[str, np.ndarray]:
    """Return all weights by tensor, brought together from the ranks' pieces. Collective."""
    own = [
        (piece.tensor, int(np.prod(piece.global_shape)), runs(piece.global_shape, piece.box, piece.flat),
         np.array(piece.array))
        for piece in training.trainer.exchange.pieces()
        if piece.kind == "parameters"
    ]  # fmt: skip
    whole: dict[str, np.ndarray] = {}
    for tensor, size, places, values in (each for rank in comm.allgather_object(own) for each in rank):
        target = whole.setdefault(tensor, np.full(size, np.nan, values.dtype))
        for first, local, count in zip(places.start, places.local, places.size, strict=True):
            target[first : first + count] = values[local : local + count]
    return whole


def check_weights(comm: Communicator, made: Mapping[str, Training]) -> None:
    """End with an error unless all trainings have the same weights, but for rounding. Collective."""
    first = next(iter(made))
    expected = weights(made[first], comm)
    norm = np.linalg.norm([np.linalg.norm(values) for values in expected.values()])
    for name, training in made.items():
        own = weights(training, comm)
        difference = np.linalg.norm([np.linalg.norm(own[key] - expected[key]) for key in expected]) / norm
        if not difference <= SAME:
            raise SystemExit(f"{name}: weights differ by {difference:.1e} of their norm from those of {first}")


def check_bits(rank: int, made: Mapping[str, Training], group_of: Mapping[str, Hashable]) -> None:
    """End with an error unless trainings of one group have the same bits in their weights (local)."""
    expected: dict[Hashable, bytes] = {}
    for name, training in made.items():
        bits = training.trainer.exchange.parameters.array.tobytes()  # type: ignore[attr-defined]
        if expected.setdefault(group_of[name], bits) != bits:
            raise SystemExit(f"{name} gave rank {rank} other weights than the others of {group_of[name]}")
