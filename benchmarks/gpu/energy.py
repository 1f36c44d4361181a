"""Energy counter of a GPU compared with its integrated power under several loads, and the cost of sampling.

    python -m benchmarks gpu.energy
    python -m benchmarks gpu.energy --seconds 20 --side 8192 -o gpu_energy.h5 --anonymous

The loads are continuous matrix products, products in bursts of --burst seconds with equal pauses, and idle. Counter and
power are read together for --seconds. "power / counter" must be within 5 % of 1 under continuous products. A sensor
that measures only part of the time is wrong under bursts: that error is what the correction must remove.

Then the products run with a sampler of the counter at several intervals. The table has the share of a processor that
the sampler uses, and the products per second. Exit code 1 if the goal is missed, 69 without a GPU or NVML.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device
from hpcdist.comm.start import Session
from hpcdist.energy.sampler import EnergySampler
from hpcdist.energy.sources import nvml
from hpcdist.energy.sources.counters import CounterReader, IntegratedPower
from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.table import aligned

SCHEMA, ON = "hpcdist.benchmark.gpu_energy", "gpu"

APART: Final = 0.05
EVERY_S: Final = 0.02  # between two reads
LOADS: Final = ("products", "bursts", "idle")
INTERVALS_S: Final = (0.0, 0.1, 0.02)  # of the sampler; 0: no sampler
OPTIONS: Final = {"seconds": 12.0, "warm": 2.0, "burst": 0.05, "side": 4096}


def products(side: int) -> Callable[[], None]:
    """Return a function that multiplies two matrices and waits for the result."""
    left, right, out = (backend.zeros((side, side), np.dtype("float32"), "gpu") for _ in range(3))
    left += 1
    right += 1

    def call() -> None:
        backend.namespace(left).matmul(left, right, out=out)
        device.synchronise()

    return call


def watched(load: str, call: Callable[[], None], chosen: argparse.Namespace, readers: Sequence[Any]) -> np.ndarray:
    """Read all ``readers`` under a load after --warm seconds: return seconds, and mJ by reader. Raises SystemExit."""
    first: list[Any] = []
    began_s, read_s, last = time.monotonic(), 0.0, list[Any]()
    while not first or time.monotonic() - began_s < chosen.warm + chosen.seconds:
        is_loaded = load == "products" or (
            load == "bursts" and (time.monotonic() - began_s) % (2 * chosen.burst) < chosen.burst
        )
        if is_loaded:
            call()
        else:
            time.sleep(EVERY_S / 10)
        now_s = time.monotonic()
        if now_s - read_s >= EVERY_S:
            last = [now_s, *(reader.read(time.monotonic_ns()) for reader in readers)]
            read_s = now_s
            if now_s - began_s >= chosen.warm and not first:
                first = last
    if None in first or None in last:
        raise SystemExit(f"{load}: {'; '.join(filter(None, (reader.explain() for reader in readers)))}")
    return np.array(last, np.float64) - np.array(first, np.float64)


def sampled(call: Callable[[], None], counter: Any, interval_s: float, seconds: float) -> tuple[float, float]:
    """Run products with a sampler of ``counter``: return products per second, and the sampler's processor share."""
    sampler = EnergySampler([counter] if interval_s else [], interval_s or 1.0)
    sampler.start()
    began_s, products_done = time.monotonic(), 0
    while (lasted_s := time.monotonic() - began_s) < seconds:
        call()
        products_done += 1
    busy_s, _ = sampler.overhead()
    if interval_s:
        sampler.stop()
    return products_done / lasted_s, busy_s / lasted_s


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Measure the energies and the cost of sampling. Raises MissingCapabilityError without an energy counter."""
    device.choose(0)
    call = products(chosen.side)
    with nvml.NvmlDriver() as driver:
        uuid = driver.at(device.bus_id())
        counter, sensor = driver.counter(uuid, 1, EVERY_S), driver.sensor(uuid)
        if not sensor.field or isinstance(counter, IntegratedPower):
            raise MissingCapabilityError(f"{counter.about.model} has no energy counter, or does not report its power")
        rows = []
        for load in LOADS:
            power = IntegratedPower(uuid, sensor.power_mw, counter.about, EVERY_S)
            rows.append(watched(load, call, chosen, (CounterReader(counter), CounterReader(power))))
        shares = [
            sampled(call, driver.counter(uuid, 1, every_s or EVERY_S), every_s, chosen.seconds / 4)
            for every_s in INTERVALS_S
        ]
        about = {"power_field": sensor.field, "model": counter.about.model}
    about |= card() | {"loads": ",".join(LOADS)}
    arrays = {"energy": np.array(rows), "sampler": np.array(shares), "interval_s": np.array(INTERVALS_S)}
    dims = {"energy": "loads, (s, mJ counted, mJ of power)", "sampler": "intervals, (products/s, share of a processor)"}
    return Results(arrays, dims | {"interval_s": "intervals"}, about)


def ratios(results: Results) -> harness.Ratios:
    """Return power / counter by load, and the speed without a sampler relative to each sampling interval."""
    energy, sampler = results.arrays["energy"], results.arrays["sampler"]
    actual = {name: row[2:] / row[1] for name, row in zip(results.names("loads"), energy, strict=True)}
    sampler_rows = zip(results.arrays["interval_s"][1:], sampler[1:], strict=True)
    return actual | {f"sampled every {every_s:g} s": sampler[0, :1] / row[:1] for every_s, row in sampler_rows}


def lines(results: Results) -> Sequence[str]:
    rows = [["", "W by the counter", f"W, {results.attributes['power_field']}", "power / counter"]]
    for name, (seconds, counted, power) in zip(results.names("loads"), results.arrays["energy"], strict=True):
        watts = [f"{mj / 1e3 / seconds:.1f}" for mj in (counted, power)]
        rows.append([name, *watts, f"{power / counted:.3f}" if counted else "no energy was counted"])
    costs = [["sampler", "share of a processor", "products/s"]]
    for every_s, (speed, share) in zip(results.arrays["interval_s"], results.arrays["sampler"], strict=True):
        costs.append([f"every {every_s:g} s" if every_s else "none", f"{share:.4%}", f"{speed:.1f}"])
    return [str(results.attributes["model"]), *aligned(rows), *aligned(costs)]


def failures(results: Results) -> Sequence[str]:
    apart = abs(float(ratios(results)["products"][0]) - 1)
    return [] if apart <= APART else [f"power and counter are {apart:.1%} apart under products"]
