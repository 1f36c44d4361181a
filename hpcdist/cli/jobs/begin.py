"""`hpcdist jobs begin` and `end`: decide for the script of a job whether it trains, and whether it is requeued.

Both run on the first node of a job, without MPI, and answer with one word on stdout: `begin` with go or done, `end`
with again, stop or cancelled; the reason goes to stderr. `hpcdist.batch.requeue` decides.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from hpcdist.batch import ledger, requeue
from hpcdist.batch.job import RECIPE_FILE
from hpcdist.batch.requeue import STOP_FILE, NewestCheckpoint
from hpcdist.batch.schedulers.slurm import allocation
from hpcdist.cli.common import DIRECTORY, FILE
from hpcdist.cli.jobs import lookup
from hpcdist.errors import CONFIGURATION, OK, REQUEUE, ConfigurationError, StorageError
from hpcdist.reporting import atomic, regular

GO: Final = "go"
DONE: Final = "done"

_RUN_DIR = click.argument("run_dir", type=DIRECTORY)
_JOB = click.option("--job", required=True, help="Number of the job.")
_RESTART = click.option("--restart", type=click.IntRange(min=0), default=0, help="How often it was requeued before.")


def newest_checkpoint(run_dir: Path) -> NewestCheckpoint:
    """Return the newest checkpoint of the run in ``run_dir``, by the names of those that are complete (local)."""
    from hpcdist.cli.run import checkpoints

    return next((NewestCheckpoint(*item) for item in checkpoints(run_dir).items()), NewestCheckpoint())


@click.command("begin")
@_RUN_DIR
@_JOB
@_RESTART
@click.option(
    "--most-fruitless",
    type=click.IntRange(min=0),
    default=3,
    help="Begin no more after so many starts in a row without a new checkpoint; 0: always begin.",
)
@click.option(
    "--recipe", "recipe_file", type=FILE, help="The recipe that this start trains.  [default: recipe.toml in RUN_DIR]"
)
@click.option("--program", help="In place of a recipe: the command that this start runs.")
def begin(
    run_dir: Path, job: str, restart: int, most_fruitless: int, recipe_file: Path | None, program: str | None
) -> None:
    """Enter the start of a job in the ledger of RUN_DIR, and print `go`; or `done` when the run has all its steps.

    A run that comes back again and again without a new checkpoint is refused with exit code 78; a changed recipe
    begins the count anew. Of a program nobody knows how many steps it has to make: it always begins, unless the starts
    since it last ended well were in vain.
    """
    from hpcdist.training.recipe import recipe as recipes

    recipe_of_run = run_dir / RECIPE_FILE
    stored = recipe_of_run if recipe_file is None else recipe_file
    known = program is None and (recipe_file is not None or stored.exists())
    recipe = recipes.load_stored(stored) if known else None
    digest = (program or "") if recipe is None else recipes.digest(recipe)
    entries, saved = _entries(run_dir), newest_checkpoint(run_dir)
    if program is not None:
        entries = _since_success(entries)
    # The recipe that the directory was made for, if it has one: more steps are the same run, another model is not.
    is_this = (
        recipe is None
        or not recipe_of_run.exists()
        or not recipes.contradictions(recipes.load_stored(recipe_of_run), recipe)
    )
    # A recipe that contradicts it is not called complete here: the training refuses it, and names the keys.
    if recipe is not None and is_this and saved.step >= recipe.run.steps and _has_ended_well(run_dir, entries):
        _end(run_dir, job, restart, OK, saved, ledger.STOP)
        lookup.say(f"the run in {run_dir} has all its {recipe.run.steps} steps")
        click.echo(DONE)
        return
    vain = requeue.fruitless_starts(entries, saved, digest)
    if 0 < most_fruitless <= len(vain):
        _end(run_dir, job, restart, CONFIGURATION, saved, ledger.STOP)
        raise ConfigurationError(_refusal(run_dir, vain, saved))
    _forget_stop(run_dir, job)
    # Written before the training: if this start is killed, the entry without an end is what tells the next one.
    origin = {"from": saved.name, "saved_ns": saved.ns, "recipe": digest, "nodes": requeue.node_count()}
    ledger.record(run_dir, ledger.BEGAN, job=job, restart=restart, **origin)
    ledger.register_run(run_dir)
    click.echo(GO)


def _entries(run_dir: Path) -> list[ledger.LedgerEntry]:
    """Return the ledger of ``run_dir``; one that cannot be read keeps no job from its start."""
    try:
        return ledger.read(run_dir)
    except StorageError as error:
        if not regular.is_damage(error):
            lookup.say(f"{error}; it stays as it is, and what became of earlier jobs is not known")
            return []
        aside = atomic.set_aside(run_dir / ledger.FILE_NAME)
        if aside is None:
            raise
        lookup.say(f"{error}; it is now {aside.name}, and what became of earlier jobs is not known")
        return []


def _since_success(entries: list[ledger.LedgerEntry]) -> list[ledger.LedgerEntry]:
    """Return what follows the last start that ended with exit code 0."""
    well = [index for index, entry in enumerate(entries) if entry.event == ledger.ENDED and entry.number("code") == OK]
    return entries[well[-1] + 1 :] if well else entries


def _refusal(run_dir: Path, vain: list[ledger.LedgerEntry], saved: NewestCheckpoint) -> str:
    starts = ", ".join(dict.fromkeys(entry.job for entry in vain[-5:]))
    return (
        f"the last {len(vain)} starts of {run_dir} (job {starts}) began at {saved.name or 'the beginning'} and made no "
        f"new checkpoint, and the next would not either; `hpcdist jobs log {run_dir}` tells why. Change the recipe, or "
        "begin nevertheless with --most-fruitless 0"
    )


def _has_ended_well(run_dir: Path, entries: list[ledger.LedgerEntry]) -> bool:
    """Whether nothing is left to do after the last step: its start was not killed while it evaluated the model."""
    from hpcdist.training.run import start_record

    own = [entry for entry in entries if entry.event in (ledger.BEGAN, ledger.ENDED)]
    if own:
        return own[-1].event == ledger.ENDED and own[-1].number("code") == OK
    starts = start_record.known_starts(run_dir)  # trained without jobs
    return bool(starts) and starts[-1].end == start_record.FINISHED


def _forget_stop(run_dir: Path, job: str) -> None:
    """Remove a stop file that `hpcdist jobs cancel` wrote for another job, which ended before it had looked.

    One that names no job is somebody's own wish, and stays.
    """
    path = run_dir / STOP_FILE
    try:
        if regular.read(path, 4096).decode(errors="replace").split() not in ([], [job]):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        lookup.say(f"{path} cannot be looked at or removed ({error.strerror or error}): a run stops while it is there")


@click.command("end")
@_RUN_DIR
@_JOB
@_RESTART
@click.option("--code", type=int, required=True, help="Exit code of the training.")
@click.option("--preempted", is_flag=True, help="The scheduler has said that it takes the nodes from this job.")
def end(run_dir: Path, job: str, restart: int, code: int, preempted: bool) -> None:
    """Enter the end of a job's start in the ledger of RUN_DIR, and print what comes next: `again` or `stop`.

    It is `again` when the training was stopped to go on (exit code 75) and this start has made a new checkpoint. A
    start that was stopped before it could save is made once more. It is `again` too when the training failed and a node
    of a Slurm job does not answer any more, or the start before lost a node or was killed, whose steps Slurm may still
    be ending; and whenever the job was preempted before its training ended: such starts without a new checkpoint are
    bounded by `begin` alone. It is `cancelled` when `jobs cancel` has stopped it: nothing is lost, and the job ends
    with exit code 0.
    """
    saved = newest_checkpoint(run_dir)
    entries: list[ledger.LedgerEntry] = []
    try:
        entries = ledger.read(run_dir)
    except StorageError as error:
        lookup.say(f"warning: {error}")
    verdict = requeue.decide(
        entries, job, restart, code, saved, preempted=preempted, lost_nodes=lambda: allocation.lost_nodes()[0]
    )
    try:
        _end(run_dir, job, restart, code, saved, verdict.word, verdict.lost)
    except StorageError as error:  # the decision stands without it
        lookup.say(f"warning: {error}")
    lookup.say(verdict.reason)
    own = ledger.jobs(entries).get(job)
    is_cancelled = code == REQUEUE and own is not None and own.is_to_save
    click.echo(ledger.CANCELLED if is_cancelled else verdict.word)


def _end(
    run_dir: Path, job: str, restart: int, code: int, saved: NewestCheckpoint, word: str, lost: Sequence[str] = ()
) -> None:
    """Enter the end of a start in the ledger. Raises StorageError."""
    values = {"code": code, "newest": saved.name, "saved_ns": saved.ns, "word": word}
    ledger.record(run_dir, ledger.ENDED, job=job, restart=restart, **values, **({"lost": list(lost)} if lost else {}))
