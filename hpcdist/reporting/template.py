"""Jinja templates of a folder, in a sandbox in which an unknown name is an error.

Only this module imports Jinja.
"""

from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import jinja2
import jinja2.nodes
from jinja2 import Environment as Templates
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateError", "TemplateSandbox", "Templates", "block_names", "extended", "templates"]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja environment whose templates, also those of users, render text and reach nothing else.

    The sandbox of Jinja refuses what leads to the interpreter; methods of paths, which read, write and delete files,
    are refused besides.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have ``value``, the attribute ``attr`` of ``obj``."""
        of_path = isinstance(obj, PurePath) or (isinstance(obj, type) and issubclass(obj, PurePath))
        return super().is_safe_attribute(obj, attr, value) and not (of_path and callable(value))


def templates(
    folder: Path, filters: Mapping[str, Callable[..., Any]], *, html: bool = False, lstrip_blocks: bool = True
) -> Templates:
    """Return the templates in ``folder`` with ``filters``; ``html`` escapes what is put in, else the filters quote."""
    environment = TemplateSandbox(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=lstrip_blocks,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment


def extended(known: Templates, name: str, base: str, text: str) -> Templates:
    """Return ``known`` with one template more: ``name``, which extends ``base`` by the blocks in ``text``."""
    assert known.loader is not None
    over = jinja2.DictLoader({name: f'{{% extends "{base}" %}}\n{text}'})
    return known.overlay(loader=jinja2.ChoiceLoader([over, known.loader]))


def block_names(known: Templates, name: str) -> set[str]:
    """Return the names of the blocks of the template ``name`` and of all that it extends."""
    assert known.loader is not None
    tree = known.parse(known.loader.get_source(known, name)[0])
    names = {block.name for block in tree.find_all(jinja2.nodes.Block)}
    for parent in tree.find_all(jinja2.nodes.Extends):
        assert isinstance(parent.template, jinja2.nodes.Const)
        names |= block_names(known, parent.template.value)
    return names
