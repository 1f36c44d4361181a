"""Configuration of checkpoints: the ``[checkpoint]`` section of a recipe. Imports nothing but `reporting`."""

import math
import shlex
from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import at_least, check_section, must, rule

GROUPS: Final = ("rank", "node")
OBSERVED: Final = "observed"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section ``[checkpoint]``: when a run is saved, by which ranks, and which checkpoints are kept.

    A run is saved at its end and every ``every_steps`` steps (0: at the end only); the newest ``keep`` stay.
    ``writers`` says who writes files: every "rank", one rank of a "node", or so many ranks (a number). The others send
    them what they hold. ``asynchronous``: steps go on while threads write a copy of the state, which takes its memory
    once more, or space in ``local_directory``, on a disk of the node. ``incremental``: what has not changed since the
    checkpoint before is linked, not written again, which pays for frozen layers only.

    ``mtbf_s`` is the mean time between failures of the job, in the place of ``every_steps``: the run is saved when the
    interval of `hpcdist.strategies.core.daly_interval.daly` is over, by the measured cost of a save (0: not used;
    "observed": the time that all starts of the run have lasted, over the number of those that failed and one more).
    ``keep_every`` keeps the first checkpoint of each so many steps, too, and ``keep_best`` those with the lowest
    validation loss, which is then computed before each save (0: none). ``stripe`` spreads them over the servers of a
    Lustre or BeeGFS ("auto", "none", or options of its tool).
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
    """Return the options in ``text``, none where they are not what a shell would take for options."""
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
        "a state would be written there and copied while all ranks wait",
        "set checkpoint.asynchronous = true",
    ),
    rule(
        "checkpoint.incremental with checkpoint.writers!=rank where checkpoint.asynchronous=false",
        "a writer would have to be sent what it then leaves out",
        "set checkpoint.asynchronous = true, or writers = 'rank'",
    ),
    *at_least(0, "checkpoint.keep_every", "checkpoint.keep_best", expected="give a number, or 0 for none"),
    must(
        "checkpoint.mtbf_s",
        lambda mtbf_s: mtbf_s == OBSERVED or (not isinstance(mtbf_s, str) and 0 <= mtbf_s < math.inf),
        "give the seconds between two failures of the job, 'observed', or 0",
    ),
    rule("checkpoint.mtbf_s with checkpoint.every_steps", "one of them says when to save", "set the other to 0"),
    must(
        "checkpoint.stripe",
        lambda text: text in ("auto", "none") or _options(text),
        "choose 'auto', 'none', or options of lfs setstripe (or the tool of BeeGFS) such as '-c 4 -S 4M'",
    ),
)
