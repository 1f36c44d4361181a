"""`hpcdist run`: start one command on N ranks, on a workstation or inside a batch job."""

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

from hpcdist.batch.schedulers.slurm_allocation import SlurmAllocation
from hpcdist.checkpoint.lock import RunLock, is_dead
from hpcdist.cli.common import COUNT, DIRECTORY
from hpcdist.cli.main import COMMANDS
from hpcdist.cli.runs.progress import checkpoints, progress, reported_checkpoints
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
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import INTERRUPTED, OK, REQUEUE, UsageError

_LAUNCH_PREFIX = "hpcdist-run-"
_OWNER_FILE = "owner.json"  # identity of the process that created the launch directory
# Commands that start ranks themselves, or need only one process.
_ONE_PROCESS_COMMANDS = ("run", "submit", "jobs", "grow", "bench", "compare", "plan")

_OUR_PYTHON = ("python", "python3")  # run by this Python: the Python on PATH may lack hpcdist


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, no_args_is_help=True
)
@click.option("-n", "--ranks", type=COUNT, required=True, help="Number of ranks.")
@click.option("--ranks-per-node", type=COUNT, help="Ranks per node.  [default: the launcher's]")
@click.option("--cpus-per-task", type=COUNT, help="Cores and threads per rank.  [default: the job's, else 1]")
@click.option(
    "--launcher",
    default=launchers.AUTO,
    show_default=False,
    metavar="NAME",
    help=f"Launcher of the ranks: {', '.join(launchers.KINDS)}.  [default: ${launchers.VARIABLE}, else mpirun]",
)
@click.option("--pmi", metavar="TYPE", help="Process management interface, e.g. pmix or pmi2.  [default: launcher's]")
@click.option("--mpi-args", default="", help="Additional launcher options, in one string; they take precedence.")
@click.option("--python", metavar="WORDS", help="Python command of the ranks, e.g. 'apptainer exec my.sif python3'.")
@click.option("--grace", default=30.0, type=click.FloatRange(min=0.0), help="Seconds to save and stop after a signal.")
@click.option(
    "--restarts",
    "most_restarts",
    default=0,
    type=click.IntRange(min=0),
    help="Maximum restarts of a failed training or script, each from the newest checkpoint in its --out DIR.",
)
@click.option(
    "--survive",
    type=click.Choice(exit_file.SURVIVE_MODES),
    help="Let `train` continue after rank failures: without the dead ranks, or with new ranks (Open MPI 5).",
)
@click.option("--spares", type=COUNT, help="Additional idle ranks that replace dead ranks, with --survive replace.")
@click.option(
    "--out",
    type=DIRECTORY,
    help="Run directory of a script with `hpcdist.torch` or Training; overrides `Training(out=)`.",
)
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    help="Whether a script's Training resumes from its newest checkpoint; overrides the script.",
)
@click.option("--energy", is_flag=True, help="Print the energy in joules of a script that uses `hpcdist.torch`.")
@click.option("--dry-run", is_flag=True, help="Print the command line without starting anything.")
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

    The default launcher is the mpirun of this Python's environment, else the first on PATH. After Ctrl-C, SIGTERM or
    SIGUSR1 the ranks save and stop after the current step (exit code 130, or 75 if the scheduler should requeue). A
    second Ctrl-C, or the end of --grace, kills the ranks. The first failure of a rank is printed last.

    --restarts starts a failed training again with `--resume auto` on the remaining nodes, but not after exit codes 0,
    2, 69, 75, 78 and 130, a stop signal, or two consecutive starts without a new checkpoint. --survive continues after
    the death of ranks, but not of a node. --restarts and --survive can be combined.

    A script with a `hpcdist.training.pytorch.Training`, or over `hpcdist.torch`, supports all options but --survive;
    --restarts needs --out to find the checkpoints of the script. --resume applies only to a `Training`. `python` means
    the Python of hpcdist, or --python. Any other program receives the signals, and the exit code of the program is
    returned.
    """
    script, options, interpreter = _check(command, energy), launcher_options(mpi_args), interpreter_words(python)
    typed = _typed_command(len(command) if script else 0)
    _check_survival(command[0], survive, spares)
    program = [] if script else [*interpreter, "-P", "-m", "hpcdist"]
    if script and command[0] in _OUR_PYTHON:
        command = (*interpreter, *command[1:])
    run_dir = _run_dir(command, script, out, resume) if most_restarts or out or resume else None
    world = ranks + (spares or 0)
    ranks_per_node = ranks_per_node and -(-world // -(-ranks // ranks_per_node))  # spares use the same nodes
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
        training_ranks = None if options or survive else ranks  # launcher options or rank failures may change it
        here = python is None and not options and starter.kind is launchers.MPIRUN
        check_training(command, training_ranks, survive, spares or 0, elsewhere=not here)
    _check_starter(starter, options, trains=script or command[0] == "train")
    return job.run(command, run_dir, most_restarts)


@dataclass(frozen=True)
class _Launch:
    starter: launchers.Starter
    program: Sequence[str]  # words that start hpcdist; empty for a script
    options: Sequence[str]
    settings: Mapping[str, str]
    grace_s: float
    surviving: bool
    script: bool  # the job runs a user's script, not an hpcdist command
    typed: Sequence[str]  # command line of `hpcdist run`

    def line(self, command: Sequence[str]) -> str:
        words = self._words(command, self.settings)
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.settings.items()), shlex.join(words)])

    def run(self, command: Sequence[str], run_dir: Path | None, most_restarts: int) -> int:
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

            announced = False

            def saved() -> Mapping[str, int]:
                nonlocal announced
                names = progress(run_dir)
                if names and not announced and not reported_checkpoints(run_dir):
                    announced = True
                    say(f"a new file in {run_dir} counts as progress, as there is no checkpoint of hpcdist")
                return names

            return restarts.repeat(start, most_restarts, saved, supervisor.pause, say, give_up, nodes)

    def start(
        self,
        command: Sequence[str],
        mask: set[signal.Signals],
        where: Sequence[str] | None = None,
        *,
        repeated: bool = False,
    ) -> supervisor.LaunchOutcome:
        # ``repeated``: the caller restarts failed jobs.
        began_ns = time.time_ns()
        with _launch_dir() as folder:
            settings = {**self.settings, FAILURE_DIR: folder, exit_file.LAUNCH_DIR: folder, **_terminal_environment()}
            settings[exit_file.COMMAND] = shlex.join(self.typed)
            words = self._words(command, settings, where or ())
            session_variables = self.starter.session(Path(folder), self.options)
            inherited = os.environ if where is None else launchers.restart_environment(os.environ)
            outcome = supervisor.Supervision(
                words,
                {**inherited, **settings, **session_variables},
                Path(folder),
                self.grace_s,
                mask,
                self.surviving,
                not self.script and command[0] == "train",
                self.starter.kind,
                self.script,
            ).run()
            run_dir, stopped = exit_file.read_announcements(Path(folder))
            # After an agreed end, messages of single ranks that the others outlived are not a failure of the job.
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
        where: list[str] = []
        if nodes.lost:
            click.echo(f"hpcdist run: restarting without the lost nodes {', '.join(nodes.lost)}", err=True)
            where = self.starter.without(nodes.lost, nodes.left)
        if self.script:
            resumed = replace(self, settings={**self.settings, RESUME: "auto"})
            return resumed.start(command, mask, where, repeated=True)
        return self.start(exit_file.resume_command(command), mask, where, repeated=True)

    def _words(self, command: Sequence[str], settings: Mapping[str, str], where: Sequence[str] = ()) -> list[str]:
        return self.starter.line([*self.program, *command], settings, [*where, *self.options])


@contextmanager
def _launch_dir() -> Iterator[str]:
    # Ignore cleanup errors: a process that is being killed may still write there.
    with tempfile.TemporaryDirectory(prefix=_LAUNCH_PREFIX, ignore_cleanup_errors=True) as folder:
        # `_remove_abandoned` reads this file.
        (Path(folder) / _OWNER_FILE).write_text(json.dumps(RunLock().identity), encoding="utf-8")
        try:
            yield folder
        finally:
            exit_file.remove_segments(Path(folder))


def _remove_abandoned() -> None:
    identity = RunLock().identity
    for folder in Path(tempfile.gettempdir()).glob(f"{_LAUNCH_PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            holder = json.loads((folder / _OWNER_FILE).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # from an older hpcdist, or just being created or removed
        if isinstance(holder, dict) and is_dead(holder, identity):
            exit_file.remove_segments(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _check_starter(starter: launchers.Starter, options: Sequence[str], *, trains: bool) -> None:
    starter.check()
    cores, ranks = len(os.sched_getaffinity(0)), starter.layout.ranks
    has_threads = starter.layout.cpus_per_task is not None or "OMP_NUM_THREADS" in os.environ or bool(options)
    is_local = starter.kind is launchers.MPIRUN and not mpirun.is_managed()
    if has_threads or not trains or not is_local or cores < 2 * ranks:
        return
    used, threads = f"{ranks} of {cores} cores", cores // ranks
    click.echo(f"hpcdist run: the ranks use {used}; --cpus-per-task {threads} gives each {threads} threads", err=True)


def _check(command: tuple[str, ...], energy: bool) -> bool:
    # Returns True for a script or other program.
    rank_commands = ", ".join(name for name in COMMANDS if name not in _ONE_PROCESS_COMMANDS)
    # `bench` of a sweep starts ranks itself; the other benchmarks run on ranks.
    measured = [("bench", "collectives"), ("bench", "step")]
    measured += [("plan", "calibrate"), ("plan", "--calibrate")]
    script = command[0] not in COMMANDS and (command[0] in _OUR_PYTHON or shutil.which(command[0]) is not None)
    if command[0].startswith("-"):
        raise click.UsageError(
            f"`hpcdist run` has no option {command[0]}; options of a training follow its command, as in hpcdist run "
            "-n 2 train --out DIR; `hpcdist run --help` lists the options of run"
        )
    if not script and command[0] not in rank_commands.split(", ") and command[:2] not in measured:
        raise click.UsageError(
            f"{command[0]!r} is neither a program nor a command to run on ranks; such commands are: {rank_commands}, "
            f"{', '.join(' '.join(words) for words in measured)}. To run a script, write: python SCRIPT"
        )
    if energy and not script:
        raise UsageError(f"--energy is for scripts: {command[0]} always measures energy; see `hpcdist help energy`")
    launched = launch_environment()
    if launched is not None and launched.size > 1:  # size 1 is an interactive shell: srun --pty bash
        raise UsageError(
            f"this process is already one of {launched.size} ranks of {launched.launcher}; "
            f"start `{'' if script else 'hpcdist '}{command[0]}` with {launched.launcher}, without `hpcdist run`"
        )
    return script


def _check_survival(name: str, survive: str | None, spares: int | None) -> None:
    if spares is not None and survive != "replace":
        raise UsageError(f"--spares {spares} needs --survive replace, as spares replace dead ranks; add this option")
    if survive is not None and name != "train":
        raise UsageError(
            f"--survive {survive} works only with train, not with {name}; leave --survive out, or use --restarts N"
        )


def _run_dir(command: Sequence[str], script: bool, out_option: Path | None, resume: str | None) -> Path | None:
    if script:
        if out_option is None:
            raise UsageError("--restarts and --resume need the directory of the checkpoints; add --out DIR")
        return out_option
    if out_option is not None or resume is not None:
        word = "--out" if out_option is not None else "--resume"
        raise UsageError(f"{word} must follow {command[0]}, an hpcdist command; write: {command[0]} ... {word}")
    if command[0] != "train":
        raise UsageError(f"--restarts works only with train, not with {command[0]}; leave --restarts out")
    out: Path | None = _train_options(command)["out"]
    if out is None:
        raise UsageError("--restarts needs the directory of the checkpoints; write: train ... --out DIR")
    return out


def _train_options(command: Sequence[str]) -> dict[str, Any]:
    from hpcdist.cli.train import train

    return train.make_context("hpcdist train", list(command[1:])).params


def check_training(
    command: Sequence[str], ranks: int | None, survive: str | None, spares: int, *, elsewhere: bool
) -> None:
    """Check the `hpcdist train` command line ``command`` before ranks are started. Raises HpcdistError. Local.

    ``ranks``: number of training ranks, or None if unknown. ``survive``, ``spares``: options of `hpcdist run`.
    ``elsewhere``: the ranks may see other files than this process, as in a container.
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
    words = [Path(sys.argv[0]).name.replace("__main__.py", "hpcdist"), *sys.argv[1:]]
    begin = len(words) - script_words
    if script_words and "--" not in words[begin - 1 : begin]:  # click removes the `--`
        words.insert(begin, "--")
    return words


