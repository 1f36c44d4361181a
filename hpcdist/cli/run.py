"""`hpcdist run`: start one command on N ranks, on a workstation or inside a batch job.

It starts ranks with the launcher at hand (mpirun, srun and others), starts them again after a failure (--restarts)
from the newest checkpoint and without lost nodes, checks beforehand what every rank of a training would refuse, and
shows the failure of the rank that failed first. It also lists the complete checkpoints of a run, without MPI.
"""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from hpcdist.batch.schedulers.slurm.allocation import SlurmAllocation
from hpcdist.checkpoint.lock import RunLock, is_dead
from hpcdist.cli.common import COUNT, DIRECTORY
from hpcdist.cli.main import COMMANDS
from hpcdist.comm.failure.failfast import FAILURE_DIR
from hpcdist.comm.launch import exit_file, launchers, mpirun, restarts, supervisor
from hpcdist.comm.launch.environment import (
    ENERGY,
    RESUME,
    RUN_DIR,
    interpreter_words,
    launch_environment,
    launcher_options,
    python_path_variables,
)
from hpcdist.errors import INTERRUPTED, OK, REQUEUE, UsageError

_LAUNCH_PREFIX = "hpcdist-run-"
_OWNER_FILE = "owner.json"  # says whose a directory with this prefix is
# What starts ranks itself, or asks for none.
_ONE_PROCESS_COMMANDS = ("run", "submit", "jobs", "grow", "bench", "compare", "plan")

