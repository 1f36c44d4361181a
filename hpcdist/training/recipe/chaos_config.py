"""The ``[chaos]`` section of a recipe: deliberate stragglers and faults.

A fault entry is ``RANK@STEP:WHAT``. Light: imports only the errors and `reporting`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import NO_EFFECT, must, rule
from hpcdist.reporting.schema import check_section, key
from hpcdist.reporting.units import counted

STEP_PHASES: Final = ("begin", "forward", "backward", "exchange", "update", "save")
CORRUPTION_TARGETS: Final = ("gradients", "parameters")
DISK_FAILURES: Final = ("fail", "full", "fsync")
FAULT_KINDS: Final = ("kill", "stall", "corrupt", "disk", "overflow")
_ENTRY_PATTERN: Final = re.compile(r"(\d{1,9})@(\d{1,12})(?::(.+))?")
_ENTRY_FORMS: Final = {
    "kill": ("'2@100' or '2@100:PHASE'", STEP_PHASES, "begin"),
    "stall": ("'2@100:SECONDS'", (), ""),
    "corrupt": ("'2@100' or '2@100:PLACE'", CORRUPTION_TARGETS, "gradients"),
    "disk": ("'2@100:WHAT'", DISK_FAILURES, ""),
}


@dataclass(frozen=True)
class ChaosFault:
    """Fault of type ``kind`` to inject on ``rank`` in step number ``step``. The first step has number 1."""

    kind: str
    rank: int
    step: int
    how: str = ""  # phase of a kill, array to corrupt, or kind of disk error
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name of the fault, which is unique in a run and a valid file name."""
        return "-".join(filter(None, [self.kind, f"{self.rank}@{self.step}", self.how]))

    @property
    def in_save(self) -> bool:
        """True if the fault happens while the rank writes a checkpoint."""
        return self.kind == "disk" or (self.kind == "kill" and self.how == "save")

    def described(self) -> str:
        """Return a description of the fault for users."""
        step = f"in step {self.step}"
        if self.kind == "kill":
            at = {"begin": f"at the begin of step {self.step}", "save": f"in the save after step {self.step}"}
            return f"rank {self.rank} is killed {at.get(self.how, f'in the {self.how} of step {self.step}')}"
        if self.kind == "stall":
            return f"rank {self.rank} sleeps {self.seconds:g} s {step}"
        if self.kind == "corrupt":
            return f"one bit of the {self.how} of rank {self.rank} flips {step}"
        if self.kind == "overflow":
            return f"the gradient overflows {step}"
        fails = {"fail": "cannot write", "full": "finds its disk full", "fsync": "cannot wait for its disk"}
        return f"rank {self.rank} {fails[self.how]} in the save after step {self.step}"


def parse_faults(kind: str, entries: Sequence[str | int]) -> list[ChaosFault]:
    """Return a list of the faults of type ``kind`` in ``entries``, the value of recipe key ``chaos.<kind>``.

    Raises ConfigurationError if an entry is invalid.
    """
    if kind == "overflow":  # entries are steps; rank 0 is always one that computes
        faults = [ChaosFault(kind, 0, int(step)) for step in entries]
        if any(fault.step < 1 for fault in faults):
            raise ConfigurationError(f"chaos.overflow = {list(entries)}; step numbers must be at least 1")
    else:
        faults = [_parse_entry(kind, str(entry)) for entry in entries]
    if len({fault.name for fault in faults}) < len(faults):
        raise ConfigurationError(f"chaos.{kind} = {list(entries)} repeats a fault; list each fault once")
    return faults


def _parse_entry(kind: str, entry: str) -> ChaosFault:
    form, choices, default = _ENTRY_FORMS[kind]
    match = _ENTRY_PATTERN.fullmatch(entry)
    if match is None or not (match[3] or default):
        raise _malformed_entry(kind, entry, f"expected RANK@STEP as in {form}")
    rank, step, how = int(match[1]), int(match[2]), match[3] or default
    if step < 1:
        raise _malformed_entry(kind, entry, f"steps are counted from 1, as in {form}")
    if kind == "stall":
        return ChaosFault(kind, rank, step, seconds=_seconds(entry, how))
    if how not in choices:
        raise _malformed_entry(kind, entry, f"{how!r} is not one of {', '.join(choices)}; expected {form}")
    return ChaosFault(kind, rank, step, how)


