"""`hpcdist evaluate`: the validation loss of a run's newest checkpoint."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--trust", is_flag=True, help="Execute the model.factory of the run's recipe, whoever wrote it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
def command(run_dir: Path, trust: bool, as_json: bool) -> None:
    """Print the validation loss of the newest checkpoint in RUN_DIR; under a launcher the ranks share the work.

    A model that its recipe imports (model.kind = 'import') is made by code: it is executed where the file is the one
    that you trained it with, and else with --trust alone.
    """
    from hpcdist.errors import OK
    from hpcdist.training.inference import Look

    with Look(run_dir) as look:
        trained = look.load(trust)
        figures = {"steps": trained.steps, "val_loss": trained.validation_loss()}
    if look.session.comm.rank == 0:
        click.echo(f"val_loss {figures['val_loss']:.4f} nats after {figures['steps']} steps", err=as_json)
        if as_json:
            click.echo(json.dumps(figures))
    look.session.leave(OK)
