"""The shape and limits of a batch job, and the errors for invalid jobs."""

import pytest

from harness.marks import cases
from hpcdist.batch.job import BatchJob, memory_mib, walltime_s
from hpcdist.errors import UsageError


@cases(
    "text, seconds",
    ("1", 60),
    ("90", 5400),
    ("00:01:00", 60),
    ("01:30:15", 5415),
    ("48:00:00", 172800),
    ("1-00:00:00", 86400),
    ("7-23:59:59", 691199),
)
def test_walltime_is_parsed(text, seconds):
    assert walltime_s(text) == seconds


@cases(
    "text",
    *("", "0", "-5", "1.5", "10:00", "1-12", "1-12:00", "00:00:59", "1-24:00:00", "00:60:00", "00:00:60", "1h"),
    *("٣", "1:0:0", "90\n", " 90", "infinite", "1-00:00:00 --wrap=x"),
)
def test_invalid_walltime_is_rejected(text):
    with pytest.raises(UsageError, match="expected D-HH:MM:SS, HH:MM:SS or whole minutes"):
        walltime_s(text)


@pytest.mark.parametrize(("text", "mib"), [("4000", 4000), ("512K", 0.5), ("200g", 204800), ("1T", 1048576), ("0", 0)])
def test_memory_is_parsed(text, mib):
    assert memory_mib(text) == mib


@cases(
    "values, words",
    (dict(nodes=0), "--nodes 0"),
    (dict(ranks_per_node=0), "--ranks-per-node 0"),
    (dict(cpus_per_task=-1), "--cpus-per-task -1"),
    (dict(restarts=-1), "--restarts -1"),
    (dict(spare_nodes=1), "--spare-nodes 1.*--restarts"),
    (dict(restarts=1, spare_nodes=-1), "--spare-nodes -1"),
    (dict(survive="yes"), "none, shrink, replace"),
    (dict(name=""), "--job-name is empty"),
    (dict(partition=""), "--partition is empty"),
    (dict(qos=""), "--qos is empty"),
    (dict(constraint=""), "--constraint is empty"),
    (dict(mem="4 GB"), "--mem '4 GB': expected MiB"),
    (dict(mem=""), "--mem '': expected MiB"),
    (dict(walltime="2", signal_s=120), "--signal-seconds 120 must be less than the walltime 2"),
    (dict(signal_s=0), "between 1 and 65535"),
    (dict(signal_s=65536), "between 1 and 65535"),
    (dict(sbatch_args=("-p debug",)), "expected a long option"),
    (dict(sbatch_args=("--qos=a", "wrap")), "expected a long option"),
)
def test_invalid_job_is_rejected(values, words):
    with pytest.raises(UsageError, match=words):
        BatchJob(**{"nodes": 1, "python": "python", "recipe": ""} | values)


def test_ranks_are_nodes_times_ranks_per_node():
    assert BatchJob(nodes=3, ranks_per_node=4, python="python", recipe="", walltime="2", signal_s=119).ranks == 12


@cases(
    "argument, words",
    ("--output=mine.txt", "conflicts with the option --output of the job script"),
    ("--open-mode=truncate", "conflicts with the option --open-mode"),
    ("--nodes=3", "conflicts with the option --nodes of the job script; use --nodes"),
    ("--ntasks=3", "conflicts with the option --ntasks of the job script; use --nodes and --ranks-per-node"),
    ("--ntasks-per-node=3", "use --ranks-per-node"),
    ("--time=5", "use --time"),
    ("--signal=B:TERM@9", "use --signal-seconds"),
    ("--sig=TERM", "conflicts with the option --signal"),  # an abbreviation that sbatch accepts
    ("--requeue", "the job script controls requeueing; the job is requeued until all steps are done"),
    ("--no-requeue", "the job script controls requeueing; use --chain"),
    ("--chdir=/tmp", "submit from that directory"),
)
def test_sbatch_option_that_contradicts_the_script_is_rejected(argument, words):
    with pytest.raises(UsageError) as error:
        BatchJob(nodes=1, python="python", recipe="", sbatch_args=("--qos=a", argument))
    assert words in str(error.value) and repr(argument) in str(error.value)


@cases(
    "argument, values, words",
    ("--qos=debug", {"qos": "regular"}, "conflicts with the option --qos of the job script; use --qos"),
    ("--constr=gpu", {"constraint": "cpu"}, "conflicts with the option --constraint"),
    ("--mem=4G", {"mem": "0"}, "conflicts with the option --mem of the job script; use --mem"),
    ("--mem-per-cpu=4G", {"mem": "0"}, "conflicts with the option --mem-per-cpu of the job script; use --mem"),
)
def test_duplicate_option_is_rejected(argument, values, words):
    given = {"nodes": 1, "python": "python", "recipe": "", "sbatch_args": (argument,)}
    assert BatchJob(**given).sbatch_args == (argument,)
    with pytest.raises(UsageError, match=words):
        BatchJob(**given, **values)


def test_gpu_option_is_rejected_if_the_job_requests_gpus():
    given = {"nodes": 1, "python": "python", "recipe": "", "sbatch_args": ("--gpus-per-node=2",)}
    assert BatchJob(**given).sbatch_args
    with pytest.raises(UsageError, match="conflicts with the option --gpus-per-node"):
        BatchJob(**given, gpus_per_node=2)
    near = ("--time-min=3", "--nodelist=n1", "--signal-x", "--nodefile=a", "--gres=gpu:2", "--error=err.txt")
    assert BatchJob(nodes=1, python="python", recipe="", gpus_per_node=2, sbatch_args=near).sbatch_args == near
