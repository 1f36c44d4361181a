"""Harness of all studies: options, alternating contenders, ratios with intervals, results files and checks.

A study is a module. The harness uses these names of the module:

    SCHEMA          schema of the results file
    OPTIONS         default values of the options by name: a number, a string, a list, False for a flag, a tuple of
                    names to choose several from, or a mapping to choose one key from
    options         adds further options to the parser
    measure         returns `Results`, or None on ranks other than 0. Collective
    lines           returns the printed table; default: a table of time_s (contenders, rounds[, ranks])
    ratios          returns the figures to compare: times relative to another contender in the same round; below 1 is
                    better. Default: time_s relative to the first contender
    plot, failures  draws the results; returns the missed goals (exit code 1)
    RANKS, ON       MPI ranks to start without a launcher; "gpu" if the study needs a GPU (exit code 69 without)
    COMMITTED       committed result below results/. --check measures with its options and SMALL, and exits with 1 if
                    the median of a ratio is more than WORSE times the committed median
    NO_CHECK        reason why the study has no --check
    read, write     replace the functions for files with datasets at the root
    WRITES_ITSELF   ``measure`` writes the output file, and continues an existing file
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np

from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import environment, mpirun
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import FAILURE, OK, HpcdistError, UsageError
from hpcdist.hdf5 import files
from hpcdist.hdf5.datasets import Column
from hpcdist.reporting.plotting import check_plot
from hpcdist.reporting.table import aligned
from hpcdist.telemetry.provenance import provenance

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = Path(__file__).resolve().parent / "results"
CONTENDERS: Final = ("contenders", "commands", "compressors", "ways")  # attributes that list the contenders
LIMIT_S: Final = 1800.0  # timeout of a job that a study starts
RESAMPLES: Final = 2000  # bootstrap resamples for the interval of a median
T = TypeVar("T")
Ratios = Mapping[str, np.ndarray]  # samples by name: times over the base's times, below 1 is better


@dataclass(frozen=True)
class Results:
    """Arrays by name, their dims in words, and the attributes of a study's file."""

    arrays: Mapping[str, np.ndarray]
    dims: Mapping[str, str]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def names(self, attribute: str = "") -> list[str]:
        """Return the names listed in ``attribute``; default: the contenders."""
        text = str(self.attributes[attribute or next(name for name in CONTENDERS if name in self.attributes)])
        return re.split("; ?", text) if ";" in text else text.split(",")


@dataclass(frozen=True, kw_only=True)
class Study:
    """The settings of a study, read from its module; see the module docstring of `benchmarks.harness`."""

    schema: str
    measure: Callable[[argparse.Namespace, Session], Any]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    lines: Callable[[Any], Sequence[str]] = lambda results: time_table(slowest(results), results.names())
    ratios: Callable[[Any], Ratios] = lambda results: over_base(slowest(results), results.names())
    plot: Callable[[Any, Path], None] | None = None
    failures: Callable[[Any], Sequence[str]] = lambda results: ()
    ranks: int = 0
    on: str = "cpu"
    committed: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    worse: float = 1.3
    no_check: str = "no result is committed"
    read: Callable[[Path], Any] | None = None
    write: Callable[[Path, Any, Mapping[str, Any]], None] | None = None
    writes_itself: bool = False

    @classmethod
    def of(cls, module: ModuleType) -> "Study":
        definitions = {key: value for key, value in vars(module).items() if callable(value) or key.isupper()}
        settings = {item.name: definitions.get(item.name.upper(), definitions.get(item.name)) for item in fields(cls)}
        settings = {name: value for name, value in settings.items() if value is not None}
        return cls(**settings | {"options": lambda parser: add_options(parser, module)})


def add_options(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """Add the options in OPTIONS, and the options that the module's function adds."""
    for name, default in getattr(module, "OPTIONS", {}).items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(
                flag, nargs="+", choices=default, default=list(default), metavar="NAME", help=", ".join(default)
            )
        elif isinstance(default, Mapping):
            parser.add_argument(flag, choices=default, default=next(iter(default)), help="(default: the first choice)")
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=f"(default {default})")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"(default {default})")
    if hasattr(module, "options"):
        module.options(parser)


