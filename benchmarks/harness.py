"""Harness of all studies: options, contenders in alternation, ratios with intervals, results files, checks.

A study is a module. What it has by these names is what the harness calls, or needs to know:

    SCHEMA          of its results file
    OPTIONS         defaults of its options by name: numbers, texts, lists of them, False for a flag, a tuple of names
                    of which some may be chosen, a mapping of which one may
    options         adds what OPTIONS cannot say to the parser
    measure         returns `Results`: arrays, what their dims are, attributes; None on ranks but the first. Collective
    lines           the table of the results; default: that of time_s (contenders, rounds[, ranks])
    ratios          what is proven: a time over that of the contender next to it in the same round, so that below 1 is
                    better, and what else the machine does falls on both; default: time_s over the first contender's
    plot, failures  the picture of the results, and the goals that they miss (exit code 1)
    RANKS, ON       ranks that are started with MPI, unless a launcher did; "gpu" where it needs one
    COMMITTED       its result below results/, beside which --check measures with the options of that result and those
                    of SMALL: exit code 1 where the median of a ratio is WORSE times the committed one
    NO_CHECK        why it has no --check
    read, write     of files that are not datasets at the root; WRITES_ITSELF: ``measure`` does, and goes on with a file
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
CONTENDERS: Final = ("contenders", "commands", "compressors", "ways")  # attributes that name them
LIMIT_S: Final = 1800.0  # of a job that a study starts
RESAMPLES: Final = 2000  # of the interval of a median
T = TypeVar("T")
Ratios = Mapping[str, np.ndarray]  # samples by name: times over those of the base, below 1 is better


@dataclass(frozen=True)
class Results:
    """Arrays by name, their dims in words, and attributes of a study's file."""

    arrays: Mapping[str, np.ndarray]
    dims: Mapping[str, str]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def names(self, attribute: str = "") -> list[str]:
        """Return the names that ``attribute`` lists; default: those of the contenders."""
        text = str(self.attributes[attribute or next(name for name in CONTENDERS if name in self.attributes)])
        return re.split("; ?", text) if ";" in text else text.split(",")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a module says of its study, by the names of this module's docstring."""

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
        """Return the study of ``module``."""
        known = {key: value for key, value in vars(module).items() if callable(value) or key.isupper()}
        given = {each.name: known.get(each.name.upper(), known.get(each.name)) for each in fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        return cls(**given | {"options": lambda parser: add_options(parser, module)})


def add_options(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """Add the options of ``module``: those of OPTIONS, and what its function adds."""
    for name, default in getattr(module, "OPTIONS", {}).items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(
                flag, nargs="+", choices=default, default=list(default), metavar="NAME", help=", ".join(default)
            )
        elif isinstance(default, Mapping):
            parser.add_argument(flag, choices=default, default=next(iter(default)), help="(default the first)")
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=f"(default {default})")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"(default {default})")
    if hasattr(module, "options"):
        module.options(parser)


def run(module: ModuleType, name: str, words: Sequence[str]) -> int:
    """Run the study of ``module`` with the options ``words`` and return the exit code. Collective with ranks."""
    study = Study.of(module)
    try:
        options = parsed(study, module, name, words)
        if options.plot is not None:
            check_plot(options.plot)
        if study.on == "gpu":
            from hpcdist.arrays.gpu import device

            device.count()  # on every rank alike, before MPI starts
        if study.ranks and environment.launch_environment() is None and options.ranks > 1:
            return launch(options.ranks, ["-m", "benchmarks", name, *words]).returncode
        session = start.start(study.on) if study.ranks else alone()
        if session.comm.size == 1:
            return _measured(study, options, session)
    except HpcdistError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    session.leave(_measured(study, options, session))  # an error of one rank ends all of them
    return OK


def parsed(study: Study, module: ModuleType, name: str, words: Sequence[str]) -> argparse.Namespace:
    """Return the options; those of a check are the committed file's."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    study.options(parser)
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    parser.add_argument("--check", action="store_true", help="measure little, and compare with the committed result")
    if study.plot is None:
        parser.set_defaults(plot=None)
    else:
        parser.add_argument("--plot", type=Path, help="picture to write")
    if study.ranks:
        parser.add_argument("-n", "--ranks", type=int, default=study.ranks, help=f"(default {study.ranks})")
    options = parser.parse_args(words)
    if not options.check:
        return options
    if not study.committed:
        parser.error(f"--check: {study.no_check}")
    before = committed(study).attributes
    given = {key: before[key] for key in vars(options) if key in before and key != "ranks"}
    defaults = {key: _typed(value) for key, value in given.items()} | dict(study.small)
    if study.ranks and "ranks" in before:
        defaults["ranks"] = int(before["ranks"])
    parser.set_defaults(**defaults)
    return parser.parse_args(words)


def _typed(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value


def _measured(study: Study, options: argparse.Namespace, session: Session) -> int:
    """Measure, print, write and draw; or check. Return the exit code of rank 0. Collective."""
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
            print(f"all that was measured is in {output}")
        if options.plot is not None:
            study.plot(results, options.plot)  # type: ignore[misc]
            print(f"the picture is {options.plot}")
        if missed := study.failures(results):
            print(f"missed: {'; '.join(missed)}", file=sys.stderr)
            code = FAILURE
        if options.check:
            lines, code = compared(study.ratios(results), study.ratios(committed(study)), study.worse)
            print("\n".join([f"beside results/{study.committed}:", *lines]))
    return int(session.comm.broadcast_object(code))


def _writer(study: Study, options: argparse.Namespace) -> Callable[[Path, Results, Mapping[str, Any]], None]:
    # With the options, which a later --check measures with, whatever the defaults are by then.
    chosen = {name: value for name, value in vars(options).items() if name not in ("output", "plot", "check")}
    chosen = {name: value for name, value in chosen.items() if isinstance(value, str | int | float | list)}

    def write(path: Path, results: Results, origin: Mapping[str, Any]) -> None:
        about = {name: {"dims": dims} for name, dims in results.dims.items()}
        attributes = {**chosen, **origin, **results.attributes}
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
    """Return a line for each ratio that both have, and 1 where one is ``worse`` times what it was, else 0."""
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
    """Raise UsageError for an option that is less than its ``least``."""
    for name, number in least.items():
        if getattr(chosen, name) < number:
            raise UsageError(f"--{name} {getattr(chosen, name)}: at least {number}")


def alone() -> Session:
    """Return the session of a study that is no MPI job."""
    comm = solo()
    return Session(comm, locate(comm, None), "none", os._exit)


def launch(
    ranks: int, program: Sequence[str], *, limit_s: float = LIMIT_S, capture: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run Python with the arguments ``program`` on ``ranks`` ranks; with ``capture`` keep what it prints."""
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
    """Return the PYTHONPATH of processes that import the studies, and the hpcdist beside them."""
    rest = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT), rest] if rest else [str(ROOT)])


