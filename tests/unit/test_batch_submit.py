"""`hpcdist submit`: what it asks of Slurm, what it prints, and what it refuses. Slurm is played by a small script."""

import os
import re
import subprocess
import sys

import pytest

from hpcdist.batch import resources, slurm
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.training import recipe as recipes

# Keeps each call: its options, and the script it read.
SBATCH = """#!/bin/bash
echo "$@" >> "$FOLDER/calls"
cat > "$FOLDER/script"
if [[ -n ${REFUSE:-} && $1 == --test-only ]]; then echo "$REFUSE" >&2; exit 1; fi
if [[ $1 == --parsable ]]; then echo "${NUMBER:-4711}"; else echo "sbatch: Job 1 to start at once" >&2; fi
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """The folder in which a played sbatch leaves what it was asked."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


def submit(*arguments, folder, **environment):
    line = [sys.executable, "-P", "-m", "hpcdist", "submit", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HPCDIST_S")}
    return subprocess.run(
        line, capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=kept | environment
    )


def test_the_number_alone_is_on_stdout(sbatch):
    (sbatch / "recipe.toml").write_text("[run]\nsteps = 5\n")
    done = submit("recipe.toml", "--nodes", "2", "--ranks-per-node", "2", folder=sbatch)
    assert (done.returncode, done.stdout) == (0, "4711\n"), done.stderr
    assert "2 nodes x 2 ranks: 4 = data 4 x pipeline 1 x tensor 1 x context 1" in done.stderr
    assert "hpcdist-4711.out" in done.stderr and "runs/slurm-4711" in done.stderr
    assert (sbatch / "calls").read_text().split() == ["--test-only", "--parsable"]
    dry = submit("recipe.toml", "--nodes", "2", "--ranks-per-node", "2", "--dry-run", folder=sbatch)
    assert (sbatch / "script").read_text() == dry.stdout
    assert "\nsteps = 5\n" in dry.stdout and "recipe.toml" not in dry.stdout, (
        "the file may change before the job starts"
    )
    assert 'train "$recipe" --out' in dry.stdout


def test_the_recipe_of_the_script_is_the_one_that_was_resolved(sbatch, monkeypatch):
    """Of the file, the user, the environment and the options, with every key; as training itself would read it."""
    (sbatch / "in").mkdir()
    (sbatch / "in" / "recipe.toml").write_text('[run]\nsteps = 5\n[data]\npath = "it\'s.txt"\n')
    (sbatch / "config" / "hpcdist").mkdir(parents=True)
    (sbatch / "config" / "hpcdist" / "config.toml").write_text("[run]\nseed = 3\nsteps = 4\n")
    given = {"XDG_CONFIG_HOME": str(sbatch / "config"), "HPCDIST_SET__RUN__GLOBAL_BATCH": "12"}
    done = submit("in/recipe.toml", "--nodes=1", "--set=model.layers=3", "--dry-run", folder=sbatch, **given)
    assert done.returncode == 0, done.stderr
    written = "set -e\nSLURM_JOB_ID=7\n" + done.stdout[done.stdout.index("recipe=$PWD") : done.stdout.index("unset")]
    subprocess.run(["bash", "-c", written], cwd=sbatch, check=True, timeout=60)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    expected = recipes.load(sbatch / "in" / "recipe.toml", ["model.layers=3"], os.environ).recipe
    assert recipes.load_stored(sbatch / "hpcdist-7.toml") == expected
    assert (expected.run.seed, expected.run.steps, expected.run.global_batch, expected.model.layers) == (3, 5, 12, 3)
    assert expected.data.path == str(sbatch / "in" / "it's.txt")


def test_options_reach_the_script(sbatch):
    options = ["--time", "00:30:00", "--partition", "debug", "--account", "me", "--job-name", "a b"]
    options += ["--signal-seconds", "90", "--cpus-per-task", "3", "--out", "here", "--set", "run.steps=7"]
    done = submit("--nodes=1", *options, "--mpi-args=-q", "--sbatch-arg=--qos=x", "--dry-run", folder=sbatch)
    assert done.returncode == 0, done.stderr
    for part in ("--time=00:30:00", "--partition=debug", "--account=me", '--job-name="a b"', "--signal=B:USR1@90"):
        assert f"#SBATCH {part}\n" in done.stdout
    for part in ("#SBATCH --qos=x\n", f"run_dir={sbatch}/here\n", "\nsteps = 7\n", "OMP_NUM_THREADS=3\n"):
        assert part in done.stdout
    assert re.search(r"run -n 1 --ranks-per-node 1 --mpi-args -q \\\n  train ", done.stdout)
    assert not (sbatch / "calls").exists(), "--dry-run asks Slurm nothing"


@pytest.mark.parametrize(
    ("options", "equation"),
    [
        (["--set=parallel.pipeline=2", "--set=model.layers=2"], "4 = data 2 x pipeline 2 x tensor 1 x context 1\n"),
        (["--set=parallel.strategy=parameter_server"], "4 = data 3 x pipeline 1 x tensor 1 x context 1 + servers 1\n"),
    ],
)
def test_the_degrees_are_counted_as_in_a_training(sbatch, options, equation):
    done = submit("--nodes=2", "--ranks-per-node=2", *options, "--dry-run", folder=sbatch)
    assert done.returncode == 0 and f"2 nodes x 2 ranks: {equation}" in done.stderr, done.stderr


def test_a_gpu_is_asked_for_only_by_a_recipe_that_computes_on_one(sbatch):
    cpu = submit("--nodes=2", "--ranks-per-node=4", "--dry-run", folder=sbatch).stdout
    gpu = submit("--nodes=2", "--ranks-per-node=4", "--dry-run", "--set=run.device=gpu", folder=sbatch).stdout
    assert "--gpu" not in cpu
    assert "#SBATCH --gpus-per-node=4\n" in gpu and "#SBATCH --gpu-bind=none\n" in gpu


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--nodes=2", "--set=model.layer=3"], 78, "model.layers"),
        (["--nodes=2", "--set=parallel.data=3"], 78, "parallel.data 3 x parallel.pipeline 1"),
        (["--nodes=1", "--set=parallel.strategy=parameter_server"], 78, "at least 1 must compute"),
        (["--nodes=17"], 78, "fewer samples than the 17 data ranks"),
        (["missing.toml", "--nodes=1"], 78, "missing.toml"),
        (["--nodes=1", "--time=10:00"], 2, "expected D-HH:MM:SS"),
        (["--nodes=1", "--time=1"], 2, "--signal-seconds 120"),
        (["--nodes=1", "--job-name=a\nb"], 2, "no #SBATCH line can hold"),
        (["--nodes=1", "--sbatch-arg=-x"], 2, "expected a long option"),
        (["--nodes=1", "--sbatch-arg=--output=mine"], 2, "contradicts --output"),
        (["--nodes=1", "--mpi-args=-x 'A"], 2, "No closing quotation"),
        (["--nodes=0"], 2, "--nodes"),
        ([], 2, "--nodes"),
    ],
)
def test_bad_input_is_refused_before_slurm_is_asked(sbatch, arguments, code, words):
    done = submit(*arguments, folder=sbatch)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (sbatch / "calls").exists()