def run(module: ModuleType, name: str, words: Sequence[str]) -> int:
    """Run the study ``module`` with arguments ``words`` and return the exit code. Collective if it has ranks."""
    study = Study.of(module)
    try:
        options = parsed(study, module, name, words)
        if options.plot is not None:
            check_plot(options.plot)
        if study.on == "gpu":
            from hpcdist.arrays.gpu import device

            device.count()  # fails on every rank if there is no GPU, before MPI starts
        if study.ranks and environment.launch_environment() is None and options.ranks > 1:
            return launch(options.ranks, ["-m", "benchmarks", name, *words]).returncode
        session = start.start(study.on) if study.ranks else alone()
        if session.comm.size == 1:
            return _measured(study, options, session)
    except HpcdistError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    session.leave(_measured(study, options, session))  # an error on one rank ends all ranks
    return OK


def parsed(study: Study, module: ModuleType, name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the options. The defaults of --check are the options of the committed result."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    study.options(parser)
    existing = "an existing file is continued" if study.writes_itself else "must not exist"
    parser.add_argument("-o", "--output", type=Path, help=f"HDF5 file to write; {existing}")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    parser.add_argument("--check", action="store_true", help="measure briefly and compare with the committed result")
    if study.plot is None:
        parser.set_defaults(plot=None)
    else:
        parser.add_argument("--plot", type=Path, help="image file to write")
    if study.ranks:
        parser.add_argument("-n", "--ranks", type=int, default=study.ranks, help=f"(default {study.ranks})")
    options = parser.parse_args(words)
    if not options.check:
        return options
    if not study.committed:
        parser.error(f"--check: {study.no_check}")
    committed_attributes = committed(study).attributes
    committed_options = {
        key: committed_attributes[key] for key in vars(options) if key in committed_attributes and key != "ranks"
    }
    defaults = {key: _typed(value) for key, value in committed_options.items()} | dict(study.small)
    if study.ranks and "ranks" in committed_attributes:
        defaults["ranks"] = int(committed_attributes["ranks"])
    parser.set_defaults(**defaults)
    return parser.parse_args(words)


def _typed(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value


def _measured(study: Study, options: argparse.Namespace, session: Session) -> int:
    """Measure, print, write and plot, or check. Return the exit code of rank 0. Collective."""
    output = None if study.writes_itself else options.output
    output_file.check_on_all_ranks(session.comm, lambda: None if output is None else files.check_place(output))
    results = study.measure(options, session)
    hosts = sorted(set(session.comm.allgather_object(session.place.host)))
    code = OK
    if session.comm.rank == 0 and results is not None:
        if session.comm.size > 1:
            print(f"{session.comm.size} ranks; {session.library}")
        print("\n".join(study.lines(results)), flush=True)
        if output is not None:
            origin = provenance(mpi_library=session.library, hosts=hosts, anonymous=options.anonymous)
            (study.write or _writer(study, options))(output, results, origin)
            print(f"wrote all measurements to {output}")
        if options.plot is not None:
            study.plot(results, options.plot)  # type: ignore[misc]
            print(f"wrote the plot to {options.plot}")
        if missed := study.failures(results):
            print(f"missed: {'; '.join(missed)}", file=sys.stderr)
            code = FAILURE
        if options.check:
            lines, code = compared(study.ratios(results), study.ratios(committed(study)), study.worse)
            print("\n".join([f"compared with results/{study.committed}:", *lines]))
    return int(session.comm.broadcast_object(code))


def _writer(study: Study, options: argparse.Namespace) -> Callable[[Path, Results, Mapping[str, Any]], None]:
    # The file keeps the options, because a later --check measures with them even if the defaults have changed.
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "plot", "check")}
    settings = {name: value for name, value in settings.items() if isinstance(value, str | int | float | list)}

    def write(path: Path, results: Results, origin: Mapping[str, Any]) -> None:
        about = {name: {"dims": dims} for name, dims in results.dims.items()}
        attributes = {**settings, **origin, **results.attributes}
        files.write_contiguous(path, results.arrays, attributes, about, schema=study.schema, version=1)

    return write


