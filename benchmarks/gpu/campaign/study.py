"""Half an hour on one GPU: all GPU studies and tests in stages with time limits, the most important first.

    python -m benchmarks gpu.campaign
    python -m benchmarks gpu.campaign --stages device step --minutes 9
    python3 benchmarks/gpu/campaign/environment.py run wheels .gpu --minutes 28      # on a machine without a network

A stage runs a few commands, each as a process with the rest of the stage's time limit (see `stages.py`). Results go to
--results: DATE-GPU-STAGE.h5 with each study's file and all printed output, and a .txt file with a one-line summary.
Both are rewritten after each command, so an interrupted campaign keeps its results. A new start with the same --date
skips complete stages, and runs stages that never started before incomplete ones, without their completed commands.
--again repeats everything. A failed stage is recorded with its error.

The time limits add up to 28 minutes, which leaves 2 of 30 minutes for the environment.

--small uses sizes that take seconds on a processor, to test the campaign itself; all full-size commands are parsed
first. Exit code 69 without a GPU, 1 if a stage is incomplete.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.campaign.stages import OUTPUT, STAGES, Command, Stage, check, headline
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from hpcdist.collectives import nccl
from hpcdist.comm.start import Session
from hpcdist.hdf5 import files
from hpcdist.reporting import atomic
from hpcdist.telemetry.provenance import provenance

SCHEMA, ON, WRITES_ITSELF = "hpcdist.benchmark.gpu_campaign", "gpu", True
NO_CHECK = "its stages are studies with their own checks"

GRACE_S: Final = 10.0  # time to exit after SIGTERM
COMPLETE: Final = "complete"
KEPT_BYTES: Final = 1 << 20  # kept output per command, from its end
OPTIONS: Final = {"stages": tuple(STAGES), "minutes": 30.0, "date": "", "again": False, "small": False}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "gpu", help="folder (default %(default)s)")


def begun(words: Sequence[str], limit_s: float, log: Path) -> tuple[str, float]:
    """Run Python with ``words``, write the output to ``log``, and return the error ("" for success) and seconds."""
    environment = os.environ | {"PYTHONPATH": harness.search_path(), "PYTHONUNBUFFERED": "1"}
    environment |= {nccl.SEVERAL_RANKS_VARIABLE: "1"}  # ranks share the GPU if this NCCL supports it
    with log.open("wb") as stream:
        start = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=harness.ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
            ended = "" if not code else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {limit_s:.0f} s"
        finally:  # also if this process is terminated
            _end(child)
    return ended, time.monotonic() - start


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Terminate the process group of ``child``. SIGTERM comes first, so that an mpirun can end its ranks."""
    for number, limit_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if child.poll() is not None and number == signal.SIGTERM:
            return
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(limit_s)
            return
        except subprocess.TimeoutExpired:
            continue


class Record:
    """Results of a stage so far: an HDF5 file and a summary line. Both are replaced atomically."""

    def __init__(self, place: Path, name: str, origin: Mapping[str, Any]) -> None:
        self.place, self.name, self._origin = place, name, origin
        self.arrays: dict[str, np.ndarray] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.commands: dict[str, dict[str, Any]] = {}  # status, seconds, headline, in their order

    @property
    def file(self) -> Path:
        return self.place.with_name(self.place.name + ".h5")

    def load(self) -> str:
        """Load the file and return the status of the stage, or "" without a file."""
        if not self.file.exists():
            return ""
        with files.open_read(self.file, SCHEMA, 1) as file:
            self.commands = json.loads(str(file.attrs["commands"]))
            status = str(file.attrs["status"])
            for command in self.commands:
                for name in file.get(command, ()):
                    if files.is_dataset(file[command][name]):
                        self.arrays[f"{command}/{name}"] = file[command][name][...]
                        self.about[f"{command}/{name}"] = dict(file[command][name].attrs)
        return status

    def add(self, command: Command, ended: str, seconds: float, log: bytes, result: Path) -> None:
        self.arrays = {name: array for name, array in self.arrays.items() if not name.startswith(f"{command.name}/")}
        # NUL characters and invalid text would make the file unreadable to some tools.
        printed = log[-KEPT_BYTES:].replace(b"\0", b"") or b"\n"
        self.arrays[f"{command.name}/printed"] = np.frombuffer(printed, np.uint8)
        output = ""
        if result.exists():
            output = self._take(command, result)
        last = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
        output = output or (last[-1].strip() if last else "printed nothing")
        self.commands[command.name] = {"status": ended or COMPLETE, "seconds": seconds, "headline": output[:300]}

    def _take(self, command: Command, result: Path) -> str:
        if result.suffix != ".h5":
            self.arrays[f"{command.name}/file"] = np.frombuffer(result.read_bytes() or b"\n", np.uint8)
            return headline(command, result, None)
        with files.open_read(result) as file:
            attributes = files.attributes_of(file)
            arrays = {name: dataset[...] for name, dataset in file.items() if files.is_dataset(dataset)}
            for name, array in arrays.items():
                self.arrays[f"{command.name}/{name}"] = array
                self.about[f"{command.name}/{name}"] = {"dims": str(file[name].attrs.get("dims", ""))}
            lists = {name: file.attrs[name].tolist() for name in file.attrs if isinstance(file.attrs[name], np.ndarray)}
        text = json.dumps(attributes | lists).encode()
        self.arrays[f"{command.name}/attributes"] = np.frombuffer(text, np.uint8)
        return headline(command, result, Results(arrays, {}, attributes | lists))

    def write(self, status: str) -> str:
        parts = [
            f"{name}: {item['headline'] if item['status'] == COMPLETE else item['status'] + ', ' + item['headline']}"
            for name, item in self.commands.items()
        ]
        seconds = sum(item["seconds"] for item in self.commands.values())
        line = f"{self.name}: {status}, {seconds:.0f} s; {'; '.join(parts) or 'nothing was begun'}"
        attributes = {**self._origin, "stage": self.name, "status": status, "line": line}
        attributes["commands"] = json.dumps(self.commands)
        about = {
            name: {key: value for key, value in item.items() if key == "dims"} for name, item in self.about.items()
        }
        about = {name: item for name, item in about.items() if name in self.arrays}
        new = self.file.with_name(self.file.name + ".new")
        new.unlink(missing_ok=True)
        files.write_contiguous(new, self.arrays, attributes, about, schema=SCHEMA, version=1)
        os.replace(new, self.file)
        atomic.save(self.place.with_name(self.place.name + ".txt"), line + "\n")
        return line


