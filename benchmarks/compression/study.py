"""Losses of trainings with compressed gradients, and their time between hosts with slow links.

    python -m benchmarks compression -o compression.h5 --plot compression.png --anonymous
    python -m benchmarks compression --parts losses --ranks 4 --only dense int8 "powersgd 4"
    sudo python -m benchmarks compression --parts times --link 1gbit

Losses: a byte GPT of a million parameters trains on the source text of the standard library, on --ranks ranks, with
every compressor of `communication.compression`, with and without error feedback. Dense gradients and the most important
compressors try all --rates; the others use the best rate of dense gradients. Some train with further --seeds. The
tables have the final validation loss, the bytes sent by a rank, and the reasons of refused combinations.

Times: the same trainings with one rank on each of two hosts (network namespaces of this machine with links of --link,
root only). Dense gradients and factors use the hierarchical allreduce. Each round also measures raw TCP on the same
links. The bound of a step is its time to compute, encode and decode, and to send its bytes at the raw TCP rate; "of
bound" is the bound divided by the measured time.

Trainings are saved one by one; the same command continues a stopped study.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.compression import plan, report
from benchmarks.compression import results as records_file
from benchmarks.compression.plan import COMMON, CONTENDERS, DENSE, FOUND, Training
from benchmarks.compression.results import Records
from benchmarks.harness import Results
from benchmarks.hosts.cluster import Hosts
from hpcdist.bench.sweep import results
from hpcdist.comm.launch import mpirun
from hpcdist.comm.start import Session
from hpcdist.errors import HpcdistError
from hpcdist.telemetry.provenance import provenance

SCHEMA, COMMITTED = records_file.SCHEMA, "compression/2026-11-22-compression.h5"
SMALL, WORSE = (
    {"parts": ["losses"], "only": ["dense", "int8", "sign"], "steps": 20, "rates": [1e-3], "seeds": 1, "threads": True},
    1.01,
)
WRITES_ITSELF = True

EVALUATIONS: Final = 10
BURST: Final = "8kb"  # bytes that a link passes at any speed after a pause
RAW_BYTES: Final = 4 << 20
# ranks, steps, seeds: of the trainings for losses; rounds, turn: rounds of the times, and steps per round
OPTIONS: Final = {"ranks": 2, "threads": False, "steps": 500, "rates": [1e-3, 2e-3, 4e-3], "seeds": 3, "text": ""}
OPTIONS |= {"link": "100mbit", "rounds": 5, "turn": 6, "parts": ("losses", "times"), "only": tuple(CONTENDERS)}


def followed(line: Sequence[str], environment: Mapping[str, str], handle: Callable[[dict[str, Any]], None]) -> str:
    """Run ``line`` and call ``handle`` on each result it prints. Return "", or the reason of a failure."""
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        line, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for output in process.stdout:
                if output.startswith(FOUND):
                    handle(json.loads(output.removeprefix(FOUND)))
                else:
                    tail.append(output)
        except BaseException:
            process.terminate()
            raise
    return "" if process.returncode == 0 else f"the ranks exited with code {process.returncode}:\n{''.join(tail)}"


def program(folder: Path, order: Mapping[str, Any]) -> list[str]:
    path = folder / "order.json"
    path.write_text(json.dumps(order))
    return [sys.executable, "-m", "benchmarks.compression.ranks", str(path)]


def losses(study: plan.Study, ranks: int, threads: bool, records: Records, folder: Path) -> dict[Training, str]:
    """Run the trainings missing in the file; return the refused trainings with the reasons."""
    launcher, refused = mpirun.find(), dict[Training, str]()
    while missing := study.next({item: ended.loss for item, ended in records.known.items()}, list(refused)):
        refused |= {item: reason for item in missing if (reason := study.refusal(item))}
        pending = deque(item for item in missing if item not in refused)
        if not pending:
            continue

        def handle(result: dict[str, Any], pending: deque[Training] = pending) -> None:
            training, ended = pending.popleft(), records_file.ended(result)
            records.add(training, ended)
            print(report.line(training, ended), file=sys.stderr, flush=True)

        order = {"what": "losses", "evaluations": EVALUATIONS, "trainings": [study.settings(item) for item in pending]}
        environment = {
            **os.environ,
            "PYTHONPATH": harness.search_path(),
            **mpirun.settings(launcher),
            **mpirun.session(launcher, folder),
        }
        line = program(folder, order | {"threads": ranks if threads else 0})
        if not threads:
            line = mpirun.command(launcher, ranks, line, mpirun.settings(launcher))
        if problem := followed(line, environment, handle):
            raise HpcdistError(f"{pending[0]}: {problem}")
    return refused


def times(study: plan.Study, chosen: argparse.Namespace, records: Records, folder: Path) -> None:
    """Time steps of every compressor between two hosts. Raises MissingCapabilityError if hosts cannot be created."""
    names, keys = [], []
    for name in study.names:
        # Contenders that differ only in their warm-up have the same steps after the warm-up.
        contender_keys = study.keys(name) | (
            {"compression.warmup_steps": 2} if "compression.warmup_steps" in study.keys(name) else {}
        )
        feedback = not study.refusal(Training(name, True, study.rates_of(name)[0]))
        training = Training(name, feedback, study.rates_of(name)[0])
        if not study.refusal(training):
            names.append(name)
            keys.append(study.settings(training) | contender_keys | {"communication.algorithm": "hierarchical"})
    order = {"what": "times", "trainings": keys, "rounds": chosen.rounds, "turn": chosen.turn, "raw_bytes": RAW_BYTES}
    launcher = mpirun.find()
    os.environ["PYTHONPATH"] = harness.search_path()  # inherited by the hosts

    def handle(result: dict[str, Any]) -> None:
        records.put_times(names, np.array(result["figures"]), result["raw_bytes_per_s"])

    with Hosts(2, chosen.link, BURST) as hosts:
        line = hosts.command(launcher, 1, program(folder, order))
        if problem := followed(line, hosts.environment(launcher), handle):
            raise HpcdistError(problem)


@dataclass(frozen=True)
class Trainings(Results):
    all: report.Found | None = None


def measure(chosen: argparse.Namespace, session: Session) -> Trainings:
    harness.at_least(chosen, ranks=2, steps=20, seeds=1, rounds=1, turn=1)
    with Hosts(2, chosen.link, BURST) if "times" in chosen.parts else nullcontext():
        pass  # fail before hours of training if hosts cannot be created
    more = (("data.path", str(Path(chosen.text).resolve())),) if chosen.text else ()
    names = tuple(name for name in CONTENDERS if name in (DENSE, *chosen.only))
    study = plan.Study(chosen.steps, tuple(sorted(chosen.rates)), chosen.seeds, names, more)
    about = {key: value for key, value in COMMON.items() if key.partition(".")[0] in ("model", "data", "run")}
    about |= {"steps": chosen.steps, "ranks": chosen.ranks, "link": chosen.link, "text": chosen.text or "library"}
    refused: dict[Training, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = chosen.output or folder / "compression.h5"
        results.check_place(path)
        with results.locked(path):
            records = Records(path, provenance(anonymous=chosen.anonymous), about)
            if "losses" in chosen.parts:
                refused = losses(study, chosen.ranks, chosen.threads, records, folder)
            if "times" in chosen.parts:
                times(study, chosen, records, folder)
        return Trainings({}, {}, about, report.Found(study, records.known, records.times(), refused))


def ratios(result: Any) -> harness.Ratios:
    """Return bytes per step after the warm-up, relative to dense gradients; these do not depend on the step count."""
    trainings = {key.contender: ended for key, ended in result.all.trainings.items() if key.feedback and key.seed == 0}
    return {
        name: np.array([ended.compressed_bytes / trainings[plan.reference(name)].compressed_bytes])
        for name, ended in trainings.items()
        if plan.reference(name) in trainings
    }


def read(path: Path) -> Trainings:
    trainings = records_file.trainings(path)
    return Trainings({}, {}, {}, report.Found(plan.Study(0, (), 0), trainings, records_file.Times({}, np.zeros(0)), {}))


def plot(result: Any, path: Path) -> None:
    report.plot(result.all, path)


def lines(result):
    return report.text(result.all).splitlines()
