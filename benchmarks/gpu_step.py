"""A training step on a GPU against one on the CPU: forward, backward, norm, clipping and update of the whole model.

    python benchmarks/gpu_step.py [--set model.hidden=512 --set run.global_batch=32 ...] [-o gpu_step.h5]

Both sides train the same recipe on one rank, alternating in one run, and their losses are compared step by step. A step
on the GPU is timed by events on its stream, from before the batch is copied there to after the update; one on the CPU,
and the GPU's step as the host sees it, by the clock. Prints one JSON line: medians in seconds, tokens/s, the ratio
(above 1: the GPU is faster), and the seconds by phase. Raw times go to the HDF5 file. Without a GPU it leaves with 69.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays.gpu import device
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.provenance import provenance
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import microbatches
from hpcdist.training.recipe import recipe as recipes

SCHEMA, VERSION = "hpcdist.benchmark.gpu_step", 1
WARM_UP = 3  # kernels are compiled, memory is taken
AGREEMENT = {"float32": 1e-3, "float64": 1e-9}  # of the losses; rounding grows over the steps


class Side:
    """The run on one device, step by step."""

    def __init__(self, on: str, overrides: list[str], steps: int) -> None:
        comm = solo()
        recipe = recipes.load(None, [*overrides, f"run.steps={steps}", f"run.device={on}"]).recipe
        self.trainer: Trainer = assemble(Session(comm, locate(comm, None), "none", sys.exit), recipe)
        self.number = 0
        self.batches = self.trainer.batches(steps)

    def step(self) -> StepResult:
        """Do the next step, the copy of its batch included."""
        trainer = self.trainer
        batch = next(self.batches)
        self.number += 1
        parts = microbatches(trainer.place(batch), trainer.recipe.parallel.microbatches)
        samples = trainer.recipe.run.global_batch
        return trainer.executor.run(trainer.operations, parts, samples, self.number, np.zeros(2))


def on_clock(side: Side) -> tuple[float, StepResult]:
    """Return the seconds of a step by the clock."""
    begin = time.perf_counter()
    done = side.step()
    return time.perf_counter() - begin, done


def by_events(side: Side) -> tuple[float, StepResult]:
    """Return the seconds of a step between two events on the GPU's stream."""
    cuda = device.cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    done = side.step()
    end.record()
    end.synchronize()
    return cuda.get_elapsed_time(begin, end) / 1e3, done


def measure(overrides: list[str], steps: int) -> tuple[Trainer, dict[str, np.ndarray]]:
    """Return the trainer of the GPU, and times in s of each step that was not for warming up."""
    cpu, gpu = (Side(on, overrides, WARM_UP + steps) for on in ("cpu", "gpu"))
    with cpu.batches, gpu.batches:
        rows = [both(cpu, gpu) for _ in range(WARM_UP + steps)]
    return gpu.trainer, {name: np.array([row[name] for row in rows[WARM_UP:]]) for name in rows[0]}


def both(cpu: Side, gpu: Side) -> dict[str, float]:
    """Do the next step on both sides, which must agree; return its times in s."""
    cpu_s, expected = on_clock(cpu)
    begin = time.perf_counter()
    events_s, found = by_events(gpu)
    host_s = time.perf_counter() - begin
    agreement = AGREEMENT[gpu.trainer.recipe.precision.mode]
    if not abs(found.loss - expected.loss) <= agreement * abs(expected.loss):
        raise SystemExit(f"step {gpu.number}: loss {found.loss} on the GPU, {expected.loss} on the CPU")
    times = {"cpu_s": cpu_s, "gpu_s": events_s, "gpu_host_s": host_s}
    times |= {f"cpu_{name}": value for name, value in expected.seconds.items()}
    return times | {f"gpu_{name}": value for name, value in found.seconds.items()}


def card() -> dict[str, Any]:
    """Return what GPU and what CUDA it was."""
    runtime = device.cupy().cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "cupy_version": getattr(device.cupy(), "__version__", "unknown"),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }


def write(path: Path, trainer: Trainer, times: dict[str, np.ndarray], anonymous: bool) -> None:
    """Write the times of all steps, with the recipe and the provenance."""
    with files.edit(path, SCHEMA, VERSION) as file:
        for name, values in times.items():
            file[name] = values
            file[name].attrs.update({"units": "s", "dims": "steps"})
        file.attrs.update(provenance(anonymous=anonymous) | card() | {"recipe": recipes.dump(trainer.recipe)})
    print(f"raw times are in {path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw figures")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(arguments)
    try:
        device.choose(0)
        trainer, times = measure(options.set, options.steps)
    except HpcdistError as error:
        print(f"gpu_step: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    medians = {name: float(np.median(values)) for name, values in times.items()}
    tokens = trainer.recipe.run.global_batch * trainer.model.tokens_per_sample
    figures = {
        **{name: round(value, 9) for name, value in medians.items()},
        "cpu_tokens_per_s": round(tokens / medians["cpu_s"]),
        "gpu_tokens_per_s": round(tokens / medians["gpu_s"]),
        "ratio": round(medians["cpu_s"] / medians["gpu_s"], 3),
    }
    print(json.dumps({"parameters": trainer.model.layout.parameters, **card(), **figures}))
    if options.output is not None:
        write(options.output, trainer, times, options.anonymous)


if __name__ == "__main__":
    main()
