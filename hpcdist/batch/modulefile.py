"""Modulefiles for Environment Modules (Tcl) and Lmod (Lua), rendered from modulefiles/hpcdist.toml."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import hpcdist
from hpcdist.batch import job
from hpcdist.batch.site_profile import VARIABLE_NAME
from hpcdist.constants import SETTINGS_PREFIX
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.template import templates

NAME: Final = "hpcdist"
KINDS: Final = {"tcl": "", "lua": ".lua"}  # kind -> file name suffix after the version

_PACKAGES: Final = ("lib/python3.*/site-packages", "lib64/python3.*/site-packages", "lib/python3.*/dist-packages")
_VERSION: Final = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
# Variables that the modulefile or the module system sets.
_TAKEN: Final = ("HPCDIST_ROOT", "PATH", "PYTHONPATH", "MODULEPATH", "LOADEDMODULES", "_LMFILES_")
# Lmod passes names in a Tcl file to Lua; only these names survive.
_MODULE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_LUA: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_TCL: Final = {letter: "\\" + letter for letter in '\\"$[]{}'} | {"\n": "\\n"}


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Installation of hpcdist: its version and absolute paths. Symbolic links in the paths are kept."""

    home: Path  # folder that contains the package hpcdist
    bin: Path  # folder that contains the command hpcdist
    version: str
    python_path: bool  # True if Python finds the package only with PYTHONPATH=`home`

    def check_alone(self) -> None:
        """Raise ConfigurationError unless the package has the command libexec/hpcdist, alone in its folder."""
        alone = self.home / "hpcdist" / "libexec" / "hpcdist"
        if not os.access(alone, os.X_OK):
            raise ConfigurationError(
                f"the command {alone} is missing or not executable in hpcdist {self.version}; reinstall hpcdist, or "
                "use --environment to put all commands of its environment on PATH"
            )


def running_installation() -> Path:
    """Return the root of the Python environment with the running hpcdist, or else the folder with the package."""
    home = Path(hpcdist.__file__).absolute().parents[1]
    return home.parents[2] if home.name in ("site-packages", "dist-packages") else home


def find_installation(prefix: Path) -> Installation:
    """Return the `Installation` in ``prefix``: a virtual environment, `pip install --target` folder or git clone.

    Raises UsageError for a path that PATH cannot contain, and ConfigurationError unless it has exactly one hpcdist.
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
            f"{prefix} has hpcdist in {home}, but no command {commands}/hpcdist; install hpcdist there with pip"
        )
    return Installation(home=home, bin=commands, version=_version(home), python_path=python_path)


def _package(home: Path) -> Path:
    return home / "hpcdist" / "__init__.py"


def _in_environment(prefix: Path) -> Path:
    try:
        candidates = [place for pattern in _PACKAGES for place in sorted(prefix.glob(pattern))]
    except OSError:
        candidates = []
    places = [place for place in candidates if os.path.isfile(_package(place))]
    different = {place.resolve(): place for place in reversed(places)}  # lib64 may be a link to lib
    if not different:
        raise ConfigurationError(
            f"{prefix}: no readable hpcdist (searched for hpcdist/__init__.py in this folder and in "
            f"{', '.join(_PACKAGES)}); give an environment, a `pip install --target` folder or a clone"
        )
    if len(different) > 1:
        folders = ", ".join(map(str, different.values()))
        raise ConfigurationError(f"{prefix} contains hpcdist more than once, in {folders}; keep only one")
    return next(iter(different.values()))


def _version(home: Path) -> str:
    try:
        match = _VERSION.search(_package(home).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the file {_package(home)} cannot be read: {error}; reinstall hpcdist, or make the file readable"
        ) from error
    if match is None:
        raise ConfigurationError(f"the file {_package(home)} has no line __version__ = ...; reinstall hpcdist")
    return match[1]


def _check_text(prefix: Path) -> None:
    text = str(prefix)
    # PATH cannot contain these characters, or Lmod cannot quote them in Tcl modulefiles.
    if not text.isprintable() or set(text) & set(':"\\'):
        raise UsageError(
            f'--prefix {text!r} contains : " \\ or a control character, which a path in PATH cannot contain; install '
            "hpcdist in another directory"
        )


@dataclass(frozen=True, kw_only=True)
class Modulefile:
    """Settings of an environment modulefile. Raises UsageError for invalid names of modules or variables."""

    installation: Installation | None = None  # None: located when the module is loaded, relative to the modulefile
    mpi: str = ""  # module of the MPI that mpi4py was built with
    depends_on: tuple[str, ...] = ()  # other modules, loaded after the MPI module
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: bool = False  # True: all commands of the environment go on PATH (python3, pip, mpirun, ...)

    def __post_init__(self) -> None:
        for module in filter(None, (self.mpi, *self.depends_on)):
            if not _MODULE.fullmatch(module):
                raise UsageError(f"{module!r} is not a valid module name; expected e.g. openmpi/5.0.3")
        for name, value in self.variables.items():
            _check_variable(name, value, source()["variables"])


def render(kind: str, chosen: Modulefile) -> str:
    """Return the text of a modulefile of type ``kind`` ("tcl" or "lua") with the settings ``chosen``."""
    description = source()
    first_line = description["help_without_mpi"] if not chosen.mpi else f"{description['help_with_mpi']} {chosen.mpi}."
    return (
        templates(job.folder(job.MODULEFILES), {"lua": lua, "tcl": tcl}, lstrip_blocks=False)
        .get_template(f"{NAME}.{kind}.j2")
        .render(
            source=description,
            help=[first_line, *description["help"]],
            installation=chosen.installation,
            depends_on=[*description["depends_on"], *filter(None, [chosen.mpi]), *chosen.depends_on],
            variables=chosen.variables,
            environment=chosen.environment,
        )
    )


def write(folder: Path, version: str, texts: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write modulefiles of hpcdist ``version`` below ``folder``; return their paths. ``texts``: {"tcl" or "lua": text}.

    Raises UsageError for an existing file with another text, unless ``force`` is True.
    """
    paths = {folder / NAME / f"{version}{KINDS[kind]}": text for kind, text in texts.items()}
    regular.save_all(paths, force=force)
    return list(paths)


