"""Where a user's parameters lie: in views of the stores of a run, which may come and go between two passes.

`torch.nn.Parameter` objects stay the user's own; their memory becomes that of the views. A graph saves parameters, and
views of them, for its backward. By then the run may have freed that memory and gathered the parameter elsewhere, so
what is saved of a parameter is its name and the place inside, looked up when it is needed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.adapters.torch_arrays import library, tensor_of
from hpcdist.adapters.torch_modules import Cut
from hpcdist.arrays.backend import Array, is_device
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.stage import Gradients, Parameters

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """A tensor inside of a parameter, instead of the tensor."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Kept:
    """A tensor that a graph saved, and the version that it had then."""

    tensor: "torch.Tensor"
    version: int


class _Bound:
    """The tensors of one stage where they lie now."""

    def __init__(self, cut: Cut) -> None:
        self.parameters = dict(cut.parameters())
        self.views: Parameters | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.starts: dict[int, str] = {}  # address of the memory -> name


class Binding:
    """The parameters of all stages of one wrapped model. Not for several threads at once."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._bound = {id(cut): _Bound(cut) for cut in cuts}
        first = next(iter(cuts[0].own.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self._initial: dict[int, torch.Tensor] | None = {
            id(parameter): parameter.detach() for cut in cuts for parameter in cut.own.values()
        }
        self._gradients: Gradients | None = None  # where those of the backward that runs go
        self._names: dict[int, str] = {}
        self._written: set[str] = set()
        self._targets: dict[int, tuple[Array, torch.Tensor]] = {}
        for cut in cuts:
            for parameter in cut.own.values():
                parameter.register_post_accumulate_grad_hook(self._take)

    def initial(self, cut: Cut) -> dict[str, np.ndarray]:
        """Return the values of the own tensors of a stage as they were wrapped, on the host."""
        if self._initial is None:
            raise UsageError("a run has taken the parameters of these modules; wrap new modules for another run")
        return {name: self._initial[id(parameter)].cpu().numpy() for name, parameter in cut.own.items()}

    def settle(self, step: int) -> None:
        """Give the initial values back once nobody can ask for them: in any step but the first of a run.

        Parameters of stages that this rank does not compute become empty.
        """
        if step > 1 and self._initial is not None:
            self._initial = None
            held = {id(p) for bound in self._bound.values() if bound.views for p in bound.parameters.values()}
            for bound in self._bound.values():
                for parameter in bound.parameters.values():
                    if id(parameter) not in held:
                        parameter.data = parameter.new_empty(0)

    def bind(self, cut: Cut, views: Parameters, beside: Array) -> None:
        """Let the parameters of a stage lie in ``views``. Raises ConfigurationError on another device than theirs."""
        bound = self._bound[id(cut)]
        if views is not bound.views:
            self._look_at(bound, views, beside)
        for name, parameter in bound.parameters.items():
            tensor = bound.tensors[name]
            if parameter.data_ptr() != tensor.data_ptr():  # one of another stage too, or the user's own again
                parameter.data = tensor

    def _look_at(self, bound: _Bound, views: Parameters, beside: Array) -> None:
        if is_device(beside) != (self.device.type == "cuda"):
            raise ConfigurationError(
                f"the modules are on {self.device}, the run computes on {'gpu' if is_device(beside) else 'cpu'}; move "
                f"them there with module.to({'cuda' if is_device(beside) else 'cpu'!r}), or change run.device"
            )
        bound.tensors = {name: tensor_of(views[name]) for name in bound.parameters}
        bound.starts = {
            tensor.untyped_storage().data_ptr(): name for name, tensor in bound.tensors.items() if tensor.numel()
        }
        bound.views = views

    def has(self, cut: Cut) -> bool:
        """Whether the run has the memory of a stage's parameters, or has given it back for them."""
        bound = self._bound[id(cut)]
        taken = {tensor.data_ptr() for tensor in bound.tensors.values()}
        gone = self._initial is None
        return any(
            p.data_ptr() in taken if p.numel() else gone and any(name in cut.own for name in bound.parameters)
            for p in bound.parameters.values()
        )

    def holds(self, cut: Cut, start: int) -> bool:
        """Whether memory that begins at ``start`` is that of a parameter of a stage."""
        return start in self._bound[id(cut)].starts

    @contextlib.contextmanager
    def saving(self, cut: Cut) -> Iterator[None]:
        """Save parameters by their names in the graph that is recorded meanwhile."""
        bound = self._bound[id(cut)]

        def pack(tensor: "torch.Tensor") -> Place | Kept:
            name = bound.starts.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if name is None or tensor.dtype != self.dtype:
                return Kept(tensor.detach(), tensor._version)
            return Place(name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: Place | Kept) -> "torch.Tensor":
            if isinstance(saved, Place):
                whole = bound.tensors[saved.name]
                return whole.as_strided(saved.shape, saved.strides, saved.offset)
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the tensors needed for the gradient has been modified by an inplace operation: a "
                    f"{tuple(saved.tensor.shape)} of stage {cut} is at version {saved.tensor._version}, expected "
                    f"version {saved.version}"
                )
            return saved.tensor

        with library().autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    @contextlib.contextmanager
    def collect(self, cut: Cut, gradients: Gradients) -> Iterator[set[str]]:
        """Let a backward leave the gradients of a stage in ``gradients``; yields the names that have got one."""
        bound = self._bound[id(cut)]
        for parameter in bound.parameters.values():
            parameter.grad = None  # the first gradient is written, not added to what was there
        self._names = {id(parameter): name for name, parameter in bound.parameters.items()}
        self._gradients, self._written = gradients, set()
        try:
            yield self._written
        finally:
            self._gradients = None

    def _take(self, parameter: Any) -> None:
        """Move the gradient of a micro-batch, which PyTorch has just completed, to where the run wants it."""
        if self._gradients is None:
            return  # a backward of the user's own
        name = self._names[id(parameter)]
        view, again = self._gradients.into(name)
        known = self._targets.get(id(parameter))
        if known is None or known[0] is not view:
            known = self._targets[id(parameter)] = (view, tensor_of(view))
        target = known[1]
        fresh = parameter.grad
        fresh = fresh.to_dense() if fresh.is_sparse else fresh
        if again:
            target.add_(fresh)
        else:
            target.copy_(fresh)
        parameter.grad = target
        self._written.add(name)
