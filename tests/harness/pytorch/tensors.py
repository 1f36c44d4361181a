# ruff: noqa: PT009 (assertEqual of PyTorch's TestCase compares tensors)
"""Tests of DTensor on the base class, models and converter of PyTorch's tests, like the tests of `sharding`."""

import copy
import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter, DTensorTestBase
from torch.utils._pytree import tree_leaves, tree_map_only

from hpcdist.errors import HpcdistError

SAMPLES = 3  # of the inputs that PyTorch has for each operator
MOST_ELEMENTS = 4096
PLACEMENTS = {"shard0": Shard(0), "shard1": Shard(1), "replicate": Replicate(), "partial": Partial()}


def full_values(tensor):
    """Return the full values of a DTensor, or a plain tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Tensors(DTensorTestBase):
    """DTensor: redistribution, tensor parallelism, and operators on the sample inputs of PyTorch."""

    @property
    def _sum_of_ranks(self):
        return self.world_size * (self.world_size + 1) / 2

    @parametrize("shape", [(8, 12), (5, 3), (1, 7), (3, 4, 5)])
    @parametrize("source", sorted(PLACEMENTS))
    @parametrize("target", ["replicate", "shard0", "shard1"])
    def test_redistribute(self, source, target, shape):
        """The full values do not change, and neither do the gradients."""
        mesh = self.build_device_mesh()
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        if source == "partial":
            tensor = DTensor.from_local(whole * (self.rank + 1), mesh, [Partial()])
            whole = whole * self._sum_of_ranks
        else:
            tensor = distribute_tensor(whole, mesh, [PLACEMENTS[source]])
        tensor.requires_grad_(True)
        other = tensor.redistribute(mesh, [PLACEMENTS[target]])
        self.assertEqual(other.full_tensor(), whole)
        expected = distribute_tensor(whole, mesh, [PLACEMENTS[target]])
        self.assertEqual(other.to_local(), expected.to_local())
        (other * 3).sum().backward()
        self.assertEqual(tensor.grad.full_tensor(), torch.full(shape, 3.0))

    @parametrize("target", ["shard0", "shard1", "replicate"])
    @parametrize("source", sorted(PLACEMENTS))
    def test_redistribute_on_two_axes(self, source, target):
        mesh = init_device_mesh("cpu", (self.world_size // 2, 2))
        whole = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
        placements = [PLACEMENTS[source], Replicate()]
        if source == "partial":
            tensor = DTensor.from_local(whole, mesh, placements)
            whole = whole * mesh.size(0)
        else:
            tensor = distribute_tensor(whole, mesh, placements)
        for first, second in itertools.product([PLACEMENTS[target]], [Replicate(), Shard(0), Shard(1)]):
            self.assertEqual(tensor.redistribute(mesh, [first, second]).full_tensor(), whole)

    @parametrize("op", ["sum", "avg", "max", "min", "product"])
    @parametrize("target", ["replicate", "shard0"])
    def test_redistribute_partial(self, op, target):
        mesh = self.build_device_mesh()
        parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(self.world_size)]
        stacked = torch.stack(parts)
        expected = {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin}
        expected["product"] = stacked.prod
        tensor = DTensor.from_local(parts[self.rank], mesh, [Partial(op)])
        self.assertEqual(tensor.redistribute(mesh, [PLACEMENTS[target]]).full_tensor(), expected[op](0))

    @parametrize("sequence", [False, True])
    @parametrize("shares", [False, True])
    def test_transformer(self, sequence, shares):
        """One step has the loss and the gradients of one process."""
        mesh = self.build_device_mesh()
        arguments = common_dtensor.ModelArgs(dropout_p=0.0, use_attn_mask=False, weight_tying=shares)
        torch.manual_seed(0)
        model = common_dtensor.Transformer(arguments)
        alone = copy.deepcopy(model)
        model = common_dtensor.Transformer.parallelize(model, mesh, sequence)
        tokens = torch.randint(0, 8, (8, 8), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            with sdpa_kernel(SDPBackend.MATH):  # DTensor has no rule for the fused attention of processors
                outputs = [candidate(tokens) for candidate in (alone, model)]
            self.assertEqual(full_values(outputs[1]), outputs[0])
            for output in outputs:
                output.square().mean().backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                self.assertEqual(full_values(ours.grad), theirs.grad)
                ours.grad = theirs.grad = None

    def test_loss_parallel(self):
        mesh = self.build_device_mesh()
        scores = torch.randn(6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        targets = torch.randint(0, 16, (6,), generator=torch.Generator().manual_seed(1))
        expected = nn.functional.cross_entropy(scores, targets)
        expected.backward()
        tensor = distribute_tensor(scores.detach(), mesh, [Shard(1)]).requires_grad_(True)
        with loss_parallel():
            loss = nn.functional.cross_entropy(tensor, targets)
            loss.backward()
        self.assertEqual(loss.full_tensor(), expected)
        self.assertEqual(tensor.grad.full_tensor(), scores.grad)

    def test_embedding_and_linear_layers(self):
        mesh = self.build_device_mesh()
        torch.manual_seed(4)
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        alone = copy.deepcopy(model)
        plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        tokens = torch.randint(0, 12, (5, 3), generator=torch.Generator().manual_seed(1))
        for candidate in (alone, model):
            candidate(tokens).square().sum().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            self.assertEqual(ours.grad.full_tensor(), theirs.grad)

    def _compare_operator(self, info):
        """Compare an operator on all even placements of its inputs with the operator on plain tensors."""
        mesh, compared, reason = self.build_device_mesh(), 0, "no inputs that can be distributed"
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), SAMPLES):
            arguments, keywords = (sample.input, *sample.args), sample.kwargs
            tensors = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, torch.Tensor)]
            if not tensors or sum(tensor.numel() for tensor in tensors) > MOST_ELEMENTS:
                continue
            expected = info.op(*arguments, **keywords)
            converter = DTensorConverter(mesh, arguments, keywords)
            for others, other_keywords in itertools.islice(converter, 6):
                if not converter.successful():
                    break
                try:
                    result = info.op(*others, **other_keywords)
                except (NotImplementedError, RuntimeError) as error:
                    if isinstance(error, HpcdistError):
                        raise
                    reason = str(error).splitlines()[0]  # DTensor refuses it, with any backend
                    continue
                whole = tree_map_only(DTensor, lambda local_data: local_data.full_tensor(), result)
                self.assertEqual(whole, expected)
                compared += 1
        if not compared:
            self.skipTest(reason)


OPERATORS = {
    "add", "addmm", "amax", "argmax", "bmm", "cat", "chunk", "clamp", "cumsum", "div", "exp", "expand", "flatten",
    "gather", "index_select", "linalg.vector_norm", "log_softmax", "masked_fill", "matmul", "mean", "mm", "mul",
    "nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.linear", "nn.functional.nll_loss", "nn.functional.relu", "permute", "prod", "reshape", "scatter",
    "softmax", "sort", "split", "squeeze", "stack", "sum", "topk", "transpose", "tril", "unsqueeze", "var", "where",
}  # fmt: skip


def add_operators():
    """Add a test of each operator to `Tensors`."""
    for info in common_methods_invocations.op_db:
        if info.name in OPERATORS:
            name = f"test_operator_{info.name}_{info.variant_test_name}".rstrip("_").replace(".", "_")
            setattr(Tensors, name, lambda self, info=info: self._compare_operator(info))


add_operators()
instantiate_parametrized_tests(Tensors)
SUITES = {"tensor": (Tensors,)}
