"""Decorators of tests: for each row of a table, and on ranks that are threads of one process."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hpcdist.comm.threads.communicator import run_threads


def cases(names: str, *rows: object, **options: Any) -> pytest.MarkDecorator:
    """Run a test for each of ``rows``, which have values of the parameters ``names``: "size, expected"."""
    return pytest.mark.parametrize(names, rows, **options)


def on_threads(size: int | str, **options: Any) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test on ``size`` ranks, with the options of `run_threads`; its first parameter is the communicator of each.

    An option that is a word is the parameter of the test that has this name. All ranks draw the same of ``rng``.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        def own(values: dict[str, Any]) -> dict[str, Any]:
            return values | {"rng": copy.deepcopy(values["rng"])} if "rng" in values else values

        @functools.wraps(test)
        def run(**values: Any) -> None:
            ranks, chosen = values.get(str(size), size), {key: values.get(str(v), v) for key, v in options.items()}
            run_threads(ranks, lambda comm: test(comm, **own(values)), **chosen)  # type: ignore[arg-type]

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate
