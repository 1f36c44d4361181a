"""Samples to a target loss against the batch size, for SGD with momentum, AdamW, LARS and LAMB, each tuned alike.

    python -m benchmarks large_batch -o large-batch.h5 --plot large-batch.png --anonymous
    python -m benchmarks large_batch --tasks digits --jobs 2
    python -m benchmarks large_batch --tasks mnist --data MNIST      # the idx files, or the .bin files of CIFAR

Tasks: a byte GPT of 135 thousand parameters on the source text of the standard library, and a perceptron on
scikit-learn's digits (pip install 'hpcdist[study]'), or on MNIST or CIFAR. For every task, optimizer and batch size the
learning rate is searched for among the same number of rates (--trials): three around the scaling rule's prediction
(linear for sgd and lars, square root for adamw and lamb, from the best rate of the batch before), then beyond the
border where the best is there, else between its neighbours. On images each rate is tried with three seeds, of which the
median counts. The best rate is trained again with --seeds that the search has not seen. A training is given up where it
needs more samples than a better rate, or a quarter more updates than the batch before.

Momentum 0.9, betas 0.9 and 0.95, trust coefficient 0.02, no weight decay, gradients clipped to a norm of 1, warm-up
over 1,024 samples, then a constant rate. The gradient noise scale is measured at the batch before the last.

A training that diverges has not reached the target. Results go to the file one by one: the same command goes on where
it was stopped, and draws and prints what is there. Metric and questions are those of Shallue et al. 2018
(arXiv:1811.03600) and Nado et al. 2021 (arXiv:2102.06356), at the size of a workstation.
"""

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.large_batch import data, report, tasks
from benchmarks.large_batch import results as records_file
from benchmarks.large_batch.results import Records
from benchmarks.large_batch.search import Cell, Ended, Line, Wanted, trials
from benchmarks.large_batch.tasks import RULES, Task
from hpcdist.bench.sweep import results
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import UsageError
from hpcdist.telemetry.provenance import provenance
from hpcdist.training.data import open_source

SCHEMA, COMMITTED = records_file.SCHEMA, "large_batch/2026-11-22-large-batch.h5"
SMALL, WORSE = {"tasks": ["digits"]}, 1.1
WRITES_ITSELF = True
OPTIONS: Final = {"tasks": ["gpt", "digits"], "text": "", "trials": 5, "seeds": 3, "largest": 10**9, "jobs": 1}
OPTIONS |= {"report": False, "optimizers": tuple(RULES)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="directory of MNIST's or CIFAR's files; name the task too")


def tasks_of(options: argparse.Namespace, folder: Path) -> list[Task]:
    """Return the tasks that were asked for, with their images as tables in ``folder``. Raises HpcdistError."""
    makers: dict[str, Callable[[], Task]] = {
        "gpt": lambda: tasks.gpt(options.text),
        "digits": lambda: _of(data.digits(), folder),
    }
    if options.data is not None:
        table = data.images(options.data)
        makers[table.name] = lambda: _of(table, folder)
    for name in options.tasks:
        if name not in makers:
            raise UsageError(f"--tasks {name}: choose among {', '.join(makers)}; --data DIRECTORY adds MNIST or CIFAR")
    return [makers[name]() for name in dict.fromkeys(options.tasks)]


def _of(table: data.Table, folder: Path) -> Task:
    table.write(folder / f"{table.name}.h5")
    rows = len(table.x)
    return tasks.classifier(table.name, folder / f"{table.name}.h5", table.validation / rows, rows)


