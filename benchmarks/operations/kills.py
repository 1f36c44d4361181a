"""Random SIGKILLs and requeues of PyTorch scripts in five styles: does each start resume at the newest checkpoint?

    python -m benchmarks kills -o kills.h5 --anonymous

The styles are in `restarted_script.py`: DDP and FSDP2 with `hpcdist.torch.save`, DDP with torch.save and
`hpcdist.torch.saved`, the Trainer of Hugging Face with `trainer_callback`, and `hpcdist.training.pytorch.Training`.

--kills: each style runs under `hpcdist run -n 2 --restarts N` and saves every five steps. Every start makes a new
checkpoint, goes on for a random time of up to --window seconds, and then a random rank gets SIGKILL. The kills are
divided among the styles. --requeues: each style is a job of two nodes of a virtual Slurm. The batch shell of the job
gets the SIGUSR1 that Slurm sends before the end of a walltime, at a random moment, this many times. Slurm needs root.

Each start must begin at the newest checkpoint that was complete when the previous start ended. The last loss and the
parameters must be bitwise equal to a run without interruptions. Lost steps are steps that were made again.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.constants import PROGRESS_FILE
from hpcdist.reporting.table import aligned

sys.path.insert(0, str(harness.ROOT / "tests"))

from harness import jobs as commands
from stubs.slurm_cluster import Cluster, Jobs

SCHEMA = "hpcdist-benchmark-kills"
NO_CHECK = "it measures no time; run it with --kills 5 --requeues 1"

SCRIPT: Final = Path(__file__).with_name("restarted_script.py")
STYLES: Final = {
    "ddp": "DDP, hpcdist.torch.save",
    "fsdp": "FSDP2, hpcdist.torch.save",
    "own": "DDP, torch.save and hpcdist.torch.saved",
    "trainer": "Trainer of Hugging Face",
    "training": "hpcdist Training",
}
WORLD: Final = 2
PAUSE_S: Final = 0.05  # sleep of each step
LIMIT_S: Final = 600.0  # timeout of every wait
Wait = Callable[[Callable[[], bool], str], None]
OPTIONS: Final = {"kills": 50, "requeues": 2, "seed": 0, "window": 1.0, "styles": tuple(STYLES)}


@dataclass(frozen=True)
class Interruption:
    """A kill or a stop: index of the style, killed rank (-1: stop request), and steps."""

    style: int
    rank: int
    saved: int  # steps of the newest complete checkpoint when the start had ended
    resumed: int  # first step of the next start
    lost: int  # steps that the next start repeats; -1 if the script has not noted its last step, which was saved


class Script:
    """A run of `restarted_script.py` in ``folder``."""

    def __init__(self, style: str, folder: Path, steps: int) -> None:
        self.style, self.folder, self.steps, self.out = style, folder, steps, folder / "run"
        folder.mkdir(parents=True)

    def line(self, pause_s: float) -> list[str]:
        """Return the words of the program, after ``--``."""
        return [sys.executable, str(SCRIPT), self.style, str(self.steps), str(pause_s)]

    def starts(self) -> list[int]:
        """Return the first step of each start."""
        path = self.out / "starts.txt"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def saved(self) -> int:
        """Return the steps of the newest complete checkpoint, or 0."""
        report = self.out / PROGRESS_FILE
        return int(json.loads(report.read_text())["step"]) if report.exists() else commands.newest_step(self.out)

    def last_step(self) -> int:
        return int((self.out / "last-step.txt").read_text())

    def wait_for_save(self, number: int, wait: Wait) -> None:
        """Wait until start ``number`` (from 0) has made a new checkpoint."""
        wait(lambda: len(self.starts()) > number, f"start {number + 1}")
        wait(lambda: self.saved() > self.starts()[-1], "checkpoint")

    def result(self) -> str:
        return (self.out / "final.json").read_text()


def run(script: Script, restarts: int, pause_s: float) -> "subprocess.Popen[str]":
    """Start ``script`` under `hpcdist run`."""
    words = ["run", "-n", str(WORLD), "--restarts", str(restarts), "--out", "run", "--", *script.line(pause_s)]
    line = [sys.executable, "-P", "-m", "hpcdist", *words]
    environment = {**os.environ, "PYTHONPATH": harness.search_path()}
    with (script.folder / "log.txt").open("w") as log:
        return subprocess.Popen(line, cwd=script.folder, env=environment, stdout=log, stderr=log, text=True)


@contextlib.contextmanager
def running(script: Script, restarts: int, pause_s: float) -> Iterator[Wait]:
    """Run ``script`` to its end. Yield a function that waits for a condition."""
    process, log = run(script, restarts, pause_s), script.folder / "log.txt"

    def wait(condition: Callable[[], bool], what: str) -> None:
        commands.until(condition, what, process, log, LIMIT_S)

    try:
        yield wait
        if process.wait(LIMIT_S):
            sys.exit(f"{script.style} ended with code {process.returncode}\n{log.read_text()[-8000:]}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(script: Script, number: int, draw: random.Random, window_s: float, wait: Wait) -> Interruption:
    """Kill a random rank of start ``number``, and wait until the next start trains."""
    script.wait_for_save(number, wait)
    rank = draw.randrange(WORLD)
    time.sleep(draw.uniform(0.0, window_s))
    pids = [int((script.out / f"rank-{each}.pid").read_text()) for each in range(WORLD)]
    os.kill(pids[rank], 9)
    wait(lambda: not any(map(is_alive, pids)), "end of all ranks")
    saved, last = script.saved(), script.last_step()
    wait(lambda: len(script.starts()) > number + 1, f"start after the kill of rank {rank}")
    resumed = script.starts()[number + 1]
    return Interruption(list(STYLES).index(script.style), rank, saved, resumed, last - resumed)


def killed(style: str, folder: Path, kills: int, seed: int, window_s: float) -> tuple[list[Interruption], bool]:
    """Run a style with and without ``kills``. Return the kills, and True if the results are bitwise equal."""
    steps = (int(window_s / PAUSE_S) + 20) * (kills + 1)
    whole, script = (Script(style, folder / name, steps) for name in (f"{style}-whole", f"{style}-killed"))
    with running(whole, 0, 0.0):
        pass
    draw, rows = random.Random(f"{style} {seed}"), []
    with running(script, kills, PAUSE_S) as wait:
        for number in range(kills):
            rows.append(kill(script, number, draw, window_s, wait))
            print(f"{STYLES[style]}: kill {number + 1} of {kills}: {rows[-1]}", flush=True)
    return rows, script.result() == whole.result()


def requeued(
    style: str, cluster: Cluster, folder: Path, requeues: int, seed: int = 0
) -> tuple[list[Interruption], bool]:
    """Submit a style as a job of two nodes that is stopped ``requeues`` times. Return the same as `killed`."""
    steps = 60 * (requeues + 1)
    whole, script = (Script(style, folder / name, steps) for name in (f"{style}-in-one", f"{style}-requeued"))
    with running(whole, 0, 0.0):
        pass
    jobs = Jobs(cluster, script.folder)
    options = [
        "submit",
        "--nodes=2",
        "--ranks-per-node=1",
        "--out=run",
        "--no-check",
        "--time=30",
        "--signal-seconds=60",
    ]
    line = [sys.executable, "-P", "-m", "hpcdist", *options, "--", *script.line(PAUSE_S)]
    done = cluster.run(*line, cwd=script.folder)
    if done.returncode:
        sys.exit(done.stderr)
    number, draw, rows = done.stdout.strip(), random.Random(f"{style} {seed}"), []
    for index in range(requeues):
        script.wait_for_save(index, cluster.wait)
        time.sleep(draw.uniform(0.0, 1.0))
        jobs.stop(number)
        jobs.release(number, index + 1)
        saved, last = script.saved(), script.last_step()
        cluster.wait(lambda index=index: len(script.starts()) > index + 1, f"start {index + 2}")
        resumed = script.starts()[index + 1]
        rows.append(Interruption(list(STYLES).index(style), -1, saved, resumed, last - resumed))
    jobs.until(number, JobState="COMPLETED")
    return rows, script.result() == whole.result()


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    kills: list[Interruption] = []
    requeues: list[Interruption] = []
    equal: dict[str, list[bool]] = {"kills": [], "requeues": []}
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        for index, style in enumerate(chosen.styles if chosen.kills else ()):
            count = chosen.kills * (index + 1) // len(chosen.styles) - chosen.kills * index // len(chosen.styles)
            rows, same = killed(style, Path(name), count, chosen.seed, chosen.window)
            kills += rows
            equal["kills"].append(same)
        if chosen.requeues:
            # A short path: it holds sockets, whose names may have 107 characters.
            with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as place:
                cluster = Cluster(Path(place), count=2, requeue_s=5)
                try:
                    cluster.start()
                    for style in chosen.styles:
                        rows, same = requeued(style, cluster, Path(name), chosen.requeues, chosen.seed)
                        requeues += rows
                        equal["requeues"].append(same)
                        print(f"{STYLES[style]}: requeues {rows}", flush=True)
                finally:
                    cluster.stop()
    columns = ", ".join(field.name for field in fields(Interruption))
    arrays = {"kills": kills, "requeues": requeues}
    tables = {key: np.array([astuple(row) for row in rows], np.int64).reshape(-1, 5) for key, rows in arrays.items()}
    about = {f"equal_after_{key}": np.array(values, np.int64) for key, values in equal.items()}
    names = {"styles_in_order": "; ".join(chosen.styles)}
    return Results(
        tables | about, dict.fromkeys(tables, f"events, ({columns})") | dict.fromkeys(about, "styles"), names
    )


def lines(results: Results) -> Sequence[str]:
    rows = [
        ["style", "interruption", "number", "resumed at newest", "lost steps, most", "lost steps, mean", "same bits"]
    ]
    for index, style in enumerate(str(results.attributes["styles_in_order"]).split("; ")):
        for key in ("kills", "requeues"):
            events = results.arrays[key][results.arrays[key][:, 0] == list(STYLES).index(style)]
            if len(events):
                newest, lost = (events[:, 2] == events[:, 3]).sum(), events[:, 4].clip(0)
                same = "yes" if results.arrays[f"equal_after_{key}"][index] else "no"
                rows.append(
                    [STYLES[style], key, str(len(events)), str(newest), str(lost.max()), f"{lost.mean():.1f}", same]
                )
    return aligned(rows)


def failures(results: Results) -> list[str]:
    missed = []
    for key in ("kills", "requeues"):
        events = results.arrays[key]
        if wrong := int((events[:, 2] != events[:, 3]).sum()):
            missed.append(f"{wrong} of {len(events)} starts after {key} did not resume at the newest checkpoint")
        if different := int((results.arrays[f"equal_after_{key}"] == 0).sum()):
            missed.append(f"{different} styles ended with other bits after {key}")
    return missed
