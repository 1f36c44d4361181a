# ruff: noqa: PT009 (assertEqual of PyTorch's TestCase compares tensors)
"""Tests of FSDP, checkpoints and pipelines on the base classes, models and parity checks of PyTorch's tests.


The wheel of PyTorch has `FSDPTest` and its helpers in torch.testing._internal, but not the files below test/distributed
that derive from it. `suite` runs these classes on the ranks of a launcher, in a default group of the selected backend.
Each test compares with one process, or with PyTorch's DDP.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_fsdp import DEVICEInitMode, FSDPInitMode, FSDPTest, check_sharded_parity
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

STRATEGIES = [strategy.name for strategy in ShardingStrategy if "HYBRID" not in strategy.name]
CPU = torch.device("cpu")  # without it `FullyShardedDataParallel` wants an accelerator


class Fsdp(FSDPTest):
    """`FullyShardedDataParallel` against DDP: loss, and parameters after some steps, by `_test_fsdp_parity`."""

    @parametrize("strategy", STRATEGIES)
    @parametrize("model", ["NestedWrappedModule", "AlwaysWrapNestedWrappedModule", "TransformerWithSharedParams"])
    def test_parity(self, model, strategy):
        self._test_fsdp_parity(
            getattr(common_fsdp, model), FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, device_id=CPU,
            sharding_strategy=ShardingStrategy[strategy],
        )  # fmt: skip

    @parametrize("strategy", STRATEGIES)
    @parametrize("model", ["NonUniformReqGradNWM", "NestedWrappedModule"])
    def test_parity_of_original_parameters(self, model, strategy):
        self._test_fsdp_parity(
            getattr(common_fsdp, model), FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, device_id=CPU,
            sharding_strategy=ShardingStrategy[strategy], use_orig_params=True,
        )  # fmt: skip

    @parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
    def test_parity_of_hybrid_shards(self, strategy):
        mesh = init_device_mesh("cpu", (self.world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5))
        alone = DistributedDataParallel(copy.deepcopy(model))
        wrapped = FullyShardedDataParallel(
            model, device_id=CPU, device_mesh=mesh, sharding_strategy=ShardingStrategy[strategy]
        )
        for step in range(3):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + self.rank))
            losses = [train(candidate, inputs) for candidate in (alone, wrapped)]
            self.assertEqual(*losses)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
                self.assertEqual(ours.detach(), theirs.detach())

    @parametrize("norm", [1.0, 2.0, float("inf")])
    def test_clipped_norms(self, norm):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        alone = DistributedDataParallel(copy.deepcopy(model))
        wrapped = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(self.rank))
        for candidate in (alone, wrapped):
            candidate(inputs).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5, norm)
        self.assertEqual(wrapped.clip_grad_norm_(0.5, norm), expected)

    @parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_mixed_precision(self, dtype):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        alone = DistributedDataParallel(copy.deepcopy(model))
        policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
        wrapped = FullyShardedDataParallel(model, device_id=CPU, mixed_precision=policy)
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(self.rank))
        for candidate in (alone, wrapped):
            train(candidate, inputs)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
                self.assertEqual(ours.detach(), theirs.detach(), atol=2e-2, rtol=2e-2)

    @parametrize("accumulates", ["no_sync", "sync"])
    def test_accumulated_gradients(self, accumulates):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        alone = DistributedDataParallel(copy.deepcopy(model))
        wrapped = FullyShardedDataParallel(model, device_id=CPU)
        optimizers = [torch.optim.SGD(candidate.parameters(), lr=0.1) for candidate in (alone, wrapped)]
        for part in range(3):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(7 * part + self.rank))
            for candidate in (alone, wrapped):
                with candidate.no_sync() if accumulates == "no_sync" and part < 2 else torch.enable_grad():
                    candidate(inputs).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        with FullyShardedDataParallel.summon_full_params(wrapped):
            for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
                self.assertEqual(ours.detach(), theirs.detach())


def train(model, inputs, rate=0.1):
    """Make a step of SGD, and return the loss before the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = model(inputs).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


