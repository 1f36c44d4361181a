"""Communication hook of DistributedDataParallel that sends compressed gradients.

    hpcdist.torch.compress(model, "powersgd", rank=2)

replaces PyTorch's allreduce of each bucket. Compressors and options are those in section [compression] of a recipe.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.compression.compressor import ErrorFeedback
from hpcdist.errors import UsageError
from hpcdist.reporting.nearest import nearest
from hpcdist.strategies.compressed.config import COMPRESSORS, READ_BY, CompressionConfig
from hpcdist.strategies.compressed.reduction import GradientCoder
from hpcdist.strategies.compressed.registry import BucketReduction, reduction_of
from hpcdist.torch import streams
from hpcdist.torch.buffers import array_of
from hpcdist.torch.group import Group


def compress(model: DistributedDataParallel, name: str, *, seed: int = 0, **options: Any) -> None:
    """Compress the gradients that the DDP model ``model`` exchanges. Call on all ranks before any backward pass.

    ``name``: one of `COMPRESSORS`. Keyword arguments are ``seed`` and the options in section [compression] of a recipe.
    Gradients must be float32. Raises UsageError if the process group of ``model`` does not use the backend hpcdist.
    """
    # Error feedback needs as much memory as the gradients.
    if name not in COMPRESSORS:
        near = nearest(name, COMPRESSORS)
        raise UsageError(
            f"compressor {name!r} is unknown{f', did you mean {near}' if near else ''}; choose one of "
            f"{', '.join(COMPRESSORS)}"
        )
    valid = {field.name for field in fields(CompressionConfig)} - {"candidates", "parameters"}
    for option in options:
        if option not in valid or name not in READ_BY.get(option, COMPRESSORS):
            raise UsageError(f"{option} is not an option of compressor {name}; remove {option}")
    if not isinstance(model.process_group, Group):
        raise UsageError(
            "compress needs a model whose process group has the backend hpcdist; call init_process_group('hpcdist') "
            "before wrapping the model"
        )
    model.register_comm_hook(_State(model.process_group, name, CompressionConfig(**options), seed), _hook)


class _Bucket:
    def __init__(self, state: "_State", parameters: list[torch.Tensor]) -> None:
        specs = [TensorSpec(0, f"p{index}", tuple(tensor.shape)) for index, tensor in enumerate(parameters)]
        self.layout = Layout.of(specs)
        self.part = Range(0, self.layout.size)
        self._state = state
        self._reduction: BucketReduction | None = None
        self.steps = 0

    def reduce(self, values: np.ndarray) -> None:
        state = self._state
        if self._reduction is None:
            on = "gpu" if backend.is_device(values) else "cpu"
            self._reduction = reduction_of(
                state.group.comm, self.layout, (self.part,), state.name, state.config, state.seed, state.algorithm, on
            )
            if state.config.error_feedback:
                kept = self._reduction.kept()
                self._reduction.codes.feedback = ErrorFeedback(self.layout, kept, on=on, can_roll_back=False)
        codes = self._reduction.codes
        if isinstance(codes, GradientCoder):
            codes.step = self.steps
        self._reduction.reduction.allreduce(values, self.part)
        if codes.feedback is not None:
            codes.feedback.keep()


class _State:
    def __init__(self, group: Group, name: str, config: CompressionConfig, seed: int) -> None:
        self.group, self.name, self.config, self.seed = group, name, config, seed
        self.algorithm = "native" if group.options.algorithm == "auto" else group.options.algorithm
        self._buckets: dict[tuple[int, ...], _Bucket] = {}

    def bucket(self, parameters: list[torch.Tensor]) -> _Bucket:
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            self._buckets[key] = _Bucket(self, parameters)
        return self._buckets[key]


def _hook(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer()
    if tensor.dtype is not torch.float32:
        raise UsageError(f"gradients of {tensor.dtype} cannot be compressed; train in float32, or under torch.autocast")
    if tensor.is_cuda:
        streams.check_cupy("hpcdist.torch.compress on a GPU")
    reducer, group = state.bucket(bucket.parameters()), state.group

    def run() -> None:
        flat = array_of(tensor.detach())
        if reducer.steps < state.config.warmup_steps:
            collectives.allreduce(group.comm, flat, state.algorithm)
        else:
            values = backend.namespace(flat).zeros(reducer.layout.size, FLOAT32)
            start, pairs = 0, []
            for segment in reducer.layout.segments:
                pairs.append((segment.range.slice, slice(start, start + segment.spec.size)))
                start += segment.spec.size
            for inside, outside in pairs:
                values[inside] = flat[outside]
            reducer.reduce(values)
            for inside, outside in pairs:
                flat[outside] = values[inside]
        flat *= FLOAT32.type(1.0 / group.comm.size)
        reducer.steps += 1

    work = group.submit(run, [tensor], f"compressed_all_reduce bucket {bucket.index()}")
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
