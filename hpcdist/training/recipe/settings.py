"""Sources of recipe values: recipe files, environment variables, overrides, the user file and the site profile.

Each source becomes a `Settings` with values of the right types. Relative paths are relative to the file that sets them.
An unknown key is an error; the message names the nearest key. ``keys``: all recipe keys (`recipe.known_keys`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.batch import site_search
from hpcdist.constants import SETTINGS_PREFIX
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import nearest, synonym
from hpcdist.reporting.schema import Field

Keys = Mapping[str, Field]  # "section.name" -> declaration


@dataclass
class Settings:
    """Values of recipe keys, and the origin of each value, such as a file."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)


def site(environment: Mapping[str, str], keys: Keys) -> Settings | None:
    """Return the settings of the site profile in the variable HPCDIST_SITE of ``environment``, or None if it is unset.

    ``keys``: all recipe keys.
    """
    named = environment.get(site_search.VARIABLE)
    if not named:
        return None
    tree, path = site_search.recipe_of(named, environment)
    return table(tree, f"site profile {path}", keys, path.parent)


def user(environment: Mapping[str, str], keys: Keys) -> Settings | None:
    """Return the settings in the user's file config.toml, or None if there is no file. Raises ConfigurationError.

    ``environment``: variables that locate the file. ``keys``: all recipe keys.
    """
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "~"), ".config")
    path = Path(home).expanduser() / "hpcdist" / "config.toml"
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # `file` raises the error
    return file(path, "user file", keys)


def file(path: Path, what: str, keys: Keys) -> Settings:
    """Return the settings in the TOML file ``path``. ``what``: kind of file for messages, such as "recipe".

    ``keys``: all recipe keys. Raises StorageError for an unreadable file, and ConfigurationError for invalid
    content.
    """
    return table(regular.settings(path, what), f"{what} {path}", keys, path.parent)


def table(tree: Mapping[str, Any], source: str, keys: Keys, base: Path) -> Settings:
    """Return the settings in the nested dict ``tree``. ``source``: origin of the values, such as "recipe a.toml".

    ``keys``: all recipe keys. ``base``: folder to which paths in the values are relative.
    """
    settings = Settings()
    for key, value in _flattened(tree, keys):
        _add_setting(settings, key, value, source, keys, base)
    return settings


def variables(environment: Mapping[str, str], keys: Keys) -> Settings:
    """Return the settings in variables of ``environment`` such as HPCDIST_SET__RUN__STEPS=9.

    ``keys``: all recipe keys.
    """
    settings = Settings()
    for name in sorted(environment):
        if name.startswith(SETTINGS_PREFIX):
            key = name.removeprefix(SETTINGS_PREFIX).lower().replace("__", ".")
            value = _parse(key, environment[name], keys)
            _add_setting(settings, key, value, f"environment variable {name}", keys, Path())
    return settings


def overrides(texts: Iterable[str], keys: Keys, option: str = "--set") -> Settings:
    """Return the settings in ``texts`` of the form "section.name=value". The last value of a repeated key counts.

    ``keys``: all recipe keys. ``option``: command-line option that contains the texts, for messages.
    """
    settings = Settings()
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected KEY=VALUE, for example --set run.steps=50")
        key = key.strip()
        _add_setting(settings, key, _parse(key, value.strip(), keys), option, keys, Path())
    return settings


def _flattened(tree: Mapping[str, Any], keys: Keys, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + name
        is_section = any(other.startswith(key + ".") for other in keys)
        if isinstance(value, dict) and key not in keys and (value or is_section):
            yield from _flattened(value, keys, key + ".")
        else:
            yield key, value


def _add_setting(settings: Settings, key: str, value: Any, source: str, keys: Keys, base: Path) -> None:
    if key not in keys:
        if any(other.startswith(key + ".") for other in keys):
            raise ConfigurationError(
                f"{key} = {value!r} in {source}: [{key}] is a section, which has no value; set one of its keys"
            )
        raise ConfigurationError(f"unknown key {key!r} in {source}; {suggestion(key, keys)}")
    settings.values[key] = keys[key].convert(value, key, source, base)
    settings.origin[key] = source


def _parse(key: str, text: str, keys: Keys) -> Any:
    # An invalid text is returned unchanged, so that the error quotes it.
    if key not in keys or (keys[key].key.word and text.strip("'\"") == keys[key].key.word):
        return text.strip("'\"")
    kind = keys[key].type
    try:
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if kind in (int, float):
            return kind(text)
        # A text needs no quotes, but a line that was copied from a TOML file has them.
        is_toml = keys[key].is_list or text[:1] in ("'", '"')
        return regular.toml_of(f"value = {text}")["value"] if is_toml else text
    except (ValueError, KeyError):
        return text


def suggestion(key: str, keys: Keys) -> str:
    """Return a hint for the error that ``key`` is not in ``keys``: the nearest key, or a list of keys or sections."""
    section = key.partition(".")[0]
    sections = list(dict.fromkeys(other.partition(".")[0] for other in keys))
    near = _nearest_key(key, keys, sections)
    if near:
        return f"the nearest known is {near!r}"
    if section in sections:
        names = ", ".join(other.partition(".")[2] for other in keys if other.startswith(section + "."))
        return f"keys of [{section}] are: {names}"
    return f"sections are: {', '.join(sections)}"


def _nearest_key(key: str, keys: Keys, sections: list[str]) -> str | None:
    section, _, name = key.rpartition(".")
    names = {other.rpartition(".")[2]: other for other in reversed(list(keys))}
    names_of_section = [other.partition(".")[2] for other in keys if other.startswith(section + ".")]
    if near := nearest(name, names_of_section, 0.85):
        return f"{section}.{near}"
    if synonym(name) in keys:
        return synonym(name)
    if name in names:
        return names[name]
    if not section:
        near = nearest(key, sections) or nearest(key, names)
        return near and names.get(near, near)
    if near := nearest(name, names_of_section):
        return f"{section}.{near}"
    near = nearest(name, names) or nearest(key, keys, 0.8)
    return near and names.get(near, near)