class Here(Executor):
    """Makes each training in this process, when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return what ``fn`` returns, as a future that is done."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def run(
    lines: Sequence[Line],
    pool: Executor,
    jobs: int,
    train: Callable[[Wanted], tuple[Callable[..., Ended], Task, Wanted]],
    known: Mapping[Wanted, Ended],
    note: Callable[[Wanted, Ended], None],
) -> list[Cell]:
    """Make the trainings of ``lines`` that are not ``known`` in ``pool``, ``note`` each, and return what was found.

    ``train`` says what one of the ``jobs`` workers is to call. With no jobs nothing is made, and what is found is of
    batches that are complete. Lines take turns, each with one training at a time.
    """
    cells: list[list[Cell]] = [[] for _ in lines]
    going = [trials(line, found) for line, found in zip(lines, cells, strict=True)]
    waiting: dict[Future[Ended], tuple[int, Wanted]] = {}

    def advance(number: int, ended: Ended | None) -> None:
        try:
            while (wanted := going[number].send(ended)) in known:  # type: ignore[arg-type]
                ended = known[wanted]
        except StopIteration:
            return
        if jobs:
            waiting[pool.submit(*train(wanted))] = number, wanted

    ready: deque[tuple[int, Ended | None]] = deque((number, None) for number in range(len(lines)))
    while ready or waiting:
        while ready and len(waiting) < max(1, jobs):
            advance(*ready.popleft())
        if not waiting:
            continue
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            number, wanted = waiting.pop(future)
            note(wanted, future.result())
            ready.append((number, future.result()))
    return [cell for found in cells for cell in found]


def line(task: Task, optimizer: str, options: argparse.Namespace) -> Line:
    """Return what is studied of ``optimizer`` on ``task``: the same for all optimizers but rule and first rate."""
    seeds = tuple(range(task.search_seeds + options.seeds))
    return Line(
        task.name,
        optimizer,
        tuple(batch for batch in task.batches if batch <= options.largest),
        RULES[optimizer],
        task.rates[optimizer],
        task.limit_samples,
        options.trials,
        seeds[: task.search_seeds],
        seeds[task.search_seeds :],
    )


def study(options: argparse.Namespace, folder: Path, path: Path) -> list[Cell]:
    """Make what is not in the file at ``path`` yet, and return what was found."""
    wanted_tasks = {task.name: task for task in tasks_of(options, folder)}
    records = Records(path, provenance(anonymous=options.anonymous))
    for task in wanted_tasks.values():
        fingerprint = open_source(task.data, task.model, solo()).fingerprint
        records.begin(task.name, {**task.settings(), "fingerprint": fingerprint})
    lines = [line(task, name, options) for task in wanted_tasks.values() for name in options.optimizers]

    def note(wanted: Wanted, ended: Ended) -> None:
        records.add(wanted, ended)
        told = f"{ended.status} {ended.samples:,.0f} samples" if ended.status == "reached" else ended.status
        which = f"{wanted.task} {wanted.optimizer} {wanted.batch} {wanted.role} {wanted.seed}"
        print(f"{which}: rate {wanted.learning_rate:.4g}, {told}, {ended.wall_s:.1f} s", file=sys.stderr, flush=True)

    def call(wanted: Wanted) -> tuple[Callable[..., Ended], Task, Wanted]:
        return tasks.train, wanted_tasks[wanted.task], wanted

    jobs = 0 if options.report else options.jobs
    with Here() if jobs < 2 else ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return run(lines, pool, jobs, call, records.known, note)


@dataclass(frozen=True)
class Cells(Results):
    """Cells of the study, or trainings of one of them."""

    cells: Sequence[Cell] = ()


def measure(chosen: argparse.Namespace, session: Session) -> Cells:
    """Make what the file does not have yet, and return all that it has; a check makes one training again."""
    harness.at_least(chosen, trials=3, seeds=1, largest=16, jobs=1)
    if chosen.report and not (chosen.output and chosen.output.exists()):
        raise UsageError(f"--report: there is no --output {chosen.output or ''}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.check:
            wanted = next(key for key in records_file.trainings(harness.RESULTS / COMMITTED) if _is_short(key))
            task = tasks_of(chosen, folder)[0]
            limited = Wanted(**{**vars(wanted), "limit_samples": task.limit_samples})
            return Cells({"samples": np.array([tasks.train(task, limited).samples])}, {})
        path = chosen.output or folder / "large-batch.h5"
        results.check_place(path)
        with results.locked(path):
            return Cells({}, {}, {}, study(chosen, folder, path))


def _is_short(key: Wanted) -> bool:
    return (key.task, key.optimizer, key.batch, key.role) == ("digits", "adamw", 32, "check")


def read(path: Path) -> Cells:
    """Return the samples of the training that a check makes again."""
    known = records_file.trainings(path)
    return Cells({"samples": np.array([next(ended.samples for key, ended in known.items() if _is_short(key))])}, {})


def plot(found: Any, path: Path) -> None:
    report.plot(found.cells, path)


def lines(found):
    return report.text(found.cells).splitlines()


def ratios(found):
    return {"samples to the target, digits, adamw, 32 a step": found.arrays["samples"]}
