"""Comparison of two results files of the same benchmark: ratios of medians, bootstrap intervals, and verdicts.

The ratio is the median time of the second file over the median time of the first file. Its interval comes from the
bootstrap (B. Efron, Ann. Statist. 7 (1979) 1-26), which resamples the iterations of both files with replacement. If
several processes measured a file (sessions of a benchmark, repeats of a sweep), the bootstrap resamples the processes
first, then the iterations of each. The interval then includes the differences between processes.

A regression is a ratio whose whole interval lies above the threshold, or a result that is wrong in the second file.
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
from hpcdist.bench.sweep.report import max_of_ranks
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5 import files
from hpcdist.reporting.table import Catalogue, Figure

REGRESSION: Final = "slower"
IMPROVEMENT: Final = "faster"
UNDECIDED: Final = "same"
FEW: Final = "too few"
WRONG: Final = "wrong in the second"
LEAST: Final = 5  # minimum number of iterations in each file for a verdict
_BATCH_ELEMENTS: Final = 1 << 22  # largest number of resampled times in memory


@dataclass(frozen=True)
class CompareSide:
    """Iteration durations of a configuration in a results file. ``session``: per iteration, index of its process."""

    times_s: np.ndarray
    session: np.ndarray
    reference: bool = False
    wrong: bool = False


@dataclass(frozen=True)
class CompareRule:
    """Settings of a comparison of two results files."""

    threshold: float = 0.05  # tolerated slowdown; 0.05 means 5 %
    confidence: float = 0.95  # level of the bootstrap interval
    resamples: int = 2000  # number of bootstrap samples
    seed: int = 0


@dataclass(frozen=True)
class MedianChange:
    """Change of a configuration's median duration from the first file to the second. ``ratio`` > 1 means slower."""

    name: str
    verdict: str
    ratio: float | None  # this field and the next four are None if the second result is wrong
    low: float | None  # confidence interval of the ratio: low to high
    high: float | None
    before_s: float | None
    after_s: float | None
    iterations: tuple[int, int]  # numbers of iterations in (first file, second file)
    sessions: tuple[int, int]
    reference: bool


