"""Samples to a target loss over the batch size, for SGD with momentum, AdamW, LARS and LAMB with equal tuning.

    python -m benchmarks large_batch -o large-batch.h5 --plot large-batch.png --anonymous
    python -m benchmarks large_batch --tasks digits --jobs 2
    python -m benchmarks large_batch --tasks mnist --data MNIST      # the idx files, or the .bin files of CIFAR

Tasks: a byte GPT of 135 thousand parameters on the source text of the standard library, and a perceptron on
scikit-learn's digits (pip install 'hpcdist[study]'), MNIST or CIFAR. For each task, optimizer and batch size, the
search tries --trials learning rates: three around the prediction of the scaling rule (linear for sgd and lars, square
root for adamw and lamb, from the best rate of the previous batch), then rates beyond the border or next to the best.
Image tasks take the median of three seeds. The best rate trains again with --seeds new seeds. A training stops early if
it needs more samples than a better rate, or a quarter more updates than the previous batch.

Settings: momentum 0.9, betas 0.9 and 0.95, trust coefficient 0.02, no weight decay, gradients clipped to norm 1, a
warm-up of 1,024 samples, then a constant rate. The gradient noise scale is measured at the second-largest batch.

Results are saved one by one; the same command continues a stopped study. The metric and the questions follow Shallue et
al. 2018 (arXiv:1811.03600) and Nado et al. 2021 (arXiv:2102.06356), at workstation size.
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
    parser.add_argument("--data", type=Path, help="directory of MNIST or CIFAR files; also name the task in --tasks")


def tasks_of(options: argparse.Namespace, folder: Path) -> list[Task]:
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
    """Executor that runs each training in this process at its submission."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def run(
    lines: Sequence[Line],
    pool: Executor,
    jobs: int,
    train: Callable[[Wanted], tuple[Callable[..., Ended], Task, Wanted]],
    completed: Mapping[Wanted, Ended],
    note: Callable[[Wanted, Ended], None],
) -> list[Cell]:
    """Run the trainings of ``lines`` that are not ``completed``, call ``note`` on each, and return the cells.

    ``train`` returns the function and arguments for a worker of ``pool``. With 0 ``jobs`` nothing is trained, and only
    complete cells are returned. Lines alternate, each with one training at a time.
    """
    cells: list[list[Cell]] = [[] for _ in lines]
    searches = [trials(line, line_cells) for line, line_cells in zip(lines, cells, strict=True)]
    waiting: dict[Future[Ended], tuple[int, Wanted]] = {}

    def advance(number: int, ended: Ended | None) -> None:
        try:
            while (trial := searches[number].send(ended)) in completed:  # type: ignore[arg-type]
                ended = completed[trial]
        except StopIteration:
            return
        if jobs:
            waiting[pool.submit(*train(trial))] = number, trial

    ready: deque[tuple[int, Ended | None]] = deque((number, None) for number in range(len(lines)))
    while ready or waiting:
        while ready and len(waiting) < max(1, jobs):
            advance(*ready.popleft())
        if not waiting:
            continue
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            number, trial = waiting.pop(future)
            note(trial, future.result())
            ready.append((number, future.result()))
    return [cell for line_cells in cells for cell in line_cells]


def line(task: Task, optimizer: str, options: argparse.Namespace) -> Line:
    """Return the plan for ``optimizer`` on ``task``. Optimizers differ only in rule and first rate."""
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
    """Run the trainings that the file ``path`` lacks, and return all cells."""
    tasks_by_name = {task.name: task for task in tasks_of(options, folder)}
    records = Records(path, provenance(anonymous=options.anonymous))
    for task in tasks_by_name.values():
        fingerprint = open_source(task.data, task.model, solo()).fingerprint
        records.begin(task.name, {**task.settings(), "fingerprint": fingerprint})
    lines = [line(task, name, options) for task in tasks_by_name.values() for name in options.optimizers]

    def note(trial: Wanted, ended: Ended) -> None:
        records.add(trial, ended)
        output = f"{ended.status} {ended.samples:,.0f} samples" if ended.status == "reached" else ended.status
        label = f"{trial.task} {trial.optimizer} {trial.batch} {trial.role} {trial.seed}"
        print(f"{label}: rate {trial.learning_rate:.4g}, {output}, {ended.wall_s:.1f} s", file=sys.stderr, flush=True)

    def call(trial: Wanted) -> tuple[Callable[..., Ended], Task, Wanted]:
        return tasks.train, tasks_by_name[trial.task], trial

    jobs = 0 if options.report else options.jobs
    with Here() if jobs < 2 else ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return run(lines, pool, jobs, call, records.known, note)


@dataclass(frozen=True)
class Cells(Results):
    """Cells of the study, or the samples of one training."""

    cells: Sequence[Cell] = ()


def measure(chosen: argparse.Namespace, session: Session) -> Cells:
    """Run the missing trainings and return all cells. A check repeats a single training."""
    harness.at_least(chosen, trials=3, seeds=1, largest=16, jobs=1)
    if chosen.report and not (chosen.output and chosen.output.exists()):
        raise UsageError(f"--report: the file --output {chosen.output or ''} does not exist")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.check:
            trial = next(key for key in records_file.trainings(harness.RESULTS / COMMITTED) if _is_short(key))
            task = tasks_of(chosen, folder)[0]
            limited = Wanted(**{**vars(trial), "limit_samples": task.limit_samples})
            return Cells({"samples": np.array([tasks.train(task, limited).samples])}, {})
        path = chosen.output or folder / "large-batch.h5"
        results.check_place(path)
        with results.locked(path):
            return Cells({}, {}, {}, study(chosen, folder, path))


def _is_short(key: Wanted) -> bool:
    return (key.task, key.optimizer, key.batch, key.role) == ("digits", "adamw", 32, "check")


def read(path: Path) -> Cells:
    trainings = records_file.trainings(path)
    return Cells({"samples": np.array([next(ended.samples for key, ended in trainings.items() if _is_short(key))])}, {})


def plot(result: Any, path: Path) -> None:
    report.plot(result.cells, path)


def lines(result):
    return report.text(result.cells).splitlines()


def ratios(result):
    return {"samples to the target, digits, adamw, 32 a step": result.arrays["samples"]}
