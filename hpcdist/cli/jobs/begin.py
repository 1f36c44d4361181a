"""`hpcdist jobs begin` and `end`: decide for a job script whether to train, and whether to requeue the job.

Both run on the first node of a job, without MPI. `hpcdist.batch.ledger` contains the rules.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from hpcdist.batch import ledger
from hpcdist.batch.ledger import NewestCheckpoint
from hpcdist.batch.schedulers import slurm_allocation
from hpcdist.cli.common import DIRECTORY, FILE
from hpcdist.cli.jobs import lookup
from hpcdist.comm.record import run_journal
from hpcdist.comm.record.run_journal import JournalEntry
from hpcdist.constants import FINISHED, RECIPE_FILE, STOP_FILE
from hpcdist.errors import CONFIGURATION, OK, REQUEUE, ConfigurationError, StorageError
from hpcdist.reporting import atomic, regular

GO: Final = "go"
DONE: Final = "done"

_RUN_DIR = click.argument("run_dir", type=DIRECTORY)
_JOB = click.option("--job", required=True, help="Job number.")
_RESTART = click.option("--restart", type=click.IntRange(min=0), default=0, help="Number of earlier requeues.")


def newest_checkpoint(run_dir: Path) -> NewestCheckpoint:
    """Return the newest complete or reported checkpoint of ``run_dir``, or an empty `NewestCheckpoint`. Local."""
    from hpcdist.cli.runs.progress import reported_checkpoints

    return next((NewestCheckpoint(*item) for item in reported_checkpoints(run_dir).items()), NewestCheckpoint())


@click.command("begin")
@_RUN_DIR
@_JOB
@_RESTART
@click.option(
    "--most-fruitless",
    type=click.IntRange(min=0),
    default=3,
    help="Refuse to start after this many consecutive starts without a new checkpoint; 0: never refuse.",
)
@click.option(
    "--recipe", "recipe_file", type=FILE, help="Recipe that this start trains.  [default: recipe.toml in RUN_DIR]"
)
@click.option("--program", help="Command that this start runs instead of a recipe.")
def begin(
    run_dir: Path, job: str, restart: int, most_fruitless: int, recipe_file: Path | None, program: str | None
) -> None:
    """Record the start of a job in the journal of RUN_DIR. Print `go`, or `done` if the run has all its steps.

    --restart: number of earlier requeues. Exits with code 78 if the last N starts made no new checkpoint, where N is
    --most-fruitless. The count restarts at 0 if the recipe changes, or if a --program (run instead of a recipe)
    succeeds.
    """
    from hpcdist.training.recipe import recipe as recipes

    recipe_of_run = run_dir / RECIPE_FILE
    stored = recipe_of_run if recipe_file is None else recipe_file
    has_recipe = program is None and (recipe_file is not None or stored.exists())
    recipe = recipes.load_stored(stored) if has_recipe else None
    digest = (program or "") if recipe is None else recipes.digest(recipe)
    entries, saved = _entries(run_dir), newest_checkpoint(run_dir)
    if program is not None:
        entries = _since_success(entries)
    # Compare with the recipe that the directory was made for: more steps continue that run, another model does not.
    is_this = (
        recipe is None
        or not recipe_of_run.exists()
        or not recipes.contradictions(recipes.load_stored(recipe_of_run), recipe)
    )
    # A recipe that contradicts the run is not called complete here: the training refuses it, and names the keys.
    if recipe is not None and is_this and saved.step >= recipe.run.steps and _has_ended_well(run_dir, entries):
        _end(run_dir, job, restart, OK, saved, ledger.STOP)
        lookup.say(f"the run in {run_dir} has all its {recipe.run.steps} steps")
        click.echo(DONE)
        return
    vain = ledger.fruitless_starts(entries, saved, digest)
    if 0 < most_fruitless <= len(vain):
        _end(run_dir, job, restart, CONFIGURATION, saved, ledger.STOP)
        raise ConfigurationError(_refusal(run_dir, vain, saved))
    _forget_stop(run_dir, job)
    # Written before the training: if this start is killed, the next start finds an entry without an end.
    origin = {"from": saved.name, "saved_ns": saved.ns, "recipe": digest, "nodes": ledger.node_count()}
    ledger.record(run_dir, ledger.BEGAN, job=job, restart=restart, **origin)
    ledger.register_run(run_dir)
    click.echo(GO)


def _entries(run_dir: Path) -> list[JournalEntry]:
    try:
        return ledger.read(run_dir)
    except StorageError as error:
        if not regular.is_damage(error):
            lookup.say(f"{error}; the file stays as it is, and the outcome of earlier jobs is unknown")
            return []
        aside = atomic.set_aside(run_dir / run_journal.JOURNAL_FILE)
        if aside is None:
            raise
        lookup.say(f"{error}; it was renamed to {aside.name}, and the outcome of earlier jobs is unknown")
        return []


def _since_success(entries: list[JournalEntry]) -> list[JournalEntry]:
    well = [index for index, entry in enumerate(entries) if entry.event == ledger.ENDED and entry.number("code") == OK]
    return entries[well[-1] + 1 :] if well else entries


def _refusal(run_dir: Path, vain: list[JournalEntry], saved: NewestCheckpoint) -> str:
    starts = ", ".join(dict.fromkeys(entry.job for entry in vain[-5:]))
    return (
        f"the last {len(vain)} starts of {run_dir} (job {starts}) began at {saved.name or 'step 0'} and made no new "
        f"checkpoint, so another start is refused; see why with `hpcdist jobs log {run_dir}`. Change the recipe, "
        "or start anyway with --most-fruitless 0"
    )


def _has_ended_well(run_dir: Path, entries: list[JournalEntry]) -> bool:
    run_entries = [entry for entry in entries if entry.event in (ledger.BEGAN, ledger.ENDED)]
    if run_entries:
        return run_entries[-1].event == ledger.ENDED and run_entries[-1].number("code") == OK
    starts = run_journal.known_starts(run_dir)  # trained without jobs
    return bool(starts) and starts[-1].end == FINISHED


def _forget_stop(run_dir: Path, job: str) -> None:
    # Only a stop file that `hpcdist jobs cancel` wrote for another job is removed.
    path = run_dir / STOP_FILE
    try:
        if regular.read(path, 4096).decode(errors="replace").split() not in ([], [job]):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        lookup.say(f"{path} cannot be read or removed ({error.strerror or error}): the run stops while it exists")


@click.command("end")
@_RUN_DIR
@_JOB
@_RESTART
@click.option("--code", type=int, required=True, help="Exit code of the training.")
@click.option("--preempted", is_flag=True, help="The scheduler has announced that it preempts this job.")
def end(run_dir: Path, job: str, restart: int, code: int, preempted: bool) -> None:
    """Record the end of one start of a job in the journal of RUN_DIR. Print `again`, `stop` or `cancelled`.

    `again` means that the job should be requeued. --code is the exit code of the training. After code 75 (training
    stopped before its last step), `again` is printed unless two consecutive starts made no new checkpoint.

    After a failure, `again` is printed if a node no longer answers, or if the previous start of the job lost a node or
    was killed. It is also printed if the job was preempted before its training ended.

    `cancelled` is printed if `hpcdist jobs cancel` stopped the training. `stop` is printed in all other cases.
    """
    saved = newest_checkpoint(run_dir)
    entries: list[JournalEntry] = []
    try:
        entries = ledger.read(run_dir)
    except StorageError as error:
        lookup.say(f"warning: {error}")
    verdict = ledger.decide(
        entries, job, restart, code, saved, preempted=preempted, lost_nodes=lambda: slurm_allocation.lost_nodes()[0]
    )
    try:
        _end(run_dir, job, restart, code, saved, verdict.word, verdict.lost)
    except StorageError as error:  # the decision is valid without the record
        lookup.say(f"warning: {error}")
    lookup.say(verdict.reason)
    ledger_job = ledger.jobs(entries).get(job)
    is_cancelled = code == REQUEUE and ledger_job is not None and ledger_job.is_to_save
    click.echo(ledger.CANCELLED if is_cancelled else verdict.word)


def _end(
    run_dir: Path, job: str, restart: int, code: int, saved: NewestCheckpoint, word: str, lost: Sequence[str] = ()
) -> None:
    values = {"code": code, "newest": saved.name, "saved_ns": saved.ns, "word": word}
    ledger.record(run_dir, ledger.ENDED, job=job, restart=restart, **values, **({"lost": list(lost)} if lost else {}))