def committed(study: Study) -> Results:
    """Return the committed result of ``study``. Raises StorageError."""
    path = RESULTS / study.committed
    if study.read is not None:
        return study.read(path)
    with files.open_read(path, study.schema, 1) as file:
        arrays = {name: dataset[...] for name, dataset in file.items() if files.is_dataset(dataset)}
        return Results(arrays, {}, {name: _typed(value) for name, value in file.attrs.items()})


def compared(now: Ratios, before: Ratios, worse: float) -> tuple[list[str], int]:
    """Compare the ratios in both ``now`` and ``before``: return a table, and 1 if any is above ``worse``, else 0."""
    rows, code = [("", "now", "interval", "committed", "now / committed")], OK
    for name in [name for name in now if name in before]:
        median, low, high = interval(now[name])
        earlier = float(np.median(before[name]))
        factor = median / earlier
        is_worse = not factor <= worse
        code = FAILURE if is_worse else code
        mark = f" WORSE than {worse:g}" if is_worse else ""
        rows.append((name, f"{median:.3f}", f"{low:.3f} to {high:.3f}", f"{earlier:.3f}", f"{factor:.3f}{mark}"))
    if len(rows) == 1:
        raise UsageError(f"nothing to compare: measured {', '.join(now)}; committed {', '.join(before)}")
    return aligned(rows), code


def at_least(chosen: argparse.Namespace, **least: int) -> None:
    """Raise UsageError if an option is below its minimum."""
    for name, number in least.items():
        if getattr(chosen, name) < number:
            raise UsageError(f"--{name} must be at least {number}, got {getattr(chosen, name)}")


def alone() -> Session:
    """Return a session of one rank without MPI."""
    comm = solo()
    return Session(comm, locate(comm, None), "none", os._exit)


