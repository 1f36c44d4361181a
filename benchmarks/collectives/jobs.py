"""Jobs of the study `libraries`: the algorithms that other libraries can be forced to use, and command lines."""

import argparse
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import harness
from hpcdist.comm.launch import mpirun
from hpcdist.errors import HpcdistError

WORKER = ("-m", "benchmarks.collectives.worker")
AS_IT_COMES = "default"
OURS = "hpcdist"
JOB_S = 240.0  # timeout of a job; a job that exceeds it is not started again

_TUNED = ("basic_linear", "nonoverlapping", "recursive_doubling", "ring", "segmented_ring", "rabenseifner")
_INTRA = (
    *("recursive_doubling", "recursive_multiplying", "reduce_scatter_allgather", "tree", "recexch", "ring"),
    "k_reduce_scatter_allgather",
)


def _mca(**values: str) -> tuple[Sequence[str], Mapping[str, str]]:
    return [word for name, value in values.items() for word in ("--mca", name, value)], {}


def _tuned(number: int) -> tuple[Sequence[str], Mapping[str, str]]:
    return _mca(coll="^han", coll_tuned_use_dynamic_rules="1", coll_tuned_allreduce_algorithm=f"{number}")


def _cvar(**values: str) -> tuple[Sequence[str], Mapping[str, str]]:
    return (), {f"MPIR_CVAR_{name}": value for name, value in values.items()}


# vendor -> algorithm name -> (options of mpirun, environment) that force this algorithm
FORCED: Mapping[str, Mapping[str, tuple[Sequence[str], Mapping[str, str]]]] = {
    mpirun.OPEN_MPI: {
        **{f"tuned {name}": _tuned(number) for number, name in enumerate(_TUNED, 1)},
        "han": _mca(coll_han_priority="100"),
        "sm": _mca(coll_sm_priority="100"),
        "xhc": _mca(coll_xhc_priority="100"),
    },
    mpirun.MPICH: {
        **{name: _cvar(DEVICE_COLLECTIVES="none", ALLREDUCE_INTRA_ALGORITHM=name) for name in _INTRA},
        "release_gather": _cvar(
            ALLREDUCE_COMPOSITION="3", ALLREDUCE_POSIX_INTRA_ALGORITHM="release_gather", POSIX_NUM_COLLS_THRESHOLD="0"
        ),
    },
}
NEEDS_COMPONENT = ("han", "sm", "xhc")  # Open MPI components: forcing a missing one would measure the default again


@dataclass(frozen=True)
class Library:
    """An MPI library: a Python whose mpi4py uses the library, and the launcher.

    ``library`` is the path of the shared library, if mpi4py does not load the right one itself. ``folder`` has a link
    with the name of the MPICH ABI, which MPICH wheels of mpi4py are linked to and some systems lack.
    """

    name: str
    python: str
    launcher: mpirun.Launcher
    library: str = ""
    folder: str = ""

    def line(
        self, ranks: int, program: Sequence[str], extra: Sequence[str], env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        variables = {**mpirun.settings(self.launcher), **env, "PYTHONPATH": str(harness.ROOT)}
        if self.library:
            variables["MPI4PY_LIBMPI"] = self.library
        if self.folder:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join([self.folder, os.environ.get("LD_LIBRARY_PATH", "")])
        command = mpirun.command(self.launcher, ranks, [self.python, "-P", *program], variables, extra)
        return command, {**os.environ, **variables}


@dataclass(frozen=True)
class Contender:
    """A job. ``library`` is None for gloo; ``algorithm`` is "" for hpcdist, which has its own list of algorithms."""

    library: Library | None
    algorithm: str
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if self.library is None:
            return "gloo"
        return f"{OURS} on {self.library.name}" if not self.algorithm else f"{self.library.name} {self.algorithm}"


def library_of(text: str) -> Library:
    """Parse ``NAME=PYTHON[@MPIEXEC[@LIBMPI]]``. The default launcher is the mpirun in the folder of PYTHON."""
    name, _, rest = text.partition("=")
    python, *more = rest.split("@")
    if not rest or not Path(python).is_file() or len(more) > 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PYTHON[@MPIEXEC[@LIBMPI]] with an existing PYTHON")
    mpiexec = more[0] if more else str(Path(python).parent / "mpirun")
    try:
        return Library(name, python, mpirun.identify(Path(mpiexec)), more[1] if len(more) > 1 else "")
    except HpcdistError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def with_abi_name(library: Library, folder: Path) -> Library:
    """Create a link with the MPICH ABI name in ``folder`` if ``library`` is an MPICH loaded by path."""
    if not library.library or library.launcher.vendor != mpirun.MPICH:
        return library
    link_folder = folder / f"abi-{library.name.replace('/', '_')}"
    link_folder.mkdir()
    (link_folder / "libmpi.so.12").symlink_to(library.library)
    return replace(library, folder=str(link_folder))


def components(library: Library) -> str:
    info = library.launcher.path.resolve().with_name("ompi_info")
    if not info.exists():
        info = library.launcher.path.with_name("ompi_info")
    try:
        environment = {**os.environ, **mpirun.settings(library.launcher)}
        return subprocess.run([info], capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def contenders(libraries: Sequence[Library], with_gloo: bool) -> Iterator[Contender]:
    for library in libraries:
        yield Contender(library, "")
        yield Contender(library, AS_IT_COMES)
        component_list = components(library) if library.launcher.vendor == mpirun.OPEN_MPI else ""
        for name, (extra, environment) in FORCED.get(library.launcher.vendor, {}).items():
            if name not in NEEDS_COMPONENT or f"MCA coll: {name} " in component_list:
                yield Contender(library, name, extra, environment)
    if with_gloo:
        yield Contender(None, AS_IT_COMES)


def launch(contender: Contender, ranks: int, program: Sequence[str], torch_python: str | None) -> str:
    if contender.library is not None:
        line, environment = contender.library.line(ranks, program, contender.options, contender.environment)
        jobs = [(line, environment)]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {**os.environ, "PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        line = [str(torch_python), "-P", *program]
        jobs = [(line, common | {"RANK": str(rank)}) for rank in range(ranks)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(line, env=environment, **streams) for line, environment in jobs]  # type: ignore[call-overload]
    reasons = []
    try:
        for process in started:
            _, stderr = process.communicate(timeout=JOB_S)
            if process.returncode:
                reasons.append(f"exit code {process.returncode}: {' '.join(stderr.split())[-400:]}")
    except subprocess.TimeoutExpired:
        reasons.append(f"timed out after {JOB_S:g} s")
    finally:
        for process in started:
            process.terminate()  # no effect on an ended process
            process.wait()
    return "; ".join(reasons)
