"""Cost of encoding and decoding a tensor on one core, compared with a memcpy of the tensor in the same round.

    python -m benchmarks compressors --mib 64 --rounds 30 -o compressors.h5 --anonymous

The tensor is copied right before each turn of a compressor: "x memcpy" is encode + decode relative to that copy. Values
are normal, or with --tails Student's t with 2 degrees of freedom. The table also has the ratio of the fastest turns
(less sensitive to a busy machine), the payload, the time to add a payload to a sum, and the error. A step of DGC,
PowerSGD of rank 4 and 1-bit Adam is timed as a whole; for 1-bit Adam one rank owns the whole momentum.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.compression import coo
from hpcdist.compression.adaptive import Adaptive
from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.compression.dgc import DeepGradientCompression
from hpcdist.compression.onebit_adam import AdamMoments, OneBitAdam
from hpcdist.compression.powersgd import PowerSgd
from hpcdist.compression.randomk import RandomK
from hpcdist.compression.sign import SignSgd
from hpcdist.compression.topk import TopK
from hpcdist.compression.uniform import Blockwise, Qsgd
from hpcdist.reporting.table import aligned

SCHEMA, COMMITTED = "hpcdist.benchmark.compressors", "compression/2026-11-22-compressors.h5"
SMALL = {"rounds": 5, "only": ["float16", "int8", "qsgd, 4 bits", "adaptive, 4 bits", "sign", "top-k 1 %"]}

PHASES: Final = ("memcpy", "encode", "decode", "add")
COMPRESSORS: Final[dict[str, Compressor]] = {
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
EXCHANGES: Final = ("DGC, accumulate", "DGC, encode", "PowerSGD, both rounds", "1-bit Adam, both sides")
OPTIONS: Final = {"mib": 64, "rounds": 20, "tails": False, "only": (*COMPRESSORS, *EXCHANGES)}


def exchanges(values: np.ndarray, out: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return functions for one rank's work in a step of DGC, PowerSGD and 1-bit Adam, by name in `EXCHANGES`."""
    n, density, rank, key = values.size, 0.01, 4, RandomKey(1, 2, 0, 3)
    dgc, sent = DeepGradientCompression(n, momentum=0.9), np.empty(coo.ENTRY_BYTES * coo.count_of(n, density), np.uint8)
    rows = 1 << (n.bit_length() // 2)
    matrix = values[: rows * (n // rows)]
    low_rank = PowerSgd((rows, matrix.size // rows), rank, seed=0, tensor=0)
    p, q = np.empty(low_rank.rows * rank, np.float32), np.empty(low_rank.columns * rank, np.float32)
    adam = OneBitAdam(n, 0, 1, AdamMoments())
    adam.warm(values.copy())
    adam.freeze()
    signs = np.empty(adam.compressor.payload_bytes(n), np.uint8)

    def gradient_to_factors() -> None:
        low_rank.project(matrix, p)
        low_rank.orthogonalise(p)
        low_rank.project_back(matrix, p, q)
        low_rank.reconstruct(p, q, out[: matrix.size])

    def signs_of_momentum() -> None:
        adam.accumulate(values)
        adam.encode_worker(0, signs, key)
        adam.add_worker(signs)
        adam.encode_server(signs, key)
        adam.receive(0, signs)
        adam.direction(out)

    calls = (lambda: dgc.accumulate(values), lambda: dgc.encode(sent), gradient_to_factors, signs_of_momentum)
    return dict(zip(EXCHANGES, calls, strict=True))


class Tensor:
    """Buffers of a tensor of ``size`` float32, shared by all compressors."""

    def __init__(self, size: int, tails: bool) -> None:
        rng = np.random.default_rng(1)
        self.values = (rng.standard_t(2, size) if tails else rng.standard_normal(size)).astype(np.float32)
        self.copy, self.out, self.total = (np.ones(size, np.float32) for _ in range(3))
        self.payloads = {name: np.ones(codec.payload_bytes(size), np.uint8) for name, codec in COMPRESSORS.items()}
        self.step, self.exchanges = 0, exchanges(self.values, self.out)

    def turn(self, name: str) -> tuple[list[float], int, float]:
        """Return the seconds of the phases, the payload bytes, and the error |decoded - values| / |values|."""
        copied = harness.seconds(lambda: np.copyto(self.copy, self.values))
        if name in self.exchanges:
            return [copied, harness.seconds(self.exchanges[name]), 0.0, 0.0], 0, np.nan
        compressor, payload = COMPRESSORS[name], self.payloads[name]
        self.step += 1
        key = RandomKey(1, self.step, 0, 0)
        encoded = harness.seconds(lambda: compressor.encode(self.values, payload, key))
        decoded = harness.seconds(lambda: compressor.decode(payload, self.out))
        added = harness.seconds(lambda: compressor.add(payload, self.total))
        error = float(np.linalg.norm(self.out - self.values) / np.linalg.norm(self.values))
        return [copied, encoded, decoded, added], payload.size, error


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    size = chosen.mib * (1 << 20) // 4
    tensor = Tensor(size, chosen.tails)
    turns = harness.alternate({name: lambda name=name: tensor.turn(name) for name in chosen.only}, chosen.rounds)
    last = [values[-1] for values in turns.values()]
    arrays = {
        "time_s": np.array([[times for times, _, _ in values] for values in turns.values()]),
        "payload_bytes": np.array([nbytes for _, nbytes, _ in last]),
        "error": np.array([error for _, _, error in last]),
    }
    dims = {"time_s": "compressors, rounds, phases", "payload_bytes": "compressors", "error": "compressors"}
    values = "Student's t, 2 degrees of freedom" if chosen.tails else "normal"
    about = {"compressors": ";".join(turns), "phases": ";".join(PHASES), "values": values, "elements": size}
    return Results(arrays, dims, about)


def ratios(results: Results) -> harness.Ratios:
    times = results.arrays["time_s"]
    return dict(zip(results.names("compressors"), times[:, :, 1:3].sum(axis=2) / times[:, :, 0], strict=True))


def lines(results: Results) -> Sequence[str]:
    rows = [["", *(f"{name} ms" for name in PHASES), "x memcpy", "interval", "fastest", "bytes", "smaller", "error"]]
    size, arrays = results.attributes["elements"], results.arrays
    for index, (name, samples) in enumerate(ratios(results).items()):
        times, nbytes = arrays["time_s"][index], arrays["payload_bytes"][index]
        ratio, low, high = harness.interval(samples)
        least = times.min(axis=0)
        cells = [f"{1e3 * value:.2f}" for value in np.median(times, axis=0)]
        cells += [f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{(least[1] + least[2]) / least[0]:.2f}"]
        smaller = f"{4 * size / nbytes:.2f}" if nbytes else "-"
        rows.append([name, *cells, f"{nbytes}", smaller, f"{arrays['error'][index]:.2e}"])
    return [f"{size} float32", *aligned(rows)]
