"""Energy of one start of a Slurm job, summed over the steps in Slurm accounting. Pure.

With PrologFlags=Contain the step `.extern` covers the whole job. Otherwise the job's value omits `.batch` and counts
concurrent steps on a node twice. Here overlapping time on a node counts once.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from hpcdist.batch.schedulers.base import JobState
from hpcdist.errors import ConfigurationError

NOT_MEASURED: Final = "Slurm measured no energy; the site must set AcctGatherEnergyType"
NOT_YET: Final = "Slurm knows the energy of a job when it is over"

_NO_VALUE: Final = 1 << 62  # just below Slurm's NO_VAL64
_SLACK_S: Final = 1  # Slurm's times are whole seconds
_MAX_NODES: Final = 1 << 17
_SHOWN: Final = 4  # maximum number of nodes in a message
_PART: Final = re.compile(r"\[([\d,-]+)\]|([^\[\]]+)", re.ASCII)
_WHOLE: Final = re.compile(r"(?:[^,\[\]]+|\[[\d,-]+\])+", re.ASCII)

_HOSTLIST: Final = re.compile(
    r"(?:NAME)(?:,NAME)*".replace("NAME", r"(?:[^,\[\]\s]|\[RUN(?:,RUN)*\])+").replace("RUN", r"\d+(?:-\d+)?"), re.ASCII
)


class AccountedStep(NamedTuple):
    """Slurm's accounting record of a job step, or of the whole job if ``name`` is empty."""

    name: str
    state: str
    begin: int  # seconds since 1970, 0: not begun
    end: int  # seconds since 1970, 0: not ended
    nodes: tuple[str, ...]
    joules: float | None  # None: not measured
    of_nodes: Mapping[str, float] = MappingProxyType({})  # joules of the nodes with the least and the most energy

    def shares(self) -> dict[str, float]:
        """Return {node name: energy in J} of this step. Unmeasured nodes get equal shares of the remaining energy."""
        measured = {node: self.of_nodes[node] for node in self.nodes if node in self.of_nodes}
        rest = max(0.0, (self.joules or 0.0) - sum(measured.values()))
        others = [node for node in self.nodes if node not in measured]
        return measured | {node: rest / len(others) for node in others}


class AccountedEnergy(NamedTuple):
    """Energy of a job in joules, from Slurm accounting, and the reason if the energy is missing or incomplete."""

    joules: float | None  # None: unknown
    missing_reason: str = ""  # why the energy is unknown or incomplete