def source() -> dict[str, Any]:
    """Return a dict of the help texts and variable names that all modulefiles contain, read from a TOML file."""
    return tomllib.loads((job.folder(job.MODULEFILES) / f"{NAME}.toml").read_text(encoding="utf-8"))


def lua(value: object) -> str:
    """Return ``value`` as a Lua string literal, in long brackets if the text has several lines, else in quotes."""
    text = str(value)
    if "\n" in text and _lines_are_printable(text):
        level = next(n for n in range(len(text) + 1) if f"]{'=' * n}]" not in text + "]")
        return f"[{'=' * level}[\n{text}]{'=' * level}]"
    return '"' + "".join(_LUA.get(letter) or _control(letter, "\\{:03d}") for letter in text) + '"'


def tcl(value: object) -> str:
    """Return ``value`` as one Tcl word in double quotes, or in braces if it has several lines and Tcl allows braces."""
    text = str(value)
    if "\n" in text and _lines_are_printable(text) and _fits_braces(text):
        return f"{{{text}}}"
    # Braces are escaped too: Tcl counts them even inside quotes when the word is in a braced body.
    return '"' + "".join(_TCL.get(letter) or _control(letter, "\\u{:04x}") for letter in text) + '"'


def _control(letter: str, code: str) -> str:
    return code.format(ord(letter)) if ord(letter) < 32 or ord(letter) == 127 else letter


def _lines_are_printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def _fits_braces(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth < 0:
            return False
    return depth == 0 and not re.search(r"\\([{}\n]|$)", text)


def _check_variable(name: str, value: str, accepted: Iterable[str]) -> None:
    if not VARIABLE_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a variable name; expected NAME=VALUE, for example HPCDIST_TUNING=off")
    if name in _TAKEN:
        raise UsageError(f"{name} is set by the modulefile or the module system; do not set this variable")
    if name.startswith("HPCDIST_") and name not in accepted and not name.startswith(SETTINGS_PREFIX):
        raise UsageError(
            f"hpcdist does not read a variable {name}; {suggestion(name, accepted, f'and {SETTINGS_PREFIX}...')}"
        )
    if not value.isprintable():
        raise UsageError(f"{name}={value!r} has a newline or another control character; remove this character")