def _terminal_environment() -> dict[str, str]:
    # The ranks see a pseudo-terminal instead of the real terminal.
    variables = {} if sys.stdout.isatty() else {"NO_COLOR": "1"}
    if sys.stderr.isatty():
        with suppress(OSError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            variables[exit_file.TERMINAL_COLUMNS] = str(columns or 80)
    return variables


def _print_resume_command(run_dir: Path, words: Sequence[str], script: bool = False) -> None:
    newest = next(iter(progress(run_dir)), None)
    where = "there is no checkpoint yet"
    if newest:
        kind, folder = ("checkpoint", "checkpoints") if newest in checkpoints(run_dir) else ("file", "")
        where = f"the newest {kind} is {run_dir / folder / newest}"
    if not script or (run_dir / RECIPE_FILE).exists():  # other scripts do not read --resume
        words = exit_file.resume_command(words, run_dir, script=script)
    click.echo(f"hpcdist run: {where}; {'resume' if newest else 'start again'} with {shlex.join(words)}", err=True)
    if run_dir.is_dir():
        click.echo(f"hpcdist run: show the last operations: hpcdist hang {shlex.quote(str(run_dir))}", err=True)


def _show_first_failure(folder: Path, run_dir: str, began_ns: int) -> None:
    written_ns = {path: path.stat().st_mtime_ns for path in folder.glob("rank-*.txt")}
    if run_dir:  # ranks on other hosts write their failure next to their recorder file
        recorded_ns = {path: path.stat().st_mtime_ns for path in (Path(run_dir) / "recorder").glob("rank-*.failed")}
        written_ns |= {path: time_ns for path, time_ns in recorded_ns.items() if time_ns >= began_ns}
    failures = sorted(written_ns, key=written_ns.__getitem__)
    if failures:
        others = f" (of {len(failures)} that failed)" if len(failures) > 1 else ""
        alike: dict[str, list[str]] = {}
        for path in failures:
            text = path.read_text()
            alike.setdefault(re.sub(r"^\[rank \d+\] (rank \d+)?", "", text, flags=re.MULTILINE), []).append(text)
        for texts in reversed(alike.values()):  # the earliest failure comes last
            which = f"the first failure{others}" if texts is next(iter(alike.values())) else "another failure"
            same = f", and {len(texts) - 1} more like it" if len(texts) > 1 else ""
            click.echo(f"\nhpcdist run: {which}{same}:\n{texts[0]}", err=True)
