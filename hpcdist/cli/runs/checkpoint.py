"""`hpcdist checkpoint`: list, show, verify, prune, stripe, export and import what runs have saved.

`export` and `import` go to and from safetensors and PyTorch state dicts. `stripe` spreads a directory of checkpoints
over the servers of its file system (Lustre, BeeGFS).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.common import BYTE_SIZE, COUNT, DIRECTORY, FILE, PATH, json_option, run_dir_argument, set_option
from hpcdist.errors import FAILURE, OK, STORAGE, StorageError, UsageError
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import counted, format_bytes

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.checkpoint.convert.importing import ImportedCheckpoint
_PATH = click.argument("path", type=PATH)


@click.group()
def command() -> None:
    """Look at checkpoints, verify, thin out, export and import them. Needs neither MPI nor the recipe."""


@command.command("export")
@_PATH
@click.argument("out", type=PATH)
@click.option("--optimizer", is_flag=True, help="Everything that a training needs to go on, not the parameters alone.")
@click.option(
    "--shard-bytes", type=BYTE_SIZE, default="5G", help="safetensors: cut into files of at most so many bytes."
)
@json_option
def export(path: Path, out: Path, optimizer: bool, shard_bytes: int, as_json: bool) -> None:
    """Write the parameters of the checkpoint PATH, or of a run's newest, to OUT.

    OUT ends with .safetensors, or with .pt, .pth or .bin for a state dict of PyTorch; a directory gets a
    model.safetensors. Tensors are whole and called by layer and name, as 3.qkv.weight; in a state dict of a model of
    your own they have the names of its modules, so that `load_state_dict` takes them. Bytes are verified as they are
    read, and pass through in blocks, so that a model may be larger than memory; for PyTorch they pass through a file
    beside OUT, which needs the space twice.
    """
    from hpcdist.checkpoint import listing
    from hpcdist.checkpoint.convert import exporting, safetensors, torch_state

    checkpoint = listing.select(path)
    loaded = listing.load_usable(checkpoint)
    tensors = exporting.tensors_to_export(loaded, optimizer)
    out = out / "model.safetensors" if out.is_dir() or not out.suffix else out
    if out.suffix == safetensors.SUFFIX:
        files = safetensors.write(checkpoint, loaded, tensors, out, shard_bytes)
    elif out.suffix in torch_state.SUFFIXES:
        files = torch_state.write(checkpoint, loaded, tensors, out, nested=optimizer)
    else:
        known = ", ".join((safetensors.SUFFIX, *torch_state.SUFFIXES))
        raise UsageError(f"{out}: unknown format {out.suffix}; end it with one of {known}")
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if as_json:
        figures: dict[str, Any] = {"checkpoint": str(checkpoint), "tensors": len(tensors), "bytes": nbytes}
        click.echo(json.dumps(figures | {"files": [str(file) for file in files]}))
        return
    click.echo(f"{counted(len(tensors), 'tensor')}, {format_bytes(nbytes)}, of {checkpoint}", err=True)
    for file in files:
        click.echo(file)


@command.command("import")
@click.argument("source", metavar="IN", type=PATH)
@click.argument("run_dir", metavar="DIR", type=DIRECTORY)
@click.option(
    "--recipe", type=FILE, help="Recipe of the model: the tensors are held against it, and it is kept in DIR."
)
@set_option
@click.option("--step", type=click.IntRange(min=0), help="Step that it is of.  [default: what an export knows, else 0]")
@json_option
def import_(
    source: Path, run_dir: Path, recipe: Path | None, overrides: tuple[str, ...], step: int | None, as_json: bool
) -> None:
    """Make the first checkpoint of a run in DIR of IN: safetensors, or a state dict of PyTorch.

    IN may be a file, an index of several, or a directory with either. No pickled code is run, and no tensor is read
    that the file cannot hold: a file that is damaged or hostile is an error message. With --recipe, DIR is a run that
    `hpcdist sample` knows; `hpcdist train --resume auto` goes on from what was exported with --optimizer.
    """
    from hpcdist.checkpoint.convert.importing import ForeignFile, import_checkpoint

    if overrides and recipe is None:
        raise UsageError("--set changes a key of --recipe; give that too")
    inputs, keys = None, None
    if recipe is not None:
        from hpcdist.training.use_cases import import_checkpoint as imported_run

        with ForeignFile(source) as file:
            known = file.metadata.get("scalars", {}).get("model_inputs", {})
            inputs, keys = imported_run.prepare_imported_run(run_dir, recipe, overrides, file.tensors, known)
    imported = import_checkpoint(source, run_dir, step, inputs, keys)
    if as_json:
        nbytes = sum(tensor.nbytes for tensor in imported.tensors)
        figures = jsonable(imported)
        figures |= {"checkpoint": figures.pop("path"), "tensors": len(imported.tensors), "bytes": nbytes}
        click.echo(json.dumps(figures))
    else:
        _warn_of_import(imported)


def _warn_of_import(imported: "ImportedCheckpoint") -> None:
    nbytes = sum(tensor.nbytes for tensor in imported.tensors)
    click.echo(imported.path)
    click.echo(f"{counted(len(imported.tensors), 'tensor')}, {format_bytes(nbytes)}, from {imported.format}", err=True)
    if imported.left_out:
        click.echo(f"left out, being no tensors of a known type: {', '.join(imported.left_out[:8])}", err=True)
    if not imported.resumable:
        click.echo("it has no state of an optimizer: a training cannot go on from it", err=True)


@command.command("stripe")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--bytes", "nbytes", type=BYTE_SIZE, default="1G", help="Size of a checkpoint, e.g. 500M or 40G.")
@click.option("--writers", type=COUNT, default=1, help="How many write at once.")
@click.option("--set", "wish", default="auto", metavar="OPTIONS", help="As checkpoint.stripe: auto, none, or options.")
@click.option("--plan", "plan_only", is_flag=True, help="Print what would be done, and do nothing.")
@json_option
def stripe(directory: Path, nbytes: int, writers: int, wish: str, plan_only: bool, as_json: bool) -> int:
    """Stripe DIR for checkpoints of a given size: on Lustre with lfs setstripe, on BeeGFS with its own tool.

    Files that are made in DIR later follow it. A training does the same before its first save. Elsewhere there is
    nothing to do, which is said, with what it would be on Lustre.

    Exit code 0 when it is done, or nothing is to be done, 74 when the tool fails.
    """
    from hpcdist.checkpoint import stripe as stripes
    from hpcdist.checkpoint.config import CheckpointConfig

    striping = stripes.plan(directory, nbytes, writers, CheckpointConfig(stripe=wish).stripe)
    failure = ""
    if not plan_only and striping.command:
        directory.mkdir(parents=True, exist_ok=True)
        failure = stripes.apply(striping)
    if as_json:
        figures = {"file_system": striping.system.kind, "mount": striping.system.mount, "command": striping.command}
        click.echo(json.dumps({**figures, "why": striping.why, "failure": failure, "done": not plan_only}))
    else:
        click.echo(striping.text or "nothing to do")
        click.echo(f"{striping.why}{f'; failed: {failure}' if failure else ''}", err=True)
    return STORAGE if failure else OK


@command.command("ls")
@run_dir_argument
@json_option
def ls(run_dir: Path, as_json: bool) -> None:
    """List the checkpoints of the run in RUN_DIR, the newest first, and say of each whether it is complete.

    Manifests and the sizes of files are looked at; `hpcdist checkpoint verify` reads every byte.
    """
    from hpcdist.checkpoint import listing

    checkpoints = listing.list_checkpoints(run_dir)
    if as_json:
        click.echo(json.dumps({"checkpoints": [listing.summary(checkpoint) for checkpoint in checkpoints]}))
        return
    rows = []
    for checkpoint in checkpoints:
        manifest, reason = checkpoint.manifest, f": {checkpoint.reason}" if checkpoint.reason else ""
        size = "" if manifest is None else f"  {counted(manifest.world, 'rank')}, {format_bytes(checkpoint.nbytes)}"
        rows.append((checkpoint.path.name, checkpoint.written_utc, f"{checkpoint.state}{size}{reason}"))
    for line in aligned(rows, left=(0, 1, 2)) if rows else ():
        click.echo(line)
    click.echo(f"{counted(len(checkpoints), 'checkpoint')} in {listing.checkpoints_directory(run_dir)}", err=True)


@command.command("show")
@_PATH
@click.option("--tensors", is_flag=True, help="List every tensor with its shape.")
@json_option
def show(path: Path, tensors: bool, as_json: bool) -> None:
    """Tell what the checkpoint PATH (.../step-N) holds; of a run directory, its newest complete one."""
    from hpcdist.checkpoint import listing

    checkpoint = listing.inspect(listing.select(path))
    loaded = checkpoint.manifest
    if loaded is None:
        raise StorageError(checkpoint.reason)
    figures: dict[str, Any] = listing.summary(checkpoint) | {"scalars": loaded.scalars}
    if tensors:
        figures["tensors"] = [jsonable(tensor) | {"bytes": tensor.nbytes} for tensor in listing.stored_tensors(loaded)]
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print_figures(figures)


def _print_figures(figures: dict[str, Any]) -> None:
    click.echo(f"{figures['path']}: after {counted(figures['step'], 'step')}, written {figures['written_utc']}")
    reason = f": {figures['reason']}" if figures["reason"] else ""
    files = counted(figures["files"], "file")
    click.echo(f"{figures['state']}{reason}; {format_bytes(figures['bytes'])} in {files}")
    click.echo(f"written by {counted(figures['ranks'], 'rank')}")
    kinds = [
        (f"  {kind}", f"{sums['tensors']} tensors", f"{sums['elements']:,} elements", format_bytes(sums["bytes"]))
        for kind, sums in figures["kinds"].items()
    ]
    names = ("kind", "name", "dtype", "shape")
    tensors = [
        [f"  {tensor['kind']}", *(str(tensor[name]) for name in names[1:])] for tensor in figures.get("tensors", ())
    ]
    for line in (*(aligned(kinds) if kinds else ()), *(aligned(tensors, left=range(4)) if tensors else ())):
        click.echo(line)


@command.command("verify")
@_PATH
@json_option
def verify(path: Path, as_json: bool) -> int:
    """Read every byte of the checkpoint PATH (.../step-N), or of all that the run directory PATH has.

    Each block is compared with its digest; all damage is told with file, bytes and tensor. What a save left unfinished
    is named, and is no damage; nor is what an earlier version of hpcdist saved without a digest, which is named, too.

    Exit code 0 when nothing is damaged, 1 when something is, 74 when there is nothing to verify.
    """
    from hpcdist.checkpoint import listing
    from hpcdist.checkpoint.verify import verify as verify_checkpoint

    single = path.is_dir() and path.name.startswith("step-")
    paths = [path] if single else [verdict.path for verdict in listing.list_checkpoints(path)]
    verdicts = [verify_checkpoint(verdict) for verdict in paths]
    if as_json:
        is_damaged = any(verdict.damage for verdict in verdicts)
        click.echo(json.dumps({"damaged": is_damaged, "checkpoints": jsonable(verdicts)}))
    else:
        for verdict in verdicts:
            click.echo(f"{verdict.path}: {verdict.state}, {format_bytes(verdict.read_bytes)} read")
            for line in verdict.damage:
                click.echo(f"  {line}")
            for line in verdict.not_covered:
                click.echo(f"  not covered: {line}; an earlier version of hpcdist saved no digest of it")
    return FAILURE if any(verdict.damage for verdict in verdicts) else OK


@command.command("prune")
@run_dir_argument
@click.option("--keep", type=COUNT, default=2, help="The newest so many stay.")
@click.option("--keep-every", type=click.IntRange(min=0), default=0, help="So does the first of each so many steps.")
@click.option("--keep-best", type=click.IntRange(min=0), default=0, help="And those with the lowest validation loss.")
@click.option("--damaged", is_flag=True, help="Remove what is damaged, too, as long as one complete checkpoint stays.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option
def prune(
    run_dir: Path, keep: int, keep_every: int, keep_best: int, damaged: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove checkpoints of the run in RUN_DIR but those that the options keep.

    Only complete ones count, so the newest that can be restored always stays: it is read and verified first. What is
    being written is left alone. A run that is under way thins out its own: then nothing is removed (exit code 74).
    """
    from hpcdist.checkpoint import verify as checkpoint_verify
    from hpcdist.checkpoint.directory import Retention

    rule = Retention(keep, keep_every, keep_best)
    if dry_run:
        plan = checkpoint_verify.plan(run_dir, rule, damaged)
        removed, failed = [checkpoint.path for checkpoint in plan.doomed], dict[Path, str]()
    else:
        with checkpoint_verify.exclude_jobs(run_dir):
            plan = checkpoint_verify.plan(run_dir, rule, damaged)
            removed, failed = checkpoint_verify.remove(plan)
    if as_json:
        names = [checkpoint.path for checkpoint in plan.kept]
        click.echo(json.dumps(jsonable({"dry_run": dry_run, "removed": removed, "kept": names, "failed": failed})))
    else:
        for path in removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {path}")
        click.echo(f"kept {', '.join(checkpoint.path.name for checkpoint in plan.kept)}", err=True)
    if failed:
        raise StorageError("; ".join(f"{path} could not be removed: {why}" for path, why in failed.items()))
