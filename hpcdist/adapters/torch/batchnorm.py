"""Synchronised BatchNorm: `torch.nn.SyncBatchNorm` modules normalise with the statistics of all replicas.

PyTorch's forward pass of this module needs a process group and a GPU. During a pass of a stage, `synchronised` replaces
it by one on the replicas of the run, for any device. The mean and the sum of squared deviations of all replicas are
merged from the local values (Chan, Golub and LeVeque 1983), in float64. Each pass makes one collective per module.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpcdist.adapters.torch.arrays import array_of, library
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError

if TYPE_CHECKING:
    import torch


class StatisticsAxis:
    """The replicas of a stage, which share BatchNorm statistics. ``comm`` must have no other use."""

    # A separate communicator, because gradients may be in flight during a pass. All replicas execute the same list of
    # passes, and PyTorch runs the nodes of equal graphs in the same order. So the collectives of all replicas match.

    def __init__(self, comm: Communicator, watch: Any) -> None:
        self.comm, self.watch = comm, watch  # ``watch``: `NanFinder`
        self._spent_s = 0.0

    def gather(self, local: "torch.Tensor") -> "torch.Tensor":
        """Return the 1-D tensors ``local`` of all replicas, one per row. Collective."""
        rows = local.new_zeros(self.comm.size, local.numel())
        rows[self.comm.rank] = local
        size = local.numel()
        ranges = [Range(rank * size, (rank + 1) * size) for rank in range(self.comm.size)]
        self._call(array_of(rows).reshape(-1), lambda array: self.comm.all_gather(array, ranges))
        return rows

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """Sum the 1-D tensor ``values`` over all replicas in place, and return it. Collective."""
        self._call(array_of(values), self.comm.allreduce)
        return values

    def _call(self, array: Array, collective: Any) -> None:
        was_finite, begin = self.watch.sees_only_finite(array), time.perf_counter()
        collective(array)
        if not is_device(array):
            self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(array)

    def taken_s(self) -> float:
        """Return the seconds spent in collectives since the previous call. Local."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def check_replaceable(name: str, module: "torch.nn.Module") -> None:
    """Raise UsageError if the forward pass of the SyncBatchNorm ``module`` cannot be replaced. ``name``: its name."""
    if type(module).forward is not library().nn.SyncBatchNorm.forward or "forward" in vars(module):
        raise UsageError(
            f"{name} ({type(module).__name__}) has its own forward pass; use torch.nn.SyncBatchNorm itself"
        )
    if module.process_group is not None:
        raise UsageError(
            f"{name} (SyncBatchNorm) has a process group, but its statistics are those of all replicas of the run; "
            "create it with process_group = None"
        )


@contextlib.contextmanager
def synchronised(modules: "Iterable[torch.nn.Module]", axis: StatisticsAxis | None) -> Iterator[None]:
    """Context manager in which the SyncBatchNorm ``modules`` use the statistics of all ranks of ``axis``.

    ``axis``: None leaves the modules as they are.
    """
    if axis is None:
        yield
        return
    distinct = set(modules)  # a module may have several names
    for module in distinct:
        module.forward = functools.partial(_forward, module, axis)
    try:
        yield
    finally:
        for module in distinct:
            del module.forward


def _forward(module: Any, axis: StatisticsAxis, x: "torch.Tensor") -> "torch.Tensor":
    if not module.training:
        return type(module).forward(module, x)
    module._check_input_dim(x)
    module._check_non_zero_input_channels(x)
    y, mean, variance, total = _function().apply(x, module.weight, module.bias, module.eps, axis)
    if module.track_running_stats and float(total):
        module.num_batches_tracked.add_(1)
        factor = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        with library().no_grad():
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
            module.running_var.lerp_((variance * (total / (total - 1))).to(module.running_var.dtype), factor)
    return y


@functools.cache
def _function() -> Any:
    torch = library()

    class SynchronisedBatchNorm(torch.autograd.Function):  # type: ignore[name-defined]
        # y = (x - mean) / sqrt(variance + eps) weight + bias, per channel, with the mean and the variance of the n
        # values of all replicas. The gradient of x has sums over all replicas, and the gradients of weight and bias
        # have sums over the local values, which the run adds up.

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, axis: StatisticsAxis) -> Any:
            channels, dims = x.shape[1], [dim for dim in range(x.dim()) if dim != 1]
            count = x.numel() // channels
            local = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
            if count:
                variance, mean = torch.var_mean(_wide(x), dims, correction=0)
                local[0], local[1 : 1 + channels], local[1 + channels :] = count, mean, variance.double() * count
            counts, means, squares = axis.gather(local).split((1, channels, channels), dim=1)
            total = counts.sum()
            if float(total) == 1:
                raise UsageError(
                    "a SyncBatchNorm module got one value per channel on all replicas together, which has no variance; "
                    "use more samples per micro-batch"
                )
            mean = (counts * means).sum(0) / total.clamp(min=1)
            variance = (squares + counts * (means - mean) ** 2).sum(0) / total.clamp(min=1)
            wide = torch.promote_types(x.dtype, torch.float32)
            shape = (1, -1, *[1] * (x.dim() - 2))
            used = mean.to(wide), variance.to(wide)
            y = torch.nn.functional.batch_norm(x, *used, weight, bias, False, 0.0, eps) if count else x.clone()
            inverse = (variance + eps).rsqrt()
            ctx.save_for_backward(x, weight, used[0].view(shape), inverse.to(wide).view(shape))
            ctx.axis, ctx.total, ctx.dims, ctx.shape = axis, total, dims, shape
            ctx.mark_non_differentiable(mean, variance, total)
            return y, mean, variance, total

        @staticmethod
        def backward(ctx: Any, dy: Any, *_: Any) -> Any:
            x, weight, mean, inverse = ctx.saved_tensors
            kept, centred = dy.dtype, _wide(x) - mean
            dy = _wide(dy)
            sums = torch.stack([dy.sum(ctx.dims), (dy * centred).sum(ctx.dims)])
            dweight = dbias = dx = None
            if weight is not None:
                dweight, dbias = (sums[1] * inverse.view(-1)).to(weight.dtype), sums[0].to(weight.dtype)
            if ctx.needs_input_grad[0]:
                whole = ctx.axis.sum(sums.to(torch.float64, copy=True).view(-1)).view_as(sums)
                whole /= ctx.total.clamp(min=1)
                mean_dy, mean_product = (row.to(dy.dtype).view(ctx.shape) for row in whole)
                dx = dy - mean_dy - centred.mul_(inverse**2 * mean_product)
                dx = dx.mul_(inverse if weight is None else inverse * weight.detach().view(ctx.shape)).to(kept)
            return dx, dweight, dbias, None, None

    return SynchronisedBatchNorm


def _wide(x: "torch.Tensor") -> "torch.Tensor":
    return x.float() if x.element_size() < 4 else x