def alternate(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 2, seed: int = 1,
    begin: Callable[[], object] = lambda: None,
) -> dict[str, list[T]]:  # fmt: skip
    """Call all contenders once a round, in an order drawn anew, and return the values of all but the first rounds.

    The order is the same on every rank; ``begin`` is called before each round. Collective where the contenders are.
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
    """Return the seconds of ``call`` on this rank, from a barrier of ``comm`` on."""
    if comm is not None:
        comm.barrier()
    begin = clock()
    call()
    return clock() - begin


def repeated(
    call: Callable[[], object], count: int, comm: Communicator, before: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """Return what calls ``before`` and makes ``count`` calls from a barrier of ``comm`` on; it returns those of one."""

    def calls() -> None:
        for _ in range(count):
            call()

    def timed() -> float:
        before()
        return seconds(calls, comm) / count

    return timed


class Stopwatch:
    """Seconds and calls of this rank's main thread in the functions that it is put around, nested ones counted once."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time taken."""
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
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def of_ranks(comm: Communicator, values: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Return the values of all ranks, (contenders, rounds, ranks, ...). Collective."""
    own = np.array([values[name] for name in values], np.float64)
    return np.moveaxis(np.array(comm.allgather_object(own)), 0, 2)


def slowest(results: Results) -> np.ndarray:
    """Return ``time_s`` (contenders, rounds), of the slowest rank each."""
    times = results.arrays["time_s"]
    return times.max(axis=2) if times.ndim == 3 else times


def over_base(times: np.ndarray, names: Sequence[str], base: int = 0) -> dict[str, np.ndarray]:
    """Return ``times`` (contenders, rounds) of all but the base over its time in the same round, by name."""
    return {name: times[place] / times[base] for place, name in enumerate(names) if place != base}


def interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Return the median of ``samples`` and its 95 % interval by the bootstrap."""
    samples = np.asarray(samples, np.float64).ravel()
    drawn = np.random.default_rng(0).integers(0, len(samples), (RESAMPLES, len(samples)))
    low, high = np.percentile(np.median(samples[drawn], axis=1), [2.5, 97.5])
    return float(np.median(samples)), float(low), float(high)


def time_table(
    times: np.ndarray, names: Sequence[str], base: int = 0, *, unit: str = "ms", scale: float = 1e3,
    more: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:  # fmt: skip
    """Return the table of ``times`` (contenders, rounds): median, quartiles, and the ratio to the base with interval.

    ``more`` are further columns by their title.
    """
    extra = more or {}
    rows: list[list[str]] = [["", unit, "quartiles", f"x {names[base]}", "interval", *extra]]
    for place, name in enumerate(names):
        low, middle, high = np.percentile(times[place] * scale, [25, 50, 75])
        ratio, least, most = interval(times[place] / times[base])
        cells = [f"{middle:.4g}", f"{low:.4g} to {high:.4g}", f"{ratio:.3f}", f"{least:.3f} to {most:.3f}"]
        rows.append([name, *cells, *(column[place] for column in extra.values())])
    return aligned(rows)


def beyond_first(results: Results) -> np.ndarray:
    """Return the median seconds of each contender beyond those of the first in the same round."""
    times = slowest(results)
    return np.asarray(np.median(times - times[0], axis=1))


def overhead_table(results: Results) -> list[str]:
    """Return the table of short calls in microseconds, with what each takes more than the first."""
    more = {"more us": [f"{1e6 * value:+.2f}" for value in beyond_first(results)]}
    return time_table(slowest(results), results.names(), unit="us", scale=1e6, more=more)


def columns_of(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return ``rows`` as the columns of a table of `hpcdist.hdf5.datasets`; what a row lacks is NaN."""
    values = {column.name: [row.get(column.name, np.nan) for row in rows] for column in columns}
    encoded = {name: [each.encode() if isinstance(each, str) else each for each in own] for name, own in values.items()}
    return {column.name: np.array(encoded[column.name], column.dtype) for column in columns}


def rows_of(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the rows of a table by name of column, with texts and numbers of Python."""
    plain = {
        name: [each.decode() if isinstance(each, bytes) else each for each in own.tolist()]
        for name, own in columns.items()
    }
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
