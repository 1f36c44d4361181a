"""Jinja templates in a sandbox: of a folder, where an undefined name is an error, and of chats. Jinja's only import."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2 import Environment as Templates
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateError", "TemplateSandbox", "Templates", "block_names", "chat_renderer", "extended", "templates"]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja environment whose templates can only render text, without access to files or the interpreter."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        of_path = isinstance(obj, PurePath) or (isinstance(obj, type) and issubclass(obj, PurePath))
        return super().is_safe_attribute(obj, attr, value) and not (of_path and callable(value))


def templates(
    folder: Path, filters: Mapping[str, Callable[..., Any]], *, html: bool = False, lstrip_blocks: bool = True
) -> Templates:
    """Return a Jinja environment for the templates in ``folder``. ``html``: escape inserted values for HTML."""
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


def extended(existing: Templates, name: str, base: str, text: str) -> Templates:
    """Return a copy of ``existing`` with a new template ``name``: ``base`` with the blocks that ``text`` redefines."""
    assert existing.loader is not None
    over = jinja2.DictLoader({name: f'{{% extends "{base}" %}}\n{text}'})
    return existing.overlay(loader=jinja2.ChoiceLoader([over, existing.loader]))


def block_names(environment: Templates, name: str) -> set[str]:
    """Return the names of the blocks in the template ``name`` and in the templates that it extends."""
    assert environment.loader is not None
    tree = environment.parse(environment.loader.get_source(environment, name)[0])
    names = {block.name for block in tree.find_all(jinja2.nodes.Block)}
    for parent in tree.find_all(jinja2.nodes.Extends):
        assert isinstance(parent.template, jinja2.nodes.Const)
        names |= block_names(environment, parent.template.value)
    return names


class _GenerationTag(Extension):
    # The tags {% generation %} and {% endgeneration %} mark answers in templates of transformers. They print nothing.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_renderer(text: str, now: datetime) -> Callable[..., str]:
    """Return the function that renders the chat template ``text``, as transformers does. Raises TemplateError.

    The arguments of the function are the names in the template. ``now``: the time that ``strftime_now`` prints.
    """

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    tags = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=tags)
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": fail, "strftime_now": now.strftime}
    return environment.from_string(text).render
