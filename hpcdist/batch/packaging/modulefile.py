"""Modulefiles for Environment Modules (Tcl) and Lmod (Lua), from one description: modulefiles/hpcdist.toml.

Rendering is pure, and every value is quoted for the language it lands in. `find_installation` looks at an
installation of hpcdist without starting its Python.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import hpcdist
from hpcdist.batch import job
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.template import templates

NAME: Final = "hpcdist"
KINDS: Final = {"tcl": "", "lua": ".lua"}  # kind -> what the file's name has after the version

_PACKAGES: Final = ("lib/python3.*/site-packages", "lib64/python3.*/site-packages", "lib/python3.*/dist-packages")
_VERSION: Final = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
# What the modulefile sets itself, and what module systems live by.
_TAKEN: Final = ("HPCDIST_ROOT", "PATH", "PYTHONPATH", "MODULEPATH", "LOADEDMODULES", "_LMFILES_")
_ANY_KEY: Final = "HPCDIST_SET__"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Lmod hands the names in a Tcl file to Lua in a way that only such names survive.
_MODULE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_LUA: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_TCL: Final = {letter: "\\" + letter for letter in '\\"$[]{}'} | {"\n": "\\n"}


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Installation of hpcdist, by absolute paths as they were given: a site's symbolic links stay."""

    home: Path  # the folder that holds the package hpcdist
    bin: Path  # the folder that holds the command hpcdist
    version: str
    python_path: bool  # whether a Python finds the package only when PYTHONPATH names `home`

    def check_alone(self) -> None:
        """Raise ConfigurationError where there is no folder with the command alone, as before version 0.2.0."""
        alone = self.home / "hpcdist" / "libexec" / "hpcdist"
        if not os.access(alone, os.X_OK):
            raise ConfigurationError(
                f"{alone} is missing, or cannot be executed, in hpcdist {self.version}; install hpcdist again, or put "
                "its whole environment on PATH: --environment"
            )


def running_installation() -> Path:
    """Return the prefix of the installation that runs: of its environment, else the folder that holds the package."""
    home = Path(hpcdist.__file__).absolute().parents[1]
    return home.parents[2] if home.name in ("site-packages", "dist-packages") else home


def find_installation(prefix: Path) -> Installation:
    """Return the installation in ``prefix``: an environment, a folder of `pip install --target`, or a clone.

    Raises UsageError for a path that no PATH can hold, and ConfigurationError where there is no, or no single, hpcdist.
    """
    prefix = Path(os.path.abspath(prefix))
    _check_text(prefix)
    if os.path.isfile(_package(prefix)):
        home, commands, python_path = prefix, prefix / ".venv" / "bin", False
        if not os.path.isfile(commands / "hpcdist"):
            commands, python_path = prefix / "bin", True
    else:
        home, commands, python_path = _in_environment(prefix), prefix / "bin", False
    if not os.path.isfile(commands / "hpcdist"):
        raise ConfigurationError(
            f"{prefix}: has the package hpcdist in {home}, but no command {commands}/hpcdist; install it there with pip"
        )
    return Installation(home=home, bin=commands, version=_version(home), python_path=python_path)


def _package(home: Path) -> Path:
    return home / "hpcdist" / "__init__.py"


def _in_environment(prefix: Path) -> Path:
    """Return the folder of packages of the Python environment ``prefix`` that has hpcdist."""
    try:
        looked = [place for pattern in _PACKAGES for place in sorted(prefix.glob(pattern))]
    except OSError:
        looked = []
    places = [place for place in looked if os.path.isfile(_package(place))]
    different = {place.resolve(): place for place in reversed(places)}  # lib64 may be a link to lib
    if not different:
        raise ConfigurationError(
            f"{prefix}: there is no hpcdist that can be read (looked for hpcdist/__init__.py in it and in "
            f"{', '.join(_PACKAGES)}); name the environment, the folder of `pip install --target` or the clone"
        )
    if len(different) > 1:
        folders = ", ".join(map(str, different.values()))
        raise ConfigurationError(f"{prefix}: hpcdist is there more than once, in {folders}; remove all but one")
    return next(iter(different.values()))


def _version(home: Path) -> str:
    try:
        match = _VERSION.search(_package(home).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{_package(home)} cannot be read: {error}; install hpcdist again, or make it readable"
        ) from error
    if match is None:
        raise ConfigurationError(f"{_package(home)}: has no line __version__ = ...; install hpcdist again")
    return match[1]


