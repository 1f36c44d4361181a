"""Energy of one start of a job, added up from the steps in Slurm's accounts. Pure.

Slurm measures whole nodes: a step has the joules of its nodes from its begin to its end. With PrologFlags=Contain the
step `.extern` is on all nodes for as long as the job, and the job's own figure is that of this step. Else the job's
own figure is the sum of the numbered steps. That leaves out `.batch`, the script on the first node: of a job whose
`mpirun` starts daemons on the other nodes alone, all that the first node has used. And it counts steps twice that run
on the same nodes at the same time. So the steps are added up here, and what several have on a node at a time counts
once.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from hpcdist.batch.schedulers.base import JobState
from hpcdist.errors import ConfigurationError

NOT_MEASURED: Final = "Slurm measured none; it does where a site has set AcctGatherEnergyType"
NOT_YET: Final = "Slurm knows the energy of a job when it is over"

_NO_VALUE: Final = 1 << 62  # Slurm's NO_VAL64, less a little, where it prints it
_SLACK_S: Final = 1  # its times are whole seconds
_MAX_NODES: Final = 1 << 17
_SHOWN: Final = 4  # nodes that are named
_PART: Final = re.compile(r"\[([\d,-]+)\]|([^\[\]]+)", re.ASCII)
_WHOLE: Final = re.compile(r"(?:[^,\[\]]+|\[[\d,-]+\])+", re.ASCII)

_HOSTLIST: Final = re.compile(
    r"(?:NAME)(?:,NAME)*".replace("NAME", r"(?:[^,\[\]\s]|\[RUN(?:,RUN)*\])+").replace("RUN", r"\d+(?:-\d+)?"), re.ASCII
)


class AccountedStep(NamedTuple):
    """Slurm's record of a step, or of a job (``name`` ""): ``begin`` and ``end`` in seconds since 1970, 0: not yet.

    ``joules`` is None where they were not measured. ``of_nodes`` are those nodes whose own joules are known: sacct has
    the least and the most, with the names.
    """

    name: str
    state: str
    begin: int
    end: int
    nodes: tuple[str, ...]
    joules: float | None
    of_nodes: Mapping[str, float] = MappingProxyType({})

    def shares(self) -> dict[str, float]:
        """Return the joules by node; nodes of which they are not known have equal parts of the rest."""
        known = {node: self.of_nodes[node] for node in self.nodes if node in self.of_nodes}
        rest = max(0.0, (self.joules or 0.0) - sum(known.values()))
        others = [node for node in self.nodes if node not in known]
        return known | {node: rest / len(others) for node in others}


class AccountedEnergy(NamedTuple):
    """``known`` is None where Slurm has none, and ``lacking`` says why, or what is not in it; "" where nothing is."""

    known: float | None
    lacking: str = ""


def joules(text: str) -> float | None:
    """Return the joules that sacct prints. Where it has none it prints 0, nothing, or the number that says so."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < _NO_VALUE else None


def of_start(job: AccountedStep, steps: Sequence[AccountedStep]) -> AccountedEnergy:
    """Return the joules of a start of a job that is over; of one without steps those that the ``job`` itself has."""
    if not steps:
        return AccountedEnergy(job.joules, "" if job.joules else NOT_MEASURED)
    covered: dict[str, list[tuple[int, int]]] = {}
    known = 0.0
    blind = []
    # What a longer step has is not taken from a shorter one. A step without a value covers nothing.
    for step in sorted(steps, key=lambda step: (step.name != "extern", step.begin - step.end)):
        if not step.end or step.joules is None:
            blind.append(step)
            continue
        lasted = max(step.end - step.begin, 1)
        left = {node: _uncovered_seconds(step.begin, step.end, covered.get(node, ())) for node in step.nodes}
        parts = step.shares()
        whole = all(seconds == lasted for seconds in left.values())
        known += step.joules if whole else sum(parts[node] * left[node] / lasted for node in left)
        for node in step.nodes:
            covered.setdefault(node, []).append((step.begin, step.end))
    if not covered and not known:
        running = [step.name for step in steps if not step.end]
        return AccountedEnergy(None, f"step {', '.join(running)} has not ended" if running else NOT_MEASURED)
    return AccountedEnergy(known, "; ".join(_missing_parts(job, steps, blind, covered)))


