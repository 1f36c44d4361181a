"""Tests whose ranks are threads of one process."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hpcdist.comm.threads.communicator import run_threads


def on_threads(size: int | str, **options: Any) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test on ``size`` ranks, with the options of `run_threads`; its first parameter is the communicator of each.

    An option that is a word is the parameter of the test that has this name.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**values: Any) -> None:
            ranks, chosen = values.get(str(size), size), {key: values.get(str(v), v) for key, v in options.items()}
            run_threads(ranks, lambda comm: test(comm, **values), **chosen)  # type: ignore[arg-type]

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate
