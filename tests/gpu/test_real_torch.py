"""The torch.distributed backend on a real GPU that its ranks share: order of streams, DDP, overlap."""

from pathlib import Path

import pytest

from hpcdist.arrays.gpu import device
from hpcdist.collectives import nccl
from hpcdist.errors import MissingCapabilityError

torch = pytest.importorskip("torch")
PROGRAM = Path(__file__).with_name("torch_job.py")
ALGORITHMS = ["native", "ring", "node_shared", "nccl"]


@pytest.fixture
def figures_of_ranks(job, cupy):
    """``figures_of_ranks(case, algorithm)``: run a case on two ranks and return the measurements of each rank."""
    if not torch.cuda.is_available():
        pytest.skip(f"PyTorch {torch.__version__} sees no GPU")

    def run(case, algorithm):
        if algorithm == "nccl":
            try:
                version = int(device.nccl().get_version())
            except MissingCapabilityError as error:
                pytest.skip(str(error))
            if cupy.cuda.runtime.getDeviceCount() < 2 and version < nccl.SEVERAL_RANKS_A_GPU:
                pytest.skip(f"NCCL {version} refuses ranks that share a GPU, and so do we")
        return job(PROGRAM, 2, case, algorithm, **{nccl.SEVERAL_RANKS_VARIABLE: "1"})["ranks"]

    return run


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operations_run_in_order_with_kernels_of_a_side_stream(figures_of_ranks, algorithm):
    for right in figures_of_ranks("operations", algorithm):
        assert all(right.values()), right


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ddp_parameters_match_one_process(figures_of_ranks, algorithm):
    assert all(rank["apart"] < 1e-5 for rank in figures_of_ranks("ddp", algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_asynchronous_allreduce_returns_before_the_gpu_is_done(figures_of_ranks, algorithm):
    for rank in figures_of_ranks("overlap", algorithm):
        assert rank["right"] and rank["called_s"] < 0.2 * rank["whole_s"], rank
