"""Modulefiles for Environment Modules (Tcl) and Lmod (Lua), from one description: modulefiles/hpcdist.toml.

Rendering is pure, and every value is quoted for the language it lands in.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcdist.batch import resources
from hpcdist.batch.installation import Installation
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import atomic, regular

NAME: Final = "hpcdist"
KINDS: Final = {"tcl": "", "lua": ".lua"}  # what the file's name has after the version

# What the modulefile sets itself, and what module systems live by.
_TAKEN: Final = ("HPCDIST_ROOT", "PATH", "PYTHONPATH", "MODULEPATH", "LOADEDMODULES", "_LMFILES_")
_ANY_KEY: Final = "HPCDIST_SET__"

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Lmod hands the names in a Tcl file to Lua in a way that only such names survive.
_MODULE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")


@dataclass(frozen=True, kw_only=True)
class Modulefile:
    """What a site chooses. Raises UsageError for a name that a module system or hpcdist would not understand."""

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
        _environment()
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
    """Write ``texts``, by kind, into folder/hpcdist and return their paths; what is there already stays as it is.

    Raises UsageError, before anything is written, where a file has another content, unless ``force`` replaces it.
    """
    paths = {folder / NAME / f"{version}{KINDS[kind]}": text for kind, text in texts.items()}
    try:
        other = [str(path) for path, text in paths.items() if path.exists() and regular.read(path) != text.encode()]
        if other and not force:
            raise UsageError(f"{', '.join(other)}: exists with another content; --force replaces it")
        (folder / NAME).mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            # Not in place: somebody's `module load` may be reading the old one.
            atomic.write(path, text)
    except OSError as error:
        raise StorageError(f"modulefiles cannot be written to {folder}: {error}") from error
    return list(paths)


def source() -> dict[str, Any]:
    """Return the description that both kinds are rendered from."""
    return tomllib.loads((resources.folder(resources.MODULEFILES) / f"{NAME}.toml").read_text(encoding="utf-8"))


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


_LUA: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_TCL: Final = {letter: "\\" + letter for letter in '\\"$[]{}'} | {"\n": "\\n"}


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


def _environment() -> jinja2.Environment:
    """Return the templates, in which an unknown name is an error and not an empty text."""
    found = ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader(resources.folder(resources.MODULEFILES)),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # this is no HTML: the filters quote
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"lua": lua, "tcl": tcl}
    return found


def _check_variable(name: str, value: str, known: Iterable[str]) -> None:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a variable; expected NAME=VALUE, for example HPCDIST_TUNING=off")
    if name in _TAKEN:
        raise UsageError(f"{name} is set by the modulefile, or by the module system, itself")
    if name.startswith("HPCDIST_") and name not in known and not name.startswith(_ANY_KEY):
        close = difflib.get_close_matches(name, known, 1)
        cure = f"the nearest known is {close[0]}" if close else f"known are {', '.join(known)} and {_ANY_KEY}..."
        raise UsageError(f"hpcdist reads no variable {name}; {cure}")
    if not value.isprintable():
        raise UsageError(f"{name}={value!r} has a newline or another control character, which no modulefile can hold")