@dataclass(frozen=True)
class ResultsComparison:
    """Comparison of two results files: changes of common configurations, and names of the other configurations."""

    changes: tuple[MedianChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    wrong_before: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> list[MedianChange]:
        """Changes to a slower or wrong result. Reference transfers (copies, exchanges between nodes) are excluded."""
        return [change for change in self.changes if change.verdict in (REGRESSION, WRONG) and not change.reference]

    @property
    def judged(self) -> list[MedianChange]:
        """Changes with enough iterations for a verdict. Reference transfers such as memory copies are excluded."""
        return [change for change in self.changes if change.verdict != FEW and not change.reference]


def compare(before: Path, after: Path, rule: CompareRule) -> ResultsComparison:
    """Compare the results files ``before`` and ``after`` of one benchmark. Raises StorageError and UsageError.

    ``rule``: tolerated slowdown and confidence level.
    """
    schemas = [_schema(path) for path in (before, after)]
    if schemas[0] != schemas[1]:
        raise UsageError(f"{before} has schema {schemas[0]}, {after} has {schemas[1]}; give two files of one benchmark")
    left, right = (_READERS[schemas[0]](path) for path in (before, after))
    common = [name for name in left if name in right]
    if not common:
        first, second = (", ".join(list(side)[:3]) or "nothing" for side in (left, right))
        raise UsageError(
            f"{before} and {after} have no configuration in common: the first file has {first}, ..., and the second "
            f"file has {second}, ...; measure the same configurations"
        )
    corrected = [name for name in common if left[name].wrong and not right[name].wrong]
    changes = [change(name, left[name], right[name], rule) for name in common if name not in corrected]
    changes.sort(key=lambda row: (row.reference, -np.inf if row.ratio is None else -row.ratio, row.name))
    return ResultsComparison(
        tuple(changes),
        tuple(name for name in left if name not in right),
        tuple(name for name in right if name not in left),
        tuple(corrected),
        tuple(_notes(changes)),
    )


def change(name: str, before: CompareSide, after: CompareSide, rule: CompareRule) -> MedianChange:
    """Return the change of the median duration of configuration ``name`` from ``before`` to ``after``."""
    counts = (len(before.times_s), len(after.times_s))
    sessions = (len(np.unique(before.session)), len(np.unique(after.session)))
    if after.wrong:
        return MedianChange(name, WRONG, None, None, None, None, None, counts, sessions, before.reference)
    medians = [float(np.median(side.times_s)) for side in (before, after)]
    ratio = medians[1] / medians[0]
    # The seed depends on the name: the intervals of a configuration do not depend on the other configurations.
    rng = np.random.default_rng([rule.seed, zlib.crc32(name.encode())])
    ratios = _medians(after, rule.resamples, rng) / _medians(before, rule.resamples, rng)
    tail = 50.0 * (1.0 - rule.confidence)
    low, high = (float(value) for value in np.percentile(ratios, [tail, 100.0 - tail]))
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
    processes = [side.times_s[side.session == number] for number in np.unique(side.session)]
    medians = np.empty(resamples)
    if len(processes) == 1:
        times = processes[0]
        step = max(1, _BATCH_ELEMENTS // len(times))
        for start in range(0, resamples, step):
            rows = min(step, resamples - start)
            medians[start : start + rows] = np.median(times[rng.integers(0, len(times), (rows, len(times)))], axis=1)
        return medians
    for index in range(resamples):
        chosen = [processes[number] for number in rng.integers(0, len(processes), len(processes))]
        medians[index] = np.median(np.concatenate([times[rng.integers(0, len(times), len(times))] for times in chosen]))
    return medians


def _notes(changes: Sequence[MedianChange]) -> list[str]:
    notes = []
    moved = [row.ratio for row in changes if row.ratio and row.reference and row.verdict in (REGRESSION, IMPROVEMENT)]
    if moved:
        worst = max(moved, key=lambda ratio: abs(np.log(ratio)))
        notes.append(
            f"{len(moved)} references (memcpy, wire) changed by up to {worst:.2f}x, but run no code of hpcdist: the "
            "files were measured on different machines, or under different load"
        )
    if single := sum(1 in row.sessions for row in changes):
        notes.append(f"{single} of {len(changes)} intervals exclude differences between processes: a file has only one")
    if few := sum(row.verdict == FEW for row in changes):
        notes.append(f"{few} configurations have no verdict: it needs at least {LEAST} iterations in each file")
    return notes


def _schema(path: Path) -> str:
    with files.open_read(path) as file:
        schema = str(file.attrs.get("schema"))
    if schema not in _READERS:
        raise StorageError(
            f"{path} has schema {schema!r}, expected {' or '.join(_READERS)}; give the --output file of `hpcdist bench "
            "collectives` or `hpcdist bench sweep`"
        )
    return schema


def _collectives(path: Path) -> dict[str, CompareSide]:
    sides = {}
    for row in collectives_results.read(path).configurations:
        key = row.key
        cache = "" if key.cache == COLD else f" {key.cache}"
        # The MPI vendor without its version: two versions can be compared. `_by_cell` splits this name.
        name = f"{key.op} {key.dtype} {key.bytes} B{cache}, {key.ranks} ranks on {key.nodes}, {key.vendor}, {key.label}"
        sides[name] = CompareSide(row.slowest_s, row.session, row.reference, bool(row.wrong))
    return sides


def _sweep(path: Path) -> dict[str, CompareSide]:
    sides = {}
    for row in results.read(path).configurations:
        times = [max_of_ranks(repeat.samples["step_s"][1:]) for repeat in row.good]
        sessions = [np.full(len(steps), repeat.number) for steps, repeat in zip(times, row.good, strict=True)]
        if sum(map(len, times)):
            sides[f"{row.name} on {row.ranks} ranks"] = CompareSide(np.concatenate(times), np.concatenate(sessions))
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
    """Return ``comparison`` as a text table, followed by the configurations in only one file and the notes."""
    return "\n".join([*_FIGURES.aligned(comparison.changes, (0, -1)), *_footer(comparison)])


def markdown(comparison: ResultsComparison) -> str:
    """Return ``comparison`` as a Markdown table, followed by the configurations in only one file and the notes."""
    lines = _FIGURES.markdown(comparison.changes)
    return "\n".join([*lines, *(f"\n{line}" for line in _footer(comparison))])


def _footer(comparison: ResultsComparison) -> list[str]:
    lists = {
        "only in the first": comparison.only_before,
        "only in the second": comparison.only_after,
        "wrong in the first, and not compared": comparison.wrong_before,
    }
    return [*(f"{title}: {line}" for title, names in lists.items() for line in _by_cell(names)), *comparison.notes]


def _by_cell(names: Sequence[str]) -> list[str]:
    cells: dict[str, list[str]] = {}
    for name in names:
        *cell, label = name.split(", ", 3)
        cells.setdefault(", ".join(cell), []).append(label)
    return [f"{cell}, {', '.join(labels)}" if cell else "; ".join(labels) for cell, labels in cells.items()]


def jsonable(comparison: ResultsComparison, rule: CompareRule) -> dict[str, Any]:
    """Return a dict for JSON with the settings ``rule``, the fields of ``comparison`` and the regressions."""
    regressions = [change.name for change in comparison.regressions]
    return {"rule": asdict(rule), **asdict(comparison), "regressions": regressions}
