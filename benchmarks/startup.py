"""How long commands of a login node take, from the shell's point of view, beside a Python that does nothing.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 20 --output startup.h5 --anonymous

The commands take turns, in random orders; a first call of each fills the page cache and is not counted. Medians are
printed, with quartiles and with the ratio to the empty Python; all times go to the HDF5 file.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.telemetry.provenance import provenance

EMPTY = "python -c pass"
SUBMIT = ("submit", "--nodes", "2", "--ranks-per-node", "4", "--dry-run")
COMMANDS = {
    "hpcdist --help": ("--help",),
    "hpcdist submit --dry-run": SUBMIT,
    "hpcdist submit --site cray --dry-run": (*SUBMIT, "--site", "cray", "--account", "a"),
    "hpcdist submit --chain 10 --dry-run": (*SUBMIT, "--chain", "10"),
    "hpcdist site list": ("site", "list"),
    "hpcdist jobs status": ("jobs", "status"),
}


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="calls of each command (default 15)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def seconds(line: list[str], folder: str) -> float:
    """Return how long ``line`` takes. Raises CalledProcessError where it fails."""
    began = time.perf_counter()
    subprocess.run(line, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, and write."""
    options = arguments()
    lines = {EMPTY: [sys.executable, "-P", "-c", "pass"]}
    lines |= {name: [sys.executable, "-P", "-m", "hpcdist", *words] for name, words in COMMANDS.items()}
    times = np.zeros((len(lines), options.rounds))
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for line in lines.values():
            seconds(line, folder)
        for number in range(options.rounds):
            for index in rng.permutation(len(lines)):
                times[index, number] = seconds(list(lines.values())[index], folder)
    empty = np.median(times[0])
    print(f"{'command':40} {'median':>8} {'quartiles':>15} {'over empty':>11}")
    for name, row in zip(lines, times, strict=True):
        low, middle, high = np.percentile(row, [25, 50, 75])
        print(f"{name:40} {middle:6.3f} s {low:6.3f} - {high:.3f} s {middle / empty:10.1f}x")
    if options.output is not None:
        files.write_contiguous(
            options.output,
            {"time_s": times},
            {**provenance(anonymous=options.anonymous), "commands": "; ".join(lines)},
            {"time_s": {"dims": "commands, rounds", "units": "s"}},
            schema="hpcdist-benchmark-startup",
            version=1,
        )


if __name__ == "__main__":
    main()
