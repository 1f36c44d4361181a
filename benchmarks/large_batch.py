"""Samples to a target loss against the batch size, for SGD with momentum, AdamW, LARS and LAMB, each tuned alike.

    export OMP_NUM_THREADS=1
    python benchmarks/large_batch.py -o large-batch.h5 --plot large-batch.png --anonymous
    python benchmarks/large_batch.py --tasks digits --jobs 2
    python benchmarks/large_batch.py --tasks mnist --data MNIST      # the idx files, or the .bin files of CIFAR

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
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import large_batch_data
import large_batch_report
import large_batch_tasks
from large_batch_file import Records
from large_batch_search import Cell, Ended, Line, Wanted, trials
from large_batch_tasks import RULES, Task

from hpcdist.bench.sweep import results
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.reporting.plotting import check_plot
from hpcdist.telemetry.provenance import provenance
from hpcdist.training.data import open_source


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["gpt", "digits"], metavar="TASK", help="default: gpt digits")
    parser.add_argument("--data", type=Path, help="directory of MNIST's or CIFAR's files; name the task too")
    parser.add_argument("--text", default="", help="text file or directory for the gpt, in place of the library's")
    parser.add_argument("--optimizers", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--trials", type=int, default=5, help="rates for each optimizer and batch (default 5)")
    parser.add_argument("--seeds", type=int, default=3, help="further trainings of the best rate (default 3)")
    parser.add_argument("--largest", type=int, default=10**9, metavar="SAMPLES", help="leave out larger batches")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train at the same time (default 1)")
    parser.add_argument("--report", action="store_true", help="train nothing: print and draw what --output has")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file of every training; one that exists is continued")
    parser.add_argument("--plot", type=Path, help="draw samples and updates against the batch")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(words)
    for name, least in (("trials", 3), ("seeds", 1), ("largest", 16), ("jobs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least}")
    if options.report and not (options.output and options.output.exists()):
        parser.error(f"--report: there is no --output {options.output or ''}")
    return options


def tasks_of(options: argparse.Namespace, folder: Path) -> list[Task]:
    """Return the tasks that were asked for, with their images as tables in ``folder``. Raises HpcdistError."""
    makers: dict[str, Callable[[], Task]] = {
        "gpt": lambda: large_batch_tasks.gpt(options.text),
        "digits": lambda: _of(large_batch_data.digits(), folder),
    }
    if options.data is not None:
        table = large_batch_data.images(options.data)
        makers[table.name] = lambda: _of(table, folder)
    for name in options.tasks:
        if name not in makers:
            raise UsageError(f"--tasks {name}: choose among {', '.join(makers)}; --data DIRECTORY adds MNIST or CIFAR")
    return [makers[name]() for name in dict.fromkeys(options.tasks)]


def _of(table: large_batch_data.Table, folder: Path) -> Task:
    table.write(folder / f"{table.name}.h5")
    rows = len(table.x)
    return large_batch_tasks.classifier(table.name, folder / f"{table.name}.h5", table.validation / rows, rows)


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
        data = open_source(task.data, task.model, solo()).fingerprint
        records.begin(task.name, {**task.settings(), "fingerprint": data})
    lines = [line(task, name, options) for task in wanted_tasks.values() for name in options.optimizers]

    def note(wanted: Wanted, ended: Ended) -> None:
        records.add(wanted, ended)
        told = f"{ended.status} {ended.samples:,.0f} samples" if ended.status == "reached" else ended.status
        which = f"{wanted.task} {wanted.optimizer} {wanted.batch} {wanted.role} {wanted.seed}"
        print(f"{which}: rate {wanted.learning_rate:.4g}, {told}, {ended.wall_s:.1f} s", file=sys.stderr, flush=True)

    def call(wanted: Wanted) -> tuple[Callable[..., Ended], Task, Wanted]:
        return large_batch_tasks.train, wanted_tasks[wanted.task], wanted

    jobs = 0 if options.report else options.jobs
    with Here() if jobs < 2 else ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return run(lines, pool, jobs, call, records.known, note)


def main(words: Sequence[str] | None = None) -> None:
    """Make the study, print it, draw it."""
    options = arguments(words)
    if options.plot is not None:
        check_plot(options.plot)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.output or folder / "large-batch.h5"
        results.check_place(path)
        with results.locked(path):
            cells = study(options, folder, path)
    print(large_batch_report.text(cells))
    if options.plot is not None:
        large_batch_report.plot(cells, options.plot)


if __name__ == "__main__":
    try:
        main()
    except HpcdistError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