def joules(text: str) -> float | None:
    """Convert an energy printed by sacct to joules. Return None for 0, an empty text, or NO_VAL."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < _NO_VALUE else None


def of_start(job: AccountedStep, steps: Sequence[AccountedStep]) -> AccountedEnergy:
    """Return the energy of one finished execution of a job from its accounting records.

    ``job``: record of the whole job. ``steps``: records of the job's steps. Where steps overlap, the energy counts
    only once.
    """
    if not steps:
        return AccountedEnergy(job.joules, "" if job.joules else NOT_MEASURED)
    covered: dict[str, list[tuple[int, int]]] = {}
    total = 0.0
    unmeasured = []
    # Longer steps first; they keep the energy of overlapping time. A step without a value covers no time.
    for step in sorted(steps, key=lambda step: (step.name != "extern", step.begin - step.end)):
        if not step.end or step.joules is None:
            unmeasured.append(step)
            continue
        duration_s = max(step.end - step.begin, 1)
        uncovered = {node: _uncovered_seconds(step.begin, step.end, covered.get(node, ())) for node in step.nodes}
        parts = step.shares()
        is_uncovered = all(seconds == duration_s for seconds in uncovered.values())
        total += step.joules if is_uncovered else sum(parts[node] * uncovered[node] / duration_s for node in uncovered)
        for node in step.nodes:
            covered.setdefault(node, []).append((step.begin, step.end))
    if not covered and not total:
        running = [step.name for step in steps if not step.end]
        return AccountedEnergy(None, f"step {', '.join(running)} has not ended" if running else NOT_MEASURED)
    return AccountedEnergy(total, "; ".join(_missing_parts(job, steps, unmeasured, covered)))


def of_rows(rows: Sequence[JobState]) -> AccountedEnergy:
    """Return the total energy in the sacct records ``rows``. A requeued job has one record per execution."""
    ran = [row for row in rows if row.elapsed_s or row.begun_utc or row.energy_j]
    if not ran:
        return AccountedEnergy(None, "no start of the job has run" if rows else "no accounts of these jobs")
    values = [row.energy_j for row in ran if row.energy_j is not None]
    if not values and len({row.energy_reason for row in ran}) == 1:
        return AccountedEnergy(None, ran[0].energy_reason)
    twice = {row.id for row in ran if row.restarts}
    reasons = []
    for row in ran:
        if row.energy_reason:
            start = f", start {(row.restarts or 0) + 1}" if row.id in twice else ""
            lead = "excluded: " if row.energy_j is None and values else ""
            reasons.append(f"job {row.id}{start}: {lead}{row.energy_reason}")
    return AccountedEnergy(math.fsum(values) if values else None, "; ".join(reasons))


def _uncovered_seconds(begin: int, end: int, others: Sequence[tuple[int, int]]) -> int:
    if begin >= end:  # less than a second: counts as 1
        return int(not any(first <= begin <= last for first, last in others))
    left, at = 0, begin
    for first, last in sorted(others):
        left += max(0, min(first, end) - at)
        at = max(at, min(last, end))
    left += max(0, end - at)
    return 0 if left <= _SLACK_S and left < end - begin else left


def _missing_parts(
    job: AccountedStep,
    steps: Sequence[AccountedStep],
    blind: Sequence[AccountedStep],
    covered: dict[str, list[tuple[int, int]]],
) -> Iterator[str]:
    reported: set[str] = set()
    for step in blind:
        where = [node for node in step.nodes if _uncovered_seconds(step.begin, step.end, covered.get(node, ()))]
        if not step.end:
            yield f"excludes step {step.name}, which has not ended"
            reported.update(step.nodes)
        elif where and step.end > step.begin:
            yield f"excludes step {step.name} ({step.end - step.begin} s on {_listed(where)}), which has no value"
            reported.update(where)
    zeros = [node for step in steps if step not in blind for node, value in step.of_nodes.items() if not value]
    for node in dict.fromkeys(zeros):
        yield f"excludes {node}, which measured no energy"
    left = [node for node in job.nodes if node not in reported]
    if unmeasured := [node for node in left if node not in covered]:
        yield f"excludes {_listed(unmeasured)}, where no step has a value"
    if partly := [
        node for node in left if node in covered and _uncovered_seconds(job.begin, job.end, covered[node]) > _SLACK_S
    ]:
        yield f"includes only the energy of steps on {_listed(partly)}"
    if job.state == "NODE_FAIL":
        yield "excludes the energy of a crashed node"


def _listed(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return ", ".join(nodes[:_SHOWN]) + more


def expand_hostlist(short: str) -> tuple[str, ...]:
    """Return a tuple of the names in a Slurm host list such as n[1-2,04]. Raises ConfigurationError if invalid."""
    if short in ("", "None assigned", "Unknown"):
        return ()
    if not _HOSTLIST.fullmatch(short):
        raise ConfigurationError(f"{short!r} is not a Slurm host list; expected names such as n[1-2,04],m7")
    names: list[str] = []
    for word in _WHOLE.findall(short):
        parts = [[match[2]] if match[2] else _numbers(match[1]) for match in _PART.finditer(word)]
        names += ("".join(name) for name in itertools.islice(itertools.product(*parts), _MAX_NODES))
    return tuple(names)


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for stretch in text.split(","):
        first, _, last = stretch.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            continue
        until = min(int(last or first), int(first) + _MAX_NODES)
        numbers += (str(number).zfill(len(first)) for number in range(int(first), until + 1))
    return numbers
