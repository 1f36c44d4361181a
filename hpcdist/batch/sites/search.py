"""Search and read site profiles: those of the user, of the machine, those that come with hpcdist, or any file.

A profile may be ``based_on`` another: its tables go over those of the other, key by key.
"""

import dataclasses
import difflib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from hpcdist.batch import resources
from hpcdist.batch.sites import profile
from hpcdist.batch.sites.profile import SiteProfile
from hpcdist.comm.launch import mpirun
from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError
from hpcdist.reporting import regular

VARIABLE: Final = "HPCDIST_SITE"
SEARCH_PATH: Final = "HPCDIST_SITE_PATH"
SYSTEM: Final = Path("/etc/hpcdist/sites")
BASED_ON: Final = "based_on"
INTERNAL_FIELDS: Final = ("name", "origin")  # fields of a Site that no profile has
FREE_TABLES: Final = ("recipe", "blocks", "variables")  # tables whose keys are not ours

_GENERIC: Final = {mpirun.MPICH: "slurm-mpich"}  # where nobody says what the site is


def folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where profiles are looked for by name, the first first.

    The user's folder, those of $HPCDIST_SITE_PATH, that of the machine, and that of this installation.
    """
    listed = [Path(part).expanduser() for part in environment.get(SEARCH_PATH, "").split(os.pathsep) if part]
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "~"), ".config")
    own = Path(home).expanduser() / "hpcdist" / "sites"
    return [own, *listed, SYSTEM, resources.folder(resources.TEMPLATES) / "sites"]


def names(environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the profiles there are, by name; the first folder hides those of the same name in the others."""
    found: dict[str, Path] = {}
    for folder in folders(environment):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def path_of(named: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the profile ``named``: a name, or a path. Raises ConfigurationError for an unknown one."""
    if os.sep in named or named.endswith(".toml"):
        return Path(named).expanduser()
    known = names(environment)
    if named not in known:
        close = difflib.get_close_matches(named, known, 1)
        cure = f"the nearest known is {close[0]!r}" if close else f"known are: {', '.join(known)}"
        raise ConfigurationError(
            f"there is no profile of a site {named!r}; {cure} (looked in "
            f"{', '.join(str(folder) for folder in folders(environment))}; your own go into the first)"
        )
    return known[named]


def load(named: str, environment: Mapping[str, str] = os.environ) -> SiteProfile:
    """Return the profile ``named``: a name, or the path of a file. Raises ConfigurationError."""
    path = path_of(named, environment)
    tree = _load_tables(path, environment, ())
    place = f"site profile {path}"
    _check_known(tree, SiteProfile, place, "")
    try:
        return msgspec.convert({**tree, "name": path.stem, "origin": str(path)}, SiteProfile)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{place}: {error}") from error


def load_selected(named: str | None, environment: Mapping[str, str] = os.environ) -> SiteProfile:
    """Return the profile that was asked for: ``named``, else that of $HPCDIST_SITE, else a generic one.

    Generic is Slurm, with the MPI whose mpirun is found here; PBS where there is a qsub and no sbatch.
    """
    named = named or environment.get(VARIABLE)
    if named:
        return load(named, environment)
    search = environment.get("PATH", "")
    if shutil.which("qsub", path=search) and not shutil.which("sbatch", path=search):
        return load("pbs", environment)
    try:
        vendor = mpirun.find(environment).vendor
    except MissingCapabilityError:
        vendor = mpirun.UNKNOWN
    return load(_GENERIC.get(vendor, "slurm-openmpi"), environment)


def recipe_of(named: str, environment: Mapping[str, str] = os.environ) -> tuple[Mapping[str, Any], Path]:
    """Return the defaults of recipe keys of a profile, and the file that they are from."""
    path = path_of(named, environment)
    return load(named, environment).recipe, path


def _load_tables(path: Path, environment: Mapping[str, str], above: tuple[Path, ...]) -> dict[str, Any]:
    try:
        tree = regular.toml(path)
    except FileNotFoundError:
        raise StorageError(f"site profile {path}: there is no such file") from None
    except OSError as error:
        raise StorageError(f"site profile {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"site profile {path} is not valid TOML: {error}") from error
    named = tree.get("cluster")
    if isinstance(named, str) and (os.sep in named or named.endswith(".toml")):
        tree["cluster"] = str(path.parent / Path(named).expanduser())  # a relative one lies beside the profile
    base = tree.pop(BASED_ON, None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigurationError(f"{BASED_ON} = {base!r} in site profile {path}; give the name of another profile")
    other = _base(base, path, environment)
    if other in (*above, path):
        raise ConfigurationError(f"{BASED_ON} = {base!r} in site profile {path}: it is based on itself")
    return _merge_tables(_load_tables(other, environment, (*above, path)), tree)


def _base(named: str, path: Path, environment: Mapping[str, str]) -> Path:
    """Return the file that ``path`` is based on; a profile may have the name of a later one that it is based on."""
    if os.sep in named or named.endswith(".toml"):
        return path.parent / Path(named).expanduser()
    if named == path.stem:
        places = [folder / path.name for folder in folders(environment)]
        later = places[places.index(path) + 1 :] if path in places else places
        return next((each for each in later if each.exists()), path)
    return path_of(named, environment)


def _merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge_tables(merged[name], value) if both else value
    return merged


def _check_known(tree: Mapping[str, Any], kind: type, place: str, prefix: str) -> None:
    """Refuse keys that ``kind`` has not, at any depth."""
    hints = get_type_hints(kind)
    known = [
        item.name for item in dataclasses.fields(kind) if not (kind is SiteProfile and item.name in INTERNAL_FIELDS)
    ]
    for name, value in tree.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            cure = f"the nearest known is {prefix + close[0]!r}" if close else f"known are: {', '.join(known)}"
            raise ConfigurationError(f"unknown field {prefix + name!r} in {place}; {cure}")
        for inner, part, label in _nested_tables(name, value, hints[name]):
            _check_known(part, inner, place, f"{prefix}{label}.")


def _nested_tables(name: str, value: Any, hint: Any) -> Iterator[tuple[type, Mapping[str, Any], str]]:
    """Yield the tables inside of a field: their type, themselves, and their names."""
    if name in FREE_TABLES:
        return
    if isinstance(value, dict):
        if dataclasses.is_dataclass(hint):
            yield hint, value, name  # type: ignore[misc]
        elif name in ("partitions", "qos"):
            yield from (
                (profile.SiteLimits, part, f"{name}.{key}") for key, part in value.items() if isinstance(part, dict)
            )
    elif isinstance(value, list) and name == "roots":
        yield from ((profile.StorageRoot, part, name) for part in value if isinstance(part, dict))
