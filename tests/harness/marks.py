"""Decorators of tests: one test for each row of a table, and tests on ranks that are threads of one process."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hpcdist.comm.threads.communicator import run_threads


def cases(names: str, *rows: object, **options: Any) -> pytest.MarkDecorator:
    """Run a test for each of ``rows``, which contain values of the parameters ``names``: "size, expected"."""
    return pytest.mark.parametrize(names, rows, **options)


def on_threads(size: int | str, **options: Any) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test on ``size`` threads as ranks, with the options of `run_threads`.


    The first parameter of the test is the communicator of each rank. A string option names the test parameter with its
    value. All ranks get the same state of ``rng``.
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
