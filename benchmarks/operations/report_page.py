"""Seconds and bytes of the page of a large run: a million steps on a thousand ranks, by default.

    python -m benchmarks report_page
    python -m benchmarks report_page --steps 100000 --ranks 64 --keep page.html

The rows are made up: a loss that falls, ranks that differ, resumes, steps that stall. Every chunk of the file is
written, compressed so that it fits on a disk; a real file has the same chunks as they are. The page is written once in
a process of its own, as ``hpcdist report --html`` does it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import h5py
import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.start import Session
from hpcdist.energy.monitor import tables as monitor_tables
from hpcdist.hdf5 import datasets
from hpcdist.reporting.units import format_bytes
from hpcdist.telemetry.metrics import observations, step_metrics

SCHEMA = "hpcdist-benchmark-report-page"

POOL = 16  # different chunks of a column
RESUMES = 6
S = 10**9
OPTIONS: Final = {"steps": 1_000_000, "ranks": 1000, "samples": 5_000_000}  # samples: rows of energy samples


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="where the run is made up (default: a temporary directory)")
    parser.add_argument("--keep", type=Path, help="keep the page here")


def narrow(steps: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the columns of one number a step."""
    number = np.arange(1, steps + 1)
    loss = 2.0 + 9.0 / (1 + number / 300) ** 0.45 + rng.normal(0, 0.03, steps)
    loss[rng.integers(0, steps, 20)] += 3.0
    return {
        "step": number,
        "session": number * (RESUMES + 1) // (steps + 1),
        "world": np.zeros(steps, np.int64),
        "loss": loss,
        "learning_rate": 3e-4 * np.minimum(number / 2000, 0.5 + 0.5 * np.cos(np.pi * number / steps)),
        "tokens": np.full(steps, 4_194_304),
    }


