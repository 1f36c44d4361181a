"""Saving in two phases: the writers write their shards, all agree, and rank 0 makes the checkpoint visible."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import index, manifest, shard
from hpcdist.checkpoint.kept import Kept
from hpcdist.checkpoint.lock import lost
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.shard import Written
from hpcdist.checkpoint.slots import Slot
from hpcdist.checkpoint.sources import Source
from hpcdist.checkpoint.writers import Delivery, Group, group_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import Overlay


@dataclass(frozen=True)
class Outcome:
    """What became of a rank's part: the reason why it failed, or "", and the shards that it has, if it writes."""

    error: str = ""
    written: Written | None = None


@dataclass(frozen=True)
class Plan:
    """A checkpoint that is being made: what rank 0 commits."""

    directory: Path
    step: int
    world: int
    scalars: dict[str, Any]
    about: dict[str, Any]
    keep: int | Retention
    opens: Callable[[Path], Overlay] = Overlay.created  # makes the file of a shard, on the rank that writes it

    @property
    def temporary(self) -> Path:
        """Where it lies until it is complete."""
        return self.directory / f"step-{self.step}.tmp"

    @property
    def final(self) -> Path:
        """Where it lies then."""
        return self.directory / f"step-{self.step}"


def save(
    directory: str | Path,
    step: int,
    pieces: Sequence[Piece],
    scalars: dict[str, Any],
    comm: Communicator,
    keep: int | Retention = 2,
    *,
    writers: str = "rank",
    about: dict[str, Any] | None = None,
) -> Path:
    """Save the checkpoint of ``step`` in ``directory`` and return ``directory/step-N``. Collective over ``comm``.

    ``pieces`` are this rank's share: together the ranks must cover every tensor, and what two ranks bring may be
    written twice. They are only read, and may change when the call returns. ``scalars`` and ``about`` (JSON values)
    are taken from rank 0, and so is ``keep``, which checkpoints stay (a number: the newest so many). ``writers``: see
    `hpcdist.checkpoint.writers`. Raises StorageError on all ranks when one of them cannot write; the checkpoints that
    were there are then untouched.
    """
    return make(Plan(Path(directory), step, comm.size, scalars, about or {}, keep), pieces, comm, writers)


def make(plan: Plan, pieces: Sequence[Piece], comm: Communicator, writers: str, kept: Kept | None = None) -> Path:
    """Save the checkpoint ``plan`` of ``pieces`` as `save` does. Collective over ``comm``.

    With ``kept``, where every rank writes, only what has changed since the one before is written.
    """
    group = group_of(comm, writers)
    prepare(plan, group, comm)
    delivery = Delivery(group, pieces)
    if group.writes:
        outcome = write(plan, group, delivery.slots, delivery.sources(), kept)
        delivery.end()
    else:
        outcome = Outcome(delivery.bring())
    outcomes = gather(comm, outcome)
    agree(comm, commit(plan, outcomes) if comm.rank == 0 else "")
    if kept is not None:
        kept.settle()
    return plan.final


def prepare(plan: Plan, group: Group, comm: Communicator) -> None:
    """Make the directory that the shards are written to. Collective; raises StorageError on all ranks."""
    error = lost(plan.directory.parent) if comm.rank == 0 else ""
    if comm.rank == 0 and not error:
        try:
            names.begin(plan.directory, plan.step, shard.directories(group.count))
        except OSError as failure:
            error = f"{plan.directory} cannot be written: {failure.strerror or failure}"
    agree(comm, error)


def write(
    plan: Plan, group: Group, slots: Sequence[Slot], sources: Sequence[Source], kept: Kept | None = None
) -> Outcome:
    """Write the shard of ``group``, of what has changed since what is ``kept`` where that is given (local)."""
    name = shard.file_name(group.index, group.count)
    about = {"step": plan.step, "rank": group.index}
    try:
        if kept is not None:
            return Outcome("", kept.write((plan.temporary, plan.final), name, slots, sources, about, plan.opens))
        return Outcome("", shard.write(plan.temporary, name, slots, sources, about, plan.opens))
    except OSError as failure:
        return Outcome(str(failure))


def gather(comm: Communicator, own: Outcome) -> list[Outcome]:
    """Return what became of each rank's part: all of it on rank 0, which commits, and the errors on the others.

    Collective. Thousands of ranks have millions of entries, which nobody else needs.
    """
    data = np.frombuffer(bytearray(msgspec.msgpack.encode(own)), np.uint8)
    known: list[tuple[str, int]] = comm.allgather_object((own.error, data.size))
    if comm.rank:
        comm.send(data, 0)
        return [Outcome(error) for error, _ in known]
    outcomes = [own]
    for peer, (_, size) in enumerate(known[1:], start=1):
        told = np.empty(size, np.uint8)
        comm.recv(told, peer)
        outcomes.append(msgspec.msgpack.decode(told.data, type=Outcome))
    return outcomes


def agree(comm: Communicator, error: str) -> None:
    """Raise StorageError on every rank when rank 0 has an error. Collective."""
    error = comm.broadcast_object(error)
    if error:
        raise StorageError(f"the checkpoint was not saved: {error}")


def commit(plan: Plan, outcomes: Sequence[Outcome]) -> str:
    """Make the checkpoint visible; return the reason when that fails, and nothing is left of it then (local).

    Where the directory was lost to another job, what lies there is that one's.
    """
    taken = lost(plan.directory.parent)
    if taken:
        return taken
    error = next((f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error), "")
    error = error or _commit(plan, outcomes)
    if error:
        names.discard(plan.temporary)
    return error


def _commit(plan: Plan, outcomes: Sequence[Outcome]) -> str:
    shards = [outcome.written for outcome in outcomes if outcome.written is not None]
    sizes = {name: size for one in shards for name, size in one.files.items()}
    outside = {name: digest for one in shards for name, digest in one.outside.items()}
    try:
        entries = [entry for one in shards for entry in one.entries]
        made = manifest.build(plan.step, plan.world, plan.scalars, sizes, entries, plan.about)
        unused = tuple(entry for one in shards for entry in one.unused)
        made = replace(made, index=index.write(plan.temporary, made.pieces, plan.step), outside=outside, unused=unused)
        names.commit(plan.directory, plan.step, manifest.encode(made), plan.keep)
    except StorageError as failure:
        return str(failure)
    except OSError as failure:
        return f"{plan.directory} cannot be written: {failure.strerror or failure}"
    return ""
