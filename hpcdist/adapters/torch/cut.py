"""Cut of one PyTorch module into stages: `torch.fx` traces the forward, and groups of child modules become stages.

A stage returns all values that later stages need, such as the skips of a U-Net; see `hpcdist.adapters.torch.values`.
"""

import contextlib
import functools
import importlib
import inspect
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from hpcdist.adapters.torch.arrays import library, restored_random
from hpcdist.arrays.backend import ArrayGroup

if TYPE_CHECKING:
    import torch

LEAST_SHARE: Final = 0.01  # of the trained parameters; a stage with fewer also takes the next child module
OPENED_SHARE: Final = 0.5  # a child module with more of the parameters is itself cut at its children
# Functions of torch that torch.fx records only while they are replaced, because their arguments are sizes.
FACTORIES: Final = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "zeros")


class UncutError(Exception):
    """Reason why a module cannot be cut, as the end of a sentence."""


def cut_module(root: "torch.nn.Module", inputs: "torch.Tensor | ArrayGroup") -> "list[torch.nn.Module]":
    """Return the stages of ``root``: modules with parameters and buffers of ``root``, under their names. Local.

    The first stage takes ``inputs``, an example; each later stage takes the output of the stage before it. Raises
    UncutError if the stages cannot replace the forward of ``root``.
    """
    try:
        return _cut(root, inputs, opens=True)
    except UncutError as reason:
        with contextlib.suppress(UncutError):
            return _cut(root, inputs, opens=False)
        raise reason


def _cut(root: "torch.nn.Module", inputs: "torch.Tensor | ArrayGroup", *, opens: bool) -> "list[torch.nn.Module]":
    if _has_hooks(root):
        raise UncutError(f"the module {type(root).__name__} itself has hooks, which are called for the whole module")
    names, by_name = _input_names(root, inputs)
    modes = {module: module.training for module in root.modules()}
    try:
        with restored_random([]):
            with _unchanged(root):
                in_training = str(_traced(root, names, True, by_name=by_name, opens=opens))
            with _unchanged(root):
                graph = _traced(root, names, False, by_name=by_name, opens=opens)
                if str(graph) != in_training:
                    raise UncutError("its forward depends on self.training; use modules such as nn.Dropout instead")
                stages = _divided(root, graph)
            _check_parameters(root, stages)
            _check_outputs(root, stages, inputs)
    except UncutError:
        raise
    except Exception as error:  # user code on the placeholders of torch.fx can raise anything
        text = (str(error).strip().splitlines() or [""])[0]
        raise UncutError(f"torch.fx cannot trace its forward ({type(error).__name__}: {text})") from error
    finally:
        for module, training in modes.items():
            module.training = training
    for stage in stages:
        for name, module in stage.named_modules():
            module.training = root.get_submodule(name).training
    return stages


def _has_hooks(module: "torch.nn.Module") -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)


def _input_names(root: "torch.nn.Module", inputs: "torch.Tensor | ArrayGroup") -> tuple[list[str], bool]:
    if isinstance(inputs, ArrayGroup) and inputs.names is not None:
        return list(inputs.names), True
    count = len(inputs.arrays) if isinstance(inputs, ArrayGroup) else 1
    names = list(inspect.signature(root.forward).parameters)[:count]
    if len(names) < count:
        raise UncutError(f"its forward takes {len(names)} inputs, but the example has {count}")
    return names, False


@contextlib.contextmanager
def _unchanged(root: "torch.nn.Module") -> Iterator[None]:
    # Raises UncutError, and restores the attributes, if the trace changes attributes of modules or draws numbers.
    before = {module: dict(vars(module)) for module in root.modules()}
    random = library().get_rng_state()
    changed: list[str] = []
    try:
        yield
        if not library().equal(library().get_rng_state(), random):
            changed.append("draws random numbers of a fixed size")
    finally:
        for module, attributes in before.items():
            now = vars(module)
            for name in now.keys() | attributes.keys():
                if now.get(name) is attributes.get(name) or name == "training":
                    continue
                if not name.startswith("_tensor_constant"):  # of torch.fx
                    changed.append(f"sets the attribute {name} of {type(module).__name__}")
                now.pop(name, None)
                now |= {name: attributes[name]} if name in attributes else {}
    if changed:
        raise UncutError(f"its forward {changed[0]}")


def _traced(root: "torch.nn.Module", names: list[str], training: bool, *, by_name: bool, opens: bool) -> Any:
    for module in root.modules():
        module.training = training
    least = OPENED_SHARE * sum(p.numel() for p in root.parameters() if p.requires_grad) if opens else float("inf")
    tracer = _tracer_class()(names, by_name, least)
    with _recorded_factories(tracer):
        return tracer.trace(root)


