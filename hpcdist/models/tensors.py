"""The tensors that several models declare, and how they begin."""

from hpcdist.arrays.layout import TensorSpec
from hpcdist.models.stage import Parameters, StreamOf


def draw(parameters: Parameters, spec: TensorSpec, rng_of: StreamOf, deviation: float) -> None:
    """Write normal draws of so large a deviation, in float64 and rounded once."""
    parameters[spec.name][...] = rng_of(spec).standard_normal(spec.shape) * deviation


def norm_specs(layer: int, name: str, width: int, kind: str) -> tuple[TensorSpec, ...]:
    """Return the scale of a norm over ``width`` numbers and, of a "layer" norm, its bias."""
    scale = TensorSpec(layer, f"{name}.scale", (width,), False)
    return (scale,) if kind == "rms" else (scale, TensorSpec(layer, f"{name}.bias", (width,), False))


def column_specs(layer: int, name: str, inputs: int, *outputs: int, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return weight and bias that tensor parallelism cuts by outputs, along the last dim of those.

    ``outputs`` are those of one linear, or before them how many are stacked.
    """
    last = len(outputs) - 1
    stacked = outputs[0] if last else 1
    weight = TensorSpec(layer, f"{name}.weight", (*outputs, inputs), cut=last, stacked=stacked)
    return (weight, TensorSpec(layer, f"{name}.bias", outputs, False, cut=last, stacked=stacked)) if bias else (weight,)


def row_specs(layer: int, name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return a weight that tensor parallelism cuts by inputs, and a bias that all ranks have."""
    weight = TensorSpec(layer, f"{name}.weight", (outputs, inputs), cut=1)
    return (weight, TensorSpec(layer, f"{name}.bias", (outputs,), False)) if bias else (weight,)