class FullyShard(FSDPTest):
    """`fully_shard` against a replicated model, by `check_sharded_parity`."""

    def _models(self, mesh, dim=8, **options):
        torch.manual_seed(42)
        model = common_fsdp.MLPStack(dim)
        alone = copy.deepcopy(model)
        for layer in model:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        return alone, model

    def _steps(self, alone, model, group=None, dim=8, steps=4):
        optimizers = [torch.optim.Adam(candidate.parameters(), lr=1e-2) for candidate in (alone, model)]
        torch.manual_seed(42 + self.rank)
        for _ in range(steps):
            inputs, losses = torch.randn(3, dim), []
            for candidate, optimizer in zip((alone, model), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(candidate(inputs).sum())
                losses[-1].backward()
                if candidate is alone:
                    for parameter in candidate.parameters():
                        dist.all_reduce(parameter.grad, group=group)
                        parameter.grad /= self.world_size
            self.assertEqual(*losses)
            check_sharded_parity(self, alone, model)
            for optimizer in optimizers:
                optimizer.step()
            check_sharded_parity(self, alone, model)

    @parametrize("reshards", [True, False, 2])
    @parametrize("dim", [8, 7])
    def test_parity(self, reshards, dim):
        if reshards == 2 and self.world_size == 2:
            reshards = True
        self._steps(
            *self._models(init_device_mesh("cpu", (self.world_size,)), dim, reshard_after_forward=reshards), dim=dim
        )

    def test_parity_of_hybrid_shards(self):
        mesh = init_device_mesh("cpu", (self.world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        self._steps(*self._models(mesh))

    @parametrize("prefetches", [1, 2])
    def test_parity_with_prefetches(self, prefetches):
        alone, model = self._models(init_device_mesh("cpu", (self.world_size,)))
        layers = list(model)
        for place, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + prefetches])
            layer.set_modules_to_backward_prefetch(layers[max(place - prefetches, 0) : place][::-1])
        self._steps(alone, model)

    def test_parity_of_the_transformer(self):
        torch.manual_seed(0)
        model = common_dtensor.Transformer(common_dtensor.ModelArgs(dropout_p=0.0))
        alone = copy.deepcopy(model)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        tokens = torch.randint(0, 8, (2, 8), generator=torch.Generator().manual_seed(self.rank))
        for candidate in (alone, model):
            candidate(tokens).sum().backward()
        for parameter in alone.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG if dist.get_backend() != "gloo" else dist.ReduceOp.SUM)
            parameter.grad /= self.world_size if dist.get_backend() == "gloo" else 1
        check_sharded_parity(self, alone, model)

    @parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_types_of_reductions(self, dtype):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        alone, model = self._models(init_device_mesh("cpu", (self.world_size,)), mp_policy=policy)
        kinds, scatter = [], dist.reduce_scatter_single

        def seen(*args, **kwargs):
            return common_fsdp.reduce_scatter_with_assert(
                self, scatter, lambda output: kinds.append(output.dtype), *args, **kwargs
            )

        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.rank))
        with common_fsdp.patch_reduce_scatter(seen):
            model(inputs).sum().backward()
        self.assertEqual(set(kinds), {dtype})
        alone.to(torch.bfloat16)(inputs.to(torch.bfloat16)).sum().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            mean = theirs.grad.to(dtype)
            dist.all_reduce(mean)
            self.assertEqual(ours.grad.full_tensor(), mean.float() / self.world_size, atol=3e-2, rtol=3e-2)

    def test_accumulated_gradients(self):
        alone, model = self._models(init_device_mesh("cpu", (self.world_size,)))
        for part in range(3):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(5 * part + self.rank))
            model.set_requires_gradient_sync(part == 2)
            for candidate in (alone, model):
                candidate(inputs).sum().backward()
        for parameter in alone.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        check_sharded_parity(self, alone, model)

    @parametrize("norm", [1.0, 2.0, float("inf")])
    def test_clipped_norms(self, norm):
        alone, model = self._models(init_device_mesh("cpu", (self.world_size,)))
        inputs = torch.randn(4, 8)  # of the same seed everywhere
        for candidate in (alone, model):
            candidate(inputs).sum().backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm)
        clipped = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm)
        self.assertEqual(clipped.full_tensor(), expected)
        check_sharded_parity(self, alone, model)

    @parametrize("checkpoints", [False, True])
    def test_parity_with_tensor_parallelism(self, checkpoints):
        mesh = init_device_mesh("cpu", (self.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(42)
        model = common_fsdp.MLPStack(6)
        alone = copy.deepcopy(model)
        model.parallelize(mesh["tp"], mesh["dp"], checkpoints, reshard_after_forward=True)
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
        for candidate in (alone, model):
            candidate(inputs).sum().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(theirs.grad, group=mesh["dp"].get_group())
            self.assertEqual(ours.grad.full_tensor(), theirs.grad / mesh["dp"].size())


class States(FSDPTest, VerifyStateDictMixin):
    """State dicts of sharded models and their checkpoints, by `VerifyStateDictMixin`."""

    def _trained(self, kind):
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
        alone = copy.deepcopy(model)
        if kind == "fully_shard":
            for layer in (model[0], model[2], model):
                fully_shard(layer)
        elif kind == "fsdp":
            mesh = init_device_mesh("cpu", (self.world_size,))
            model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, device_mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        optimizers = [torch.optim.AdamW(candidate.parameters(), lr=1e-2) for candidate in (alone, model)]
        for step in range(2):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            for candidate, optimizer in zip((alone, model), optimizers, strict=True):
                candidate(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return alone, model, *optimizers

    @parametrize("kind", ["fully_shard", "fsdp", "ddp"])
    def test_state_dicts(self, kind):
        alone, model, optimizer, sharded_optimizer = self._trained(kind)
        self._verify_msd(alone.state_dict(), states.get_model_state_dict(model))
        self._verify_osd(
            alone, optimizer, optimizer.state_dict(), states.get_optimizer_state_dict(model, sharded_optimizer)
        )

    def test_full_state_dicts(self):
        alone, model, *_ = self._trained("fully_shard")
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = states.get_model_state_dict(model, options=options)
        if self.rank == 0:
            self._verify_msd(alone.state_dict(), whole)
        other = self._trained("fully_shard")[1]
        for parameter in other.parameters():
            parameter.data.zero_()
        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        states.set_model_state_dict(other, whole if self.rank == 0 else {}, options=options)
        self._verify_msd(alone.state_dict(), states.get_model_state_dict(other))

    @parametrize("is_async", [False, True])
    @parametrize("kind", ["fully_shard", "fsdp", "ddp"])
    @with_temp_dir
    def test_checkpoints(self, kind, is_async):
        alone, model, _, optimizer = self._trained(kind)
        saved = dict(zip(("model", "optimizer"), states.get_state_dict(model, optimizer), strict=True))
        if is_async:
            dcp.async_save(saved, checkpoint_id=self.temp_dir).result()
        else:
            dcp.save(saved, checkpoint_id=self.temp_dir)
        dist.barrier()
        _, other, _, other_optimizer = self._trained("fully_shard")
        for parameter in other.parameters():
            parameter.data.zero_()
        loaded = dict(zip(("model", "optimizer"), states.get_state_dict(other, other_optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=self.temp_dir)
        states.set_state_dict(
            other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        self._verify_msd(alone.state_dict(), states.get_model_state_dict(other))


class Pipelines(FSDPTest):
    """Schedules of `torch.distributed.pipelining` against one process."""

    @parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS",
                              "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])  # fmt: skip
    def test_schedule(self, schedule):
        local_data = 1 if schedule in ("ScheduleGPipe", "Schedule1F1B") else 2
        count = local_data * self.world_size
        torch.manual_seed(8)
        whole = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)))
        alone = copy.deepcopy(whole)
        places = [self.rank + part * self.world_size for part in range(local_data)]
        if schedule == "ScheduleZBVZeroBubble":
            places = [self.rank, count - 1 - self.rank]
        stages = [PipelineStage(whole[place], place, count, torch.device("cpu")) for place in places]
        kind = getattr(schedules, schedule)
        loss = lambda result, expected: (result - expected).square().sum()  # noqa: E731
        plan = kind(stages[0] if local_data == 1 else stages, 2 * self.world_size, loss_fn=loss, scale_grads=False)
        inputs, targets = torch.randn(4 * self.world_size, 8), torch.randn(4 * self.world_size, 8)
        losses = []
        arguments = (inputs,) if 0 in places else ()
        last = count - 1 in places
        plan.step(*arguments, **({"target": targets, "losses": losses} if last else {}))
        loss(alone(inputs), targets).backward()
        for place in places:
            for ours, theirs in zip(whole[place].parameters(), alone[place].parameters(), strict=True):
                self.assertEqual(ours.grad, theirs.grad)


SUITES = {"fsdp": (Fsdp, FullyShard, States), "pipelining": (Pipelines,)}
for _kind in (*SUITES["fsdp"], *SUITES["pipelining"]):
    instantiate_parametrized_tests(_kind)
