"""Wheelhouse: hpcdist and its requirements as wheels with their SHA-256, for machines without a network. No MPI.

pip downloads, and pip installs: what is added here is hpcdist's own wheel, the tags of the other machine, and the
hashes. Wheels and the machines they are for are named as pip names both (PEP 427, 503, 600).
"""

import email.parser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import hpcdist
from hpcdist.batch import job
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.nearest import suggestion

REQUIREMENTS: Final = "requirements.txt"
SUMS: Final = "SHA256SUMS"
SCRIPT: Final = "install.sh"
LIMIT_S: Final = 3600.0  # of one download; the CUDA wheels are gigabytes
# What mpi4py's source is built with, in an environment that pip makes: mpi4py asks for the last two while it is built.
MPI4PY_BUILD: Final = ("setuptools >= 42", "build", "cython >= 3.0.1")
BUILT_FROM: Final = ("LICENSE", "README.md", "hpcdist", "modulefiles", "pyproject.toml", "setup.cfg", "slurm")

_OWN: Final = "hpcdist"
_MPI4PY: Final = "mpi4py"
_PLATFORM: Final = re.compile(r"manylinux_2_(\d+)_(x86_64|aarch64|ppc64le)")
_OLDEST: Final = {"x86_64": 5, "aarch64": 17, "ppc64le": 17}  # minor version of glibc in the oldest tag
_ALIASES: Final = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True)
class Wheel:
    """A wheel by its file name; ``read`` also knows what is in it."""

    path: Path
    name: str  # normalised: lower case, with hyphens
    version: str
    extras: tuple[str, ...] = field(default=())
    python: str = ""  # Requires-Python

    @classmethod
    def named(cls, path: Path) -> "Wheel":
        """Return what the file name says. Raises UsageError for a name that is none of a wheel."""
        parts = path.name.removesuffix(".whl").split("-")
        if path.suffix != ".whl" or len(parts) not in (5, 6):
            raise UsageError(f"{path} is no wheel: expected a name like hpcdist-0.2.0-py3-none-any.whl")
        return cls(path, re.sub(r"[-_.]+", "-", parts[0]).lower(), parts[1])

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        """Return what its name and its metadata say. Raises UsageError for a file that is no wheel of hpcdist."""
        named = cls.named(path)
        if named.name != _OWN:
            raise UsageError(f"{path} is a wheel of {named.name}; expected one of {_OWN}")
        try:
            with zipfile.ZipFile(path) as archive:
                (inside,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
                message = email.parser.BytesParser().parsebytes(archive.read(inside))
        except (zipfile.BadZipFile, ValueError) as error:
            raise UsageError(f"{path} is damaged, or no wheel: {error}; build it again with `pip wheel`") from error
        extras = tuple(message.get_all("Provides-Extra") or ())
        return cls(path, named.name, named.version, extras, str(message.get("Requires-Python", "")))

    def check(self, *, extras: Sequence[str], python: str) -> None:
        """Refuse extras that the wheel does not have, with the nearest one, and a Python that is too old for it."""
        for extra in extras:
            if extra not in self.extras:
                raise UsageError(f"hpcdist has no extra {extra!r}; {suggestion(extra, sorted(self.extras))}")
        least = re.search(r">=\s*(\d+)\.(\d+)", self.python)
        if least and tuple(map(int, python.split("."))) < tuple(map(int, least.groups())):
            raise UsageError(
                f"hpcdist {self.version} needs Python {self.python}, and the wheels asked for are for {python}"
            )


def compatible_tags(platform: str) -> tuple[str, ...]:
    """Return every tag that a machine of ``platform`` takes, the newest first: manylinux_2_28, 2_27, ..., 2_17, 2014.

    pip takes a tag to the letter, and would miss the wheels that are built for older machines. Raises UsageError.
    """
    match = _PLATFORM.fullmatch(platform)
    if match is None:
        raise UsageError(
            f"--platform {platform!r}: expected manylinux_2_N_ARCH, with N of the glibc of the compute nodes (`ldd "
            f"--version` there says 2.N) and ARCH one of {', '.join(_OLDEST)}: for example manylinux_2_28_x86_64"
        )
    newest, machine = int(match[1]), match[2]
    tags = []
    for minor in range(newest, _OLDEST[machine] - 1, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _ALIASES:
            tags.append(f"{_ALIASES[minor]}_{machine}")
    if not tags:
        raise UsageError(f"--platform {platform}: the oldest on {machine} is manylinux_2_{_OLDEST[machine]}_{machine}")
    return tuple(tags)


@dataclass(frozen=True, kw_only=True)
class WheelhouseOrder:
    """Packages to collect, and the machine: this one where ``platform`` and ``python_version`` are empty."""

    output: Path
    extras: tuple[str, ...] = ()
    requirements: tuple[Path, ...] = ()  # files of further requirements
    wheel: Path | None = None  # hpcdist's own; None: built from the clone
    mpi4py_source: bool = False
    platform: str = ""  # e.g. manylinux_2_28_x86_64
    python_version: str = ""  # e.g. 3.12

    @property
    def python(self) -> str:
        """Return the Python that the wheels are for: "3.12"."""
        return self.python_version or f"{sys.version_info.major}.{sys.version_info.minor}"

    @property
    def pip_options(self) -> list[str]:
        """Return pip's options for wheels of another machine; none for this one."""
        version = ["--implementation", "cp", "--python-version", self.python_version] if self.python_version else []
        tags = compatible_tags(self.platform) if self.platform else ()
        return [*version, *(word for tag in tags for word in ("--platform", tag))]


@dataclass(frozen=True)
class CollectedWheels:
    """Content of a wheelhouse."""

    folder: Path
    files: int
    nbytes: int


def collect(order: WheelhouseOrder) -> CollectedWheels:
    """Fill a new folder ``order.output``: it appears when it is complete. Needs pip and a network.

    Raises UsageError for a folder that is not empty, an unknown extra, or where hpcdist's own wheel cannot be built;
    MissingCapabilityError when pip does not find or reach something; StorageError when the folder cannot be written.
    """
    _check(order)
    try:
        order.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{order.output.name}.", dir=order.output.parent) as scratch:
            folder = Path(scratch) / "wheelhouse"
            folder.mkdir()
            _fill(folder, order)
            files = [path for path in folder.iterdir() if path.is_file()]
            nbytes = sum(path.stat().st_size for path in files)
            folder.rename(order.output)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"the wheelhouse {order.output} cannot be written: {error}; give a folder of yours"
        ) from error
    return CollectedWheels(order.output, len(files), nbytes)


def _check(order: WheelhouseOrder) -> None:
    """Refuse before anything is downloaded what cannot end well."""
    if order.output.exists() and (not order.output.is_dir() or any(order.output.iterdir())):
        raise UsageError(
            f"{order.output} exists and is not an empty folder: give a new one, since wheels of an earlier collection "
            "would be installed with these"
        )
    if order.python_version and not re.fullmatch(r"3\.\d{1,2}", order.python_version):
        raise UsageError(f"--python-version {order.python_version!r}: expected two numbers, as in 3.12")
    if order.platform:
        compatible_tags(order.platform)  # raises for what is none


def _fill(folder: Path, order: WheelhouseOrder) -> None:
    own = Wheel.read(_own_wheel(folder, order.wheel))
    own.check(extras=order.extras, python=order.python)
    extras = f"[{','.join(order.extras)}]" if order.extras else ""
    requirements = [f"hpcdist{extras} @ {own.path.as_uri()}"]
    for path in order.requirements:
        requirements += ["--requirement", str(path)]
    binary = ("download", "--only-binary", ":all:", *order.pip_options, "--dest", str(folder))
    _pip(*binary, *requirements)
    listed = sorted(folder.glob("*.whl"), key=lambda path: path.name.lower())
    if order.mpi4py_source:
        version = next(wheel.version for wheel in map(Wheel.named, listed) if wheel.name == _MPI4PY)
        source = ("--no-deps", "--no-binary", _MPI4PY, f"{_MPI4PY} == {version}")
        _pip("download", "--dest", str(folder), *source)
        _pip(*binary, *MPI4PY_BUILD)
    shutil.copyfile(job.folder(job.INSTALL) / SCRIPT, folder / SCRIPT)
    (folder / SCRIPT).chmod(0o755)
    (folder / REQUIREMENTS).write_text(_requirements(listed, order))
    sums = sorted(path for path in folder.iterdir() if path.is_file())
    (folder / SUMS).write_text("".join(f"{digest(path)}  {path.name}\n" for path in sums))


def _requirements(listed: list[Path], order: WheelhouseOrder) -> str:
    """Write what pip's --require-hashes reads: each project once, at its version, with the digests of its files.

    The tools that build mpi4py's source are not among them: pip takes those from the folder when it builds.
    """
    lines = [
        f"# hpcdist {hpcdist.__version__}{' with ' + ', '.join(order.extras) if order.extras else ''}",
        f"# python {order.python}",
    ]
    for path in listed:
        wheel = Wheel.named(path)
        files = [path]
        if wheel.name == _MPI4PY:
            files += sorted(path.parent.glob(f"{_MPI4PY}-*.tar.gz"))
        hashes = " ".join(f"--hash=sha256:{digest(file)}" for file in files)
        lines.append(f"{wheel.name}=={wheel.version} {hashes}")
    return "\n".join(lines) + "\n"


def _own_wheel(folder: Path, wheel: Path | None) -> Path:
    """Put hpcdist's own wheel into ``folder`` and return its path there."""
    if wheel is not None:
        Wheel.named(wheel)  # raises for another name
        try:
            return Path(shutil.copy(wheel, folder))
        except FileNotFoundError as error:
            raise UsageError(f"--wheel {wheel}: there is no such file") from error
    installed = Path(hpcdist.__file__).resolve().parents[1]
    clone = next((place for place in (installed, Path.cwd()) if _is_clone(place)), None)
    if clone is None:
        raise UsageError(
            f"hpcdist is installed in {installed}, and neither that nor this directory, {Path.cwd()}, is a clone that "
            "its own wheel can be built from: give the wheel it was installed from with --wheel FILE, or call this in "
            "a clone"
        )
    with tempfile.TemporaryDirectory() as scratch:  # setuptools writes beside what it builds
        for name in BUILT_FROM:
            source, copy = clone / name, Path(scratch) / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, copy)
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), scratch)
    (built,) = folder.glob("hpcdist-*.whl")
    return built


def _is_clone(place: Path) -> bool:
    """Whether ``place`` has all that the wheel is built from."""
    return all((place / name).exists() for name in (*BUILT_FROM, "hpcdist/__init__.py"))


def _pip(*words: str) -> None:
    """Run this Python's pip. Raises MissingCapabilityError with its last words when it fails."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    # A job of ours sets PYTHONPATH: nothing of it may stand in for what pip imports.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise MissingCapabilityError(f"pip {words[0]} did not end within {LIMIT_S:g} s; is the network up?") from error
    if result.returncode == 0:
        return
    messages = result.stderr.strip().splitlines()
    errors = [text for text in messages if text.startswith("ERROR")] or messages
    raise MissingCapabilityError(
        f"pip {words[0]} failed (exit code {result.returncode}): {' '.join(errors[-3:])}; this needs pip, and a "
        "network or an index of the site (PIP_INDEX_URL, PIP_FIND_LINKS); a version without a wheel for the machine "
        "asked for counts as missing"
    )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
