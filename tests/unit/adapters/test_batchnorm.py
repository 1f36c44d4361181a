"""SyncBatchNorm modules on several replicas equal BatchNorm modules on all samples in one process."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from hpcdist.adapters.torch.batchnorm import StatisticsAxis, synchronised
from hpcdist.adapters.torch.model import wrap
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.strategies.schedule.step import NanFinder
from hpcdist.training.script import Training


@pytest.mark.parametrize("sizes", [(4,), (1, 0, 6), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-11), ("float32", 1e-5)])
@pytest.mark.parametrize(("dims", "affine", "momentum", "offset"), [((), True, 0.1, 0.0), ((3, 2), False, None, 100.0)])
def test_synchronised_modules_equal_one_process(sizes, dtype, bound, dims, affine, momentum, offset):
    """Outputs, gradients and statistics of two passes, with uneven and empty replicas and a mean far from zero."""
    torch.manual_seed(0)
    whole = (2 * torch.randn(sum(sizes), 5, *dims, dtype=torch.float64) + offset).to(getattr(torch, dtype))
    dy = torch.randn_like(whole)
    alone = (nn.BatchNorm2d if dims else nn.BatchNorm1d)(5, affine=affine, momentum=momentum).to(whole.dtype)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    modules = [nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)) for _ in sizes]
    leaves = [x.clone().requires_grad_() for x in whole.split(sizes)]

    def body(comm):
        module, x = modules[comm.rank], leaves[comm.rank]
        with synchronised([module, module], StatisticsAxis(comm, NanFinder())):
            y, again = module(x), module(2 * x)
            (y + again).backward(dy.split(sizes)[comm.rank])
        assert "forward" not in vars(module)
        return y.detach()

    outputs = run_threads(len(sizes), body)
    x = whole.clone().requires_grad_()
    y, again = alone(x), alone(2 * x)
    (y + again).backward(dy)
    close = {"rtol": bound, "atol": bound * (1 + offset)}
    torch.testing.assert_close(torch.cat(outputs), y.detach(), **close)
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves]), x.grad, **close)
    for name, parameter in alone.named_parameters():
        total = sum(module.get_parameter(name).grad for module in modules)
        torch.testing.assert_close(total, parameter.grad, **close)
    for name, buffer in alone.named_buffers():
        for module in modules:
            torch.testing.assert_close(module.get_buffer(name), buffer, rtol=bound, atol=0)
            assert torch.equal(module.get_buffer(name), modules[0].get_buffer(name))


def test_single_value_per_channel_is_rejected():
    module = nn.SyncBatchNorm(3)

    def body(comm):
        with synchronised([module], StatisticsAxis(comm, NanFinder())):
            module(torch.ones(1, 3))

    with pytest.raises(UsageError, match="one value per channel on all replicas"):
        run_threads(1, body)


class Scaled(nn.SyncBatchNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (lambda: Scaled(4), r"1 \(Scaled\) has its own forward pass"),
        (lambda: nn.SyncBatchNorm(4, process_group=object()), r"1 \(SyncBatchNorm\) has a process group"),
    ],
)
def test_modules_that_cannot_be_synchronised_are_rejected(norm, message):
    with pytest.raises(UsageError, match=message):
        wrap(nn.Sequential(nn.Linear(5, 4), norm()), nn.functional.mse_loss)


@pytest.mark.parametrize("keys", [{"parallel.strategy": "local_sgd"}, {"run.logical_shards": 4}])
def test_strategies_without_common_micro_batches_are_rejected(keys, tmp_path):
    model = wrap(nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4)), nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match="SyncBatchNorm modules cannot be used with"):
        Training(model, {"run.steps": 2, "run.global_batch": 4} | keys, out=tmp_path / "run")


def test_stage_that_cannot_run_without_samples_names_the_cure():
    module = nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.Unflatten(1, (-1, 4)), nn.Linear(4, 1))
    module[2].forward = lambda x: x.view(len(x), -1)  # not possible for 0 samples
    with pytest.raises(UsageError, match=r"cannot run without samples: .* parallel\.microbatches samples"):
        wrap(module, nn.functional.mse_loss).stages[1]._run(torch.zeros(0, 4))
