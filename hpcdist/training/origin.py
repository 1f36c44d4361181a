"""Where the state of a run comes from: a checkpoint, or whatever else has pieces and scalars."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.restore import from_newest, on_first, restore_together
from hpcdist.comm.communicator import Communicator
from hpcdist.training.directory import refuse_to_begin_again

Result = TypeVar("Result")


class Origin(Protocol):
    """A state that a run goes on from."""

    @property
    def scalars(self) -> Mapping[str, Any]:
        """What was kept beside the pieces (local)."""
        ...

    def fill(self, comm: Communicator, wanted: Sequence[Piece], optional: Collection[str]) -> None:
        """Fill the arrays of ``wanted``; those of a kind in ``optional`` may be missing. Collective over ``comm``.

        Raises StorageError, naming the tensor, where something is missing or of another shape.
        """
        ...


@dataclass(frozen=True)
class Stored:
    """The checkpoint in the directory ``path``."""

    path: Path
    read: Mapping[str, Any] | None = None

    @classmethod
    def together(cls, comm: Communicator, path: Path) -> "Stored":
        """Return the checkpoint with its scalars, which rank 0 reads. Collective; raises StorageError on all ranks."""
        return cls(path, on_first(comm, lambda: manifest.load(path).scalars))

    @cached_property
    def scalars(self) -> Mapping[str, Any]:
        """What its manifest says. Raises StorageError."""
        return manifest.load(self.path).scalars if self.read is None else self.read

    def fill(self, comm: Communicator, wanted: Sequence[Piece], optional: Collection[str]) -> None:
        """Read what this rank wants. Collective; raises `DamagedError` on all ranks where bytes are damaged."""
        restore_together(comm, self.path, wanted, optional)

    def __str__(self) -> str:
        return str(self.path)


def from_whole(
    comm: Communicator, run_dir: Path, origin: Origin | None, take: Callable[[Origin | None], Result]
) -> tuple[Result, Origin | None]:
    """Return ``take(origin)``, and ``origin``. Collective.

    Where that is a checkpoint of ``run_dir`` whose bytes are damaged, the first one before it that is whole counts.
    Raises StorageError where none is left: a run does not begin again over its checkpoints.
    """
    if not isinstance(origin, Stored):
        return take(origin), origin

    def begin(path: Path | None) -> tuple[Result, Origin | None]:
        if path is None:
            refuse_to_begin_again(run_dir)
        stored = None if path is None else Stored.together(comm, path)
        return take(stored), stored

    return from_newest(run_dir, comm, origin.path, begin)