def launch(
    ranks: int, program: Sequence[str], *, limit_s: float = LIMIT_S, capture: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run Python with the arguments ``program`` on MPI ranks; ``capture`` keeps the output."""
    launcher = mpirun.find()
    settings = {**mpirun.settings(launcher), "PYTHONPATH": search_path()}
    line = mpirun.command(launcher, ranks, [sys.executable, *program], settings)
    stream = subprocess.PIPE if capture else None
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **settings, **mpirun.session(launcher, Path(folder))}
        return subprocess.run(
            line, env=variables, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, text=True, timeout=limit_s,
            check=False,
        )  # fmt: skip


def search_path() -> str:
    """Return a PYTHONPATH that begins with the root of this clone."""
    rest = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT), rest] if rest else [str(ROOT)])


def alternate(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 2, seed: int = 1,
    begin: Callable[[], object] = lambda: None,
) -> dict[str, list[T]]:  # fmt: skip
    """Call every contender once per round, in a new random order, and return the values by contender.

    The first ``warm_up`` rounds are dropped. All ranks use the same order. ``begin`` is called before each round.
    Collective if the contenders are.
    """
    order = np.random.default_rng(seed)
    values: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        begin()
        for name in order.permutation(list(contenders)).tolist():
            value = contenders[name]()
            if number >= 0:
                values[name].append(value)
    return values


def seconds(
    call: Callable[[], object], comm: Communicator | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Time ``call`` on this rank, after a barrier of ``comm``."""
    if comm is not None:
        comm.barrier()
    begin = clock()
    call()
    return clock() - begin


def repeated(
    call: Callable[[], object], count: int, comm: Communicator, before: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """Return a function that calls ``before``, times ``count`` calls after a barrier, and returns seconds per call."""

    def calls() -> None:
        for _ in range(count):
            call()

    def timed() -> float:
        before()
        return seconds(calls, comm) / count

    return timed


class Stopwatch:
    """Seconds and calls of wrapped functions on this rank's main thread; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        thread, clock = threading.get_ident(), time.perf_counter

        @wraps(function)
        def timed(*args: Any, **keys: Any) -> Any:
            if self._depth or threading.get_ident() != thread:
                return function(*args, **keys)
            self._depth, begin = 1, clock()
            try:
                return function(*args, **keys)
            finally:
                self.seconds += clock() - begin
                self.calls += 1
                self._depth = 0

        return timed

    def taken(self) -> float:
        """Return and reset the counted seconds."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def of_ranks(comm: Communicator, values: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Gather the values of all ranks as (contenders, rounds, ranks, ...). Collective."""
    rank_values = np.array([values[name] for name in values], np.float64)
    return np.moveaxis(np.array(comm.allgather_object(rank_values)), 0, 2)


def slowest(results: Results) -> np.ndarray:
    """Return ``time_s`` (contenders, rounds) of the slowest rank."""
    times = results.arrays["time_s"]
    return times.max(axis=2) if times.ndim == 3 else times


def over_base(times: np.ndarray, names: Sequence[str], base: int = 0) -> dict[str, np.ndarray]:
    """Return ``times`` (contenders, rounds) divided by the times of the base, by name, without the base."""
    return {name: times[index] / times[base] for index, name in enumerate(names) if index != base}


def interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Return the median of ``samples`` and its 95 % bootstrap interval."""
    samples = np.asarray(samples, np.float64).ravel()
    drawn = np.random.default_rng(0).integers(0, len(samples), (RESAMPLES, len(samples)))
    low, high = np.percentile(np.median(samples[drawn], axis=1), [2.5, 97.5])
    return float(np.median(samples)), float(low), float(high)


def time_table(
    times: np.ndarray, names: Sequence[str], base: int = 0, *, unit: str = "ms", scale: float = 1e3,
    more: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:  # fmt: skip
    """Tabulate ``times`` (contenders, rounds): median, quartiles, and the ratio to the base with its interval.

    ``more`` holds further columns by title.
    """
    extra = more or {}
    rows: list[list[str]] = [["", unit, "quartiles", f"x {names[base]}", "interval", *extra]]
    for index, name in enumerate(names):
        low, middle, high = np.percentile(times[index] * scale, [25, 50, 75])
        ratio, least, most = interval(times[index] / times[base])
        cells = [f"{middle:.4g}", f"{low:.4g} to {high:.4g}", f"{ratio:.3f}", f"{least:.3f} to {most:.3f}"]
        rows.append([name, *cells, *(column[index] for column in extra.values())])
    return aligned(rows)


def beyond_first(results: Results) -> np.ndarray:
    """Return the median extra seconds of each contender over the first in the same round."""
    times = slowest(results)
    return np.asarray(np.median(times - times[0], axis=1))


def overhead_table(results: Results) -> list[str]:
    """Tabulate short calls in microseconds, with their extra time over the first contender."""
    more = {"more us": [f"{1e6 * value:+.2f}" for value in beyond_first(results)]}
    return time_table(slowest(results), results.names(), unit="us", scale=1e6, more=more)


def columns_of(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Convert ``rows`` to columns of a `hpcdist.hdf5.datasets` table. A missing value becomes NaN."""
    values = {column.name: [row.get(column.name, np.nan) for row in rows] for column in columns}
    encoded = {
        name: [cell.encode() if isinstance(cell, str) else cell for cell in cells] for name, cells in values.items()
    }
    return {column.name: np.array(encoded[column.name], column.dtype) for column in columns}


def rows_of(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Convert columns to rows of Python strings and numbers."""
    plain = {
        name: [cell.decode() if isinstance(cell, bytes) else cell for cell in column.tolist()]
        for name, column in columns.items()
    }
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