def fill(file: h5py.File, name: str, steps: int, ranks: int, rng: np.random.Generator) -> None:
    """Make a column of all ranks anew, with the chunks that it had, and write each of them."""
    group = file["steps"]
    old = group[name]
    chunks, attributes = old.chunks, dict(old.attrs)
    del group[name]
    column = group.create_dataset(
        name, (steps, ranks), "f8", chunks=chunks, maxshape=(None, None), compression="gzip", shuffle=True
    )
    column.attrs.update({key: attributes[key] for key in ("units", "long_name")})
    slow = 1.0 + 0.3 * (np.arange(ranks) == ranks // 3)
    base = {"step_s": 2.2, "compute_s": 1.5, "communication_s": 0.5, "update_s": 0.1, "sent_bytes": 3.2e9}[name]
    with tempfile.TemporaryDirectory() as folder, h5py.File(Path(folder) / "pool.h5", "w") as pool:
        made = pool.create_dataset(
            "made", (chunks[0] * POOL, ranks), "f8", chunks=chunks, compression="gzip", shuffle=True
        )
        made[...] = base * slow * (1 + 0.01 * rng.integers(0, 8, made.shape))
        raw = [made.id.read_direct_chunk((row * chunks[0], 0))[1] for row in range(POOL)]
    for number, row in enumerate(range(0, steps, chunks[0])):
        column.id.write_direct_chunk((row, 0), raw[number * 7 % POOL])


def events(steps: int) -> list[SimpleNamespace]:
    """Return what the stream of a month would say, once in five minutes."""
    stream = []
    parts = {"parameters": 8e9, "gradients": 4e9, "optimizer": 1.6e10, "activations": 3e10, "communication": 1e9}
    for number in range(8000):
        values: dict[str, Any] = {
            f"memory_bytes[{name}]": each * (1 + 0.01 * (number % 7)) for name, each in parts.items()
        }
        at = {"step": number * steps // 8000, "time_ns": number * 300 * S}
        stream.append(SimpleNamespace(kind="memory", values=values, **at))
        if number % 400 == 0:
            stream.append(SimpleNamespace(kind="anomaly", values={"text": "loss 9.1, far above the median"}, **at))
    return stream


def energy(file: h5py.File, rows: int, rng: np.random.Generator) -> None:
    """Put samples of 16 nodes with 4 GPUs each into the file, in the order in which nodes bring them."""
    for name in ("sources", "samples"):
        monitor_tables.TABLES[name].create(file)
    numbers = np.arange(64)
    where = {"session": np.zeros(64, np.int64), "node": numbers // 4, "source": numbers % 4}
    about = {"kind": np.full(64, b"gpu", "S8"), "name": np.array([f"GPU-{n}" for n in range(64)], "S96")}
    datasets.extend(file, f"{monitor_tables.GROUP}/sources", {**where, **about})
    each = rows // 64
    times = np.repeat(np.arange(each) * (30 * 86400 * S // each), 64)
    watts = 500 + 50 * rng.random(64 * each)
    samples = {name: np.tile(values, each) for name, values in where.items()}
    samples |= {"t_mono_ns": times, "energy_mj": (watts * times / 1e6).astype(np.int64)}
    datasets.extend(file, f"{monitor_tables.GROUP}/samples", samples)


def make(folder: Path, options: argparse.Namespace) -> None:
    """Write the run directory."""
    rng = np.random.default_rng(0)
    path = folder / "metrics.h5"
    with step_metrics.MetricsWriter(path, options.ranks, attributes={"unigram_nats": 7.1, "bigram_nats": 4.9}):
        pass
    columns = narrow(options.steps, rng)
    columns["world"][:] = options.ranks
    with h5py.File(path, "r+") as file:
        for name, values in columns.items():
            file["steps"][name].resize((options.steps,))
            file["steps"][name][...] = values
        for name in step_metrics.PER_RANK:
            fill(file, name, options.steps, options.ranks, rng)
        datasets.extend(
            file, "evaluations", {"step": columns["step"][::500], "val_loss": columns["loss"][::500] + 0.05}
        )
        observations.append(file, RESUMES, events(options.steps))
        energy(file, options.samples, rng)
    (folder / "recipe.toml").write_text("[run]\nsteps = 1000000\n")
    starts = [1e9 + number * 4e5 for number in range(RESUMES + 1)]
    began = [{"began": start, "seen": start + 3.9e5, "end": "stopped", "deaths": 0} for start in starts]
    (folder / "starts.json").write_text(json.dumps(began))
    (folder / "recorder").mkdir()
    for rank in range(options.ranks):
        spans = Spans(folder / f"recorder/rank-{rank:05d}.spans", rank, options.ranks, 512)
        for number in range(2):
            at = number * 2200 * 10**6
            for part in range(100):
                spans.add("compute", "FORWARD", number, at + part * 10**7, at + part * 10**7 + 8 * 10**6, part)
            spans.add("communication", "REDUCE", number, at + 10**9, at + 2 * 10**9)
            spans.add("step", "step", number, at, at + 2100 * 10**6)
        spans.close()


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Make a run up, write its page, and return what that took."""
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        folder = Path(place) / "month"
        folder.mkdir()
        made_s = harness.seconds(lambda: make(folder, chosen))
        rows_bytes = 8 * chosen.steps * chosen.ranks * len(step_metrics.PER_RANK)
        print(f"made up in {made_s:.0f} s: {rows_bytes / 1e9:.1f} GB of rows", flush=True)
        page = chosen.keep.resolve() if chosen.keep else Path(place) / "page.html"
        line = [sys.executable, "-P", "-m", "hpcdist", "report", str(folder), "--html", str(page)]
        environment = {**os.environ, "PYTHONPATH": harness.search_path()}
        page_s = harness.seconds(lambda: subprocess.run(line, env=environment, check=True, timeout=600))
        arrays = {"page_s": np.array([page_s]), "page_bytes": np.array([page.stat().st_size])}
    about = {name: getattr(chosen, name) for name in ("steps", "ranks", "samples")}
    return Results(arrays, dict.fromkeys(arrays, "pages"), about)


def lines(results: Results) -> Sequence[str]:
    """Return the line that is spans."""
    about, size = results.attributes, format_bytes(int(results.arrays["page_bytes"][0]))
    return [f"{about['steps']:,} steps on {about['ranks']:,} ranks: {results.arrays['page_s'][0]:.1f} s, {size}"]
