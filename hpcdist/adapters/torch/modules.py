"""Modules of a user: their stages and tensors, checked before anything is computed, and bound to the run's memory.

`check_modules` refuses what no run can train. `torch.nn.Parameter` objects stay the user's own; their memory becomes
that of views of the stores of a run, which may come and go between two passes. A graph saves parameters, and views of
them, for its backward. By then the run may have freed that memory and gathered the parameter elsewhere, so what is
saved of a parameter is its name and the place inside, looked up when it is needed.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.adapters.torch.arrays import library, tensor_of
from hpcdist.arrays.backend import Array, is_device
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.stage import Gradients, Parameters

if TYPE_CHECKING:
    import torch


@dataclass
class StageModules:
    """Modules of one stage, which run one after the other, each with its qualified name ("" where it has none).

    ``own`` are its tensors by qualified name, ``tied`` those that an earlier stage owns: name -> (layer, name there).
    ``modes`` says of every module, nested ones included, whether it is in training mode in a step.
    """

    modules: list[tuple[str, "torch.nn.Module"]]
    own: dict[str, "torch.nn.Parameter"] = field(default_factory=dict)
    tied: dict[str, tuple[int, str]] = field(default_factory=dict)
    modes: dict["torch.nn.Module", bool] = field(default_factory=dict)

    def every(self) -> Iterator["torch.nn.Module"]:
        """Yield all modules, nested ones included."""
        for _, module in self.modules:
            yield from module.modules()

    def set_modes(self, modes: Mapping["torch.nn.Module", bool]) -> None:
        """Put each module into training mode or out of it, through `train` first, which may be the user's own."""
        if any(module.training != training for module, training in modes.items()):
            for _, module in self.modules:
                module.train(modes[module])
            for module, training in modes.items():
                module.training = training

    def parameters(self) -> Iterator[tuple[str, "torch.nn.Parameter"]]:
        """Yield all parameters with their qualified names, each once."""
        seen: set[int] = set()
        for prefix, module in self.modules:
            for name, parameter in module.named_parameters(prefix):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def buffers(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield all buffers with their qualified names."""
        for prefix, module in self.modules:
            yield from module.named_buffers(prefix)

    def __str__(self) -> str:
        return " + ".join(f"{prefix or 'module'} ({type(module).__name__})" for prefix, module in self.modules)


def stages_of(given: Any) -> list[StageModules]:
    """Return the stages of ``given``, a module or a sequence of modules, with their tensors.

    The children of an ``nn.Sequential`` are stages, and so are the modules of a list or tuple; any other module is one
    stage. A stage needs a tensor of its own, so a module without one goes with the modules before it (or, if it is the
    first, with those behind it). A step leaves each module in the mode that it is in now; where all are in evaluation
    mode, nobody chose what stays so, and a step trains them all. Raises UsageError for what are no modules.
    """
    modules = _modules(given)
    stages: list[StageModules] = []
    owner: dict[int, tuple[int, str]] = {}  # of a parameter: (layer, its name there)
    leading: list[tuple[str, torch.nn.Module]] = []
    for prefix, module in modules:
        news = [parameter for parameter in module.parameters() if id(parameter) not in owner]
        if news:
            stages.append(StageModules([*leading, (prefix, module)]))
            leading = []
        elif stages:
            stages[-1].modules.append((prefix, module))
        else:
            leading.append((prefix, module))
        if stages:
            for name, parameter in stages[-1].parameters():
                owner.setdefault(id(parameter), (len(stages) - 1, name))
    if not stages:
        raise UsageError("the modules have no parameter: there is nothing to train")
    chosen = any(module.training for cut in stages for module in cut.every())
    for layer, cut in enumerate(stages):
        cut.modes = {module: module.training or not chosen for module in cut.every()}
        for name, parameter in cut.parameters():
            if owner[id(parameter)][0] == layer:
                cut.own[name] = parameter
            else:
                cut.tied[name] = owner[id(parameter)]
    return stages


def _modules(given: Any) -> list[tuple[str, "torch.nn.Module"]]:
    """Return what runs one after the other, by name: in a list, the place, as an ``nn.ModuleList`` names it."""
    nn = library().nn
    if isinstance(given, nn.Sequential):
        return [(name, module) for name, module in given._modules.items() if module is not None]  # also one used twice
    if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList):
        return [("", given)]
    if isinstance(given, nn.ModuleList | Sequence) and not isinstance(given, str) and len(given):
        wrong = [type(module).__name__ for module in given if not isinstance(module, nn.Module)]
        if not wrong:
            return [(str(place), module) for place, module in enumerate(given)]
        raise UsageError(f"got a {wrong[0]} among the stages; each has to be a torch.nn.Module")
    raise UsageError(
        f"got a {type(given).__name__} to wrap; pass a torch.nn.Module, an nn.Sequential whose children are the "
        "stages, or a list of modules, each of which takes one tensor and returns one"
    )


def check_modules(stages: Sequence[StageModules]) -> None:
    """Raise UsageError or ConfigurationError, with the name of the parameter, for modules that cannot be trained."""
    torch = library()
    parameters = [(cut, name, parameter) for cut in stages for name, parameter in cut.own.items()]
    for cut, name, parameter in parameters:
        where = f"parameter {name} of {cut}"
        if torch.nn.parameter.is_lazy(parameter):
            raise UsageError(f"{where} has no shape yet; run the module once on an example before it is wrapped")
        if parameter.device.type == "meta":
            raise UsageError(f"{where} is on the meta device and has no values; materialise it with to_empty")
        if not parameter.numel():
            raise UsageError(f"{where} is empty; did another run take it? Wrap modules that have all their values")
        if not parameter.requires_grad:
            raise UsageError(
                f"{where} has requires_grad = False, so no gradient; what is not trained has to be a buffer "
                "(register_buffer), or set requires_grad"
            )
        if parameter.layout is not torch.strided:
            raise UsageError(f"{where} is {parameter.layout}; only dense tensors can be trained")
    _check_alike(parameters)
    _check_memory(parameters)
    for cut in stages:
        _check_statistics(cut)


def _check_alike(parameters: Sequence[tuple[StageModules, str, "torch.nn.Parameter"]]) -> None:
    """Refuse modules of several devices or types, and of types that no run computes in."""
    torch = library()
    _, first, alike = parameters[0]
    if alike.dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"parameter {first} is {alike.dtype}; parameters are float32 or float64: use module.float(), and "
            "torch.autocast inside of the modules for products in 16 bits"
        )
    for cut, name, parameter in parameters:
        if (parameter.dtype, parameter.device) != (alike.dtype, alike.device):
            raise ConfigurationError(
                f"parameter {name} of {cut} is {parameter.dtype} on {parameter.device}, {first} is {alike.dtype} on "
                f"{alike.device}; move the modules to one device and type with module.to"
            )
        for buffer_name, buffer in cut.buffers():
            if buffer.device != alike.device:
                raise ConfigurationError(
                    f"buffer {buffer_name} of {cut} is on {buffer.device}, parameter {first} on {alike.device}; move "
                    "the modules to one device with module.to"
                )


def _check_memory(parameters: Sequence[tuple[StageModules, str, "torch.nn.Parameter"]]) -> None:
    """Refuse parameters that lie in each other's memory without being the same one."""
    spans = []
    for cut, name, parameter in parameters:
        if parameter.numel():
            reach = sum(
                (size - 1) * abs(stride) for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            spans.append((start, start + (reach + 1) * parameter.element_size(), name, cut))
            if reach + 1 < parameter.numel():
                raise UsageError(f"parameter {name} of {cut} is an expanded tensor: several elements share one number")
    spans.sort(key=lambda span: span[:2])
    for (_, stop, name, cut), (start, _, other, other_cut) in zip(spans, spans[1:], strict=False):
        if start < stop:
            raise UsageError(
                f"parameters {name} of {cut} and {other} of {other_cut} share memory but are two parameters; "
                "modules may share a parameter where it is the same torch.nn.Parameter in both, not a view of it"
            )


def _check_statistics(cut: StageModules) -> None:
    """Refuse norms that gather statistics of what they have seen: each replica would have others."""
    batchnorm = library().nn.modules.batchnorm._NormBase
    for prefix, module in cut.modules:
        for name, inner in module.named_modules(prefix=prefix):
            if isinstance(inner, batchnorm) and inner.track_running_stats:
                raise UsageError(
                    f"{name or 'the module'} is a {type(inner).__name__} that gathers running statistics: each replica "
                    "would gather others, and a forward that is computed again would count twice; use GroupNorm or "
                    "LayerNorm, or track_running_stats=False"
                )


@dataclass(frozen=True)
class ParameterView:
    """Place of a tensor inside of a parameter: what a graph saves instead of the tensor."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _StageTensors:
    """The tensors of one stage where they lie now."""

    def __init__(self, cut: StageModules) -> None:
        self.parameters = dict(cut.parameters())
        self.views: Parameters | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.starts: dict[int, str] = {}  # address of the memory -> name


class ParameterBinding:
    """The parameters of all stages of one wrapped model. Not for several threads at once."""

    def __init__(self, cuts: Sequence[StageModules]) -> None:
        self._bound = {id(cut): _StageTensors(cut) for cut in cuts}
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

    def initial(self, cut: StageModules) -> dict[str, np.ndarray]:
        """Return the values of the own tensors of a stage as they were wrapped, on the host."""
        if self._initial is None:
            raise UsageError("a run has taken the parameters of these modules; wrap new modules for another run")
        return {name: self._initial[id(parameter)].cpu().numpy() for name, parameter in cut.own.items()}

    def settle(self, step: int) -> None:
        """Free the initial values once they cannot be needed any more: in any step but the first of a run.

        Parameters of stages that this rank does not compute become empty.
        """
        if step > 1 and self._initial is not None:
            self._initial = None
            held = {id(p) for bound in self._bound.values() if bound.views for p in bound.parameters.values()}
            for bound in self._bound.values():
                for parameter in bound.parameters.values():
                    if id(parameter) not in held:
                        parameter.data = parameter.new_empty(0)

    def bind(self, cut: StageModules, views: Parameters, beside: Array) -> None:
        """Place the parameters of a stage in ``views``. Raises ConfigurationError on another device than theirs."""
        bound = self._bound[id(cut)]
        if views is not bound.views:
            self._look_at(bound, views, beside)
        for name, parameter in bound.parameters.items():
            tensor = bound.tensors[name]
            if parameter.data_ptr() != tensor.data_ptr():  # one of another stage too, or the user's own again
                parameter.data = tensor

    def _look_at(self, bound: _StageTensors, views: Parameters, beside: Array) -> None:
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

    def has(self, cut: StageModules) -> bool:
        """Whether the run has the memory of a stage's parameters, or has given it back for them."""
        bound = self._bound[id(cut)]
        taken = {tensor.data_ptr() for tensor in bound.tensors.values()}
        gone = self._initial is None
        return any(
            p.data_ptr() in taken if p.numel() else gone and any(name in cut.own for name in bound.parameters)
            for p in bound.parameters.values()
        )

    def holds(self, cut: StageModules, start: int) -> bool:
        """Whether memory that begins at ``start`` is that of a parameter of a stage."""
        return start in self._bound[id(cut)].starts

    @contextlib.contextmanager
    def saving(self, cut: StageModules) -> Iterator[None]:
        """Save parameters by their names in the graph that is recorded meanwhile."""
        bound = self._bound[id(cut)]

        def pack(tensor: "torch.Tensor") -> "ParameterView | tuple[torch.Tensor, int]":
            name = bound.starts.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if name is None or tensor.dtype != self.dtype:
                return tensor.detach(), tensor._version
            return ParameterView(name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: "ParameterView | tuple[torch.Tensor, int]") -> "torch.Tensor":
            if isinstance(saved, ParameterView):
                whole = bound.tensors[saved.name]
                return whole.as_strided(saved.shape, saved.strides, saved.offset)
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "one of the tensors needed for the gradient has been modified by an inplace operation: a "
                    f"{tuple(tensor.shape)} of stage {cut} is at version {tensor._version}, expected version {version}"
                )
            return tensor

        with library().autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    @contextlib.contextmanager
    def collect(self, cut: StageModules, gradients: Gradients) -> Iterator[set[str]]:
        """Collect the gradients of a backward of a stage in ``gradients``; yields the set of names that got one."""
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
        view, add = self._gradients.into(name)
        known = self._targets.get(id(parameter))
        if known is None or known[0] is not view:
            known = self._targets[id(parameter)] = (view, tensor_of(view))
        target = known[1]
        fresh = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        (target.add_ if add else target.copy_)(fresh)
        parameter.grad = target
        self._written.add(name)
