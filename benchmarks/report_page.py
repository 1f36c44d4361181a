"""How long the page of a large run takes, and how large it is: a million steps on a thousand ranks, by default.

    python benchmarks/report_page.py
    python benchmarks/report_page.py --steps 100000 --ranks 64 --keep page.html

The rows are made up: a loss that falls, ranks that differ, resumes, steps that stall. Every chunk of the file is
written, compressed so that it fits on a disk; a real file has the same chunks as they are. The page is written once in
a process of its own, as ``hpcdist report --html`` does it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np

from hpcdist.comm.record.spans import Spans
from hpcdist.energy.monitor import tables as monitor_tables
from hpcdist.hdf5 import datasets
from hpcdist.reporting.units import format_bytes
from hpcdist.telemetry.metrics import observations, step_metrics

POOL = 16  # different chunks of a column
RESUMES = 6
S = 10**9


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=5_000_000, help="rows of energy samples (default 5 million)")
    parser.add_argument("--folder", type=Path, help="where the run is made up (default: a temporary directory)")
    parser.add_argument("--keep", type=Path, help="keep the page here")
    return parser.parse_args()


def narrow(steps: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the columns of one number a step."""
    number = np.arange(1, steps + 1)
    loss = 2.0 + 9.0 / (1 + number / 300) ** 0.45 + rng.normal(0, 0.03, steps)
    loss[rng.integers(0, steps, 20)] += 3.0
    return {
        "step": number,
        "session": np.sort(rng.integers(0, RESUMES + 1, steps))
        if steps < 100
        else number * (RESUMES + 1) // (steps + 1),
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
    found = []
    parts = {"parameters": 8e9, "gradients": 4e9, "optimizer": 1.6e10, "activations": 3e10, "communication": 1e9}
    for number in range(8000):
        step, moment = number * steps // 8000, number * 300 * S
        values = {f"memory_bytes[{name}]": value * (1 + 0.01 * (number % 7)) for name, value in parts.items()}
        found.append(SimpleNamespace(kind="memory", step=step, time_ns=moment, values=values))
        if number % 400 == 0:
            said = {"text": f"step {step}: loss 9.1, far above the median"}
            found.append(SimpleNamespace(kind="anomaly", step=step, time_ns=moment, values=said))
    return found


def energy(file: h5py.File, rows: int, rng: np.random.Generator) -> None:
    """Put samples of 16 nodes with 4 GPUs each into the file, in the order in which nodes bring them."""
    for name in ("sources", "samples"):
        monitor_tables.TABLES[name].create(file)
    nodes, gpus = 16, 4
    where = {
        "session": np.zeros(64, np.int64),
        "node": np.repeat(np.arange(nodes), gpus),
        "source": np.tile(np.arange(gpus), nodes),
    }
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
    columns = narrow(options.steps, rng) | {}
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
    began = [
        {"began": 1e9 + n * 4e5, "seen": 1e9 + n * 4e5 + 3.9e5, "end": "stopped", "deaths": 0}
        for n in range(RESUMES + 1)
    ]
    (folder / "starts.json").write_text(json.dumps(began))
    (folder / "recorder").mkdir()
    for rank in range(options.ranks):
        told = Spans(folder / f"recorder/rank-{rank:05d}.spans", rank, options.ranks, 512)
        for number in range(2):
            at = number * 2200 * 10**6
            for part in range(100):
                told.add("compute", "FORWARD", number, at + part * 10**7, at + part * 10**7 + 8 * 10**6, part)
            told.add("communication", "REDUCE", number, at + 10**9, at + 2 * 10**9)
            told.add("step", "step", number, at, at + 2100 * 10**6)
        told.close()


def main() -> None:
    """Make a run up, write its page, print what that took."""
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place) / "month"
        folder.mkdir()
        began = time.perf_counter()
        make(folder, options)
        rows = 8 * options.steps * options.ranks * len(step_metrics.PER_RANK)
        print(f"made up in {time.perf_counter() - began:.0f} s: {rows / 1e9:.1f} GB of rows", flush=True)
        page = options.keep.resolve() if options.keep else Path(place) / "page.html"
        line = [sys.executable, "-P", "-m", "hpcdist", "report", str(folder), "--html", str(page)]
        began = time.perf_counter()
        subprocess.run(line, check=True, timeout=600)
        took = time.perf_counter() - began
        print(f"{options.steps:,} steps on {options.ranks:,} ranks: {took:.1f} s, {format_bytes(page.stat().st_size)}")


if __name__ == "__main__":
    main()
