"""Modules of a user: stages and tensors, checked before training, and bound to the memory of the run.

The parameters become views of the run's stores, which may be freed between forward and backward.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch.arrays import library, tensor_of
from hpcdist.adapters.torch.batchnorm import check_replaceable
from hpcdist.arrays.backend import Array, is_device
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.stage import Gradients, Parameters

if TYPE_CHECKING:
    import torch


COMPILED: Final = "_orig_mod"  # attribute of a compiled module: the user's module


@dataclass
class StageModules:
    """Modules of one pipeline stage in order of execution, with the parameters that the stage owns or shares."""

    modules: list[tuple[str, "torch.nn.Module"]]  # qualified names, "" if unnamed
    owned: dict[str, "torch.nn.Parameter"] = field(default_factory=dict)  # without parameters of earlier stages
    # name of a parameter shared with an earlier stage: (layer, name) in that stage
    tied: dict[str, tuple[int, str]] = field(default_factory=dict)
    modes: dict["torch.nn.Module", bool] = field(default_factory=dict)  # True: training, False: evaluation
    entries: tuple["torch.nn.Module", ...] = ()  # modules that user code may call

    def all_modules(self) -> Iterator["torch.nn.Module"]:
        """Yield the modules of the stage and all nested modules."""
        for _, module in self.modules:
            yield from module.modules()

    @cached_property
    def is_compiled(self) -> bool:
        """True if ``torch.compile`` or ``module.compile()`` has compiled a module of the stage."""
        return any(hasattr(module, COMPILED) or module._compiled_call_impl for module in self.all_modules())

    def set_modes(self, modes: Mapping["torch.nn.Module", bool]) -> None:
        """Set all modules of the stage to training or evaluation mode. ``modes``: {module: True if training}."""
        # If a mode changes, call `train` of the stage's top-level modules, which users may override.
        if any(module.training != training for module, training in modes.items()):
            for _, module in self.modules:
                module.train(modes[module])
            for module, training in modes.items():
                module.training = training

    def parameters(self) -> Iterator[tuple[str, "torch.nn.Parameter"]]:
        """Yield (qualified name, PyTorch parameter) for each trained parameter of the stage."""
        seen: set[int] = set()
        for prefix, module in self.modules:
            for name, parameter in module.named_parameters(prefix):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield plain_name(name), parameter

    def constants(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield (qualified name, tensor) for each frozen parameter and each buffer, without running statistics."""
        statistics = self.statistics()
        for prefix, module in self.modules:
            constants = [pair for pair in module.named_parameters(prefix) if not pair[1].requires_grad]
            named = ((plain_name(name), tensor) for name, tensor in (*constants, *module.named_buffers(prefix)))
            yield from (pair for pair in named if pair[0] not in statistics)

    def statistics(self) -> dict[str, "torch.Tensor"]:
        """Return {qualified name: buffer} of the running statistics of BatchNorm and InstanceNorm modules."""
        norms = self._inner(library().nn.modules.batchnorm._NormBase)
        return {plain_name(key): buffer for name, inner in norms.items() for key, buffer in inner.named_buffers(name)}

    def synchronised(self) -> dict[str, "torch.nn.Module"]:
        """Return {qualified name: module} of the SyncBatchNorm modules. Raises UsageError for unsupported ones."""
        modules = self._inner(library().nn.SyncBatchNorm)
        for name, module in modules.items():
            check_replaceable(name, module)
        return modules

    def _inner(self, kind: "type[torch.nn.Module]") -> dict[str, "torch.nn.Module"]:
        inner_modules = (pair for prefix, module in self.modules for pair in module.named_modules(prefix=prefix))
        return {name: inner for name, inner in inner_modules if isinstance(inner, kind)}

    def __str__(self) -> str:
        called = ((prefix, getattr(module, COMPILED, module)) for prefix, module in self.modules)
        return " + ".join(f"{prefix or 'module'} ({type(module).__name__})" for prefix, module in called)


def plain_name(name: str) -> str:
    """Return the qualified ``name`` of a tensor without the names that ``torch.compile`` adds."""
    return name.replace(f"{COMPILED}.", "")


def stages_of(module_or_stages: Any, cut: "Sequence[torch.nn.Module] | None" = None) -> list[StageModules]:
    """Return a list of stages: one for a single module, or one per child of an ``nn.Sequential`` or list.

    ``cut``: stages of a single module, from `hpcdist.adapters.torch.cut`, or None.
    """
    # A child without new parameters joins the stage before it, or the first stage.
    modules = modules_of(module_or_stages) if cut is None else [("", module) for module in cut]
    stages: list[StageModules] = []
    owner: dict[int, tuple[int, str]] = {}  # id of a parameter -> (layer, name there)
    leading: list[tuple[str, torch.nn.Module]] = []
    for prefix, module in modules:
        news = [one for one in module.parameters() if one.requires_grad and id(one) not in owner]
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
        raise UsageError("no parameter of the modules requires a gradient; pass a module with parameters to train")
    chosen = any(module.training for stage in stages for module in stage.all_modules())
    for layer, stage in enumerate(stages):
        stage.entries = tuple(module for _, module in stage.modules) if cut is None else (module_or_stages,)
        stage.modes = {module: module.training or not chosen for module in stage.all_modules()}
        for name, parameter in stage.parameters():
            if owner[id(parameter)][0] == layer:
                stage.owned[name] = parameter
            else:
                stage.tied[name] = owner[id(parameter)]
    return stages


