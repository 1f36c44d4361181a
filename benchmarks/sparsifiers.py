"""What sparse, low-rank and 1-bit compression cost on one core, in units of a memcpy of the same bytes.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/sparsifiers.py
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/sparsifiers.py --mebibytes 256 --density 0.001 --json costs.jsonl

In each round everything has one turn, between two memcpys of the gradient; a cost is the time over the mean of these
two, and its median over the rounds is printed with the quartiles. Top-k is measured on several gradients, since its
path depends on them: normal, heavy-tailed (fifth powers), rounded to few levels (ties), and nearly all zero. What it
selects is compared with a full sort in the same run. A 1-bit step is that of one rank with all of the momentum as its
own chunk: more than its share among many. benchmarks/compressors.py measures all compressors on one gradient.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.compression.powersgd import PowerSgd
from hpcdist.compression.quantise.onebit_adam import AdamMoments, OneBitAdam
from hpcdist.compression.sparsify import coo
from hpcdist.compression.sparsify.dgc import DeepGradientCompression
from hpcdist.compression.sparsify.topk import TopK

KEY = RandomKey(1, 2, 0, 3)
Calls = dict[str, Callable[[], object]]


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the gradient (default 64)")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements that is sent (default 0.01)")
    parser.add_argument("--rank", type=int, default=4, help="rank of PowerSGD (default 4)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--json", type=Path, help="file to append one line of JSON for each cost to")
    return parser.parse_args()


def gradients(n: int) -> dict[str, np.ndarray]:
    """Return gradients of each kind by name."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(n, np.float32)
    return {
        "normal": normal,
        "heavy-tailed": normal**5,
        "few levels": np.round(normal * 8) / 8,
        "nearly all zero": np.where(rng.random(n, np.float32) < 0.005, normal, np.float32(0)),
    }


def both_ways(name: str, compressor: Compressor, values: np.ndarray, out: np.ndarray) -> Calls:
    """Return what encodes and what decodes ``values``."""
    payload = np.empty(compressor.payload_bytes(values.size), np.uint8)
    return {
        f"{name}, encode": lambda: compressor.encode(values, payload, KEY),
        f"{name}, decode": lambda: compressor.decode(payload, out),
    }


def exchanges(values: np.ndarray, out: np.ndarray, density: float, rank: int) -> Calls:
    """Return the local work of a step of DGC, PowerSGD and 1-bit Adam on ``values``."""
    n = values.size
    dgc, sent = DeepGradientCompression(n, momentum=0.9), np.empty(coo.ENTRY_BYTES * coo.count_of(n, density), np.uint8)
    rows = 1 << (n.bit_length() // 2)
    matrix = values[: rows * (n // rows)]
    low = PowerSgd((rows, matrix.size // rows), rank, seed=0, tensor=0)
    p, q = np.empty(low.rows * rank, np.float32), np.empty(low.columns * rank, np.float32)
    adam = OneBitAdam(n, 0, 1, AdamMoments())
    adam.warm(values.copy())
    adam.freeze()
    signs = np.empty(adam.own_places[0].size, np.uint8)

    def gradient_to_factors() -> None:
        low.project(matrix, p)
        low.orthogonalise(p)
        low.project_back(matrix, p, q)
        low.reconstruct(p, q, out[: matrix.size])

    def signs_of_momentum() -> None:
        adam.accumulate(values)
        adam.encode_worker(0, signs, KEY)
        adam.add_worker(signs)
        adam.encode_server(signs, KEY)
        adam.receive(0, signs)
        adam.direction(out)

    return {
        "DGC, accumulate": lambda: dgc.accumulate(values),
        "DGC, encode": lambda: dgc.encode(sent),
        f"PowerSGD, rank {rank}, both rounds": gradient_to_factors,
        "1-bit Adam, both sides": signs_of_momentum,
    }


def check(values: np.ndarray, density: float) -> None:
    """Leave with an error unless top-k is what a stable sort puts first."""
    compressor = TopK(density=density)
    payload = np.empty(compressor.payload_bytes(values.size), np.uint8)
    compressor.encode(values, payload, KEY)
    k = payload.size // coo.ENTRY_BYTES
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    if not np.array_equal(coo.indices(payload), expected):
        raise SystemExit("top-k has not selected what a stable sort puts first")


def measure(calls: Calls, values: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Return the costs of each call in memcpys of ``values``, one a round."""
    target = np.empty_like(values)

    def seconds(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    costs: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, rounds):  # one to compile
        for name, call in calls.items():
            before = seconds(lambda: np.copyto(target, values))
            taken = seconds(call)
            after = seconds(lambda: np.copyto(target, values))
            if turn >= 0:
                costs[name].append(2 * taken / (before + after))
    return costs


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    n = options.mebibytes << 18
    kinds = gradients(n)
    out = np.empty(n, np.float32)
    calls: Calls = {}
    for kind, values in kinds.items():
        check(values[: 1 << 20], options.density)
        calls |= both_ways(f"top-k, {kind}", TopK(density=options.density), values, out)
    calls |= exchanges(kinds["normal"], out, options.density, options.rank)
    costs = measure(calls, kinds["normal"], options.rounds)
    print(f"{options.mebibytes} MiB of float32, density {options.density}, {options.rounds} rounds, in memcpys")
    for name, found in costs.items():
        low, median, high = statistics.quantiles(found, n=4)
        print(f"{name:36} {median:7.2f}   ({low:.2f} to {high:.2f})")
        if options.json is not None:
            point = {"name": name, "mebibytes": options.mebibytes, "density": options.density, "memcpys": found}
            with options.json.open("a") as file:
                file.write(json.dumps(point) + "\n")


if __name__ == "__main__":
    main()
