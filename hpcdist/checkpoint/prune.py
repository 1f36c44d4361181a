"""Prune the checkpoints of a run on request; what stays is verified first (local).

Called by `hpcdist checkpoint`. Jobs of the run are kept out meanwhile (`exclude_jobs`). The automatic removal after
each save is `directory.commit`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.directory import Retention, loss_of
from hpcdist.checkpoint.listing import COMPLETE, DAMAGED, ListedCheckpoint
from hpcdist.checkpoint.lock import RunLock
from hpcdist.checkpoint.verify import verify
from hpcdist.errors import StorageError


@dataclass(frozen=True)
class PrunePlan:
    """What goes and what stays, the most recent first."""

    doomed: tuple[ListedCheckpoint, ...]
    kept: tuple[ListedCheckpoint, ...]


@contextmanager
def exclude_jobs(run_dir: Path) -> Iterator[None]:
    """Keep jobs out of ``run_dir``. Raises StorageError while one is there: it may be reading what would be removed."""
    place, lock = listing.checkpoints_directory(run_dir), RunLock()
    lock.take(
        place.parent if place.name == "checkpoints" else place,
        waits=False,
        otherwise="let it keep fewer itself (checkpoint.keep)",
    )
    try:
        yield
    finally:
        lock.release()


def plan(run_dir: Path, rule: Retention, damaged: bool = False) -> PrunePlan:
    """Return what ``rule`` leaves of the checkpoints of ``run_dir``. Raises StorageError when none can be restored.

    The newest complete one is read in full: where its bytes are damaged, the one before is the newest.
    """
    found = [one for one in listing.list_checkpoints(run_dir) if one.path.suffix == ""]
    complete = [one for one in found if one.state == COMPLETE]
    while complete and verify(complete[0].path).damage:
        complete.pop(0)
    if not complete:
        raise StorageError(
            f"{run_dir} has no checkpoint that can be restored; nothing is removed. `hpcdist checkpoint verify "
            f"{run_dir}` says what is damaged"
        )
    stay = rule.kept({one.step: loss_of(one.path) if rule.best else float("nan") for one in complete})
    usable = {one.path for one in complete}
    doomed = [one for one in complete if one.step not in stay]
    if damaged:
        doomed += [one for one in found if one.path not in usable and one.state in (COMPLETE, DAMAGED)]
    gone = {one.path for one in doomed}
    return PrunePlan(tuple(doomed), tuple(one for one in found if one.path not in gone))


def remove(wanted: PrunePlan) -> tuple[list[Path], dict[Path, str]]:
    """Remove what is doomed; return what is gone, and the reason of what could not be removed."""
    gone, failed = [], {}
    for one in wanted.doomed:
        try:
            names.remove(one.path)
            gone.append(one.path)
        except OSError as error:
            failed[one.path] = error.strerror or str(error)
    return gone, failed


def check_removed(failed: Mapping[Path, str]) -> None:
    """Raise StorageError when something could not be removed."""
    if failed:
        raise StorageError("; ".join(f"{path} could not be removed: {why}" for path, why in failed.items()))