def _seconds(entry: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _malformed_entry("stall", entry, "give a finite number of seconds above 0, as in '2@100:60'")
    return seconds


def _malformed_entry(kind: str, entry: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"chaos.{kind} has {entry!r}: {reason}")


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Section ``[chaos]``: stragglers and faults to inject into a run, for tests.

    Each fault happens once per run directory, even if a restart repeats the step. A PHASE is one of `STEP_PHASES`.
    """

    slow_ranks: tuple[int, ...] = key((), "Ranks to slow down, as [0].", ge=0)
    slow_factor: float = key(3.0, "Factor by which a slow step takes longer to compute.", ge=1)
    slow_probability: float = key(1.0, "Probability that a step of slow_ranks is slow.", ge=0, le=1)
    step_s: float = key(0.0, "Least seconds that computing in a step takes; ranks sleep to reach it. 0: off.", ge=0)
    seed: int = key(0, "Random seed for the choice of slow steps.", ge=0)
    kill: tuple[str, ...] = key((), 'Ranks to kill, RANK@STEP or RANK@STEP:PHASE, as ["2@100", "0@200:update"].')
    stall: tuple[str, ...] = key((), 'Ranks that sleep, as ["1@50:20"]: rank 1 in step 50, 20 s.')
    corrupt: tuple[str, ...] = key((), 'Ranks with a flipped bit, as ["1@50"] (gradient) or ["1@50:parameters"].')
    overflow: tuple[int, ...] = key((), "Steps whose gradient overflows, as [50].")
    disk: tuple[str, ...] = key(
        (), 'Saves that fail, as ["0@50:full"] (full, fail or fsync): the first save after step 50.'
    )

    def __post_init__(self) -> None:
        check_section(RULES, "chaos", self)
        _ = self.faults  # validates each entry

    @property
    def on(self) -> bool:
        """True if the section contains any straggler or fault."""
        return bool(self.slow_ranks) or self.step_s > 0 or bool(self.faults)

    @property
    def faults(self) -> list[ChaosFault]:
        """List of the faults, sorted by step. Raises ConfigurationError for an invalid entry."""
        faults = [fault for kind in FAULT_KINDS for fault in parse_faults(kind, getattr(self, kind))]
        return sorted(faults, key=lambda fault: fault.step)

    def within(self, world: int) -> "ChaosConfig":
        """Return a copy without the stragglers and faults of ranks that do not exist in a job of ``world`` ranks."""
        among: dict[str, Any] = {
            kind: tuple(entry for entry in getattr(self, kind) if parse_faults(kind, [entry])[0].rank < world)
            for kind in FAULT_KINDS
        }
        slow = tuple(rank for rank in self.slow_ranks if rank < world)
        return replace(self if slow else ChaosConfig(step_s=self.step_s), slow_ranks=slow, **among)

    def check_steps(self, steps: int) -> None:
        """Raise ConfigurationError if a fault is set for a step after ``steps``, the last step of the run."""
        for fault in self.faults:
            if fault.step > steps:
                raise ConfigurationError(
                    f"chaos.{fault.kind} = {list(getattr(self, fault.kind))}: the run ends with step {steps} "
                    f"(run.steps), before step {fault.step}; name steps from 1 to {steps}"
                )

    def check_world(self, world: int, computing: int, *, lock_step: bool = True) -> None:
        """Raise ConfigurationError if a fault cannot occur on its rank in a job of ``world`` ranks.

        The first ``computing`` ranks compute; the other ranks are parameter servers. ``lock_step``: True if
        servers take part in every step.
        """
        for rank in self.slow_ranks:
            self._check_rank("slow_ranks", rank, world)
            if rank >= computing:
                raise ConfigurationError(
                    f"chaos.slow_ranks = {list(self.slow_ranks)}: rank {rank} is only a server, which has no steps to "
                    f"slow down; use ranks 0 to {computing - 1}"
                )
        for fault in self.faults:
            self._check_rank(fault.kind, fault.rank, world)
            computes = fault.kind == "corrupt" or fault.how in ("forward", "backward")
            steps = fault.kind == "stall" or (fault.kind == "kill" and fault.how != "save")
            if fault.rank >= computing and (computes or (steps and not lock_step)):
                reason = "computes nothing" if computes else "makes no steps of its own"
                raise ConfigurationError(
                    f"chaos.{fault.kind} = {list(getattr(self, fault.kind))}: rank {fault.rank} is only a server, "
                    f"which {reason}; use ranks 0 to {computing - 1}"
                )

    def _check_rank(self, key: str, rank: int, world: int) -> None:
        if rank >= world:
            raise ConfigurationError(
                f"chaos.{key} = {list(getattr(self, key))} on {counted(world, 'rank')}: there is no rank {rank}; use "
                + (f"ranks 0 to {world - 1}" if world > 1 else "rank 0")
            )

    def described(self) -> str:
        """Return a text for users that describes the stragglers and faults, or "" if the section has none."""
        parts = []
        if self.step_s:
            parts.append(f"computing takes {self.step_s:g} s a step by sleep")
        if self.slow_ranks:
            ranks = ", ".join(map(str, self.slow_ranks))
            plural = "s" if len(self.slow_ranks) > 1 else ""
            often = "" if self.slow_probability == 1 else f" with probability {self.slow_probability:g} a step"
            parts.append(f"rank{plural} {ranks} {self.slow_factor:g} times slower{often}")
        faults = "; ".join(fault.described() for fault in self.faults)
        return "; ".join([*parts, *([f"once in this run directory: {faults}"] if faults else [])])


RULES: Final = (
    must("chaos.slow_ranks", lambda ranks: len(set(ranks)) == len(ranks), "list each rank once"),
    *(
        rule(
            f"chaos.{name}!={int(getattr(ChaosConfig, name))} with chaos.slow_ranks=",
            NO_EFFECT,
            "name the ranks to slow down, or remove it",
        )
        for name in ("slow_factor", "slow_probability", "seed")
    ),
)
