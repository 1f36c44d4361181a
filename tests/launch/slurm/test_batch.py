"""Whole jobs under a real Slurm of three virtual nodes, which this session starts: submitted, stopped, requeued.


Needs Debian's slurm-wlm and munge, and root.
"""

import dataclasses
import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import pages
from harness.marks import cases
from hpcdist.batch import site_search as search
from hpcdist.batch import submission
from hpcdist.batch.array import BenchmarkJob, MergeJob, ServersJob, SweepJob
from hpcdist.batch.job import BatchJob
from hpcdist.cli.help import DOCS
from hpcdist.comm.launch import mpirun
from hpcdist.errors import MissingCapabilityError
from hpcdist.telemetry import report
from stubs.slurm_cluster import ENDLESS, STEPS, Jobs

EVIL = "$(touch x) `touch y` \"two\" 'one' \\ # ; & | é"
EVIL_FOLDER = EVIL.replace("\\", "")  # see test_directory_name_with_slurm_pattern_is_rejected

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    return Jobs(cluster, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module", autouse=True)
def endless(jobs):
    """A job whose time limit passes while the other tests run."""
    # Slurm looks every 30 s, and signals when less than 15 s more than that are left. Of one minute, the shortest that
    # there is, a start on a loaded machine has used up so much before its first step that nothing new is saved.
    return jobs.begin("--time=2", "--signal-seconds=15", "--out=endless", nodes=1, ranks=1, steps=ENDLESS)


def test_job_stopped_and_requeued_on_two_nodes_has_the_same_bits(jobs, mpi):
    whole = jobs.begin("--out", "whole")
    jobs.until(whole, JobState="COMPLETED")
    site, started_by = {mpirun.MPICH: ("slurm-mpich", "srun")}.get(mpi.vendor, ("slurm-openmpi", "mpirun"))
    script = (jobs.folder / "whole" / "job.sbatch").read_text()
    assert f"for the site {site}." in script and f"--launcher {started_by} " in script

    shutil.copy(jobs.folder / "recipe.toml", jobs.folder / "edited.toml")
    stopped = jobs.begin("--out", "stopped", "--no-check", recipe="edited.toml")
    (jobs.folder / "edited.toml").write_text(
        "[model]\nlayers = 2\n"
    )  # the job trains what was submitted, at every start
    jobs.wait_for_log(stopped, "\nstep 1/")
    jobs.stop(stopped)
    jobs.release(stopped)
    jobs.until(stopped, JobState="COMPLETED")

    output = jobs.log(stopped)
    (saved,) = (int(step) for step in re.findall(r"saved step-(\d+); the job resumes from there", output))
    assert 0 < saved < STEPS and f"checkpoints/step-{saved} after {saved} steps" in output
    assert jobs.log(whole).count("4 ranks on 2 nodes") == 2  # the doctor's and the training's
    assert output.count("4 ranks on 2 nodes") == 2  # in both starts
    one, two = (report.report(jobs.folder / name) for name in ("whole", "stopped"))
    assert two.figures["sessions"] == 2 and two.figures["steps"] == STEPS
    assert np.array_equal(one.run.steps["loss"], two.run.steps["loss"])
    assert one.figures["val_loss"] == two.figures["val_loss"]


def test_script_of_the_page_from_one_gpu_is_requeued_on_two_nodes(jobs):
    blocks = {block.title: block.text for block in pages.blocks((DOCS / "from-one-gpu.md").read_text())}
    (jobs.folder / "train.py").write_text(blocks["train.py"].replace("epochs = 8", "epochs = 30"))
    options = ("--nodes=2", "--ranks-per-node=1", "--time=30", "--restarts=3", "--out=scripted", "--no-check")
    line = [sys.executable, "-P", "-m", "hpcdist", "submit", *options, "--", sys.executable, "train.py"]
    done = jobs.cluster.run(*line, cwd=jobs.folder)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    jobs.wait_for_log(number, "epoch 1:")
    jobs.stop(number)
    jobs.release(number)
    jobs.until(number, JobState="COMPLETED")
    output = jobs.log(number)
    (saved,) = re.findall(r"saved step-(\d+); the job resumes from there", output)
    assert re.findall(r"from step (\d+) on 2 ranks", output) == ["0", saved] and "epoch 30:" in output
    steps = report.report(jobs.folder / "scripted").run.steps["step"]
    assert steps.tolist() == list(range(1, 30 * 64 + 1))


def test_failed_node_is_excluded_from_the_next_start(jobs):
    cluster = jobs.cluster
    options = ("--restarts=3", "--spare-nodes=1", "--out", "spared")
    number = jobs.begin(*options, nodes=2, ranks=1, steps=ENDLESS)
    try:
        saved = jobs.checkpoint(jobs.folder / "spared")
        assert cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test").returncode == 0
        cluster.wait(lambda: "without the lost nodes n2" in jobs.log(number), "a start without n2")
        jobs.checkpoint(jobs.folder / "spared", older=(jobs.folder / "spared" / "checkpoints" / "latest").read_text())
        cluster.wait(
            lambda: "2 ranks on 2 nodes" in jobs.log(number).partition("without the lost nodes n2")[2], "two nodes"
        )
    finally:
        print(jobs.log(number))
        cluster.run("scancel", number)
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    again = re.search(r"start 2 follows .*, from step-(\d+)\n", jobs.log(number))
    assert again and int(again[1]) >= int(saved.strip().removeprefix("step-"))
    cluster.wait(lambda: "down" not in cluster.run("sinfo", "-h", "-o", "%t").stdout, "n2")


def test_job_survives_the_death_of_the_only_rank_of_a_node(jobs, mpi):
    try:
        mpirun.ulfm_options(mpi)
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    number = jobs.begin("--survive=replace", "--out", "outlived", "--set=chaos.kill=['1@30']", ranks=1, steps=40)
    jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
    assert re.search(r"rank 1 died .* on 2 ranks,.* after 29 steps", jobs.log(number))


def test_two_concurrent_jobs_with_hostile_texts_complete(cluster, tmp_path):
    """The directory, the file, the names and the comment have quotes, blanks and commands.

    The second job has another recipe.
    """
    jobs = Jobs(cluster, tmp_path / EVIL_FOLDER)
    shutil.copy(jobs.folder / "text.txt", jobs.folder / EVIL)
    names = (f"--job-name={EVIL}", f"--account={EVIL}", f"--sbatch-arg=--comment={EVIL}")
    options = (*names, "--no-check", "--set", f"data.path={json.dumps(EVIL, ensure_ascii=False)}")
    out = f"{EVIL} run"
    endless = jobs.begin(*options, "--out", out, nodes=2, ranks=1, steps=ENDLESS)
    completes = jobs.begin(*options, "--set=run.seed=7", nodes=2, ranks=1, steps=20)
    shown = cluster.run("scontrol", "show", "job", endless).stdout
    assert f"JobName={EVIL}\n" in shown and f"Comment={EVIL} \n" in shown and f"Account={EVIL.lower()} " in shown
    jobs.checkpoint(jobs.folder / out)
    jobs.until(completes, JobState="COMPLETED", ExitCode="0:0")
    jobs.until(endless, JobState="RUNNING")
    (local_data,) = (jobs.folder / "runs").iterdir()
    assert f"run directory {local_data}\n" in jobs.log(completes) and "2 ranks on 2 nodes" in jobs.log(completes)
    assert f"run directory {jobs.folder / out}\n" in jobs.log(endless) and str(local_data) not in jobs.log(endless)

    # The script by hand, while the job runs: two would destroy each other's checkpoints.
    again = cluster.run("sbatch", "--parsable", f"{out}/job.sbatch", cwd=jobs.folder)
    assert again.returncode == 0, again.stderr
    jobs.until(again.stdout.strip(), JobState="FAILED", ExitCode="74:0")
    assert "is being written by process" in jobs.log(again.stdout.strip())
    cluster.run("scancel", endless)
    assert not list(tmp_path.rglob("[xy]"))


@pytest.mark.parametrize("sbcast", ["false", "true"])
def test_nodes_get_copies_of_environment_and_data(cluster, tmp_path, sbcast):
    """The archive contains this Python, and the Python on the node reports the path of the copy."""
    jobs = Jobs(cluster, tmp_path / "home")
    (tmp_path / "node").mkdir()
    base = search.load_selected(None, cluster.environment).name
    (jobs.folder / "site.toml").write_text(
        f"based_on = '{base}'\n[storage]\nnode_local = '{tmp_path / 'node'}'\nsbcast = {sbcast}\n"
    )
    clone = Path(hpcdist.__file__).parents[1]
    program = f'#!/bin/sh\necho "staged as $0" >&2\nexport PYTHONPATH={clone}\nexec {sys.executable} "$@"\n'
    with tarfile.open(jobs.folder / "environment.tar", "w") as archive:
        member = tarfile.TarInfo("bin/python")
        member.size, member.mode = len(program), 0o755
        archive.addfile(member, io.BytesIO(program.encode()))
    options = ("--site=site.toml", "--stage-data", "--stage-environment=environment.tar", "--no-check", "--out=run")
    number = jobs.begin(*options, nodes=1, ranks=2, steps=2)
    jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
    assert ("\nsbcast " in (jobs.folder / "run" / "job.sbatch").read_text()) is (sbcast == "true")
    output = jobs.log(number)
    (local,) = set(re.findall(r"staged as (\S+)/environment/bin/python\n", output))
    assert Path(local).parent == tmp_path / "node" and not Path(local).exists()
    assert output.count("staged as") >= 3  # `run`, its ranks, `jobs end`
    assert f"data: {local}/data/text.txt, " in output


@pytest.fixture(scope="module")
def machine_partitions(cluster):
    """Give this cluster the partitions and features that the machine profiles name.


    Their QOS are entries of an accounting database. Slurm accepts any QOS without such a database.
    """
    schedulers = [search.load(name, {}).scheduler for name in search.names({})]
    partitions = sorted({each.partition for each in schedulers if each.partition and each.kind == "slurm"})
    features = ",".join(sorted({each.constraint for each in schedulers if each.constraint}))

    def update(*words):
        done = cluster.run("scontrol", *words)
        assert done.returncode == 0, done.stderr

    update("update", "NodeName=n[1-3]", f"AvailableFeatures={features}")
    for name in partitions:
        update("create", f"PartitionName={name}", "Nodes=n[1-3]")
    yield
    for name in partitions:
        update("delete", f"PartitionName={name}")
    update("update", "NodeName=n[1-3]", "ActiveFeatures=", "AvailableFeatures=")


@pytest.mark.parametrize("name", [name for name in search.names({}) if search.load(name, {}).scheduler.kind == "slurm"])
def test_slurm_accepts_the_script_of_each_profile(cluster, machine_partitions, tmp_path, name):
    site = search.load(name, {})
    gpus = 0 if site.gpu.unsupported else 4
    job = BatchJob(
        nodes=2,
        ranks_per_node=4,
        gpus_per_node=gpus,
        walltime="1-00:00:00",
        partition=None if site.scheduler.partition else "debug",
        mem="500",
        account="project",
        python=sys.executable,
        recipe="",
        warmup=True,
        local=tmp_path,
    )
    (tmp_path / "job").write_text(submission.render(job, site))
    done = cluster.run("sbatch", "--test-only", str(tmp_path / "job"))
    assert done.returncode == 0 and "using 8 processors on nodes" in done.stderr, done.stderr
    assert f"in partition {site.scheduler.partition or 'debug'}" in done.stderr
    shared = {item.name: getattr(job, item.name) for item in dataclasses.fields(job)}
    del shared["recipe"], shared["sweep"]
    others = [SweepJob(**shared, sweep="", trial_ranks=(8, 8)), BenchmarkJob(**shared, suite="collectives")]
    others.append(MergeJob.of(others[0]))
    if site.launcher.kind == "srun":
        others.append(ServersJob(**{**shared, "nodes": 1}, recipe="", server_nodes=1))
    for other in others:
        (tmp_path / "job").write_text(submission.render(other, site))
        done = cluster.run("sbatch", "--test-only", str(tmp_path / "job"))
        assert done.returncode == 0, (other.template, done.stderr)
    for more in ({"gpus_per_node": 5}, {"mem": "2G"}, {"constraint": "nix"}):
        (tmp_path / "job").write_text(submission.render(dataclasses.replace(job, **more), site))
        done = cluster.run("sbatch", "--test-only", str(tmp_path / "job"))
        taken = "gpus_per_node" in more and site.gpu.request == "none"
        assert (done.returncode == 0) == taken, (more, done.stderr)


@pytest.mark.parametrize("name", ["%j", "back\\slash"])
def test_directory_name_with_slurm_pattern_is_rejected(cluster, tmp_path, name):
    jobs = Jobs(cluster, tmp_path / name)
    done = jobs.submit("--nodes=1")
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert "which Slurm reads as a pattern" in done.stderr
    (jobs.folder / "job").write_text("#!/bin/bash\n#SBATCH --output=log\n")
    number = cluster.run("sbatch", "--parsable", "job", cwd=jobs.folder).stdout.strip()
    jobs.until(number, JobState="FAILED")  # so it does
    assert not (jobs.folder / "log").exists()


@cases(
    "options, words",
    (["--nodes=4"], "node configuration is not available"),
    (["--nodes=1", "--partition=nix"], "invalid partition specified: nix"),
    (["--nodes=1", "--constraint=nix"], "Invalid feature specification"),
    (["--nodes=1", "--mem=2G"], "node configuration is not available"),
)
def test_rejection_by_slurm_is_reported(jobs, options, words):
    done = jobs.submit("--job-name=hpcdist-refused", *options)
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert "Slurm refused the job" in done.stderr and words in done.stderr
    assert "hpcdist-refused" not in jobs.cluster.run("squeue", "-h", "-o", "%j").stdout


def test_time_limit_requeues_the_job_unless_forbidden(jobs, endless):
    run_dir = jobs.folder / "endless"
    # Whoever comes late finds it in its second start, or in a later one: Slurm lets it wait for two minutes only.
    jobs.cluster.wait(lambda: int(jobs.cluster.job(endless).get("Restarts", "0")) >= 1, f"requeue of job {endless}")
    assert jobs.cluster.run("scontrol", "update", f"JobId={endless}", "Requeue=0").returncode == 0
    saved = (run_dir / "checkpoints" / "latest").read_text()
    if jobs.cluster.job(endless)["JobState"] == "PENDING":
        # Wait: a node accepts no credential from the second in which it revoked the first start's credential.
        jobs.cluster.run("scontrol", "update", f"JobId={endless}", "StartTime=now+3")
    assert "SIGUSR1: the walltime ends soon" in jobs.log(endless)
    newer = jobs.checkpoint(run_dir, older=saved)
    jobs.cluster.run("scancel", "--signal=USR1", "--batch", endless)  # if its walltime has not said so already
    jobs.until(endless, JobState="FAILED", ExitCode="75:0")
    last = (run_dir / "checkpoints" / "latest").read_text().strip()
    assert f"saved {last}; the job resumes from there\n" in jobs.log(endless)
    assert "not requeued: scontrol refused" in jobs.log(endless)
    assert int(last.removeprefix("step-")) >= int(newer.strip().removeprefix("step-"))
