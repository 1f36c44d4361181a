"""What it costs to encode and decode a tensor on one core, beside a memcpy of it in the same round.

    OMP_NUM_THREADS=1 python benchmarks/compressors.py
    OMP_NUM_THREADS=1 python benchmarks/compressors.py --mib 64 --rounds 30 -o compressors.h5 --anonymous

In each round every compressor has its turn, in an order that is drawn anew, and right before each turn the tensor is
copied: the ratio of a turn is encode + decode over the copy next to it, so that what else the machine does falls on
both. Values are normal ones, or with --tails Student's t with 2 degrees of freedom. Medians are printed, the ratio of
the fastest turns too, which a busy machine spoils less, and the payload, the seconds it takes to add one to a sum, and
the error; all times, in seconds, go to the HDF5 file.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.compression.quantise.adaptive import Adaptive
from hpcdist.compression.quantise.sign import SignSgd
from hpcdist.compression.quantise.uniform import Blockwise, Qsgd
from hpcdist.compression.sparsify.randomk import RandomK
from hpcdist.compression.sparsify.topk import TopK
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.compressors", 1
PHASES = ("memcpy", "encode", "decode", "add")
COMPRESSORS: dict[str, Compressor] = {
    "float16": Float16(),
    "bfloat16": BFloat16(),
    "int8": Blockwise(),
    "int8, by draws": Blockwise(rounding="stochastic"),
    "int4": Blockwise(bits=4),
    "qsgd, 2 bits": Qsgd(bits=2),
    "qsgd, 4 bits": Qsgd(),
    "qsgd, 8 bits": Qsgd(bits=8),
    "adaptive, 4 bits": Adaptive(),
    "sign": SignSgd(),
    "top-k 1 %": TopK(density=0.01),
    "random-k 1 %": RandomK(density=0.01),
}


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the float32 tensor in MiB (default 64)")
    parser.add_argument("--rounds", type=int, default=20, help="how often each has its turn (default 20)")
    parser.add_argument("--only", nargs="+", choices=COMPRESSORS, default=list(COMPRESSORS), help="those to measure")
    parser.add_argument("--tails", action="store_true", help="values with heavy tails")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


class Bench:
    """The buffers of one tensor of ``size`` float32, which every compressor uses."""

    def __init__(self, size: int, tails: bool) -> None:
        rng = np.random.default_rng(1)
        self.values = (rng.standard_t(2, size) if tails else rng.standard_normal(size)).astype(np.float32)
        self.copy, self.out, self.total = (np.ones(size, np.float32) for _ in range(3))

    def turn(self, compressor: Compressor, payload: np.ndarray, step: int) -> list[float]:
        """Return the seconds of a copy, and of what the compressor does."""
        key = RandomKey(1, step, 0, 0)

        def encode() -> None:
            compressor.encode(self.values, payload, key)

        copied = _seconds(lambda: np.copyto(self.copy, self.values))
        encoded = _seconds(encode)
        decoded = _seconds(lambda: compressor.decode(payload, self.out))
        return [copied, encoded, decoded, _seconds(lambda: compressor.add(payload, self.total))]

    def error(self) -> float:
        """Return |decoded - values| / |values| of the last turn."""
        return float(np.linalg.norm(self.out - self.values) / np.linalg.norm(self.values))


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(bench: Bench, names: list[str], rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds (compressors, rounds, phases), and the payload in bytes and the error of each."""
    order = np.random.default_rng(2)
    payloads = {name: np.ones(COMPRESSORS[name].payload_bytes(bench.values.size), np.uint8) for name in names}
    times, nbytes, errors = np.zeros((len(names), rounds, len(PHASES))), np.zeros(len(names), int), np.zeros(len(names))
    for step in range(-1, rounds):  # one round to compile and to touch all memory
        for place in order.permutation(len(names)):
            compressor, payload = COMPRESSORS[names[place]], payloads[names[place]]
            found = bench.turn(compressor, payload, step + 1)
            if step >= 0:
                times[place, step] = found
            nbytes[place], errors[place] = payload.size, bench.error()
    return times, nbytes, errors


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    if options.output is not None:
        files.check_place(options.output)
    size = options.mib * (1 << 20) // 4
    times, nbytes, errors = measure(Bench(size, options.tails), options.only, options.rounds)
    print(f"{size} float32, {options.rounds} rounds; medians of seconds, and of (encode + decode) / memcpy")
    heads = "".join(f"{name:>9}" for name in PHASES) + f"{'ratio':>8}{'fastest':>9}"
    print(f"{'':18}{heads}{'bytes':>11}{'smaller':>9}{'error':>10}")
    for name, own, payload_bytes, error in zip(options.only, times, nbytes, errors, strict=True):
        ratio = np.median((own[:, 1] + own[:, 2]) / own[:, 0])
        copied, encoded, decoded, _ = own.min(axis=0)
        medians = "".join(f"{value:9.5f}" for value in np.median(own, axis=0))
        ratios = f"{ratio:8.2f}{(encoded + decoded) / copied:9.2f}"
        print(f"{name:18}{medians}{ratios}{payload_bytes:11d}{4 * size / payload_bytes:9.2f}{error:10.2e}")
    if options.output is not None:
        files.write_contiguous(
            options.output,
            {"time_s": times, "payload_bytes": nbytes, "error": errors},
            {
                **provenance(anonymous=options.anonymous),
                "compressors": ";".join(options.only),
                "phases": ";".join(PHASES),
                "values": "Student's t, 2 degrees of freedom" if options.tails else "normal",
                "elements": size,
            },
            {
                "time_s": {"dims": "compressors, rounds, phases"},
                "payload_bytes": {"dims": "compressors"},
                "error": {"dims": "compressors", "long_name": "norm of what is lost over the norm of the values"},
            },
            schema=SCHEMA,
            version=VERSION,
        )


if __name__ == "__main__":
    try:
        main()
    except HpcdistError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
