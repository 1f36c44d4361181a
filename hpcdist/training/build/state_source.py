"""State sources that a run resumes from: a checkpoint on disk, or the memory of ranks (`elastic.protection`)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of, name_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.manifest import Manifest
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
    """Interface of a source from which a run can resume, such as a checkpoint."""

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Scalars of the state, such as the number of completed steps. Local."""
        ...

    def fill(self, comm: Communicator, pieces: Sequence[Piece], optional: Collection[str]) -> None:
        """Read data from the source into the arrays of ``pieces``. Collective over ``comm``.

        Raises StorageError if the source lacks a piece. Pieces of a kind in ``optional`` may be missing.
        """
        ...


@dataclass(frozen=True)
class CheckpointSource:
    """Checkpoint from which a run can resume."""

    path: Path
    read: Mapping[str, Any] | None = None

    @classmethod
    def together(cls, comm: Communicator, path: Path) -> "CheckpointSource":
        """Open the checkpoint at ``path``. Rank 0 reads the scalars, and all ranks raise the same error. Collective."""
        return cls(path, on_first_rank(comm, lambda: scalars_of(path)))

    @cached_property
    def scalars(self) -> Mapping[str, Any]:
        return scalars_of(self.path) if self.read is None else self.read

    def fill(self, comm: Communicator, pieces: Sequence[Piece], optional: Collection[str]) -> None:
        restore_together(comm, self.path, pieces, optional)

    def __str__(self) -> str:
        return str(self.path)


def scalars_of(path: Path, stored: Manifest | None = None) -> dict[str, Any]:
    """Return a dict of the scalars of the checkpoint at ``path``, after checking their types. Raises StorageError.

    ``stored``: manifest of the checkpoint, or None to read the manifest from ``path``. Local.
    """
    scalars = (stored or manifest.load(path)).scalars
    try:
        msgspec.convert(scalars, _Scalars)
    except (msgspec.ValidationError, OverflowError) as error:
        raise StorageError(f'{path / manifest.FILE_NAME}: the value of "scalars" is invalid: {error}') from error
    return scalars


def from_intact_source(
    comm: Communicator, run_dir: Path, origin: StateSource | None, take: Callable[[StateSource | None], Result]
) -> tuple[Result, StateSource | None]:
    """Call ``take(source)`` to restore a state, and return (result of ``take``, ``source``). Collective.

    ``source`` is ``origin``, or the newest intact checkpoint in ``run_dir`` if the checkpoint ``origin`` is damaged.
    """
    if not isinstance(origin, CheckpointSource):
        return take(origin), origin

    def begin(path: Path | None) -> tuple[Result, StateSource | None]:
        if path is None:
            refuse_restart_over_checkpoints(run_dir)
        stored = None if path is None else CheckpointSource.together(comm, path)
        return take(stored), stored

    return from_newest_intact(run_dir, comm, origin.path, begin)


def restore_converted(comm: Communicator, path: Path, pieces: Sequence[Piece], dtypes: Mapping[str, str]) -> None:
    """Restore ``pieces`` from the checkpoint ``path``, and convert them from ``dtypes``, {tensor: stored dtype}.

    Collective.
    """
    same = [piece for piece in pieces if name_of(piece.array.dtype) == dtypes[piece.tensor]]
    others = [piece for piece in pieces if name_of(piece.array.dtype) != dtypes[piece.tensor]]
    read = [replace(piece, array=np.empty(piece.flat.size, dtype_of(dtypes[piece.tensor]))) for piece in others]
    restore_together(comm, path, [*same, *read])
    for piece, stored in zip(others, read, strict=True):
        values = stored.array.astype(piece.array.dtype)
        if isinstance(piece.array, FileSlice):
            piece.array.write(Range(0, values.size), values)
        elif values.size:
            piece.array[...] = backend.namespace(piece.array).asarray(values)
