"""Checkpoints of a run directory, as evidence that a start of the job made progress. Loads neither numpy nor HDF5."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from hpcdist.checkpoint.lock import LOCK_FILE
from hpcdist.comm.record.run_journal import JOURNAL_FILE
from hpcdist.constants import METRICS_FILE, PROGRESS_FILE, RECIPE_FILE, STOP_FILE, USAGE_FILE
from hpcdist.reporting import regular

# Files of hpcdist in the run directory of a script.
OUTPUTS: Final = (METRICS_FILE, USAGE_FILE, "events.jsonl", "tensorboard", "prometheus")
RUN_FILES: Final = ("recorder", JOURNAL_FILE, LOCK_FILE, STOP_FILE, *OUTPUTS)
LOG_SUFFIXES: Final = (".log", ".out", ".err")
MAX_RECORD_BYTES: Final = 1 << 16


def checkpoints(run_dir: Path) -> dict[str, int]:
    """Return {name: write time in ns} of the complete hpcdist checkpoints in ``run_dir``, highest step first."""
    written_ns = {}
    for path in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        step = path.parent.name.removeprefix("step-")
        if step.isascii() and step.isdecimal():
            with suppress(OSError):  # just deleted
                written_ns[int(step)] = path.stat().st_mtime_ns
    return {f"step-{step}": written_ns[step] for step in sorted(written_ns, reverse=True)}


def reported_checkpoints(run_dir: Path) -> dict[str, int]:
    """Return `checkpoints` or, if empty, {path: time in ns} of the checkpoint that `hpcdist.torch.saved` reported."""
    if saved := checkpoints(run_dir):
        return saved
    record = run_dir / PROGRESS_FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        return {json.loads(regular.text(record, MAX_RECORD_BYTES))["checkpoint"]: record.stat().st_mtime_ns}
    return {}


def progress(run_dir: Path) -> dict[str, int]:
    """Return {name: write time in ns} of the checkpoints in ``run_dir``, newest first. Local.

    For a script without hpcdist checkpoints, return the checkpoint that `hpcdist.torch.saved` reported or, without a
    report, the newest file that is neither a log nor a file of hpcdist.
    """
    if (saved := reported_checkpoints(run_dir)) or (run_dir / RECIPE_FILE).exists():
        return saved
    newest: dict[str, int] = {}
    for folder, folders, names in os.walk(run_dir):
        if Path(folder) == run_dir:
            folders[:] = [name for name in folders if name not in RUN_FILES]
            names = [name for name in names if name not in RUN_FILES and not name.startswith(".")]
        for path in (Path(folder) / name for name in names if not name.endswith(LOG_SUFFIXES)):
            with suppress(OSError):  # just deleted
                newest[str(path.relative_to(run_dir))] = path.stat().st_mtime_ns
    return dict(sorted(newest.items(), key=lambda item: -item[1])[:1])
