"""The command line on a login node: fast, without MPI, and with exit codes for scripts."""

import sys

import click
import pytest

from harness import jobs
from harness.jobs import call_command, hpcdist
from harness.marks import cases
from hpcdist import __version__, errors
from hpcdist.cli import main
from hpcdist.cli.bench import group

HEAVY = ("mpi4py", "numba", "llvmlite", "h5py", "cupy", "matplotlib", "numpy", "msgspec", "torch")


@cases(
    "arguments",
    ["--help"],
    ["-h"],
    ["--version"],
    ["run", "--help"],
    ["train", "--help"],
    ["bench", "collectives", "--help"],
    ["bench", "step", "--help"],
    ["bench", "sweep", "--help"],
    ["schedule", "--help"],
    ["compare", "--help"],
    ["checkpoint", "--help"],
    ["checkpoint", "export", "--help"],
)
@pytest.mark.full_except("arguments11")
def test_help_imports_no_heavy_modules(arguments):
    assert jobs.run_light_commands(HEAVY, arguments)


def test_version():
    done = hpcdist("--version")
    assert (done.returncode, done.stdout) == (0, f"hpcdist, version {__version__}\n")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_and_option_has_a_help_text(name):
    command = main.group.get_command(click.Context(main.group), name)
    assert command is not None
    assert command.help, f"hpcdist {name} has no docstring"
    unexplained = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
    assert not unexplained


def test_main_help_lists_every_command():
    shown = hpcdist("--help").stdout
    assert all(f"\n  {name} " in shown for name in main.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["tarin"], 2), (["train", "--no-such-option"], 2), (["run", "train"], 2), (["run", "-n", "0", "train"], 2)],
)
def test_usage_errors(arguments, code, capsys):
    result, _, err = call_command(capsys, *arguments)
    assert result == code and "Error:" in err


ERRORS = [
    error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.HpcdistError)
]


@pytest.mark.parametrize("error", ERRORS)
def test_hpcdist_errors_print_one_message_and_exit_code(error, monkeypatch, capsys):
    def fail(**_):
        raise error("got this, expected that")

    monkeypatch.setattr(main.group, "main", fail)
    code, _, err = call_command(capsys)
    assert code == error.exit_code != 0 and err == "Error: got this, expected that\n"


@pytest.mark.parametrize(
    ("raised", "code"), [(click.Abort(), 130), (KeyboardInterrupt(), 130), (click.UsageError("no"), 2)]
)
def test_other_exceptions_have_exit_codes(raised, code, monkeypatch, capsys):
    def fail(**_):
        raise raised

    monkeypatch.setattr(main.group, "main", fail)
    assert call_command(capsys)[0] == code


def test_returned_number_becomes_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(main.group, "main", lambda **_: 7)
    assert call_command(capsys)[0] == 7


def test_nested_run_is_rejected(monkeypatch, capsys):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "0")
    code, _, err = call_command(capsys, "run", "-n", "2", "train")
    assert code == errors.USAGE and "already one of 4 ranks" in err


def test_run_dry_run_prints_the_command():
    done = hpcdist("run", "-n", "3", "--mpi-args", "--quiet -v", "--dry-run", "train", "a b.toml")
    if done.returncode == errors.MISSING_CAPABILITY:
        pytest.skip(done.stderr)
    assert done.returncode == 0
    assert done.stdout.endswith(f"-n 3 --quiet -v {sys.executable} -P -m hpcdist train 'a b.toml'\n")


@pytest.mark.matrix
def test_warmup_fills_the_named_cache(tmp_path):
    done = hpcdist("warmup", "--cache", str(tmp_path / "cache"))  # compiles all kernels
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").rglob("*.nbc"))
    assert f"export NUMBA_CACHE_DIR={tmp_path / 'cache'}" in done.stdout


@pytest.mark.parametrize("name", group.MOVED)
def test_moved_benchmark_names_its_successor(name):
    done = hpcdist("bench", name, "--json")
    assert done.returncode == 2 and f"bench {name}` has moved; use" in done.stderr