def _check_text(prefix: Path) -> None:
    """Refuse what ends an entry of PATH, and what Lmod does not quote when it reads a Tcl modulefile."""
    text = str(prefix)
    if not text.isprintable() or set(text) & set(':"\\'):
        raise UsageError(f'--prefix {text!r}: a modulefile cannot put a path with : " \\ or control characters on PATH')


@dataclass(frozen=True, kw_only=True)
class Modulefile:
    """Choices of a site for its modulefile; UsageError for names that module systems or hpcdist do not understand."""

    installation: Installation | None = None  # None: found at load, from where the file lies
    mpi: str = ""  # module of the MPI that mpi4py was built for
    depends_on: tuple[str, ...] = ()  # further modules, loaded after that of the MPI
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: bool = False  # whether python3, pip and mpirun of the installation go on PATH too

    def __post_init__(self) -> None:
        """Check the names of modules and variables, and the characters of values."""
        for module in filter(None, (self.mpi, *self.depends_on)):
            if not _MODULE.fullmatch(module):
                raise UsageError(f"{module!r} is no name of a module; expected one such as openmpi/5.0.3")
        for name, value in self.variables.items():
            _check_variable(name, value, source()["variables"])


def render(kind: str, chosen: Modulefile) -> str:
    """Return the text of the modulefile of ``kind``, a key of KINDS."""
    described = source()
    own = described["help_without_mpi"] if not chosen.mpi else f"{described['help_with_mpi']} {chosen.mpi}."
    return (
        templates(job.folder(job.MODULEFILES), {"lua": lua, "tcl": tcl}, lstrip_blocks=False)
        .get_template(f"{NAME}.{kind}.j2")
        .render(
            source=described,
            help=[own, *described["help"]],
            installation=chosen.installation,
            depends_on=[*described["depends_on"], *filter(None, [chosen.mpi]), *chosen.depends_on],
            variables=chosen.variables,
            environment=chosen.environment,
        )
    )


def write(folder: Path, version: str, texts: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write ``texts``, by kind, into folder/hpcdist and return their paths. A `module load` never reads half a file.

    Raises UsageError, before anything is written, if a file has another content and ``force`` is False; StorageError.
    """
    paths = {folder / NAME / f"{version}{KINDS[kind]}": text for kind, text in texts.items()}
    regular.save_all(paths, force=force)
    return list(paths)


def source() -> dict[str, Any]:
    """Return the description that both kinds are rendered from."""
    return tomllib.loads((job.folder(job.MODULEFILES) / f"{NAME}.toml").read_text(encoding="utf-8"))


def lua(value: object) -> str:
    """Return ``value`` as a string literal of Lua; several lines stay lines, where they are printable."""
    text = str(value)
    if "\n" in text and _lines_are_printable(text):
        level = next(n for n in range(len(text) + 1) if f"]{'=' * n}]" not in text + "]")
        return f"[{'=' * level}[\n{text}]{'=' * level}]"
    return '"' + "".join(_LUA.get(letter) or _control(letter, "\\{:03d}") for letter in text) + '"'


def tcl(value: object) -> str:
    """Return ``value`` as one word of Tcl; several lines stay lines, where braces can hold them."""
    text = str(value)
    if "\n" in text and _lines_are_printable(text) and _fits_braces(text):
        return f"{{{text}}}"
    # Braces are escaped as well: the word may stand in a body in braces, and Tcl counts those in quotes too.
    return '"' + "".join(_TCL.get(letter) or _control(letter, "\\u{:04x}") for letter in text) + '"'


def _control(letter: str, code: str) -> str:
    """Return ``letter``, or its code where it is a control character."""
    return code.format(ord(letter)) if ord(letter) < 32 or ord(letter) == 127 else letter


def _lines_are_printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def _fits_braces(text: str) -> bool:
    """Whether Tcl reads ``text`` in braces as it is: they match, and no backslash is before one, or ends a line."""
    depth = 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth < 0:
            return False
    return depth == 0 and not re.search(r"\\([{}\n]|$)", text)


def _check_variable(name: str, value: str, known: Iterable[str]) -> None:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a variable; expected NAME=VALUE, for example HPCDIST_TUNING=off")
    if name in _TAKEN:
        raise UsageError(f"{name} is set by the modulefile, or by the module system, itself")
    if name.startswith("HPCDIST_") and name not in known and not name.startswith(_ANY_KEY):
        raise UsageError(f"hpcdist reads no variable {name}; {suggestion(name, known, f'and {_ANY_KEY}...')}")
    if not value.isprintable():
        raise UsageError(f"{name}={value!r} has a newline or another control character, which no modulefile can hold")
