"""Incremental checkpoints: a piece that has not changed since the last one is linked, not written again (local).

A piece is unchanged when all its digests are. The older shard gets a second name in the new checkpoint (a hard link),
so that a checkpoint needs nothing outside its directory and may be removed in any order; the space of a shard is free
when the last checkpoint that uses a part of it is gone. A few unchanged bytes of a large shard are written again:
they are not worth its space. This pays for frozen layers, and for embeddings of which few pieces are touched. It pays
nothing for a model all of which is trained: every parameter and moment of a dense Adam changes in every step, and has
been read once more to find that out. The first checkpoint of a start is always whole.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.checkpoint.format import shard
from hpcdist.checkpoint.format.manifest import StoredPiece
from hpcdist.checkpoint.format.shard import WrittenShards
from hpcdist.checkpoint.format.shard_layout import BlockSource, Slot
from hpcdist.hdf5.overlay import Overlay

MAX_UNUSED_RATIO: Final = (
    8  # a shard of which less than one in so many bytes is in use is not kept for those (empirical)
)


@dataclass
class IncrementalWriter:
    """What one writer has in the checkpoint before: ``entries`` in ``directory``, None where there is none."""

    directory: Path | None = None
    entries: dict[Slot, StoredPiece] = field(default_factory=dict)
    shards: WrittenShards = field(default_factory=WrittenShards)
    _written: tuple[Path, dict[Slot, StoredPiece], WrittenShards] | None = None  # by the save that is under way

    def write(
        self,
        directories: tuple[Path, Path],
        name: str,
        slots: Sequence[Slot],
        sources: Sequence[BlockSource],
        about: Mapping[str, Any],
        opens: Callable[[Path], Overlay] = Overlay.created,
    ) -> WrittenShards:
        """Write the shard ``name`` of what has changed, and link the rest.

        ``directories`` are where the checkpoint is made, and where it will lie. The sources are asked for their blocks
        twice. Raises StorageError.
        """
        temporary, final = directories
        shards, linked = self._link(temporary, self._unchanged(slots, sources))
        new = [(slot, source) for slot, source in zip(slots, sources, strict=True) if slot not in linked]
        new_shard = WrittenShards()
        if new or not linked:
            changed = [slot for slot, _ in new], [source for _, source in new]
            new_shard = shard.write(temporary, name, *changed, about, opens)
        found = dict(zip((slot for slot, _ in new), new_shard.entries, strict=True)) | linked
        shards = WrittenShards(
            shards.files | new_shard.files,
            [found[slot] for slot in slots],
            shards.outside | new_shard.outside,
            shards.unused,
        )
        self._written = final, found, shards
        return shards

    def _unchanged(self, slots: Sequence[Slot], sources: Sequence[BlockSource]) -> dict[Slot, StoredPiece]:
        same = {}
        for slot, source in zip(slots, sources, strict=True):
            entry = self.entries.get(slot)
            if entry is not None and slot.nbytes and shard.block_digests(source()) == entry.digests:
                same[slot] = entry
        return same

    def _link(self, temporary: Path, same: dict[Slot, StoredPiece]) -> tuple[WrittenShards, dict[Slot, StoredPiece]]:
        """Give the shards of ``same`` names in ``temporary``; those that cannot be linked are written again."""
        files: dict[str, int] = {}
        outside: dict[str, str] = {}
        unused: list[StoredPiece] = []
        linked: dict[Slot, StoredPiece] = {}
        for name in sorted({entry.file for entry in same.values()}):
            assert self.directory is not None
            step = self.directory.name.removeprefix("step-")
            again = name if shard.is_linked(name) else shard.linked_name(name, step)
            used = sum(entry.nbytes for entry in same.values() if entry.file == name)
            try:
                size = (self.directory / name).stat().st_size
                if used * MAX_UNUSED_RATIO < size:
                    continue
                os.link(self.directory / name, temporary / again)
            except OSError as error:
                print(f"hpcdist: {self.directory / name} is written again: {error.strerror}", file=sys.stderr)
                continue
            files[again], outside[again] = size, self.shards.outside[name]
            linked |= {slot: replace(entry, file=again) for slot, entry in same.items() if entry.file == name}
            before = [entry for slot, entry in self.entries.items() if slot not in same] + list(self.shards.unused)
            unused += [replace(entry, file=again) for entry in before if entry.file == name and entry.nbytes]
        return WrittenShards(files, (), outside, unused), linked

    def settle(self) -> None:
        """Take note that what was written last is part of a complete checkpoint."""
        if self._written is not None:
            self.directory, self.entries, self.shards = self._written
        self._written = None
