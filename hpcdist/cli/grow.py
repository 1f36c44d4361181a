"""`hpcdist grow`: a training that outlives its ranks takes in more."""

from pathlib import Path

import click

from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.reporting import atomic


@click.command("grow")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("ranks", type=click.IntRange(min=1))
def command(run_dir: Path, ranks: int) -> None:
    """Let RANKS more ranks join the training in RUN_DIR after its next step.

    It must have been started by `hpcdist run --survive`. Its launcher starts them, on the machines that it has; the
    global batch stays what it is, so each rank has less to do. Another call before they have come takes the place of
    the first.
    """
    from hpcdist.training.survival import GROW_FILE

    check(run_dir)
    try:
        atomic.write(run_dir / GROW_FILE, f"{ranks}\n")
    except OSError as error:
        raise StorageError(f"{run_dir / GROW_FILE} cannot be written: {error.strerror}") from error
    click.echo(f"asked for {ranks} more: {run_dir / GROW_FILE} is there until they have come", err=True)


def check(run_dir: Path) -> None:
    """Raise ConfigurationError where no training runs in ``run_dir`` that can take in ranks."""
    from hpcdist.checkpoint.lock import LOCK_FILE
    from hpcdist.training import starts
    from hpcdist.training.directory import RECIPE_FILE

    if not (run_dir / RECIPE_FILE).exists():
        raise ConfigurationError(f"{run_dir} holds no run of hpcdist; give the --out of the training")
    try:
        found = starts.read(run_dir / starts.STARTS_FILE)
    except (OSError, ValueError, TypeError):
        found = []
    if not found or found[-1].end or not (run_dir / LOCK_FILE).exists():
        raise ConfigurationError(
            f"nothing trains in {run_dir} now; start it with that many ranks: hpcdist run -n RANKS train ... --resume "
            "auto"
        )
    if not found[-1].survives:
        raise ConfigurationError(
            f"the training in {run_dir} has a fixed number of ranks; stop it (touch {run_dir}/stop), and start it with "
            "more, or with `hpcdist run --survive`"
        )
