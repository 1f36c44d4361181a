"""Sources of recipe values: files, environment variables, overrides, user and site profiles.

Each becomes a checked `Settings`: the keys exist, the values have the right type, relative paths count from the file
that has them. An unknown key is refused with the nearest known one.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from hpcdist.batch.sites import search
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.jsonable import plain_number
from hpcdist.reporting.nearest import nearest, synonym
from hpcdist.reporting.rules import written

PREFIX: Final = "HPCDIST_SET__"
PATHS: Final = (
    "data.path",
    "data.staged",
    "zero.offload_directory",
    "telemetry.textfile_directory",
    "checkpoint.local_directory",
    "parallel.schedule_file",
    "run.init_from",
    "model.factory",
)  # keys that hold the path of a file or directory
GROUPS: Final = "optimizer.groups"
NUMBERS_AS_TEXTS: Final = ("checkpoint.writers",)  # keys of texts that may be numbers
TEXTS: Final = (
    "chaos.kill",
    "chaos.stall",
    "chaos.corrupt",
    "chaos.disk",
    "compression.candidates",
    GROUPS,
)  # keys of lists of texts
TEXTS_FOR_NUMBERS: Final = {"checkpoint.mtbf_s": "observed"}  # the text that a key of a number may have instead
TYPES: Final = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of whole numbers",
}


@dataclass
class Settings:
    """Settings: values by key, and the place of each."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)


def site(environment: Mapping[str, str], known: Mapping[str, Any]) -> Settings | None:
    """Return the recipe keys of the site's profile, which HPCDIST_SITE names; it must then exist."""
    named = environment.get(search.VARIABLE)
    if not named:
        return None
    keys, path = search.recipe_of(named, environment)
    return table(keys, f"site profile {path}", known, path.parent)


def user(environment: Mapping[str, str], known: Mapping[str, Any]) -> Settings | None:
    """Return the settings in the user's own file, None without one. Raises StorageError or ConfigurationError."""
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "~"), ".config")
    path = Path(home).expanduser() / "hpcdist" / "config.toml"
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # reading it raises the error
    return file(path, "user file", known)


def file(path: Path, what: str, known: Mapping[str, Any]) -> Settings:
    """Return the settings in a TOML file; errors call it ``what``.

    Raises StorageError where it cannot be read, ConfigurationError for its contents.
    """
    return table(regular.settings(path, what), f"{what} {path}", known, path.parent)


def table(tree: Mapping[str, Any], place: str, known: Mapping[str, Any], base: Path) -> Settings:
    """Return the settings in nested tables, as TOML reads them from ``place``; paths count from ``base``."""
    settings = Settings()
    for key, value in _flattened(tree, known):
        _add_setting(settings, key, value, place, known, base)
    return settings


def variables(environment: Mapping[str, str], known: Mapping[str, Any]) -> Settings:
    """Return the settings in variables like HPCDIST_SET__OPTIMIZER__LEARNING_RATE."""
    settings = Settings()
    for name in sorted(environment):
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower().replace("__", ".")
            _add_setting(
                settings, key, _parse(key, environment[name], known), f"environment variable {name}", known, Path()
            )
    return settings


def overrides(texts: Iterable[str], known: Mapping[str, Any]) -> Settings:
    """Return the settings in overrides ``section.name=value``; the last of one key counts."""
    settings = Settings()
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected KEY=VALUE, for example --set run.steps=50")
        key = key.strip()
        _add_setting(settings, key, _parse(key, value.strip(), known), "--set", known, Path())
    return settings


