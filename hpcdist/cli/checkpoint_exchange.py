"""`hpcdist checkpoint export` and `import`: to and from safetensors and PyTorch state dicts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.checkpoint.convert.importing import ImportedCheckpoint


def _bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    from hpcdist.reporting.units import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("export")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--optimizer", is_flag=True, help="Everything that a training needs to go on, not the parameters alone.")
@click.option(
    "--shard-bytes", callback=_bytes, default="5G", help="safetensors: cut into files of at most so many bytes."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    from hpcdist.errors import UsageError
    from hpcdist.reporting.units import counted, format_bytes

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
    nbytes = sum(one.nbytes for one in tensors)
    if as_json:
        figures: dict[str, Any] = {"checkpoint": str(checkpoint), "tensors": len(tensors), "bytes": nbytes}
        click.echo(json.dumps(figures | {"files": [str(file) for file in files]}))
        return
    click.echo(f"{counted(len(tensors), 'tensor')}, {format_bytes(nbytes)}, of {checkpoint}", err=True)
    for file in files:
        click.echo(file)


@click.command("import")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("run_dir", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--recipe",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Recipe of the model: the tensors are held against it, and it is kept in DIR.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of --recipe, e.g. run.steps=50."
)
@click.option("--step", type=click.IntRange(min=0), help="Step that it is of.  [default: what an export knows, else 0]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_(
    source: Path, run_dir: Path, recipe: Path | None, overrides: tuple[str, ...], step: int | None, as_json: bool
) -> None:
    """Make the first checkpoint of a run in DIR of IN: safetensors, or a state dict of PyTorch.

    IN may be a file, an index of several, or a directory with either. It is opened in a process of its own, with
    limits of memory and time and without a network, and no pickled code is run: a file that is damaged or hostile is
    an error message. With --recipe, DIR is a run that `hpcdist sample` knows; `hpcdist train --resume auto` goes on
    from what was exported with --optimizer.
    """
    from hpcdist.checkpoint.convert.importing import ForeignFile, import_checkpoint
    from hpcdist.errors import UsageError

    if overrides and recipe is None:
        raise UsageError("--set changes a key of --recipe; give that too")
    inputs, keys = None, None
    if recipe is not None:
        from hpcdist.training import adoption

        with ForeignFile(source) as file:
            known = file.metadata.get("scalars", {}).get("model_inputs", {})
            inputs, keys = adoption.prepare(run_dir, recipe, overrides, file.tensors, known)
    found = import_checkpoint(source, run_dir, step, inputs, keys)
    if as_json:
        click.echo(json.dumps(_figures(found)))
    else:
        _tell(found)


def _figures(found: "ImportedCheckpoint") -> dict[str, Any]:
    return {
        "checkpoint": str(found.path),
        "format": found.format,
        "step": found.step,
        "tensors": len(found.tensors),
        "bytes": sum(one.nbytes for one in found.tensors),
        "left_out": list(found.left_out),
        "not_confined": found.not_confined,
        "resumable": found.resumable,
    }


def _tell(found: "ImportedCheckpoint") -> None:
    from hpcdist.reporting.units import counted, format_bytes

    nbytes = sum(one.nbytes for one in found.tensors)
    click.echo(found.path)
    click.echo(f"{counted(len(found.tensors), 'tensor')}, {format_bytes(nbytes)}, from {found.format}", err=True)
    if found.left_out:
        click.echo(f"left out, being no tensors of a known type: {', '.join(found.left_out[:8])}", err=True)
    if found.not_confined:
        click.echo(f"the process that opened it had limits, but a network: {found.not_confined}", err=True)
    if not found.resumable:
        click.echo("it has no state of an optimizer: a training cannot go on from it", err=True)
