"""`hpcdist checkpoint`: list, show, verify, prune, stripe, export and import checkpoints."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.common import (
    BYTE_SIZE,
    COUNT,
    DIRECTORY,
    FILE,
    PATH,
    averaged_option,
    json_option,
    run_dir_argument,
    set_option,
)
from hpcdist.errors import FAILURE, OK, STORAGE, StorageError, UsageError
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import counted, format_bytes

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.checkpoint.convert.importing import ImportedCheckpoint
_PATH = click.argument("path", type=PATH)


@click.group()
def command() -> None:
    """List, verify, prune, export and import checkpoints. Needs neither MPI nor the recipe."""


@command.command("export")
@_PATH
@click.argument("out")
@click.option("--optimizer", is_flag=True, help="Also export what a training needs to resume, such as optimizer state.")
@averaged_option
@click.option("--shard-bytes", type=BYTE_SIZE, default="5G", help="Maximum size of each safetensors file.")
@click.option("--replace", is_flag=True, help="Replace an existing Hugging Face directory, in one step.")
@click.option("--adapters", is_flag=True, help="Write only the low-rank adapters, to a directory of PEFT.")
@json_option
def export(
    path: Path,
    out: str,
    optimizer: bool,
    averaged: bool,
    shard_bytes: int,
    replace: bool,
    adapters: bool,
    as_json: bool,
) -> None:
    """Write the parameters of the checkpoint PATH, or of a run's newest checkpoint, to OUT.

    If OUT is a directory or ends in /, OUT becomes a Hugging Face directory with config.json, which transformers loads.
    Low-rank adapters are merged into the weights, unless you add --adapters.
    Otherwise the suffix of OUT selects the format: .safetensors, or .pt, .pth or .bin for a PyTorch state dict. Without
    a suffix, the file is OUT/model.safetensors. Tensors are named by layer and parameter, e.g. 3.qkv.weight, but
    tensors of your own PyTorch model keep the module names. Every byte of the checkpoint is verified. The model may be
    larger than the memory. A PyTorch export needs twice the disk space.
    """
    from hpcdist.checkpoint import listing
    from hpcdist.checkpoint.convert import exporting, huggingface_export, safetensors, torch_state

    checkpoint, target = listing.select(path), Path(out)
    loaded = listing.load_usable(checkpoint)
    tensors = exporting.tensors_to_export(loaded, optimizer, averaged)
    is_directory = target.is_dir() or out.endswith("/")
    target = target if is_directory or target.suffix else target / "model.safetensors"
    if (replace or adapters or is_directory) and (optimizer or not is_directory):
        raise UsageError(
            "--replace and --adapters need an OUT that is a directory or ends in /, and such a directory has no "
            "--optimizer state"
        )
    if is_directory:
        from hpcdist.checkpoint.convert import families
        from hpcdist.checkpoint.convert.adapters import CONFIG
        from hpcdist.training.run_directory import plan_stored_export

        huggingface_export.check_target(target, replace, CONFIG if adapters else families.CONFIG)
        plan = plan_stored_export(checkpoint, target, replace=replace, shard_bytes=shard_bytes, only_adapters=adapters)
        files = huggingface_export.export_directory(plan, checkpoint, tensors)
    elif target.suffix == safetensors.SUFFIX:
        files = safetensors.write(checkpoint, loaded, tensors, target, shard_bytes)
    elif target.suffix in torch_state.SUFFIXES:
        files = torch_state.write(checkpoint, loaded, tensors, target, nested=optimizer)
    else:
        suffixes = ", ".join((safetensors.SUFFIX, *torch_state.SUFFIXES))
        raise UsageError(f"{out}: unknown format {target.suffix!r}; the name must end with one of {suffixes}, or /")
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
@click.option("--recipe", type=FILE, help="Recipe of the model, checked against the tensors and copied to DIR.")
@set_option
@click.option("--step", type=click.IntRange(min=0), help="Training step of the checkpoint.  [default: from IN, else 0]")
@json_option
def import_(
    source: Path, run_dir: Path, recipe: Path | None, overrides: tuple[str, ...], step: int | None, as_json: bool
) -> None:
    """Import IN, a safetensors file, a PyTorch state dict or a Hugging Face directory, as the first checkpoint of DIR.

    IN is a file, an index of several files, or a directory with either. A directory with a config.json is a model of
    Hugging Face, of the family llama, mistral, qwen2, qwen3 or gpt2: the recipe in DIR gets its [model] section. Its
    tensors may also be a checkpoint of torch.distributed.checkpoint. A .gguf file of the llama architecture has both
    its settings and its tokenizer. No pickled code is executed. With --recipe, `hpcdist sample` can use DIR. If IN was
    written by `hpcdist checkpoint export --optimizer`, `hpcdist train --resume auto` can resume from DIR.
    """
    from hpcdist.checkpoint.convert import families
    from hpcdist.checkpoint.convert.importing import ForeignFile, import_checkpoint
    from hpcdist.training.recipe import recipe as recipes
    from hpcdist.training.use_cases import import_checkpoint as imported_run

    is_model = families.is_source(source)
    if overrides and recipe is None and not is_model:
        raise UsageError("--set changes keys of --recipe; add --recipe")
    inputs, keys = None, None
    if recipe is not None and not is_model:
        with ForeignFile(source) as file:
            model_inputs = file.metadata.get("scalars", {}).get("model_inputs", {})
            loaded = recipes.load(recipe, overrides).recipe
            inputs, keys = imported_run.prepare_imported_run(run_dir, loaded, file.tensors, model_inputs)
    if is_model:
        imported = imported_run.import_directory(source, run_dir, recipe, overrides, step)
    else:
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
        click.echo(f"skipped, not tensors of a known type: {', '.join(imported.left_out[:8])}", err=True)
    if not imported.resumable:
        click.echo("no optimizer state was imported: a training cannot resume from this checkpoint", err=True)


@command.command("stripe")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--bytes", "nbytes", type=BYTE_SIZE, default="1G", help="Expected checkpoint size, e.g. 500M or 40G.")
@click.option("--writers", type=COUNT, default=1, help="Number of ranks that write concurrently.")
@click.option("--set", "wish", default="auto", metavar="OPTIONS", help="As checkpoint.stripe: auto, none, or options.")
@click.option("--plan", "plan_only", is_flag=True, help="Print the striping command without running it.")
@json_option
def stripe(directory: Path, nbytes: int, writers: int, wish: str, plan_only: bool, as_json: bool) -> int:
    """Stripe the directory DIR for checkpoints of a given size, by lfs setstripe on Lustre or by BeeGFS's tool.

    The stripe count is computed for --bytes bytes that --writers ranks write together. --set replaces the computed
    options. --plan prints the command without running it. The striping applies to files created in DIR later. On other
    file systems the settings for Lustre are printed.

    Exit code 0: success, or nothing to do. 74: the striping tool failed.
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
    """List the checkpoints of the run in RUN_DIR, newest first: complete, unfinished or damaged.

    Only manifests and file sizes are checked; `hpcdist checkpoint verify` reads every byte.
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
    """Print the content of the checkpoint PATH (.../step-N), or of the newest complete checkpoint of the run PATH."""
    from hpcdist.checkpoint import listing

    checkpoint = listing.inspect(listing.select(path))
    loaded = checkpoint.manifest
    if loaded is None:
        raise StorageError(checkpoint.reason)
    figures: dict[str, Any] = listing.summary(checkpoint) | {"scalars": loaded.scalars}
    if tensors:
        stored = [(jsonable(tensor), tensor.nbytes) for tensor in listing.stored_tensors(loaded)]
        figures["tensors"] = [{name: about[name] for name in _COLUMNS} | {"bytes": size} for about, size in stored]
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print_figures(figures)


_COLUMNS = "kind", "name", "dtype", "shape"  # of a stored tensor


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
    tensors = [
        [f"  {tensor['kind']}", *(str(tensor[name]) for name in _COLUMNS[1:])] for tensor in figures.get("tensors", ())
    ]
    for line in (*(aligned(kinds) if kinds else ()), *(aligned(tensors, left=range(4)) if tensors else ())):
        click.echo(line)


@command.command("verify")
@_PATH
@json_option
def verify(path: Path, as_json: bool) -> int:
    """Read every byte of the checkpoint PATH (.../step-N), or of all checkpoints of the run directory PATH.

    Damage is printed with file, byte range and tensor. Incomplete saves, and files without digests, are printed but do
    not count as damage.

    Exit code 0: no damage. 1: damage. 74: nothing to verify.
    """
    from hpcdist.checkpoint import listing

    single = path.is_dir() and path.name.startswith("step-")
    paths = [path] if single else [verdict.path for verdict in listing.list_checkpoints(path)]
    verdicts = [listing.verify(verdict) for verdict in paths]
    if as_json:
        is_damaged = any(verdict.damage for verdict in verdicts)
        click.echo(json.dumps({"damaged": is_damaged, "checkpoints": jsonable(verdicts)}))
    else:
        for verdict in verdicts:
            click.echo(f"{verdict.path}: {verdict.state}, {format_bytes(verdict.read_bytes)} read")
            for line in verdict.damage:
                click.echo(f"  {line}")
            for line in verdict.not_covered:
                click.echo(f"  not verified: {line}; an older version of hpcdist saved it without a digest")
    return FAILURE if any(verdict.damage for verdict in verdicts) else OK


@command.command("prune")
@run_dir_argument
@click.option("--keep", type=COUNT, default=2, help="Number of newest checkpoints to keep.")
@click.option("--keep-every", type=click.IntRange(min=0), default=0, help="Also keep one checkpoint per N steps.")
@click.option("--keep-best", type=click.IntRange(min=0), default=0, help="Also keep N with the lowest validation loss.")
@click.option("--damaged", is_flag=True, help="Also remove damaged checkpoints if a complete one remains.")
@click.option("--dry-run", is_flag=True, help="Print the checkpoints to remove without removing them.")
@json_option
def prune(
    run_dir: Path, keep: int, keep_every: int, keep_best: int, damaged: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove the checkpoints of the run in RUN_DIR that no --keep option selects.

    Incomplete checkpoints are neither counted nor removed. Damaged checkpoints are removed only with --damaged. The
    newest restorable checkpoint is always kept; it is verified first. While a job of the run is running, this command
    removes nothing (exit code 74).
    """
    from hpcdist.checkpoint import listing
    from hpcdist.checkpoint.directory import Retention

    rule = Retention(keep, keep_every, keep_best)
    if dry_run:
        plan = listing.plan_pruning(run_dir, rule, damaged)
        removed, failed = [checkpoint.path for checkpoint in plan.doomed], dict[Path, str]()
    else:
        with listing.exclude_jobs(run_dir):
            plan = listing.plan_pruning(run_dir, rule, damaged)
            removed, failed = listing.prune(plan)
    if as_json:
        names = [checkpoint.path for checkpoint in plan.kept]
        click.echo(json.dumps(jsonable({"dry_run": dry_run, "removed": removed, "kept": names, "failed": failed})))
    else:
        for path in removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {path}")
        click.echo(f"kept {', '.join(checkpoint.path.name for checkpoint in plan.kept)}", err=True)
    if failed:
        raise StorageError("; ".join(f"{path} could not be removed: {why}" for path, why in failed.items()))
