"""The launch environment of a process, and the rejection of a world that fell apart."""

import os
import tempfile

import pytest

from harness.jobs import call_command
from harness.marks import cases
from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import LaunchEnvironment, drop_empty, launch_environment, provide_home
from hpcdist.comm.placement import locate
from hpcdist.comm.start import check_world
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
}
PMI = {"PMI_SIZE": "8", "PMI_RANK": "5"}
FLUX = {"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1"}
BATCH = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}


@cases(
    "environment, expected",
    ({}, None),
    (OPEN_MPI, LaunchEnvironment("Open MPI mpirun", 4, 3, 1)),
    ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, LaunchEnvironment("MPICH mpirun", 2, 1, 1)),
    (SRUN, LaunchEnvironment("Slurm srun", 8, 5, 1)),
    (SRUN | {"PMI_SIZE": "8", "PMI_RANK": "5"}, LaunchEnvironment("Slurm srun", 8, 5, 1)),
    (SRUN | {"PMI_SIZE": "16", "PMI_RANK": "5"}, LaunchEnvironment("MPICH mpirun", 16, 5, None)),
    (SRUN | PMI | {"MPI_LOCALRANKID": "3"}, LaunchEnvironment("MPICH mpirun", 8, 5, 3)),
    (FLUX, LaunchEnvironment("Flux", 8, 5, 1)),
    (FLUX | PMI, LaunchEnvironment("Flux", 8, 5, 1)),
    (PMI | {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "2"}, LaunchEnvironment("PALS mpiexec", 8, 5, 2)),
    (BATCH, None),
    (BATCH | {"SLURM_STEP_ID": "4294967291"}, None),
    (BATCH | OPEN_MPI, LaunchEnvironment("Open MPI mpirun", 4, 3, 1)),
    ids=[
        "by hand",
        "Open MPI",
        "MPICH",
        "srun",
        "srun with PMI",
        "a daemon of srun",
        "mpirun says itself",
        "flux",
        "flux with PMI",
        "PALS",
        "batch script",
        "batch step",
        "mpirun in sbatch",
    ],
)
def test_launch_environment_is_recognised(environment, expected):
    assert launch_environment(environment) == expected


def test_separate_singleton_worlds_are_rejected_with_cure():
    output = launch_environment(SRUN)
    assert output is not None
    check_world(output, 8, "Open MPI v5")
    with pytest.raises(
        ConfigurationError, match=r"announced 8 ranks, but MPI \(Open MPI v5\) sees a world of 1.*--mpi="
    ):
        check_world(output, 1, "Open MPI v5")


@pytest.mark.parametrize("local_ranks", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_local_ranks_follow_the_launcher_order(local_ranks):
    def body(comm):
        return locate(comm, LaunchEnvironment("Open MPI mpirun", 8, comm.rank, local_ranks[comm.rank])).local_rank

    assert run_threads(8, body) == list(local_ranks)


@pytest.mark.parametrize("local_ranks", [(0, 0, 1, 2), (1, 2, 3, 4), (0, 1, 2, 4)])
def test_invalid_local_ranks_are_rejected(local_ranks):
    def body(comm):
        return locate(comm, LaunchEnvironment("Open MPI mpirun", 4, comm.rank, local_ranks[comm.rank]))

    with pytest.raises(
        ConfigurationError, match=f"announced the local ranks {' '.join(map(str, local_ranks))}; expected each"
    ):
        run_threads(4, body)


def test_unannounced_local_rank_is_the_index_on_the_node():
    def body(comm):
        return locate(comm, LaunchEnvironment("mpiexec", 3, comm.rank, None if comm.rank == 1 else 2)).local_rank

    assert run_threads(3, body) == [0, 1, 2]


def test_missing_home_is_set_from_the_user_database(monkeypatch):
    environment = {}
    monkeypatch.delenv("HOME")
    provide_home(environment)
    assert os.path.isdir(environment["HOME"])
    for given in ("", "/elsewhere"):
        environment = {"HOME": given}
        provide_home(environment)
        assert environment == {"HOME": given}, "an existing HOME is kept"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user that the system does not know
    environment = {}
    provide_home(environment)
    assert environment["HOME"] == tempfile.gettempdir()


def test_mpirun_is_identified_without_home(monkeypatch, capsys):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(mpirun, "identify", lambda path: mpirun.Launcher(path, os.environ["HOME"], ""))
    code, _, err = call_command(capsys, "run", "-n", "2", "--dry-run", "doctor")
    assert code == 0, err


@pytest.mark.parametrize("empty", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"])
def test_empty_variable_of_a_launcher_counts_as_unset(empty):
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"} | {empty: ""}
    assert launch_environment(variables) is None


def test_size_that_is_no_number_is_rejected():
    with pytest.raises(ConfigurationError, match="OMPI_COMM_WORLD_SIZE='two'"):
        launch_environment({"OMPI_COMM_WORLD_SIZE": "two", "OMPI_COMM_WORLD_RANK": "1"})


def test_empty_variables_of_slurm_do_not_reach_the_launcher():
    variables = {"SLURM_CPUS_PER_TASK": "", "PMI_RANK": "", "SLURM_JOB_ID": "7", "HOME": ""}
    drop_empty(variables)
    assert variables == {"SLURM_JOB_ID": "7", "HOME": ""}
