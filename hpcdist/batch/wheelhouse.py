"""Wheelhouse: wheels of hpcdist and its requirements with SHA-256 hashes, for machines without a network. No MPI.

The names of the wheels follow PEP 427, 503 and 600.
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
LIMIT_S: Final = 3600.0  # per pip call; the CUDA wheels are gigabytes
# Build requirements of mpi4py; it asks for the last two during its build.
MPI4PY_BUILD: Final = ("setuptools >= 42", "build", "cython >= 3.0.1")
BUILT_FROM: Final = ("LICENSE", "README.md", "hpcdist", "modulefiles", "pyproject.toml", "setup.cfg", "slurm")

_OWN: Final = "hpcdist"
_MPI4PY: Final = "mpi4py"
_PLATFORM: Final = re.compile(r"manylinux_2_(\d+)_(x86_64|aarch64|ppc64le)")
_OLDEST: Final = {"x86_64": 5, "aarch64": 17, "ppc64le": 17}  # minor glibc version of the oldest tag
_ALIASES: Final = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True)
class Wheel:
    """Path, name, version and metadata of a wheel file. Only `read` sets the metadata, ``extras`` and ``python``."""

    path: Path
    name: str  # normalised: lower case, with hyphens
    version: str
    extras: tuple[str, ...] = field(default=())
    python: str = ""  # Requires-Python

    @classmethod
    def named(cls, path: Path) -> "Wheel":
        """Return the wheel ``path``, with name and version from the file name. Raises UsageError for a bad name."""
        parts = path.name.removesuffix(".whl").split("-")
        if path.suffix != ".whl" or len(parts) not in (5, 6):
            raise UsageError(f"{path} is not a wheel: expected a name like hpcdist-0.2.0-py3-none-any.whl")
        return cls(path, re.sub(r"[-_.]+", "-", parts[0]).lower(), parts[1])

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        """Return the wheel ``path`` with the metadata. Raises UsageError unless it is an undamaged hpcdist wheel."""
        parsed = cls.named(path)
        if parsed.name != _OWN:
            raise UsageError(f"{path} is a wheel of {parsed.name}; expected a wheel of {_OWN}")
        try:
            with zipfile.ZipFile(path) as archive:
                (metadata_name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
                message = email.parser.BytesParser().parsebytes(archive.read(metadata_name))
        except (zipfile.BadZipFile, ValueError) as error:
            raise UsageError(f"{path} is damaged or not a wheel: {error}; build a wheel with `pip wheel`") from error
        extras = tuple(message.get_all("Provides-Extra") or ())
        return cls(path, parsed.name, parsed.version, extras, str(message.get("Requires-Python", "")))

    def check(self, *, extras: Sequence[str], python: str) -> None:
        """Raise UsageError if the wheel lacks one of ``extras``, or needs a newer Python version than ``python``."""
        for extra in extras:
            if extra not in self.extras:
                raise UsageError(f"hpcdist has no extra {extra!r}; {suggestion(extra, sorted(self.extras))}")
        minimum = re.search(r">=\s*(\d+)\.(\d+)", self.python)
        if minimum and tuple(map(int, python.split("."))) < tuple(map(int, minimum.groups())):
            raise UsageError(
                f"hpcdist {self.version} needs Python {self.python}, but wheels for Python {python} were requested"
            )


def compatible_tags(platform: str) -> tuple[str, ...]:
    """Return the tags of wheels that run on ``platform``, newest first. Raises UsageError if it is unsupported."""
    # pip matches tags literally, so older compatible tags must be listed.
    match = _PLATFORM.fullmatch(platform)
    if match is None:
        raise UsageError(
            f"--platform {platform!r}: expected manylinux_2_N_ARCH, where glibc of the compute nodes is 2.N (see `ldd "
            f"--version` there) and ARCH is one of {', '.join(_OLDEST)}; for example manylinux_2_28_x86_64"
        )
    newest, machine = int(match[1]), match[2]
    tags = []
    for minor in range(newest, _OLDEST[machine] - 1, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _ALIASES:
            tags.append(f"{_ALIASES[minor]}_{machine}")
    if not tags:
        raise UsageError(
            f"--platform {platform} is too old; the oldest for {machine} is manylinux_2_{_OLDEST[machine]}_{machine}"
        )
    return tuple(tags)


@dataclass(frozen=True, kw_only=True)
class WheelhouseOrder:
    """Request for a wheelhouse (folder of wheels) for this machine, or for ``platform`` and ``python_version``."""

    output: Path
    extras: tuple[str, ...] = ()
    requirements: tuple[Path, ...] = ()  # additional requirements files
    wheel: Path | None = None  # wheel of hpcdist; None: build it from the clone
    mpi4py_source: bool = False
    platform: str = ""  # e.g. manylinux_2_28_x86_64
    python_version: str = ""  # e.g. 3.12

    @property
    def python(self) -> str:
        """Python version of the wheels, e.g. "3.12"."""
        return self.python_version or f"{sys.version_info.major}.{sys.version_info.minor}"

    @property
    def pip_options(self) -> list[str]:
        """List of pip options that select wheels for another machine, or [] for this machine."""
        version = ["--implementation", "cp", "--python-version", self.python_version] if self.python_version else []
        tags = compatible_tags(self.platform) if self.platform else ()
        return [*version, *(word for tag in tags for word in ("--platform", tag))]


@dataclass(frozen=True)
class CollectedWheels:
    """A finished wheelhouse (folder of wheels): path, number of files, and size in bytes."""

    folder: Path
    files: int
    nbytes: int


def collect(order: WheelhouseOrder) -> CollectedWheels:
    """Collect the wheels of ``order`` with pip in the new folder ``order.output``, which appears when complete."""
    # If ``order.wheel`` is None, build hpcdist's wheel from its git clone; without a clone, raise UsageError.
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
            f"the wheelhouse {order.output} cannot be written: {error}; choose a folder that you can write to"
        ) from error
    return CollectedWheels(order.output, len(files), nbytes)


def _check(order: WheelhouseOrder) -> None:
    if order.output.exists() and (not order.output.is_dir() or any(order.output.iterdir())):
        raise UsageError(
            f"{order.output} exists and is not an empty folder; give a new folder, because old wheels would be "
            "installed together with the new wheels"
        )
    if order.python_version and not re.fullmatch(r"3\.\d{1,2}", order.python_version):
        raise UsageError(f"--python-version {order.python_version!r}: expected two numbers, as in 3.12")
    if order.platform:
        compatible_tags(order.platform)  # raises for an invalid platform


def _fill(folder: Path, order: WheelhouseOrder) -> None:
    hpcdist_wheel = Wheel.read(_own_wheel(folder, order.wheel))
    hpcdist_wheel.check(extras=order.extras, python=order.python)
    extras = f"[{','.join(order.extras)}]" if order.extras else ""
    requirements = [f"hpcdist{extras} @ {hpcdist_wheel.path.as_uri()}"]
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
    if wheel is not None:
        Wheel.named(wheel)  # raises for an invalid name
        try:
            return Path(shutil.copy(wheel, folder))
        except FileNotFoundError as error:
            raise UsageError(f"--wheel {wheel} does not exist; give the path of a hpcdist wheel") from error
    installed = Path(hpcdist.__file__).resolve().parents[1]
    content = (*BUILT_FROM, "hpcdist/__init__.py")
    places = (installed, Path.cwd())
    clone = next((place for place in places if all((place / name).exists() for name in content)), None)
    if clone is None:
        raise UsageError(
            f"hpcdist is installed in {installed}. Neither this folder nor the current directory, {Path.cwd()}, is a "
            "clone that a wheel can be built from: give a wheel of hpcdist with --wheel FILE, or run this command in "
            "a clone"
        )
    with tempfile.TemporaryDirectory() as scratch:  # setuptools writes into its source folder
        for name in BUILT_FROM:
            source, copy = clone / name, Path(scratch) / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, copy)
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), scratch)
    (built,) = folder.glob("hpcdist-*.whl")
    return built


def _pip(*words: str) -> None:
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    # Jobs of hpcdist set PYTHONPATH, which must not shadow modules that pip imports.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise MissingCapabilityError(f"pip {words[0]} did not end within {LIMIT_S:g} s; check the network") from error
    if result.returncode == 0:
        return
    messages = result.stderr.strip().splitlines()
    errors = [text for text in messages if text.startswith("ERROR")] or messages
    raise MissingCapabilityError(
        f"pip {words[0]} failed (exit code {result.returncode}): {' '.join(errors[-3:])}; pip needs a network or an "
        "index of the site (PIP_INDEX_URL, PIP_FIND_LINKS), and a wheel of each package for the requested machine"
    )


def digest(path: Path) -> str:
    """Return the SHA-256 of the file ``path`` in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