def of_rows(rows: Sequence[JobState]) -> AccountedEnergy:
    """Return the joules of all starts in ``rows`` together."""
    ran = [row for row in rows if row.elapsed_s or row.begun_utc or row.energy_j]
    if not ran:
        return AccountedEnergy(None, "no start of it has run" if rows else "no accounts of these jobs")
    known = [row.energy_j for row in ran if row.energy_j is not None]
    if not known and len({row.energy_reason for row in ran}) == 1:
        return AccountedEnergy(None, ran[0].energy_reason)
    twice = {row.id for row in ran if row.restarts}
    reasons = []
    for row in ran:
        if row.energy_reason:
            start = f", start {(row.restarts or 0) + 1}" if row.id in twice else ""
            lead = "without all of it: " if row.energy_j is None and known else ""
            reasons.append(f"job {row.id}{start}: {lead}{row.energy_reason}")
    return AccountedEnergy(math.fsum(known) if known else None, "; ".join(reasons))


def _uncovered_seconds(begin: int, end: int, others: Sequence[tuple[int, int]]) -> int:
    """Return of how many seconds from ``begin`` to ``end`` no other has the joules of a node."""
    if begin >= end:  # less than a second counts as one
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
    """Yield what is in no step that has a value."""
    reported: set[str] = set()
    for step in blind:
        where = [node for node in step.nodes if _uncovered_seconds(step.begin, step.end, covered.get(node, ()))]
        if not step.end:
            yield f"without step {step.name}, which has not ended"
            reported.update(step.nodes)
        elif where and step.end > step.begin:
            yield f"without step {step.name} ({step.end - step.begin} s on {_listed(where)}), which has no value"
            reported.update(where)
    zeros = [node for step in steps if step not in blind for node, own in step.of_nodes.items() if not own]
    for node in dict.fromkeys(zeros):
        yield f"without {node}, which has measured none"
    left = [node for node in job.nodes if node not in reported]
    if bare := [node for node in left if node not in covered]:
        yield f"without {_listed(bare)}, where no step has a value"
    if partly := [
        node for node in left if node in covered and _uncovered_seconds(job.begin, job.end, covered[node]) > _SLACK_S
    ]:
        yield f"of {_listed(partly)} only what steps used there"
    if job.state == "NODE_FAIL":
        yield "without what a node had used when it crashed"


def _listed(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return ", ".join(nodes[:_SHOWN]) + more


def expand_hostlist(short: str) -> tuple[str, ...]:
    """Return the names of nodes that Slurm writes as n[1-2,04],m7; none for "None assigned".

    Raises ConfigurationError if ``short`` is malformed.
    """
    if short in ("", "None assigned", "Unknown"):
        return ()
    if not _HOSTLIST.fullmatch(short):
        raise ConfigurationError(f"{short!r} is no host list of Slurm; expected names such as n[1-2,04],m7")
    names: list[str] = []
    for word in _WHOLE.findall(short):
        parts = [[match[2]] if match[2] else _numbers(match[1]) for match in _PART.finditer(word)]
        names += ("".join(name) for name in itertools.islice(itertools.product(*parts), _MAX_NODES))
    return tuple(names)


def _numbers(text: str) -> list[str]:
    """Return the numbers of 1-2,04, each as wide as it is written."""
    numbers: list[str] = []
    for stretch in text.split(","):
        first, _, last = stretch.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            continue
        until = min(int(last or first), int(first) + _MAX_NODES)
        numbers += (str(number).zfill(len(first)) for number in range(int(first), until + 1))
    return numbers