def modules_of(root: Any) -> list[tuple[str, "torch.nn.Module"]]:
    """Return (name, module) of the modules in ``root``, in order: a module, an ``nn.Sequential`` or a list."""
    nn = library().nn
    if isinstance(root, nn.Sequential):
        return [(name, module) for name, module in root._modules.items() if module is not None]
    if isinstance(root, nn.Module) and not isinstance(root, nn.ModuleList):
        return [("", root)]
    if isinstance(root, nn.ModuleList | Sequence) and not isinstance(root, str) and len(root):
        wrong = [type(module).__name__ for module in root if not isinstance(module, nn.Module)]
        if not wrong:
            return [(str(index), module) for index, module in enumerate(root)]
        raise UsageError(f"got a {wrong[0]} among the stages; each stage must be a torch.nn.Module")
    raise UsageError(
        f"got a {type(root).__name__} to wrap; pass a torch.nn.Module, an nn.Sequential whose children are the "
        "stages, or a list of modules, each of which takes the output of the module before it"
    )


def check_modules(stages: Sequence[StageModules]) -> None:
    """Raise UsageError or ConfigurationError if a parameter or module of ``stages`` cannot be trained by hpcdist."""
    torch = library()
    parameters = [(stage, name, parameter) for stage in stages for name, parameter in stage.owned.items()]
    for stage, name, parameter in parameters:
        where = f"parameter {name} of {stage}"
        if torch.nn.parameter.is_lazy(parameter):
            raise UsageError(f"{where} has no shape yet; run the module once on an example before you wrap the module")
        if parameter.device.type == "meta":
            raise UsageError(f"{where} is on the meta device without values; call to_empty, then set the values")
        if not parameter.numel():
            raise UsageError(
                f"{where} is empty; another run may have freed its values. Wrap modules that have all their values"
            )
        if parameter.layout is not torch.strided:
            raise UsageError(f"{where} has the layout {parameter.layout}; convert the parameter with to_dense()")
    _check_alike(parameters)
    _check_memory(parameters)


def _check_alike(parameters: Sequence[tuple[StageModules, str, "torch.nn.Parameter"]]) -> None:
    torch = library()
    _, first, alike = parameters[0]
    if alike.dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"parameter {first} is {alike.dtype}; parameters must be float32 or float64: use module.float(), and "
            "torch.autocast inside the modules for 16-bit products"
        )
    for stage, name, parameter in parameters:
        if (parameter.dtype, parameter.device) != (alike.dtype, alike.device):
            raise ConfigurationError(
                f"parameter {name} of {stage} is {parameter.dtype} on {parameter.device}, but parameter {first} is "
                f"{alike.dtype} on {alike.device}; give the modules one dtype and device with module.to"
            )
        for constant, tensor in (*stage.constants(), *stage.statistics().items()):
            if tensor.device != alike.device:
                raise ConfigurationError(
                    f"buffer {constant} of {stage} is on {tensor.device}, but parameter {first} is on "
                    f"{alike.device}; move the modules to one device with module.to"
                )


