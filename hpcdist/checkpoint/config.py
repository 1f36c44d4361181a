"""Configuration of checkpoints: the ``[checkpoint]`` section of a recipe. Imports only `reporting`."""

import shlex
from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, rule
from hpcdist.reporting.schema import check_section, key

GROUPS: Final = ("rank", "node")
OBSERVED: Final = "observed"


def _is_count(text: str) -> bool:
    return text.isascii() and text.strip("0").isdecimal()


def _are_options(text: str) -> bool:
    try:
        return shlex.split(text)[0].startswith("-")
    except (ValueError, IndexError):
        return False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section ``[checkpoint]``: when a run is saved, which ranks write, and which checkpoints are kept."""

    every_steps: int = key(0, "Steps between saves. 0: save only at the end.", ge=0)
    mtbf_s: float | str = key(
        0.0, "Mean time between failures in seconds; sets Daly's interval. 0: use every_steps.", ge=0, word=OBSERVED
    )
    keep: int = key(2, "Number of newest checkpoints to keep.", ge=1)
    keep_every: int = key(
        0, "Also keep the first checkpoint at or after each multiple of this many steps. 0: none.", ge=0
    )
    keep_best: int = key(0, "Number of checkpoints with the lowest validation loss to keep, too. 0: none.", ge=0)
    stripe: str = key(
        "auto",
        "Striping on Lustre and BeeGFS.",
        choices=("auto", "none"),
        valid=_are_options,
        expected="options of lfs setstripe such as -c 4 -S 4M",
    )
    writers: str = key(
        "rank",
        "Ranks that write files: every rank, one per node, or this number of ranks.",
        choices=GROUPS,
        valid=_is_count,
        expected="a number of ranks of at least 1",
        digits=True,
    )
    asynchronous: bool = key(False, "Train on while threads write a copy of the state. The copy needs memory.")
    incremental: bool = key(False, "Hard-link data that has not changed since the last save. Useful for frozen layers.")
    local_directory: str = key(
        "", "Directory on a disk of the node for the asynchronous copy, which then needs no memory.", path=True
    )

    export_to: str = key("", "Hugging Face directory to which the model is also saved at the end.", path=True)
    export_every_steps: int = key(0, "Steps between saves that also replace export_to. 0: only at the end.", ge=0)

    def __post_init__(self) -> None:
        check_section(RULES, "checkpoint", self)


RULES: Final = (
    rule("checkpoint.export_every_steps with checkpoint.export_to=", NO_EFFECT, "set checkpoint.export_to"),
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
    rule("checkpoint.mtbf_s with checkpoint.every_steps", "only one of the two may set the interval", "set one to 0"),
)