def _flattened(tree: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of all values but tables; also of a table in place of a value, and of an unknown empty one."""
    for name, value in tree.items():
        key = prefix + name
        section = any(other.startswith(key + ".") for other in known)
        if isinstance(value, dict) and key not in known and (value or section):
            yield from _flattened(value, known, key + ".")
        else:
            yield key, value


def _add_setting(settings: Settings, key: str, value: Any, place: str, known: Mapping[str, Any], base: Path) -> None:
    _check_known(key, value, place, known)
    kind, value = type(known[key]), plain_number(value)
    if key in NUMBERS_AS_TEXTS and type(value) is int:
        value = str(value)
    try:
        of = tuple[str, ...] if key in TEXTS else tuple[int, ...]
        if value != TEXTS_FOR_NUMBERS.get(key, ...):
            value = msgspec.convert(value, of if kind is tuple else kind)
    except msgspec.ValidationError:
        expected, example = TYPES[kind], "[0, 1]" if kind is tuple else written(known[key])
        if key in TEXTS:
            expected, example = "a list of texts", "['*.bias: weight_decay=0.0']" if key == GROUPS else "['1@20']"
        elif key in TEXTS_FOR_NUMBERS:
            expected += f" or {TEXTS_FOR_NUMBERS[key]!r}"
        raise ConfigurationError(
            f"{key} = {value!r} in {place} has the wrong type: expected {expected}, such as {example}"
        ) from None
    # The factory of a model may be one of a module that Python finds by its name.
    if key in PATHS and value and (key != "model.factory" or ".py:" in value):
        value = os.path.abspath(base / Path(value).expanduser())
    settings.values[key] = value
    settings.origin[key] = place


def _parse(key: str, text: str, known: Mapping[str, Any]) -> Any:
    """Return ``text`` as a value of the type of ``key``; unchanged where it is none, so that the error can quote it."""
    kind = type(known.get(key, text))  # an unknown key is refused with its text
    if key in TEXTS_FOR_NUMBERS and text.strip("'\"") == TEXTS_FOR_NUMBERS[key]:
        return TEXTS_FOR_NUMBERS[key]
    try:
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if kind is int or kind is float:
            return kind(text)
        if kind is tuple:
            return regular.toml_of(f"list = {text}")["list"]
        # Quotes are not needed around a text, but a copied line of TOML has them.
        return regular.toml_of(f"text = {text}")["text"] if text[:1] in ("'", '"') else text
    except (ValueError, KeyError):
        return text


def _check_known(key: str, value: Any, place: str, known: Mapping[str, Any]) -> None:
    if key in known:
        return
    if any(other.startswith(key + ".") for other in known):
        raise ConfigurationError(
            f"{key} = {value!r} in {place}: [{key}] is a section with keys of its own, not a value"
        )
    raise ConfigurationError(f"unknown key {key!r} in {place}; {known_instead(key, known)}")


def known_instead(key: str, known: Mapping[str, Any]) -> str:
    """Return the cure of an unknown ``key``: the nearest of those ``known``, else the names that there are."""
    section = key.partition(".")[0]
    sections = list(dict.fromkeys(other.partition(".")[0] for other in known))
    near = _nearest_key(key, known, sections)
    if near:
        return f"the nearest known is {near!r}"
    if section in sections:
        names = ", ".join(other.partition(".")[2] for other in known if other.startswith(section + "."))
        return f"keys of [{section}] are: {names}"
    return f"sections are: {', '.join(sections)}"


def _nearest_key(key: str, known: Mapping[str, Any], sections: list[str]) -> str | None:
    """Return the known key, or section, most like ``key``.

    Likeliest is a name of the section that differs in a letter or two, then the right name in the wrong section.
    """
    section, _, name = key.rpartition(".")
    names = {other.rpartition(".")[2]: other for other in reversed(list(known))}
    beside = [other.partition(".")[2] for other in known if other.startswith(section + ".")]
    if near := nearest(name, beside, 0.85):
        return f"{section}.{near}"
    if synonym(name) in known:
        return synonym(name)
    if name in names:
        return names[name]
    if not section:
        near = nearest(key, sections) or nearest(key, names)
        return near and names.get(near, near)
    if near := nearest(name, beside):
        return f"{section}.{near}"
    near = nearest(name, names) or nearest(key, known, 0.8)
    return near and names.get(near, near)