_OUR_PYTHON = ("python", "python3")  # ours: that of PATH need not have hpcdist


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, no_args_is_help=True
)
@click.option("-n", "--ranks", type=COUNT, required=True, help="Number of ranks.")
@click.option("--ranks-per-node", type=COUNT, help="Ranks on each node.  [default: the launcher's]")
@click.option("--cpus-per-task", type=COUNT, help="Cores and threads of a rank.  [default: job's or 1]")
@click.option(
    "--launcher",
    default=launchers.AUTO,
    show_default=False,
    metavar="NAME",
    help=f"What starts the ranks: {', '.join(launchers.KINDS)}.  [default: ${launchers.VARIABLE}, else mpirun]",
)
@click.option("--pmi", metavar="TYPE", help="How ranks find each other, e.g. pmix or pmi2.  [default: the launcher's]")
@click.option("--mpi-args", default="", help="Further options of the launcher, in one string; they win over ours.")
@click.option("--python", metavar="WORDS", help="What runs hpcdist on the ranks, e.g. 'apptainer exec my.sif python3'.")
@click.option("--grace", default=30.0, type=click.FloatRange(min=0.0), help="Seconds the ranks have to save and stop.")
@click.option(
    "--restarts",
    "most_restarts",
    default=0,
    type=click.IntRange(min=0),
    help="How often a failed `train --out DIR` is started again, from its newest checkpoint.",
)
@click.option(
    "--survive",
    type=click.Choice(exit_file.SURVIVE_MODES),
    help="Let `train` outlive dead ranks: with fewer, or with new ones in their place (Open MPI 5).",
)
@click.option("--spares", type=COUNT, help="Ranks more that wait to replace a dead one, with --survive replace.")
@click.option("--out", type=DIRECTORY, help="Run directory of the Training in a script, whatever the script says.")
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    help="Whether that Training goes on from its newest checkpoint, whatever the script says.",
)
@click.option("--energy", is_flag=True, help="Print at its end the joules of a script over `hpcdist.torch`.")
@click.option("--dry-run", is_flag=True, help="Print the command line and start nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int,
    ranks_per_node: int | None,
    cpus_per_task: int | None,
    launcher: str,
    pmi: str | None,
    mpi_args: str,
    python: str | None,
    grace: float,
    most_restarts: int,
    survive: str | None,
    spares: int | None,
    out: Path | None,
    resume: str | None,
    energy: bool,
    dry_run: bool,
    command: tuple[str, ...],
) -> int:
    """Start the hpcdist COMMAND, or any program, on several ranks.

    For example `hpcdist run -n 2 train recipe.toml`, or `hpcdist run -n 2 -- python train.py --my-option`.

    The mpirun is that of this Python's environment, else the first on PATH; the other launchers belong to a site.
    Ctrl-C, SIGTERM and SIGUSR1 reach the ranks, which save and stop at the next step (exit code 130, or 75 for the
    scheduler to start them again), or at once while there is nothing to save; a second Ctrl-C, or the end of the
    grace, kills them. The first failure of a rank is shown last.

    With --restarts, a training that fails is started again with `--resume auto`, on the nodes that are left, but not
    after exit codes 0, 2, 69, 75, 78 and 130, a signal to stop, or two starts in a row without a new checkpoint. With
    --survive, the others go on when ranks die, not when a node does, which ends Open MPI's mpirun. Both go together.

    A script that makes a `hpcdist.training.pytorch.Training` gets all of this but --survive; --out is for --restarts to
    know its checkpoints. `python` is the Python of hpcdist, or --python. A program without hpcdist is started, its exit
    code is returned, and signals are passed on to it.
    """
    script, options, interpreter = _check(command, energy), launcher_options(mpi_args), interpreter_words(python)
    typed = _typed_command(len(command) if script else 0)
    _check_survival(command[0], survive, spares)
    program = [] if script else [*interpreter, "-P", "-m", "hpcdist"]
    if script and command[0] in _OUR_PYTHON:
        command = (*interpreter, *command[1:])
    run_dir = _run_dir(command, script, out, resume) if most_restarts or out or resume else None
    world = ranks + (spares or 0)
    ranks_per_node = ranks_per_node and -(-world // -(-ranks // ranks_per_node))  # spares go to the same nodes
    layout = launchers.LaunchRequest(world, ranks_per_node, cpus_per_task, pmi)
    starter = launchers.choose_starter(launchers.kind_named(launcher), layout, survive)
    settings = starter.settings() | (python_path_variables() if python is None else {})
    settings |= {} if survive is None else {exit_file.SURVIVE: survive, exit_file.SPARES: str(spares or 0)}
    chosen = {RUN_DIR: str(out.absolute()) if out else None, RESUME: resume, ENERGY: "1" if energy else None}
    settings |= {name: value for name, value in chosen.items() if value}
    job = _Launch(starter, program, options, settings, grace, survive is not None, script, typed)
    if dry_run:
        click.echo(job.line(command))
        return OK
    if command[0] == "train":
        known = None if options or survive else ranks  # the launcher's options, or deaths, may change it
        here = python is None and not options and starter.kind is launchers.MPIRUN
        check_training(command, known, survive, spares or 0, elsewhere=not here)
    _check_starter(starter, options, trains=script or command[0] == "train")
    return job.run(command, run_dir, most_restarts)


@dataclass(frozen=True)
class _Launch:
    """Settings of all starts; ``program`` runs hpcdist, ``options`` are those of the launcher.

    A ``script`` is a command of its own, which ``program`` does not run. ``typed`` is the line of `hpcdist run` itself.
    """

    starter: launchers.Starter
    program: Sequence[str]
    options: Sequence[str]
    settings: Mapping[str, str]
    grace_s: float
    surviving: bool
    script: bool
    typed: Sequence[str]

    def line(self, command: Sequence[str]) -> str:
        """Return what a shell would be told."""
        words = self._words(command, self.settings)
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.settings.items()), shlex.join(words)])

    def run(self, command: Sequence[str], run_dir: Path | None, most_restarts: int) -> int:
        """Run ``command`` to its end, started again up to ``most_restarts`` times; return its exit code."""
        if unbound := self.starter.unbound(self.options):
            click.echo(f"hpcdist run: ranks are not bound to cores: {unbound}", err=True)
        with supervisor.signals_held() as mask:
            exit_file.disable_leave_at_signals()
            _remove_abandoned()
            if run_dir is None or not most_restarts:
                return self.start(command, mask).code
            kind = self.starter.kind
            nodes = SlurmAllocation(self.starter.layout.nodes, whole=not kind.without and kind is not launchers.MPIRUN)

            def start(number: int) -> supervisor.LaunchOutcome:
                if number == 1:
                    return self.start(command, mask, repeated=True)
                return self.start_again(nodes, command, mask)

            def say(text: str) -> None:
                click.echo(f"hpcdist run: {text}", err=True)

            def give_up(why: str) -> None:
                say(why)
                _print_resume_command(run_dir, self.typed, self.script)

            return restarts.repeat(
                start, most_restarts, lambda: checkpoints(run_dir), supervisor.pause, say, give_up, nodes
            )

    def start(
        self,
        command: Sequence[str],
        mask: set[signal.Signals],
        where: Sequence[str] | None = None,
        *,
        repeated: bool = False,
    ) -> supervisor.LaunchOutcome:
        """Run the hpcdist ``command`` to its end, and show its first failure.

        A start that follows another says ``where``, by options of the launcher: on which nodes, none for all.

        Where no other one follows, it tells what is left of a training that failed, and the command that goes on: one
        that is ``repeated`` has another behind it, unless its exit code forbids that.
        """
        began_ns = time.time_ns()
        with _launch_dir() as folder:
            settings = {**self.settings, FAILURE_DIR: folder, exit_file.LAUNCH_DIR: folder, **_terminal_environment()}
            settings[exit_file.COMMAND] = shlex.join(self.typed)
            words = self._words(command, settings, where or ())
            own = self.starter.session(Path(folder), self.options)
            inherited = os.environ if where is None else launchers.restart_environment(os.environ)
            outcome = supervisor.Supervision(
                words,
                {**inherited, **settings, **own},
                Path(folder),
                self.grace_s,
                mask,
                self.surviving,
                not self.script and command[0] == "train",
                self.starter.kind,
                self.script,
            ).run()
            run_dir, stopped = exit_file.read_announcements(Path(folder))
            # What single ranks said before the others went on without them, and ended well, is no failure of the job.
            if outcome.code not in ((OK, REQUEUE, INTERRUPTED) if outcome.agreed else (OK,)):
                if run_dir and (not repeated or outcome.code in restarts.FINAL_CODES):
                    _print_resume_command(Path(run_dir), self.typed, self.script)
                _show_first_failure(Path(folder), run_dir, began_ns)
            if stopped:
                click.echo(f"hpcdist run: {stopped}", err=True)
        return outcome

    def start_again(
        self, nodes: SlurmAllocation, command: Sequence[str], mask: set[signal.Signals]
    ) -> supervisor.LaunchOutcome:
        """Run ``command`` as `start` does, from its newest checkpoint, and not on nodes that were lost."""
        where: list[str] = []
        if nodes.lost:
            click.echo(f"hpcdist run: without {', '.join(nodes.lost)}, which the job has lost", err=True)
            where = self.starter.without(nodes.lost, nodes.left)
        if self.script:
            again = replace(self, settings={**self.settings, RESUME: "auto"})
            return again.start(command, mask, where, repeated=True)
        return self.start(exit_file.resume_command(command), mask, where, repeated=True)

    def _words(self, command: Sequence[str], settings: Mapping[str, str], where: Sequence[str] = ()) -> list[str]:
        return self.starter.line([*self.program, *command], settings, [*where, *self.options])


