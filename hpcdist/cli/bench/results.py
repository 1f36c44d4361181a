"""`hpcdist bench merge` and `hpcdist compare`: join results files, and tell whether something became slower.

`merge` makes one file of those of the tasks of a job array. `compare` takes ratios of medians with a bootstrap
interval; its exit code 1 says that something is slower or wrong, for CI jobs.
"""

import json
import re
from pathlib import Path

import click

from hpcdist.errors import FAILURE, OK, UsageError


@click.command("merge")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="HDF5 file that the results are put into; it keeps what it has.",
)
@click.option("--mixed", is_flag=True, help="Take trials of different commits of hpcdist.")
@click.argument("parts", metavar="FILE...", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
def merge(output: Path, mixed: bool, parts: tuple[Path, ...]) -> None:
    """Put the results FILEs of one sweep into OUTPUT, as if one `hpcdist bench sweep` had measured all of it.

    Of two tries of a trial a good one counts, and of two failed ones the later; two good ones that differ are refused.
    In what versions and machines the files differ is said on stderr. The same command again changes nothing.
    """
    from hpcdist.bench.sweep import merge, results

    results.check_place(output)
    with results.locked(output):
        found = merge.merge(output, parts, mixed=mixed)
    for difference in found.differences:
        click.echo(f"hpcdist bench merge: the trials differ in {difference}", err=True)
    click.echo(f"{found.ok} ok, {found.failed} failed; `hpcdist report {output}`", err=True)


def _threshold(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Return "5%", "5 %" or "0.05" as 0.05."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", value)
    if match is None:
        raise click.BadParameter(f"{value!r}: expected a share such as 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


@click.command("compare")
@click.argument("before", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("after", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--threshold", callback=_threshold, default="5%", help="Slowdown that is still tolerated.")
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1.0, max_open=True), default=0.95, help="Of the intervals of ratios."
)
@click.option("--resamples", type=click.IntRange(min=100), default=2000, help="Draws of the bootstrap.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the draws: the same seed, the same intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def compare(
    before: Path,
    after: Path,
    threshold: float,
    confidence: float,
    resamples: int,
    seed: int,
    as_json: bool,
    markdown: bool,
) -> int:
    """Say what of AFTER is slower or faster than in BEFORE: two results of `hpcdist bench collectives`, or of a sweep.

    The ratio is that of the medians of the slowest rank's times, with a bootstrap interval over the iterations; the
    largest slowdown comes first. What only one of the files has is listed.

    Exit codes, for CI: 0 when nothing is slower beyond the threshold with its whole interval, 1 when something is, or
    gives a wrong result in AFTER, 2 for usage (also files that have nothing in common, or too few iterations for any
    verdict), 74 for a file that cannot be read.
    """
    from hpcdist.bench import compare as comparing  # late: --help must not load h5py

    if as_json and markdown:
        raise UsageError("--json and --markdown are two ways to print the same; choose one")
    rule = comparing.CompareRule(threshold, confidence, resamples, seed)
    found = comparing.compare(before, after, rule)
    if as_json:
        click.echo(json.dumps(comparing.jsonable(found, rule)))
    else:
        click.echo(comparing.markdown(found) if markdown else comparing.text(found))
    judged, total = len(found.judged), sum(not change.reference for change in found.changes)
    if not judged:
        raise UsageError(
            f"none of {total} configurations that both files have has a verdict, which takes {comparing.LEAST} "
            "iterations a side; measure more (--iterations, --seconds)"
        )
    wrong = sum(change.verdict == comparing.WRONG for change in found.regressions)
    counts = f"{wrong} wrong in the second, {total - judged} without a verdict"
    slower = len(found.regressions) - wrong
    click.echo(f"{slower} of {total} slower by more than {100 * threshold:g} %, {counts}", err=True)
    return FAILURE if found.regressions else OK
