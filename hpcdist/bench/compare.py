"""Compare two results files of the same benchmark: ratios of medians with bootstrap intervals, and a verdict.

The figure is the ratio of medians, the second file's over the first's. Its interval comes from the bootstrap (B.
Efron, Ann. Statist. 7 (1979) 1-26): the iterations of both sides are drawn again, with replacement, many times. Where
a side was measured by several processes (sessions of a benchmark, repeats of a sweep), processes are drawn first and
then iterations within each: what differs from process to process is then part of the interval. One process a side
cannot measure that part, so its interval holds for these two runs, not for the next two.

A regression is a ratio whose whole interval lies beyond the threshold, or a wrong result, whose time means nothing.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.collectives import results as collectives_results
from hpcdist.bench.collectives.results import COLD
from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.report import most_of_ranks
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5 import files
from hpcdist.reporting.figures import Catalogue, Figure

REGRESSION: Final = "slower"
IMPROVEMENT: Final = "faster"
UNDECIDED: Final = "same"
FEW: Final = "too few"
WRONG: Final = "wrong in the second"
LEAST: Final = 5  # iterations of a side, below which a median has no interval worth the name
_DRAWN_ELEMENTS: Final = 1 << 22  # at once, to keep memory small


@dataclass(frozen=True)
class CompareSide:
    """One configuration of one file: the slowest rank's time of each iteration, and the session that measured it."""

    times_s: np.ndarray
    session: np.ndarray
    reference: bool = False
    wrong: bool = False


@dataclass(frozen=True)
class CompareRule:
    """Thresholds of a difference; ``threshold`` 0.05 is five percent."""

    threshold: float = 0.05
    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class MedianChange:
    """One configuration that both files have; ``ratio`` above 1 is slower in the second, None beside a wrong result."""

    name: str
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    before_s: float | None
    after_s: float | None
    iterations: tuple[int, int]
    sessions: tuple[int, int]
    reference: bool


