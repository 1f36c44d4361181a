"""Where an installation of hpcdist is, as a modulefile needs it: found by looking, without starting its Python."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import hpcdist
from hpcdist.errors import ConfigurationError, UsageError

_PACKAGES: Final = ("lib/python3.*/site-packages", "lib64/python3.*/site-packages", "lib/python3.*/dist-packages")
_VERSION: Final = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Absolute paths as they were given: a site's symbolic links stay."""

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


def this() -> Path:
    """Return the prefix of the installation that runs: of its environment, else the folder that holds the package."""
    home = Path(hpcdist.__file__).absolute().parents[1]
    return home.parents[2] if home.name in ("site-packages", "dist-packages") else home


def find(prefix: Path) -> Installation:
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
        found = ", ".join(map(str, different.values()))
        raise ConfigurationError(f"{prefix}: hpcdist is there more than once, in {found}; remove all but one")
    return next(iter(different.values()))


def _version(home: Path) -> str:
    try:
        found = _VERSION.search(_package(home).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{_package(home)} cannot be read: {error}; install hpcdist again, or make it readable"
        ) from error
    if found is None:
        raise ConfigurationError(f"{_package(home)}: has no line __version__ = ...; install hpcdist again")
    return found[1]


def _check_text(prefix: Path) -> None:
    """Refuse what ends an entry of PATH, and what Lmod does not quote when it reads a Tcl modulefile."""
    text = str(prefix)
    if not text.isprintable() or set(text) & set(':"\\'):
        raise UsageError(f'--prefix {text!r}: a modulefile cannot put a path with : " \\ or control characters on PATH')