@contextmanager
def _launch_dir() -> Iterator[str]:
    """Make the directory of one start, which names its owner, and remove it."""
    # A process that is just being ended may still write there: what it leaves is no failure of the job.
    with tempfile.TemporaryDirectory(prefix=_LAUNCH_PREFIX, ignore_cleanup_errors=True) as folder:
        (Path(folder) / _OWNER_FILE).write_text(json.dumps(RunLock().identity), encoding="utf-8")
        try:
            yield folder
        finally:
            exit_file.remove_segments(Path(folder))


def _remove_abandoned() -> None:
    """Remove the directories of starts of this user whose `hpcdist run` is known to be dead, and what they name."""
    own = RunLock().identity
    for folder in Path(tempfile.gettempdir()).glob(f"{_LAUNCH_PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            holder = json.loads((folder / _OWNER_FILE).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # of an older hpcdist, or just being made or removed
        if isinstance(holder, dict) and is_dead(holder, own):
            exit_file.remove_segments(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _check_starter(starter: launchers.Starter, options: Sequence[str], *, trains: bool) -> None:
    """Check ``starter``, and say how ranks with one thread each by default may have the idle cores, too."""
    starter.check()
    cores, ranks = len(os.sched_getaffinity(0)), starter.layout.ranks
    chosen = starter.layout.cpus_per_task is not None or "OMP_NUM_THREADS" in os.environ or bool(options)
    here = starter.kind is launchers.MPIRUN and not mpirun.is_managed()
    if chosen or not trains or not here or cores < 2 * ranks:
        return
    used, each = f"{ranks} of {cores} cores", cores // ranks
    click.echo(f"hpcdist run: the ranks use {used}; --cpus-per-task {each} gives each {each} threads", err=True)


def _check(command: tuple[str, ...], energy: bool) -> bool:
    """Refuse what would fail on every rank at once; return whether ``command`` is a program of its own."""
    known = ", ".join(name for name in COMMANDS if name not in _ONE_PROCESS_COMMANDS)
    # A sweep starts ranks itself; the other benchmarks are measured by ranks.
    measured = [("bench", name) for name in ("collectives", "pipeline", "checkpoint", "step")]
    measured += [("plan", "calibrate"), ("plan", "--calibrate")]
    script = command[0] not in COMMANDS and (command[0] in _OUR_PYTHON or shutil.which(command[0]) is not None)
    if not script and command[0] not in known.split(", ") and command[:2] not in measured:
        raise click.UsageError(
            f"{command[0]!r} is no program, nor a command to run on ranks; known: {known}, "
            f"{', '.join(' '.join(words) for words in measured)}; for a script write: python SCRIPT"
        )
    if energy and not script:
        raise UsageError(f"--energy is for scripts: {command[0]} counts joules by itself, see `hpcdist help energy`")
    launched = launch_environment()
    if launched is not None and launched.size > 1:  # one rank is an interactive shell: srun --pty bash
        raise UsageError(
            f"this process is already one of {launched.size} ranks of {launched.launcher}; "
            f"start `{'' if script else 'hpcdist '}{command[0]}` there, without `hpcdist run`"
        )
    return script


def _check_survival(name: str, survive: str | None, spares: int | None) -> None:
    if spares is not None and survive != "replace":
        raise UsageError(f"--spares {spares}: ranks that wait replace dead ones; add --survive replace")
    if survive is not None and name != "train":
        raise UsageError(
            f"--survive {survive}: only train goes on without a rank, not {name}; leave it out, or use --restarts N"
        )


def _run_dir(command: Sequence[str], script: bool, out_option: Path | None, resume: str | None) -> Path | None:
    """Return the directory of a training: the --out of a script, or of a `train` that shall be started again.

    Raises UsageError for another command, without one where it is needed, or where it is said in the wrong place.
    """
    if script:
        if out_option is None:
            raise UsageError("--restarts and --resume need to know where checkpoints are; add --out DIR")
        return out_option
    if out_option is not None or resume is not None:
        word = "--out" if out_option is not None else "--resume"
        raise UsageError(f"{word} before {command[0]} is for scripts; write: {command[0]} ... {word}")
    if command[0] != "train":
        raise UsageError(f"--restarts: only train goes on from a checkpoint, not {command[0]}; leave it out")
    out: Path | None = _train_options(command)["out"]
    if out is None:
        raise UsageError("--restarts needs to know where checkpoints are; write: train ... --out DIR")
    return out


def _train_options(command: Sequence[str]) -> dict[str, Any]:
    """Return the options of the `train` in ``command``, by its own parser: what it refuses need not be started."""
    from hpcdist.cli.train import train

    return train.make_context("hpcdist train", list(command[1:])).params


def check_training(
    command: Sequence[str], ranks: int | None, survive: str | None, spares: int, *, elsewhere: bool
) -> None:
    """Raise here what every rank of a `train` would raise, as far as it can be known without them.

    ``ranks`` is how many train, None where that is not known yet. Ranks that run ``elsewhere``, as in a container
    or on other hosts, see other files.
    """
    from hpcdist.cli import train
    from hpcdist.training.recipe import requirements

    options = _train_options(command)
    if elsewhere and options["recipe"] is not None and not options["recipe"].exists():
        return
    train.time_limit_s(options["time_limit"])
    recipe = train.recipe_from_options(options)
    if survive is not None:
        recipe.check_world(0, **{"--survive": survive, "--spares": spares})
    if ranks is not None:
        requirements.grid_of_recipe(recipe, ranks)
    if not elsewhere:
        recipe.data.check_exists()


def _typed_command(script_words: int) -> list[str]:
    """Return the command line of this process, as a person types it, with `--` before the words of a script."""
    words = [Path(sys.argv[0]).name.replace("__main__.py", "hpcdist"), *sys.argv[1:]]
    begin = len(words) - script_words
    if script_words and "--" not in words[begin - 1 : begin]:  # called from Python, the process has other words
        words.insert(begin, "--")
    return words


def _terminal_environment() -> dict[str, str]:
    """Return what tells the ranks of this terminal, or that there is none: to them a launcher shows its own.

    Rank 0 draws its bar where standard error is a terminal; without one behind standard output nobody uses colours.
    """
    variables = {} if sys.stdout.isatty() else {"NO_COLOR": "1"}
    if sys.stderr.isatty():
        with suppress(OSError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            variables[exit_file.TERMINAL_COLUMNS] = str(columns or 80)
    return variables


def _print_resume_command(run_dir: Path, words: Sequence[str], script: bool = False) -> None:
    """Name the newest checkpoint of a training that did not end as it should, the command that goes on, and `hang`."""
    newest = next(iter(checkpoints(run_dir)), None)
    where = f"the newest checkpoint is {run_dir / 'checkpoints' / newest}" if newest else "there is no checkpoint yet"
    typed = shlex.join(exit_file.resume_command(words, run_dir, script=script))
    click.echo(f"hpcdist run: {where}; {'go on' if newest else 'begin again'} with {typed}", err=True)
    if run_dir.is_dir():
        click.echo(f"hpcdist run: what each rank did last: hpcdist hang {shlex.quote(str(run_dir))}", err=True)


def checkpoints(run_dir: Path) -> dict[str, int]:
    """Return the complete checkpoints of a run, the most recent first, and when each was written.

    By their names alone: this process forks, so it loads nothing that starts threads.
    """
    written_ns = {}
    for path in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        step = path.parent.name.removeprefix("step-")
        if step.isascii() and step.isdecimal():
            with suppress(OSError):  # just removed
                written_ns[int(step)] = path.stat().st_mtime_ns
    return {f"step-{step}": written_ns[step] for step in sorted(written_ns, reverse=True)}


def _show_first_failure(folder: Path, run_dir: str, began_ns: int) -> None:
    """Print each different failure of the ranks once, after the launcher's output; the first failure comes last."""
    written_ns = {path: path.stat().st_mtime_ns for path in folder.glob("rank-*.txt")}
    if run_dir:  # ranks of other hosts, which have no such folder, write beside their records
        beside = {path: path.stat().st_mtime_ns for path in (Path(run_dir) / "recorder").glob("rank-*.failed")}
        written_ns |= {path: time_ns for path, time_ns in beside.items() if time_ns >= began_ns}
    failures = sorted(written_ns, key=written_ns.__getitem__)
    if failures:
        others = f" (of {len(failures)} that failed)" if len(failures) > 1 else ""
        alike: dict[str, list[str]] = {}
        for path in failures:
            text = path.read_text()
            alike.setdefault(re.sub(r"^\[rank \d+\] (rank \d+)?", "", text, flags=re.MULTILINE), []).append(text)
        for texts in reversed(alike.values()):
            which = f"the first failure{others}" if texts is next(iter(alike.values())) else "another failure"
            same = f", and {len(texts) - 1} more in the same way" if len(texts) > 1 else ""
            click.echo(f"\nhpcdist run: {which}{same}:\n{texts[0]}", err=True)
