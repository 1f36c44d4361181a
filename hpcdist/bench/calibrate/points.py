"""Points of a calibration: sizes and seconds, before anything is fitted to them. Light.

Each time is there twice: with one rank of a node at work, and with all of them. Ranks share caches, memory and, where
cores are few, the cores.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.models.config import ModelConfig

OPERATIONS: Final = ("allreduce", "reduce_scatter", "all_gather")
MESSAGE: Final = "message"


class BusySeconds(NamedTuple):
    """Seconds while one rank of a node works, and while all of them do: the first quartile on the slowest rank.

    A calibration is of the machine alone. What else runs there makes repetitions longer and none shorter, so that their
    first quartile is nearer to that than their median. ``spread`` is how far their mean lies above it, relative; None
    where that is not kept.
    """

    one: float
    all: float
    spread: float | None = None


class ProductPoint(NamedTuple):
    """A product of (m, k) and (k, n)."""

    m: int
    k: int
    n: int
    seconds: BusySeconds


class MovePoint(NamedTuple):
    """An operation that reads and writes ``nbytes`` together: "copy", or "add" of one array to another."""

    operation: str
    nbytes: int
    seconds: BusySeconds


class KindPoint(NamedTuple):
    """The operations of one kind in a step, forward and back: "matmul", "attention", "norm", "activation", ..."""

    kind: str
    forward: BusySeconds
    backward: BusySeconds


@dataclass(frozen=True, kw_only=True)
class ModelPoint:
    """A step of a model on one rank, of one micro-batch of ``samples``, by what its seconds are.

    ``update`` is that of the optimizer, ``norm`` that of all gradients; ``operations`` are those of the step's list.
    """

    config: ModelConfig
    context: int
    samples: int
    kinds: tuple[KindPoint, ...]
    norm: BusySeconds
    update: BusySeconds
    step: BusySeconds
    parameters: int
    operations: int


class LinkPoint(NamedTuple):
    """Messages of ``nbytes`` over the links of a level: one pair alone, and all pairs at once, both ways.

    ``border``: measured to find where times jump, as an MPI library changes its protocol there.
    """

    level: str
    ranks: int
    nbytes: int
    seconds: BusySeconds
    border: bool = False


class CollectivePoint(NamedTuple):
    """A collective of the ``ranks`` that a level joins, on buffers of ``nbytes``.

    The first quartile of iterations, each of which is that of its slowest rank. ``border``: as in `LinkPoint`.
    """

    operation: str
    algorithm: str
    level: str
    ranks: int
    nbytes: int
    seconds: float
    border: bool = False


@dataclass(frozen=True, kw_only=True)
class CalibratedMachine:
    """What a rank computes on."""

    device: str
    on: str  # "cpu", or "gpu"
    hosts: int
    ranks_per_host: int
    devices_per_host: int
    threads: int
    memory_bytes: int  # of a device; of a host divided by its ranks
    host_memory_bytes: int
    blas: str
    mpi_library: str


@dataclass(frozen=True, kw_only=True)
class CalibrationPoints:
    """All of a calibration; empty tuples where there was nothing to measure (links of a single rank)."""

    machine: CalibratedMachine
    products: dict[str, tuple[ProductPoint, ...]]  # by dtype
    moves: tuple[MovePoint, ...]
    models: tuple[ModelPoint, ...]
    links: tuple[LinkPoint, ...]
    collectives: tuple[CollectivePoint, ...]
    seconds: float  # that measuring took
    busy: str = ""  # how one sees that the machine did something else meanwhile


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """What is measured: types of numbers, models, algorithms; ``seconds`` are for each of the three parts."""

    dtypes: tuple[str, ...] = ("float32",)
    on: str = "cpu"
    models: tuple[tuple[ModelConfig, int, tuple[int, ...]], ...] = ()  # (config, context, samples)
    algorithms: tuple[str, ...] = ("auto", "ring")
    least_bytes: int = 1 << 10
    most_bytes: int = 32 << 20
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.most_bytes < 64 * self.least_bytes:
            raise UsageError(
                f"sizes from {self.least_bytes} to {self.most_bytes} bytes are too few to fit; let the largest be at "
                f"least {64 * self.least_bytes}"
            )


def sizes(least: int, most: int, per_octave: int = 4) -> tuple[int, ...]:
    """Return sizes from ``least`` to ``most``, ``per_octave`` between each and its double, multiples of 64 bytes."""
    found, step = [], 0
    while (size := least * 2 ** (step / per_octave)) <= most * 1.0001:
        found.append(max(64, round(size / 64) * 64))
        step += 1
    return tuple(dict.fromkeys(found))


def default_models() -> tuple[tuple[ModelConfig, int, tuple[int, ...]], ...]:
    """Return gpts whose operations are timed: two widths, two contexts, and small and larger micro-batches."""
    return (
        (ModelConfig(layers=2, hidden=128, heads=2, vocabulary=256), 128, (1, 4)),
        (ModelConfig(layers=2, hidden=256, heads=4, vocabulary=256), 128, (2, 4)),
        (ModelConfig(layers=2, hidden=256, heads=4, vocabulary=256), 256, (1, 2)),
    )