@dataclass(frozen=True)
class ResultsComparison:
    """Changes, wrong results and the largest slowdown first, and the names that only one file has."""

    changes: tuple[MedianChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    wrong_before: tuple[str, ...]  # and right in the second
    notes: tuple[str, ...]

    @property
    def regressions(self) -> list[MedianChange]:
        """The cases that became wrong, or slower beyond doubt and threshold, without references (memcpy, wire)."""
        return [change for change in self.changes if change.verdict in (REGRESSION, WRONG) and not change.reference]

    @property
    def judged(self) -> list[MedianChange]:
        """The cases that have a verdict, references left out."""
        return [change for change in self.changes if change.verdict != FEW and not change.reference]


def compare(before: Path, after: Path, rule: CompareRule) -> ResultsComparison:
    """Compare two files of `hpcdist bench collectives`, or two of `hpcdist bench sweep`.

    Raises StorageError for a file that is neither, UsageError for files that have no configuration in common.
    """
    kinds = {path: _schema(path) for path in (before, after)}
    if kinds[before] != kinds[after]:
        raise UsageError(f"{before} is of schema {kinds[before]}, {after} of {kinds[after]}; give two of a kind")
    left, right = (_READERS[kinds[path]](path) for path in (before, after))
    common = [name for name in left if name in right]
    if not common:
        raise UsageError(
            f"{before} and {after} have no configuration in common: {', '.join(list(left)[:3]) or 'nothing'}, ... "
            f"against {', '.join(list(right)[:3]) or 'nothing'}, ..."
        )
    healed = [name for name in common if left[name].wrong and not right[name].wrong]
    compared = [name for name in common if name not in healed]
    changes = sorted((change(name, left[name], right[name], rule) for name in compared), key=_effect)
    return ResultsComparison(
        tuple(changes),
        tuple(name for name in left if name not in right),
        tuple(name for name in right if name not in left),
        tuple(healed),
        tuple(_notes(changes)),
    )


def change(name: str, before: CompareSide, after: CompareSide, rule: CompareRule) -> MedianChange:
    """Return how ``after`` differs from ``before``; the same for the same samples, rule and name."""
    counts = (len(before.times_s), len(after.times_s))
    sessions = (len(np.unique(before.session)), len(np.unique(after.session)))
    if after.wrong:
        return MedianChange(name, WRONG, None, None, None, None, None, counts, sessions, before.reference)
    medians = [float(np.median(side.times_s)) for side in (before, after)]
    ratio = medians[1] / medians[0]
    # The draws depend on the name, so that one configuration more does not change the intervals of the others.
    rng = np.random.default_rng([rule.seed, zlib.crc32(name.encode())])
    drawn = _medians(after, rule.resamples, rng) / _medians(before, rule.resamples, rng)
    tail = 50.0 * (1.0 - rule.confidence)
    low, high = (float(value) for value in np.percentile(drawn, [tail, 100.0 - tail]))
    if min(counts) < LEAST:
        verdict = FEW
    elif low > 1.0 + rule.threshold:
        verdict = REGRESSION
    elif high < 1.0 / (1.0 + rule.threshold):
        verdict = IMPROVEMENT
    else:
        verdict = UNDECIDED
    return MedianChange(name, verdict, ratio, low, high, medians[0], medians[1], counts, sessions, before.reference)


def _medians(side: CompareSide, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Return the medians of ``resamples`` samples drawn from ``side``: processes first, then their iterations."""
    processes = [side.times_s[side.session == number] for number in np.unique(side.session)]
    medians = np.empty(resamples)
    if len(processes) == 1:
        times = processes[0]
        step = max(1, _DRAWN_ELEMENTS // len(times))
        for start in range(0, resamples, step):
            rows = min(step, resamples - start)
            medians[start : start + rows] = np.median(times[rng.integers(0, len(times), (rows, len(times)))], axis=1)
        return medians
    for index in range(resamples):
        chosen = [processes[number] for number in rng.integers(0, len(processes), len(processes))]
        medians[index] = np.median(np.concatenate([times[rng.integers(0, len(times), len(times))] for times in chosen]))
    return medians


def _effect(change: MedianChange) -> tuple[bool, float, str]:
    return (change.reference, -np.inf if change.ratio is None else -change.ratio, change.name)


def _notes(changes: Sequence[MedianChange]) -> list[str]:
    notes = []
    moved = [
        change.ratio
        for change in changes
        if change.ratio and change.reference and change.verdict in (REGRESSION, IMPROVEMENT)
    ]
    if moved:
        worst = max(moved, key=lambda ratio: abs(np.log(ratio)))
        notes.append(
            f"{len(moved)} of the references (memcpy, wire), which are no code of ours, changed as well, by up to "
            f"{worst:.2f}x: the two files are from different machines, or from different loads"
        )
    single = sum(1 in change.sessions for change in changes)
    if single:
        notes.append(
            f"{single} of {len(changes)} intervals come from one process a side: what differs by start is not in them"
        )
    few = sum(change.verdict == FEW for change in changes)
    if few:
        notes.append(f"{few} configurations have fewer than {LEAST} iterations a side, and no verdict")
    return notes


def _schema(path: Path) -> str:
    with files.open_read(path) as file:
        schema = str(file.attrs.get("schema"))
    if schema not in _READERS:
        raise StorageError(
            f"{path}: a file of schema {schema!r}, expected {' or '.join(_READERS)}: the --output of "
            "`hpcdist bench collectives` or `hpcdist bench sweep`"
        )
    return schema


def _collectives(path: Path) -> dict[str, CompareSide]:
    """Return the configurations of a benchmark of collectives; versions of the MPI library may differ."""
    sides = {}
    for configuration in collectives_results.read(path).configurations:
        key = configuration.key
        cache = "" if key.cache == COLD else f" {key.cache}"
        where = f"{key.ranks} ranks on {key.nodes}, {key.vendor}"
        name = f"{key.op} {key.dtype} {key.bytes} B{cache}, {where}, {key.label}"  # `_by_cell` takes it apart
        sides[name] = CompareSide(
            configuration.slowest_s, configuration.session, configuration.reference, bool(configuration.wrong)
        )
    return sides


def _sweep(path: Path) -> dict[str, CompareSide]:
    """Return the steps of each configuration of a sweep over its good repeats, without the first, which compiles."""
    sides = {}
    for configuration in results.read(path).configurations:
        times, sessions = [], []
        for repeat in configuration.good:
            times.append(most_of_ranks(repeat.samples["step_s"][1:]))
            sessions.append(np.full(len(times[-1]), repeat.number))
        if sum(map(len, times)):
            name = f"{configuration.name} on {configuration.ranks} ranks"
            sides[name] = CompareSide(np.concatenate(times), np.concatenate(sessions))
    return sides


_READERS: Final[Mapping[str, Callable[[Path], dict[str, CompareSide]]]] = {
    collectives_results.SCHEMA: _collectives,
    results.SCHEMA: _sweep,
}

_FIGURES: Final[Catalogue[MedianChange]] = Catalogue(
    Figure("configuration", lambda change: change.name),
    Figure("before us", lambda change: change.before_s, ",.1f", 1e-6),
    Figure("after us", lambda change: change.after_s, ",.1f", 1e-6),
    Figure("ratio", lambda change: change.ratio, ".3f"),
    Figure("interval", lambda change: None if change.low is None else f"{change.low:.3f} - {change.high:.3f}"),
    Figure("n", lambda change: f"{change.iterations[0]}/{change.iterations[1]}"),
    Figure("verdict", lambda change: change.verdict + (" (reference)" if change.reference else "")),
)


def text(comparison: ResultsComparison) -> str:
    """Return the table as lines for people, the largest slowdown first, and below what only one file has."""
    lines = _FIGURES.aligned(comparison.changes, (0, -1))
    return "\n".join([*lines, *_below(comparison)])


def markdown(comparison: ResultsComparison) -> str:
    """Return the table as Markdown."""
    lines = _FIGURES.markdown(comparison.changes)
    return "\n".join([*lines, *(f"\n{line}" for line in _below(comparison))])


def _below(comparison: ResultsComparison) -> list[str]:
    lines = []
    for what, names in (
        ("only in the first", comparison.only_before),
        ("only in the second", comparison.only_after),
        ("wrong in the first, and not compared", comparison.wrong_before),
    ):
        lines += [f"{what}: {cell}" for cell in _by_cell(names)]
    return [*lines, *comparison.notes]


def _by_cell(names: Sequence[str]) -> list[str]:
    """Return a line for each operation, size and place, with the names that have it."""
    cells: dict[str, list[str]] = {}
    for name in names:
        *where, label = name.split(", ", 3)
        cells.setdefault(", ".join(where), []).append(label)
    return [f"{where}, {', '.join(labels)}" if where else "; ".join(labels) for where, labels in cells.items()]


def jsonable(comparison: ResultsComparison, rule: CompareRule) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "rule": asdict(rule),
        **asdict(comparison),
        "regressions": [change.name for change in comparison.regressions],
    }