def carry_out(stage: Stage, record: Record, small: bool, limit_s: float) -> str:
    deadline = time.monotonic() + limit_s
    status = COMPLETE
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        done = {name for name, entry in record.commands.items() if entry["status"] == COMPLETE}
        done -= {command.after for command in stage.commands(small) if command.name not in done}
        for command in stage.commands(small):
            if command.name in done:
                continue
            left_s = deadline - time.monotonic()
            result, log = Path(folder) / f"{command.name}{command.suffix}", Path(folder) / f"{command.name}.log"
            if left_s <= 0:
                ended = "not begun: the time of the stage is over"
                record.commands.setdefault(command.name, {"status": ended, "seconds": 0.0, "headline": ""})
                status = f"{command.name} {ended}"
                continue
            line = [word.replace(OUTPUT, str(result)).replace("FOLDER", folder) for word in command.line]
            ended, seconds = begun(line, left_s, log)
            if ended:
                status = f"failed in {command.name}, {ended}"
            try:
                record.add(command, ended, seconds, log.read_bytes(), result)
            except Exception as error:  # noqa: BLE001 - an unreadable result is a failure of the command
                status = f"failed in {command.name}, {type(error).__name__}: {error}"
                record.commands[command.name] = {"status": status, "seconds": seconds, "headline": ""}
            record.write(f"under way: {command.name} is done")
    return record.write(status)


def in_order(records: Mapping[str, Record], again: bool) -> Iterator[str]:
    states = {name: "" if again else record.load() for name, record in records.items()}
    for name, status in states.items():
        if status == COMPLETE:
            print(f"{name}: there already, {records[name].file.name}", flush=True)
    yield from (name for name, status in states.items() if not status)
    yield from (name for name, status in states.items() if status not in ("", COMPLETE))


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    harness.at_least(chosen, minutes=0)
    if chosen.small:
        for command in (command for name in chosen.stages for command in STAGES[name].full):
            check(command)
    chosen.results.mkdir(parents=True, exist_ok=True)
    about = card()
    slug = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    date = chosen.date or datetime.now(UTC).date().isoformat()
    origin = provenance(mpi_library="none", hosts=[], anonymous=True) | about | {"small": chosen.small}
    records = {name: Record(chosen.results / f"{date}-{slug}-{name}", name, origin) for name in chosen.stages}
    deadline, lines = time.monotonic() + 60 * chosen.minutes, []
    for name in in_order(records, chosen.again):
        limit_s = min(STAGES[name].limit_s, deadline - time.monotonic())
        if limit_s <= 0:
            lines.append(f"{name}: not begun, the {chosen.minutes:g} minutes are over")
        else:
            lines.append(carry_out(STAGES[name], records[name], chosen.small, limit_s))
        print(lines[-1], flush=True)
    states = [next(iter(record.commands.values()), {}).get("seconds", 0.0) for record in records.values()]
    missed = [line.partition(";")[0] for line in lines if not re.match(rf"\S+: {COMPLETE},", line)]
    return Results({"seconds": np.array(states)}, {}, {"stages": ";".join(records), "missed": json.dumps(missed)})


def lines(results: Results) -> Sequence[str]:
    return [f"{len(results.arrays['seconds'])} stages"]


def failures(results: Results) -> Sequence[str]:
    return list(json.loads(str(results.attributes["missed"])))
