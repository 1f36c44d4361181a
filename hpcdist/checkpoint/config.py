"""Configuration of checkpoints: the ``[checkpoint]`` section of a recipe. Imports nothing but the errors."""

import math
import shlex
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

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
    interval of `hpcdist.strategies.daly_interval.daly` is over, by the measured cost of a save (0: not used;
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
        if self.every_steps < 0:
            raise ConfigurationError(
                f"checkpoint.every_steps = {self.every_steps}; give a number of steps, or 0 to save at the end only"
            )
        if self.keep < 1:
            raise ConfigurationError(f"checkpoint.keep = {self.keep}; at least 1 checkpoint must be kept")
        if self.writers not in GROUPS and not (self.writers.isascii() and self.writers.strip("0").isdecimal()):
            raise ConfigurationError(
                f"checkpoint.writers = {self.writers!r}; choose 'rank', 'node', or a number of ranks of at least 1"
            )
        if self.local_directory and not self.asynchronous:
            raise ConfigurationError(
                f"checkpoint.local_directory = {self.local_directory!r} with checkpoint.asynchronous = false: a state "
                "would be written there and copied while all ranks wait; set checkpoint.asynchronous = true"
            )
        if self.incremental and not (self.asynchronous or self.writers == "rank"):
            raise ConfigurationError(
                f"checkpoint.incremental = true with checkpoint.writers = {self.writers!r}: a writer would have to be "
                "sent what it then leaves out; set checkpoint.asynchronous = true, or writers = 'rank'"
            )
        self._check_rules()

    def _check_rules(self) -> None:
        for key in ("keep_every", "keep_best"):
            if getattr(self, key) < 0:
                raise ConfigurationError(f"checkpoint.{key} = {getattr(self, key)}; give a number, or 0 for none")
        if self.mtbf_s != OBSERVED and (isinstance(self.mtbf_s, str) or not 0 <= self.mtbf_s < math.inf):
            raise ConfigurationError(
                f"checkpoint.mtbf_s = {self.mtbf_s!r}; give the seconds between two failures of the job, 'observed', "
                "or 0"
            )
        if self.mtbf_s and self.every_steps:
            raise ConfigurationError(
                f"checkpoint.mtbf_s = {self.mtbf_s!r} with checkpoint.every_steps = {self.every_steps}: one of them "
                "says when to save; set the other to 0"
            )
        if self.stripe not in ("auto", "none") and not _options(self.stripe):
            raise ConfigurationError(
                f"checkpoint.stripe = {self.stripe!r}; choose 'auto', 'none', or options of lfs setstripe (or the tool "
                "of BeeGFS) such as '-c 4 -S 4M'"
            )

    def check_steps(self, lock_step: bool, validated: bool) -> None:
        """Raise ConfigurationError where no step is followed by a decision of all ranks, or nothing is validated."""
        for key in ("mtbf_s", "keep_best"):
            if getattr(self, key) and not lock_step:
                raise ConfigurationError(
                    f"checkpoint.{key} = {getattr(self, key)!r} where workers are not in lock-step is not built in "
                    f"this version; set checkpoint.{key} = 0, or parameter_server.consistency = 'bsp' without backup "
                    "workers"
                )
        if self.keep_best and not validated:
            raise ConfigurationError(
                f"checkpoint.keep_best = {self.keep_best} with data.validation_fraction = 0: there is no validation "
                "loss; set checkpoint.keep_best = 0, or keep some data for validation"
            )

    def check_beside(self, in_file: bool) -> None:
        """Raise ConfigurationError for a copy in memory of a state that is kept ``in_file``."""
        if self.asynchronous and in_file and not self.local_directory:
            raise ConfigurationError(
                "checkpoint.asynchronous = true with a state offloaded to a file: it would make a copy in memory; "
                "set checkpoint.asynchronous = false, or name a checkpoint.local_directory"
            )


def _options(text: str) -> list[str]:
    """Return the options in ``text``, none where they are not what a shell would take for options."""
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    return words if words and words[0].startswith("-") else []