@contextlib.contextmanager
def _recorded_factories(tracer: Any) -> Iterator[None]:
    torch, proxy = library(), importlib.import_module("torch.fx").Proxy
    before = {name: getattr(torch, name) for name in FACTORIES}

    def recording(function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            leaves = importlib.import_module("torch.utils._pytree").tree_leaves((arguments, named))
            if any(isinstance(leaf, proxy) for leaf in leaves):
                return tracer.create_proxy("call_function", function, arguments, named)
            return function(*arguments, **named)

        return call

    try:
        for name, function in before.items():
            setattr(torch, name, recording(function))
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


@functools.cache
def _tracer_class() -> Any:
    torch, fx = library(), importlib.import_module("torch.fx")

    class ChildTracer(fx.Tracer):  # type: ignore[name-defined]
        """Tracer that records one node for each call of a child module, and looks into containers of modules."""

        proxy_buffer_attributes = True

        def __init__(self, names: list[str], by_name: bool, opened: float) -> None:
            super().__init__()
            self._names, self._by_name, self._opened = names, by_name, opened
            self._state = self._modes()

        def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
            count = sum(parameter.numel() for parameter in m.parameters() if parameter.requires_grad)
            return _has_hooks(m) or (type(m) is not torch.nn.Sequential and not (count > self._opened and _nests(m)))

        def create_args_for_root(
            self, root_fn: Any, is_module: bool, concrete_args: Any = None
        ) -> tuple[Any, list[Any]]:
            inputs = [self.create_proxy("placeholder", name, (), {}) for name in self._names]

            def forward(root: Any, *inputs: Any) -> Any:
                if self._by_name:
                    return root.forward(**dict(zip(self._names, inputs, strict=True)))
                return root.forward(*inputs)

            return forward, [self.root, *inputs]

        def create_node(self, *arguments: Any, **options: Any) -> Any:
            if self._modes() != self._state:
                raise UncutError("its forward uses no_grad, set_grad_enabled or autocast")
            return super().create_node(*arguments, **options)

        @staticmethod
        def _modes() -> tuple[bool, ...]:
            enabled = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
            return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *enabled

    return ChildTracer


def _nests(module: "torch.nn.Module") -> bool:
    return any(child is not module and next(child.parameters(), None) is not None for child in module.modules())


def _divided(root: "torch.nn.Module", graph: Any) -> "list[torch.nn.Module]":
    fx = importlib.import_module("torch.fx")
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    (output,) = (node for node in graph.nodes if node.op == "output")
    stage_of, titles = _grouped(root, nodes)
    last = len(titles) - 1
    if last < 1:
        raise UncutError("its forward calls only one child module with parameters")
    values = dict.fromkeys(inputs, 0) | stage_of  # node -> the stage that computes it
    until = {node: max((stage_of.get(user, last) for user in node.users), default=0) for node in values}
    passed = [[node for node in values if values[node] <= stage < until[node]] for stage in range(last)]
    if not all(passed):
        raise UncutError("some of its child modules use no output of earlier child modules and no input")
    stages = []
    for stage, title in enumerate(titles):
        part, copies = fx.Graph(), dict[Any, Any]()

        def copied(node: Any, part: Any = part, copies: dict[Any, Any] = copies) -> Any:
            if node not in copies:  # a parameter or buffer, which each stage reads itself
                copies[node] = part.node_copy(node)
            return copies[node]

        if stage == 0:
            copies.update({node: part.placeholder(node.target) for node in inputs})
        else:
            taken = part.placeholder("values")
            several = len(passed[stage - 1]) > 1
            for index, node in enumerate(passed[stage - 1]):
                copies[node] = part.call_function(operator.getitem, (taken, index)) if several else taken
        for node in nodes:
            if stage_of[node] == stage:
                copies[node] = part.node_copy(node, copied)
        leaves = tuple(passed[stage]) if stage < last else ()
        part.output(fx.map_arg(output.args[0] if stage == last else leaves if len(leaves) > 1 else leaves[0], copied))
        stages.append(fx.GraphModule(root, part, class_name=title))
    return stages


def _grouped(root: "torch.nn.Module", nodes: list[Any]) -> tuple[dict[Any, int], list[str]]:
    # Returns the stage of each node, and the names of the first and the last module or parameter of each stage.
    least = LEAST_SHARE * sum(parameter.numel() for parameter in root.parameters() if parameter.requires_grad)
    seen: set[int] = set()
    stage_of: dict[Any, int] = {}
    titles: list[list[str]] = []
    size = 0
    for node in nodes:
        used = _trained(root, node)
        new = {id(parameter): parameter.numel() for _, parameter in used if id(parameter) not in seen}
        seen |= new.keys()
        if new and (size >= least or not titles):
            titles.append([])
            size = 0
        if new:
            size += sum(new.values())
            titles[-1].append(used[0][0])
        stage_of[node] = max(0, len(titles) - 1)
    return stage_of, [" to ".join(dict.fromkeys((names[0], names[-1]))) for names in titles]


def _trained(root: "torch.nn.Module", node: Any) -> "list[tuple[str, torch.nn.Parameter]]":
    # Returns the trained parameters that the node uses, with the name of the called module, or of the parameter.
    named: list[tuple[str, Any]] = []
    if node.op == "call_module":
        named += [(node.target, parameter) for parameter in root.get_submodule(node.target).parameters()]
    for each in node.all_input_nodes:
        if each.op == "get_attr":
            named.append((each.target, operator.attrgetter(each.target)(root)))
    return [pair for pair in named if isinstance(pair[1], library().nn.Parameter) and pair[1].requires_grad]


def _check_parameters(root: "torch.nn.Module", stages: "list[torch.nn.Module]") -> None:
    reached = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            raise UncutError(f"its traced forward does not use the parameter {name}")


def _check_outputs(
    root: "torch.nn.Module", stages: "list[torch.nn.Module]", inputs: "torch.Tensor | ArrayGroup"
) -> None:
    torch, pytree = library(), importlib.import_module("torch.utils._pytree")
    given: Any = inputs.given if isinstance(inputs, ArrayGroup) else (inputs,)
    with torch.no_grad():
        expected, y = (model(**given) if isinstance(given, dict) else model(*given) for model in (root, stages[0]))
        for stage in stages[1:]:
            y = stage(y)
    (leaves, tree), (others, other) = pytree.tree_flatten(expected), pytree.tree_flatten(y)
    same = tree == other and all(
        torch.allclose(one, two, rtol=1e-5, equal_nan=True) if isinstance(one, torch.Tensor) else one == two
        for one, two in zip(leaves, others, strict=True)
    )
    if not same:
        raise UncutError("the traced forward does not return the outputs of the module for the example")