def test_what_slurm_refuses_is_not_submitted(sbatch):
    done = submit("--nodes=1", folder=sbatch, REFUSE="sbatch: error: invalid partition specified: nix")
    assert (done.returncode, done.stdout) == (78, "")
    assert "invalid partition specified: nix" in done.stderr and "sinfo" in done.stderr
    assert (sbatch / "calls").read_text().split() == ["--test-only"]


def test_a_machine_without_slurm(tmp_path):
    (tmp_path / "bin").mkdir()
    done = submit("--nodes=1", folder=tmp_path, PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (69, "")
    assert "no sbatch on PATH" in done.stderr and "--dry-run" in done.stderr
    assert submit("--nodes=1", "--dry-run", folder=tmp_path, PATH=str(tmp_path / "bin")).returncode == 0


def test_a_slurm_that_does_not_answer_is_missing_and_not_misconfigured(sbatch, monkeypatch):
    monkeypatch.setenv("REFUSE", "sbatch: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(MissingCapabilityError, match="does not answer"):
        slurm.submit("#!/bin/bash\n")
    monkeypatch.setenv("REFUSE", "sbatch: error: Batch job submission failed: Requested time limit is invalid")
    with pytest.raises(ConfigurationError, match="time limit"):
        slurm.submit("#!/bin/bash\n")


def test_the_cluster_is_no_part_of_the_number(sbatch, monkeypatch):
    monkeypatch.setenv("NUMBER", "12;alps")
    assert slurm.submit("#!/bin/bash\n") == "12"


def test_submit_loads_nothing_heavy(tmp_path):
    watched = ("mpi4py", "h5py", "numba", "cupy", "torch", "matplotlib")
    code = (
        "import sys\nfrom hpcdist.cli.main import main\n"
        "try:\n    main(['submit', '--nodes=2', '--dry-run'])\nexcept SystemExit as leaving:\n"
        f"    print('loaded:', leaving.code, [name for name in {watched} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "loaded: 0 []", done.stderr


def test_a_lost_template_is_a_damaged_installation(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.__file__", str(tmp_path / "site" / "hpcdist" / "__init__.py"))
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(MissingCapabilityError, match="install the wheel again"):
        resources.folder(resources.TEMPLATES)
