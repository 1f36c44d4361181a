"""`hpcdist checkpoint`: what a run has saved: looked at, verified, thinned out, and carried to and from other tools."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.checkpoint_exchange import export, import_
from hpcdist.cli.checkpoint_stripe import stripe
from hpcdist.errors import FAILURE, OK

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.checkpoint.verify import VerifyResult

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_PATH = click.argument("path", metavar="PATH", type=click.Path(path_type=Path))


@click.group()
def command() -> None:
    """Look at checkpoints, verify, thin out, export and import them. Needs neither MPI nor the recipe."""


command.add_command(export)
command.add_command(import_)
command.add_command(stripe)


@command.command("ls")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@_JSON
def ls(run_dir: Path, as_json: bool) -> None:
    """List the checkpoints of the run in RUN_DIR, the newest first, and say of each whether it is complete.

    Manifests and the sizes of files are looked at; `hpcdist checkpoint verify` reads every byte.
    """
    from hpcdist.checkpoint import listing
    from hpcdist.reporting.units import counted, format_bytes

    found = listing.list_checkpoints(run_dir)
    if as_json:
        click.echo(json.dumps({"checkpoints": [listing.summary(one) for one in found]}))
        return
    for one in found:
        ranks = "" if one.manifest is None else f"  {counted(one.manifest.world, 'rank')}, {format_bytes(one.nbytes)}"
        reason = f": {one.reason}" if one.reason else ""
        click.echo(f"{one.path.name:<16} {one.written_utc:<25}  {one.state}{ranks}{reason}")
    click.echo(f"{counted(len(found), 'checkpoint')} in {listing.checkpoints_directory(run_dir)}", err=True)


@command.command("show")
@_PATH
@click.option("--tensors", is_flag=True, help="List every tensor with its shape.")
@_JSON
def show(path: Path, tensors: bool, as_json: bool) -> None:
    """Tell what the checkpoint PATH (.../step-N) holds; of a run directory, its newest complete one."""
    from hpcdist.checkpoint import listing
    from hpcdist.errors import StorageError

    found = listing.inspect(listing.select(path))
    loaded = found.manifest
    if loaded is None:
        raise StorageError(found.reason)
    figures: dict[str, Any] = listing.summary(found) | {"scalars": loaded.scalars}
    if tensors:
        figures["tensors"] = [
            {"kind": one.kind, "name": one.name, "dtype": one.dtype, "shape": list(one.shape), "bytes": one.nbytes}
            for one in listing.stored_tensors(loaded)
        ]
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)


def _print(figures: dict[str, Any]) -> None:
    from hpcdist.reporting.units import counted, format_bytes

    click.echo(f"{figures['path']}: after {counted(figures['step'], 'step')}, written {figures['written_utc']}")
    reason = f": {figures['reason']}" if figures["reason"] else ""
    files = counted(figures["files"], "file")
    click.echo(f"{figures['state']}{reason}; {format_bytes(figures['bytes'])} in {files}")
    click.echo(f"written by {counted(figures['ranks'], 'rank')}")
    for kind, sums in figures["kinds"].items():
        size = f"{sums['elements']:>15,} elements  {format_bytes(sums['bytes']):>10}"
        click.echo(f"  {kind:<20} {sums['tensors']:>6} tensors  {size}")
    for one in figures.get("tensors", ()):
        click.echo(f"  {one['kind']:<20} {one['name']:<28} {one['dtype']:<9} {one['shape']}")


@command.command("verify")
@_PATH
@_JSON
def verify(path: Path, as_json: bool) -> int:
    """Read every byte of the checkpoint PATH (.../step-N), or of all that the run directory PATH has.

    Each block is compared with its digest; all damage is told with file, bytes and tensor. What a save left unfinished
    is named, and is no damage; nor is what an earlier version of hpcdist saved without a digest, which is named, too.

    Exit code 0 when nothing is damaged, 1 when something is, 74 when there is nothing to verify.
    """
    from hpcdist.checkpoint import listing
    from hpcdist.checkpoint.verify import verify as verified
    from hpcdist.reporting.units import format_bytes

    single = path.is_dir() and path.name.startswith("step-")
    paths = [path] if single else [one.path for one in listing.list_checkpoints(path)]
    verdicts = [verified(one) for one in paths]
    if as_json:
        click.echo(json.dumps({"damaged": any(one.damage for one in verdicts), "checkpoints": _plain(verdicts)}))
    else:
        for one in verdicts:
            click.echo(f"{one.path}: {one.state}, {format_bytes(one.read_bytes)} read")
            for line in one.damage:
                click.echo(f"  {line}")
            for line in one.not_covered:
                click.echo(f"  not covered: {line}; an earlier version of hpcdist saved no digest of it")
    return FAILURE if any(one.damage for one in verdicts) else OK


def _plain(verdicts: "list[VerifyResult]") -> list[dict[str, Any]]:
    return [
        {
            "path": str(one.path),
            "state": one.state,
            "damage": list(one.damage),
            "read_bytes": one.read_bytes,
            "not_covered": list(one.not_covered),
        }
        for one in verdicts
    ]


@command.command("prune")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--keep", type=click.IntRange(min=1), default=2, help="The newest so many stay.")
@click.option("--keep-every", type=click.IntRange(min=0), default=0, help="So does the first of each so many steps.")
@click.option("--keep-best", type=click.IntRange(min=0), default=0, help="And those with the lowest validation loss.")
@click.option("--damaged", is_flag=True, help="Remove what is damaged, too, as long as one complete checkpoint stays.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@_JSON
def prune(
    run_dir: Path, keep: int, keep_every: int, keep_best: int, damaged: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove checkpoints of the run in RUN_DIR but those that the options keep.

    Only complete ones count, so the newest that can be restored always stays: it is read and verified first. What is
    being written is left alone. A run that is under way thins out its own: then nothing is removed (exit code 74).
    """
    from hpcdist.checkpoint import prune
    from hpcdist.checkpoint.directory import Retention

    rule = Retention(keep, keep_every, keep_best)
    if dry_run:
        plan = prune.plan(run_dir, rule, damaged)
        removed, failed = [one.path for one in plan.doomed], dict[Path, str]()
    else:
        with prune.exclude_jobs(run_dir):
            plan = prune.plan(run_dir, rule, damaged)
            removed, failed = prune.remove(plan)
    if as_json:
        figures = {"dry_run": dry_run, "removed": [str(path) for path in removed]}
        kept = [str(one.path) for one in plan.kept]
        click.echo(json.dumps({**figures, "kept": kept, "failed": {str(path): why for path, why in failed.items()}}))
    else:
        for path in removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {path}")
        click.echo(f"kept {', '.join(one.path.name for one in plan.kept)}", err=True)
    prune.check_removed(failed)
