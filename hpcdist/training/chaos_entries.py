"""Faults that a ``[chaos]`` section names one by one: ``RANK@STEP``, and what happens there. Light."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

PHASES: Final = ("begin", "forward", "backward", "exchange", "update", "save")
PLACES: Final = ("gradients", "parameters")
DISKS: Final = ("fail", "full", "fsync")
KINDS: Final = ("kill", "stall", "corrupt", "disk")
_ENTRY: Final = re.compile(r"(\d{1,9})@(\d{1,12})(?::(.+))?")
_FORMS: Final = {
    "kill": ("'2@100' or '2@100:PHASE'", PHASES, "begin"),
    "stall": ("'2@100:SECONDS'", (), ""),
    "corrupt": ("'2@100' or '2@100:PLACE'", PLACES, "gradients"),
    "disk": ("'2@100:WHAT'", DISKS, ""),
}


@dataclass(frozen=True)
class Fault:
    """What happens to ``rank`` in ``step``, counted from 1: ``how`` is the phase, the place, or what a disk does."""

    kind: str
    rank: int
    step: int
    how: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """A name that no other fault of a run has, and any file may."""
        return "-".join(filter(None, [self.kind, f"{self.rank}@{self.step}", self.how]))

    @property
    def in_save(self) -> bool:
        """Whether it happens to the rank as one that writes."""
        return self.kind == "disk" or (self.kind == "kill" and self.how == "save")

    def described(self) -> str:
        """Return, for people, what happens."""
        where = f"in step {self.step}"
        if self.kind == "kill":
            at = {"begin": f"at the begin of step {self.step}", "save": f"in the save after step {self.step}"}
            return f"rank {self.rank} is killed {at.get(self.how, f'in the {self.how} of step {self.step}')}"
        if self.kind == "stall":
            return f"rank {self.rank} sleeps {self.seconds:g} s {where}"
        if self.kind == "corrupt":
            return f"one bit of the {self.how} of rank {self.rank} flips {where}"
        if self.kind == "overflow":
            return f"the gradient overflows {where}"
        fails = {"fail": "cannot write", "full": "finds its disk full", "fsync": "cannot wait for its disk"}
        return f"rank {self.rank} {fails[self.how]} in the save after step {self.step}"


def read(kind: str, entries: Sequence[str]) -> list[Fault]:
    """Return the faults that the entries of ``chaos.<kind>`` name. Raises ConfigurationError for others."""
    found = [_read(kind, entry) for entry in entries]
    _refuse_twice(kind, entries, found)
    return found


def overflows(steps: Sequence[int]) -> list[Fault]:
    """Return the overflows in ``steps``: one rank that computes is enough. Raises ConfigurationError."""
    if any(step < 1 for step in steps):
        raise ConfigurationError(f"chaos.overflow = {list(steps)}; steps are counted from 1")
    found = [Fault("overflow", 0, step) for step in steps]
    _refuse_twice("overflow", steps, found)
    return found


def _refuse_twice(kind: str, entries: Sequence[object], found: Sequence[Fault]) -> None:
    if len({fault.name for fault in found}) < len(found):
        raise ConfigurationError(f"chaos.{kind} = {list(entries)}; each happens once, so name each once")


def _read(kind: str, entry: str) -> Fault:
    form, ways, default = _FORMS[kind]
    match = _ENTRY.fullmatch(entry)
    if match is None or not (match[3] or default):
        raise _malformed(kind, entry, f"expected RANK@STEP as in {form}")
    rank, step, how = int(match[1]), int(match[2]), match[3] or default
    if step < 1:
        raise _malformed(kind, entry, f"steps are counted from 1, as in {form}")
    if kind == "stall":
        return Fault(kind, rank, step, seconds=_seconds(entry, how))
    if how not in ways:
        raise _malformed(kind, entry, f"{how!r} is none of {', '.join(ways)}; expected {form}")
    return Fault(kind, rank, step, how)


def _seconds(entry: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _malformed("stall", entry, "give finite seconds above 0, as in '2@100:60'")
    return seconds


def _malformed(kind: str, entry: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"chaos.{kind} has {entry!r}: {why}")