def _check_memory(parameters: Sequence[tuple[StageModules, str, "torch.nn.Parameter"]]) -> None:
    spans = []
    for stage, name, parameter in parameters:
        if parameter.numel():
            reach = sum(
                (size - 1) * abs(stride) for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            spans.append((start, start + (reach + 1) * parameter.element_size(), name, stage))
            if reach + 1 < parameter.numel():
                raise UsageError(
                    f"parameter {name} of {stage} is an expanded tensor: several elements share one number; make the "
                    "parameter contiguous before you wrap the module"
                )
    spans.sort(key=lambda span: span[:2])
    for (_, stop, name, stage), (start, _, other, other_stage) in zip(spans, spans[1:], strict=False):
        if start < stop:
            raise UsageError(
                f"parameters {name} of {stage} and {other} of {other_stage} share memory but are two parameters; "
                "to share a parameter, use the same torch.nn.Parameter in both modules, not a view of it"
            )


@dataclass(frozen=True)
class ParameterView:
    """Description of a view of a parameter, to recreate the view: name, shape, strides and storage offset."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _StageTensors:
    def __init__(self, stage: StageModules) -> None:
        self.parameters = dict(stage.parameters())
        self.views: Parameters | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.starts: dict[int, str] = {}  # address of the memory -> name


class ParameterBinding:
    """Link between the user's modules and a training run, whose arrays hold the parameters. Not thread-safe."""

    def __init__(self, stages: Sequence[StageModules]) -> None:
        self._bound = {id(stage): _StageTensors(stage) for stage in stages}
        first = next(iter(stages[0].owned.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self._initial: dict[int, torch.Tensor] | None = {
            id(parameter): parameter.detach() for stage in stages for parameter in stage.owned.values()
        }
        self._gradients: Gradients | None = None  # destination of the gradients of the running backward
        self._names: dict[int, str] = {}
        self._written: set[str] = set()
        self._targets: dict[int, tuple[Array, torch.Tensor]] = {}
        for stage in stages:
            for parameter in stage.owned.values():
                parameter.register_post_accumulate_grad_hook(self._take)

    def initial(self, stage: StageModules) -> dict[str, np.ndarray]:
        """Return the initial values of the parameters that ``stage`` owns: {parameter name: host array}."""
        if self._initial is None:
            raise UsageError("another run has taken the parameters of these modules; wrap new modules for this run")
        return {name: self._initial[id(parameter)].cpu().numpy() for name, parameter in stage.owned.items()}

    def free_initial(self, step: int) -> None:
        """If ``step`` is at least 2, free the initial parameter values, and all parameters of stages on other ranks."""
        if step > 1 and self._initial is not None:
            self._initial = None
            held = {id(p) for bound in self._bound.values() if bound.views for p in bound.parameters.values()}
            for bound in self._bound.values():
                for parameter in bound.parameters.values():
                    if id(parameter) not in held:
                        parameter.data = parameter.new_empty(0)

    def bind(self, stage: StageModules, views: Parameters, same_device: Array) -> None:
        """Make the arrays ``views``, {parameter name: array}, the memory of the parameters of ``stage``.

        ``same_device``: any array on the device of ``views``. Raises ConfigurationError if the modules are elsewhere.
        """
        bound = self._bound[id(stage)]
        if views is not bound.views:
            self._look_at(bound, views, same_device)
        for name, parameter in bound.parameters.items():
            tensor = bound.tensors[name]
            if parameter.data_ptr() != tensor.data_ptr():  # another stage or the user has changed the memory
                parameter.data = tensor

    def _look_at(self, bound: _StageTensors, views: Parameters, array: Array) -> None:
        if is_device(array) != (self.device.type == "cuda"):
            raise ConfigurationError(
                f"the modules are on {self.device}, but the run computes on {'gpu' if is_device(array) else 'cpu'}; "
                f"move the modules with module.to({'cuda' if is_device(array) else 'cpu'!r}), or change run.device"
            )
        bound.tensors = {name: tensor_of(views[name]) for name in bound.parameters}
        bound.starts = {
            tensor.untyped_storage().data_ptr(): name for name, tensor in bound.tensors.items() if tensor.numel()
        }
        bound.views = views

    def has(self, stage: StageModules) -> bool:
        """Return True if the run has moved or freed parameters of ``stage``."""
        bound = self._bound[id(stage)]
        run_memory = {tensor.data_ptr() for tensor in bound.tensors.values()}
        freed = self._initial is None
        return any(
            p.data_ptr() in run_memory if p.numel() else freed and any(name in stage.owned for name in bound.parameters)
            for p in bound.parameters.values()
        )

    def holds(self, stage: StageModules, start: int) -> bool:
        """Return True if a parameter of ``stage`` begins at the memory address ``start``."""
        return start in self._bound[id(stage)].starts

    @contextlib.contextmanager
    def saving(self, stage: StageModules) -> Iterator[None]:
        """Context manager in which autograd saves a `ParameterView` instead of each parameter of ``stage``."""
        bound = self._bound[id(stage)]

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
                    "one of the tensors needed for the gradient has been modified by an inplace operation: a tensor "
                    f"{tuple(tensor.shape)} of stage {stage} is at version {tensor._version}, expected version "
                    f"{version}; replace the in-place operation on this tensor"
                )
            return tensor

        hooks = (pack, unpack)
        if stage.is_compiled:  # else PyTorch would compile the hooks again for each shape
            hooks = tuple(map(library().compiler.disable, hooks))
        with library().autograd.graph.saved_tensors_hooks(*hooks):
            yield

    @contextlib.contextmanager
    def collect(self, stage: StageModules, gradients: Gradients) -> Iterator[set[str]]:
        """Context manager in which backward writes to ``gradients``. Yields the set of names of written gradients."""
        bound = self._bound[id(stage)]
        for parameter in bound.parameters.values():
            parameter.grad = None  # the first gradient is written, not added to an old gradient
        self._names = {id(parameter): name for name, parameter in bound.parameters.items()}
        self._gradients, self._written = gradients, set()
        try:
            yield self._written
        finally:
            self._gradients = None

    def _take(self, parameter: Any) -> None:
        if self._gradients is None:
            return  # a backward by the user
        name = self._names[id(parameter)]
        view, add = self._gradients.into(name)
        cached = self._targets.get(id(parameter))
        if cached is None or cached[0] is not view:
            cached = self._targets[id(parameter)] = (view, tensor_of(view))
        target = cached[1]
        fresh = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        (target.add_ if add else target.copy_)(fresh)
        parameter.grad = target
        self._written.add(name)
