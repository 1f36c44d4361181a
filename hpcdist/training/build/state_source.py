"""State sources: a checkpoint, or another source of pieces and scalars, that a run goes on from.

`CheckpointSource` is the one on disk; the memory of surviving ranks is in `elastic.protection`. Damaged checkpoints
give way to the newest intact one before them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.format import manifest
from hpcdist.checkpoint.format.manifest import Manifest
from hpcdist.checkpoint.restoring.restore import from_newest_intact, on_first_rank, restore_together
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.training.run_directory import refuse_restart_over_checkpoints

Result = TypeVar("Result")
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Finite = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]


class _Optimizer(msgspec.Struct):
    """Types of the scalars of exchanges and optimizers; fields that it does not have are not checked."""

    count: Count = 0
    rate: Finite = 0.0
    pending: bool = False
    frozen: Ranks = 0
    residuals: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    clocks: list[Count] = []
    updates: Count = 0
    arithmetic: str = ""


class _LossScale(msgspec.Struct):
    scale: Annotated[float, msgspec.Meta(gt=0, lt=1e300)] = 1.0
    skipped: Count = 0
    overflows: Count = 0
    grown: Count = 0
    stuck: Count = 0


class _NoiseScale(msgspec.Struct):
    weight: float = 0.0
    gradient_squared: float = 0.0
    trace: float = 0.0


class _Scalars(msgspec.Struct):
    """Types of the scalars that `state.scalars` writes; earlier versions wrote fewer."""

    steps: Count = 0
    data: str = ""
    data_digest: str = ""
    sample_order: Count = 0
    world: Size = 1
    ranks_per_node: list[Size] = []
    algorithm: str = ""
    compression: str = ""
    model_inputs: dict[str, Size] = {}
    optimizer: _Optimizer = msgspec.field(default_factory=_Optimizer)
    loss_scale: _LossScale = msgspec.field(default_factory=_LossScale)
    noise_scale: _NoiseScale = msgspec.field(default_factory=_NoiseScale)
    shares: list[tuple[Count, list[Size]]] = []
    router_bias: list[list[Finite]] = []
    stage_units: list[Size] = []


class StateSource(Protocol):
    """Source of the state that a run goes on from."""

    @property
    def scalars(self) -> Mapping[str, Any]:
        """The scalars beside the pieces (local)."""
        ...

    def fill(self, comm: Communicator, wanted: Sequence[Piece], optional: Collection[str]) -> None:
        """Fill the arrays of ``wanted``; those of a kind in ``optional`` may be missing. Collective over ``comm``.

        Raises StorageError, naming the tensor, where something is missing or of another shape.
        """
        ...


@dataclass(frozen=True)
class CheckpointSource:
    """State source on disk: the checkpoint in the directory ``path``."""

    path: Path
    read: Mapping[str, Any] | None = None

    @classmethod
    def together(cls, comm: Communicator, path: Path) -> "CheckpointSource":
        """Return the checkpoint with its scalars, which rank 0 reads. Collective; raises StorageError on all ranks."""
        return cls(path, on_first_rank(comm, lambda: scalars_of(path)))

    @cached_property
    def scalars(self) -> Mapping[str, Any]:
        """The scalars of its manifest. Raises StorageError."""
        return scalars_of(self.path) if self.read is None else self.read

    def fill(self, comm: Communicator, wanted: Sequence[Piece], optional: Collection[str]) -> None:
        """Read the pieces of this rank. Collective; raises `DamagedError` on all ranks where bytes are damaged."""
        restore_together(comm, self.path, wanted, optional)

    def __str__(self) -> str:
        return str(self.path)


def scalars_of(path: Path, stored: Manifest | None = None) -> dict[str, Any]:
    """Return the scalars of the checkpoint at ``path``, ``stored`` where it was read, of the types that a run writes.

    Local. Raises StorageError for others: a digest says that they are what was written, not who wrote them.
    """
    scalars = (stored or manifest.load(path)).scalars
    try:
        msgspec.convert(scalars, _Scalars)
    except (msgspec.ValidationError, OverflowError) as error:
        raise StorageError(f"{path / manifest.FILE_NAME} is not valid: of its scalars, {error}") from error
    return scalars


def from_intact_source(
    comm: Communicator, run_dir: Path, origin: StateSource | None, take: Callable[[StateSource | None], Result]
) -> tuple[Result, StateSource | None]:
    """Return ``take(origin)``, and ``origin``. Collective.

    Where that is a checkpoint of ``run_dir`` whose bytes are damaged, the first one before it that is whole counts.
    Raises StorageError where none is left: a run does not begin again over its checkpoints.
    """
    if not isinstance(origin, CheckpointSource):
        return take(origin), origin

    def begin(path: Path | None) -> tuple[Result, StateSource | None]:
        if path is None:
            refuse_restart_over_checkpoints(run_dir)
        stored = None if path is None else CheckpointSource.together(comm, path)
        return take(stored), stored

    return from_newest_intact(run_dir, comm, origin.path, begin)
