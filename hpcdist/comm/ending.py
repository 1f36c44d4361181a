"""How a job ended: said by the ranks, since their launcher may not know.

Open MPI's mpirun returns 0 when it has lost a node. With user-level fault tolerance it returns 0 when all ranks were
killed, 1 when some were and the others ended well, and may wait for ever in the finalisation of the survivors. So the
ranks write the exit code they agreed on into the directory of `hpcdist run`, which believes that file.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from hpcdist.reporting import atomic, regular

LAUNCH_DIR: Final = "HPCDIST_LAUNCH_DIR"  # of this start; where each rank also writes its process id
SURVIVE: Final = "HPCDIST_SURVIVE"  # "shrink" or "replace": the ranks go on after a death
SPARES: Final = "HPCDIST_SPARES"  # how many of them wait to replace one
WAYS: Final = ("shrink", "replace")
ENDED: Final = "ended"


def say(code: int) -> None:
    """Tell `hpcdist run` that the job ends with ``code``; the last thing a rank does (local).

    Every rank should call: which of them lives on the host of the launcher, where the directory is, is not known. All
    say the same, unless one fails while the others leave: whoever speaks first is believed.
    """
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        path = Path(folder) / ENDED
        with suppress(OSError):  # on another host the directory does not exist
            own = atomic.unfinished(path)
            atomic.write(own, str(code))
            with suppress(FileExistsError):
                os.link(own, path)
            own.unlink()


def said(folder: Path) -> int | None:
    """Return the code that the ranks have said, None where they have not (yet)."""
    try:
        return int(regular.text(folder / ENDED, 64))
    except (OSError, ValueError):
        return None
