"""`hpcdist evaluate`: the validation loss of a run's newest checkpoint."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
def command(run_dir: Path, as_json: bool) -> None:
    """Print the validation loss of the newest checkpoint in RUN_DIR; under a launcher the ranks share the work."""
    from hpcdist.errors import OK
    from hpcdist.training.inference import Look

    with Look(run_dir) as look:
        trained = look.load()
        figures = {"steps": trained.steps, "val_loss": trained.validation_loss()}
    if look.session.comm.rank == 0:
        click.echo(f"val_loss {figures['val_loss']:.4f} nats after {figures['steps']} steps", err=as_json)
        if as_json:
            click.echo(json.dumps(figures))
    look.session.leave(OK)
