"""Configuration of checkpoints: the ``[checkpoint]`` section of a recipe. Imports only `reporting`."""

import math
import shlex
from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import at_least, check_section, must, rule

GROUPS: Final = ("rank", "node")
OBSERVED: Final = "observed"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section ``[checkpoint]``: when a run is saved, which ranks write, and which checkpoints are kept.

    Args:
        every_steps: Number of steps between saves. The end of the run is always saved (0: only the end).
        mtbf_s: Mean time between failures of the job, from which the save interval is derived (0: off).
            "observed" means the run time of all starts / (failed starts + 1).
        keep: Number of newest checkpoints to keep.
        keep_every: Also keep the first checkpoint at or after each multiple of this number of steps (0: none).
        keep_best: Also keep this number of checkpoints with the lowest validation loss (0: none).
        stripe: Striping on Lustre or BeeGFS: "auto", "none", or options of the file system's striping command.
        writers: "rank" (every rank), "node" (one rank per node), or the number of ranks that write.
        asynchronous: Copy the state to memory or to ``local_directory``. Threads write the copy to the run directory.
        incremental: Hard-link data that has not changed since the last checkpoint.
    """

    every_steps: int = 0
    mtbf_s: float | str = 0.0
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    stripe: str = "auto"
    writers: str = "rank"
    asynchronous: bool = False
    incremental: bool = False
    local_directory: str = ""

    def __post_init__(self) -> None:
        check_section(RULES, "checkpoint", self)


def _options(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    return words if words and words[0].startswith("-") else []


RULES: Final = (
    *at_least(0, "checkpoint.every_steps", expected="give a number of steps, or 0 to save at the end only"),
    *at_least(1, "checkpoint.keep", expected="at least 1 checkpoint must be kept"),
    must(
        "checkpoint.writers",
        lambda text: text in GROUPS or (text.isascii() and text.strip("0").isdecimal()),
        "choose 'rank', 'node', or a number of ranks of at least 1",
    ),
    rule(
        "checkpoint.local_directory with checkpoint.asynchronous=false",
        "the state would be written to the local disk and copied while all ranks wait",
        "set checkpoint.asynchronous = true",
    ),
    rule(
        "checkpoint.incremental with checkpoint.writers!=rank where checkpoint.asynchronous=false",
        "a rank would have to send data that its writer then skips",
        "set checkpoint.asynchronous = true, or writers = 'rank'",
    ),
    *at_least(0, "checkpoint.keep_every", "checkpoint.keep_best", expected="give a number, or 0 for none"),
    must(
        "checkpoint.mtbf_s",
        lambda mtbf_s: mtbf_s == OBSERVED or (not isinstance(mtbf_s, str) and 0 <= mtbf_s < math.inf),
        "give the mean time between failures in seconds, 'observed', or 0",
    ),
    rule("checkpoint.mtbf_s with checkpoint.every_steps", "only one of the two may set the interval", "set one to 0"),
    must(
        "checkpoint.stripe",
        lambda text: text in ("auto", "none") or _options(text),
        "choose 'auto', 'none', or options of lfs setstripe (or the tool of BeeGFS) such as '-c 4 -S 4M'",
    ),
)
