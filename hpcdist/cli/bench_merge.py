"""`hpcdist bench merge`: one results file from those of the tasks of a job array."""

from pathlib import Path

import click


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
def command(output: Path, mixed: bool, parts: tuple[Path, ...]) -> None:
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
