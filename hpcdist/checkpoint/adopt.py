"""A foreign file becomes a checkpoint: its bytes pass through in blocks, and none of it is believed (local)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.catalogue import Tensor
from hpcdist.checkpoint.foreign import Foreign
from hpcdist.checkpoint.save import save
from hpcdist.comm.solo import solo
from hpcdist.errors import StorageError, UsageError


@dataclass(frozen=True)
class Adopted:
    """What was made of a file."""

    path: Path
    format: str
    step: int
    tensors: tuple[Tensor, ...]
    left_out: tuple[str, ...]
    not_confined: str  # why the child could have used the network; "" where it could not
    resumable: bool  # whether it has what a training needs to go on: it is one of our exports, with all that there was


def adopt(
    source: Path,
    run_dir: Path,
    step: int | None = None,
    inputs: Mapping[str, int] | None = None,
    keys: Mapping[str, str] | None = None,
) -> Adopted:
    """Save what the file ``source`` holds as the only checkpoint of ``run_dir``.

    ``step`` is that which an export of ours knows, else 0. With a recipe, ``inputs`` are what the data decides
    of its model, and ``keys`` the names that the tensors get, by those in the file; other tensors are left out. Raises
    StorageError where the file cannot be read or the checkpoint not be written, UsageError when there are checkpoints
    already.
    """
    directory = run_dir / "checkpoints"
    if names.candidates(directory):
        raise UsageError(f"{directory} has checkpoints already; import into the directory of a new run")
    with Foreign(source) as file:
        if not file.tensors:
            raise StorageError(f"{file.path} holds no tensors")
        ours = bool(file.metadata)
        number = (file.metadata["step"] if ours else 0) if step is None else step
        scalars = file.metadata["scalars"] if ours else _of_nobody(number, inputs or {})
        scalars = {**scalars, "imported": file.path.name}
        pieces = file.pieces()
        if keys is not None:
            pieces = [replace(piece, tensor=keys[piece.tensor]) for piece in pieces if piece.tensor in keys]
        path = save(directory, number, pieces, scalars, solo(), keep=1)
        return Adopted(
            path,
            file.format,
            number,
            tuple(file.tensors),
            tuple(file.left_out),
            file.not_confined,
            ours and {one.kind for one in file.tensors} == set(file.metadata["kinds"]),
        )


def _of_nobody(step: int, inputs: Mapping[str, int]) -> dict[str, Any]:
    """Return the scalars of a state of which only the tensors are known: no data is the one that it was made with."""
    known = {"model_inputs": dict(inputs)} if inputs else {}
    return {"steps": step, "samples": 0, "seed": 0, "data": "", "optimizer": {}, "loss_scale": {}, **known}
