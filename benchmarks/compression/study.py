"""Losses of trainings with compressed gradients, and their time between hosts with slow links.

    python -m benchmarks compression -o compression.h5 --plot compression.png --anonymous
    python -m benchmarks compression --parts losses --ranks 4 --only dense int8 "powersgd 4"
    sudo python -m benchmarks compression --parts times --link 1gbit

Losses: a byte GPT of a million parameters on the source text of the standard library, trained by --ranks ranks with
every compressor of `communication.compression`, with error feedback and without. Dense gradients, and compressors of
which something is claimed, are tried with all --rates, the others with the best rate of dense ones; the best rates of
those that count are trained with further --seeds. Told are the validation loss at the end and on the way, and the bytes
that a rank sent. What hpcdist refuses is listed with its reason.

Times: the same trainings between two hosts, which are network namespaces of this machine joined by links of --link
(root only), with one rank each; dense gradients and factors go by the algorithm that is made for it, hierarchical. All
take turns in one run; before each round raw TCP is measured on the same links. The bound of a step is what it computes,
encodes and decodes, and what raw TCP needs for its bytes; "of bound" is that over the step that was measured. A loss
against time is that of the training at the pace that was measured here.

Trainings go to the file one by one: the same command goes on where it was stopped, and prints and draws what is there.
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
BURST: Final = "8kb"  # that a link lets pass at any speed after a pause
RAW_BYTES: Final = 4 << 20
# ranks, steps, seeds: of the trainings for losses; rounds, turn: of times, and the steps of each in a round
OPTIONS: Final = {"ranks": 2, "threads": False, "steps": 500, "rates": [1e-3, 2e-3, 4e-3], "seeds": 3, "text": ""}
OPTIONS |= {"link": "100mbit", "rounds": 5, "turn": 6, "parts": ("losses", "times"), "only": tuple(CONTENDERS)}


def followed(line: Sequence[str], environment: Mapping[str, str], take: Callable[[dict[str, Any]], None]) -> str:
    """Run ``line`` and ``take`` what it tells as it comes; return "", or why it ended early."""
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        line, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for said in process.stdout:
                if said.startswith(FOUND):
                    take(json.loads(said.removeprefix(FOUND)))
                else:
                    tail.append(said)
        except BaseException:
            process.terminate()
            raise
    return "" if process.returncode == 0 else f"the ranks ended with {process.returncode}:\n{''.join(tail)}"


def program(folder: Path, order: Mapping[str, Any]) -> list[str]:
    """Return the command line of one rank, its ``order`` in ``folder``."""
    path = folder / "order.json"
    path.write_text(json.dumps(order))
    return [sys.executable, "-m", "benchmarks.compression.ranks", str(path)]


def losses(study: plan.Study, ranks: int, threads: bool, records: Records, folder: Path) -> dict[Training, str]:
    """Make the trainings that the file does not have yet; return those that are refused, with the reasons."""
    launcher, refused = mpirun.find(), dict[Training, str]()
    while missing := study.next({one: ended.loss for one, ended in records.known.items()}, list(refused)):
        refused |= {one: reason for one in missing if (reason := study.refusal(one))}
        waiting = deque(one for one in missing if one not in refused)
        if not waiting:
            continue

        def take(found: dict[str, Any], waiting: deque[Training] = waiting) -> None:
            training, ended = waiting.popleft(), records_file.ended(found)
            records.add(training, ended)
            print(report.line(training, ended), file=sys.stderr, flush=True)

        order = {"what": "losses", "evaluations": EVALUATIONS, "trainings": [study.settings(one) for one in waiting]}
        environment = {
            **os.environ,
            "PYTHONPATH": harness.search_path(),
            **mpirun.settings(launcher),
            **mpirun.session(launcher, folder),
        }
        line = program(folder, order | {"threads": ranks if threads else 0})
        if not threads:
            line = mpirun.command(launcher, ranks, line, mpirun.settings(launcher))
        if why := followed(line, environment, take):
            raise HpcdistError(f"{waiting[0]}: {why}")
    return refused


def times(study: plan.Study, chosen: argparse.Namespace, records: Records, folder: Path) -> None:
    """Time steps of every compressor between two hosts. Raises MissingCapabilityError where none can be made."""
    names, keys = [], []
    for name in study.names:
        # Those that differ in a warm-up only have the same steps after it.
        own = study.keys(name) | (
            {"compression.warmup_steps": 2} if "compression.warmup_steps" in study.keys(name) else {}
        )
        feedback = not study.refusal(Training(name, True, study.rates_of(name)[0]))
        training = Training(name, feedback, study.rates_of(name)[0])
        if not study.refusal(training):
            names.append(name)
            keys.append(study.settings(training) | own | {"communication.algorithm": "hierarchical"})
    order = {"what": "times", "trainings": keys, "rounds": chosen.rounds, "turn": chosen.turn, "raw_bytes": RAW_BYTES}
    launcher = mpirun.find()
    os.environ["PYTHONPATH"] = harness.search_path()  # the hosts take it from there

    def take(found: dict[str, Any]) -> None:
        records.put_times(names, np.array(found["figures"]), found["raw_bytes_per_s"])

    with Hosts(2, chosen.link, BURST) as made:
        line = made.command(launcher, 1, program(folder, order))
        if why := followed(line, made.environment(launcher), take):
            raise HpcdistError(why)


@dataclass(frozen=True)
class Trainings(Results):
    """Everything that the file has."""

    all: report.Found | None = None


def measure(chosen: argparse.Namespace, session: Session) -> Trainings:
    """Make what the file does not have yet, and return all that it has."""
    harness.at_least(chosen, ranks=2, steps=20, seeds=1, rounds=1, turn=1)
    with Hosts(2, chosen.link, BURST) if "times" in chosen.parts else nullcontext():
        pass  # before hours of training: whether there can be any
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


def ratios(found: Any) -> harness.Ratios:
    """Return the bytes of a step behind its warm-up over those of dense gradients: they do not depend on its length."""
    trainings = {key.contender: each for key, each in found.all.trainings.items() if key.feedback and key.seed == 0}
    return {
        name: np.array([each.compressed_bytes / trainings[plan.reference(name)].compressed_bytes])
        for name, each in trainings.items()
        if plan.reference(name) in trainings
    }


def read(path: Path) -> Trainings:
    """Return the trainings of a file."""
    known = records_file.trainings(path)
    return Trainings({}, {}, {}, report.Found(plan.Study(0, (), 0), known, records_file.Times({}, np.zeros(0)), {}))


def plot(found: Any, path: Path) -> None:
    report.plot(found.all, path)


def lines(found):
    return report.text(found.all).splitlines()
