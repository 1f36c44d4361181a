"""A rank of a PyTorch program on GPUs over the backend hpcdist.


The first argument names the case, the second the algorithm of the group. Rank 0 prints the results as JSON. Kernels
that only take time are queued before each operation that must be waited for.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hpcdist.torch

CYCLES = 100_000_000  # of the GPU, about 50 ms
COUNT = (9 << 20) + 5


def operations(device: torch.device) -> dict[str, Any]:
    """Return for each operation whether it ran between the kernels before and after it on a side stream."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = {}
    for is_async in (False, True):
        for name, (call, expected) in _cases(ranks).items():
            with torch.cuda.stream(torch.cuda.Stream(device)):
                local_data = torch.zeros(4 * ranks, 1000, device=device)
                torch.cuda._sleep(CYCLES)
                local_data += rank + torch.arange(4 * ranks, device=device)[:, None]
                result, work = call(local_data, is_async)
                del local_data  # its memory may not be given away yet
                other = torch.full((4 * ranks, 1000), -7.0, device=device)
                if work is not None:
                    work.wait()
                result = result + 1
                rows = torch.arange(4 * ranks, device=device)[:, None]
                requested = expected(torch.stack([rows + each for each in range(ranks)])) + 1
                same = bool((result == requested).all()) and bool((other == -7).all())
            right[f"{name}, {'async' if is_async else 'blocking'}"] = same
    return right


def _cases(ranks: int) -> dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor]]]:
    """Return the call and the expected result of each operation. A result is computed from (ranks, rows, 1)."""
    rank = dist.get_rank()

    def all_reduce(local_data: torch.Tensor, is_async: bool) -> Any:
        return local_data, dist.all_reduce(local_data, async_op=is_async)

    def broadcast(local_data: torch.Tensor, is_async: bool) -> Any:
        return local_data, dist.broadcast(local_data, ranks - 1, async_op=is_async)

    def all_gather(local_data: torch.Tensor, is_async: bool) -> Any:
        received = local_data.new_empty(ranks * len(local_data), local_data.shape[1])
        return received, dist.all_gather_into_tensor(received, local_data, async_op=is_async)

    def reduce_scatter(local_data: torch.Tensor, is_async: bool) -> Any:
        received = local_data.new_empty(len(local_data) // ranks, local_data.shape[1])
        return received, dist.reduce_scatter_tensor(received, local_data, async_op=is_async)

    def all_to_all(local_data: torch.Tensor, is_async: bool) -> Any:
        received = torch.empty_like(local_data)
        return received, dist.all_to_all_single(received, local_data, async_op=is_async)

    def strided(local_data: torch.Tensor, is_async: bool) -> Any:
        result = local_data.t().contiguous().t()
        return result, dist.all_reduce(result, async_op=is_async)

    def message(local_data: torch.Tensor, is_async: bool) -> Any:
        received = torch.empty_like(local_data)
        works = [dist.irecv(received, (rank - 1) % ranks), dist.isend(local_data, (rank + 1) % ranks)]
        for work in works:
            work.wait()
        return received, None

    return {
        "all_reduce": (all_reduce, lambda inputs: inputs.sum(0)),
        "all_reduce of a strided tensor": (strided, lambda inputs: inputs.sum(0)),
        "broadcast": (broadcast, lambda inputs: inputs[-1]),
        "all_gather": (all_gather, lambda inputs: inputs.flatten(0, 1)),
        "reduce_scatter": (reduce_scatter, lambda inputs: inputs.sum(0)[4 * rank : 4 * rank + 4]),
        "all_to_all": (all_to_all, lambda inputs: inputs[:, 4 * rank : 4 * rank + 4].flatten(0, 1)),
        "message": (message, lambda inputs: inputs[rank - 1]),
    }


def ddp(device: torch.device) -> dict[str, Any]:
    """Return the largest relative difference between DDP parameters and parameters of one process with all samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)]
    alone = torch.nn.Sequential(*layers).to(device)
    module = torch.nn.Sequential(*[type(each)(*_sizes(each)) for each in layers]).to(device)
    module.load_state_dict(alone.state_dict())
    model = torch.nn.parallel.DistributedDataParallel(module, device_ids=[device.index], bucket_cap_mb=0.2)
    inputs = torch.randn(6, 8 * ranks, 256, device=device)
    for step in range(6):
        for local_input, samples in ((model, inputs[step][rank::ranks]), (alone, inputs[step])):
            local_input.zero_grad()
            local_input(samples).square().mean().backward()
            with torch.no_grad():
                for parameter in local_input.parameters():
                    parameter -= 0.05 * parameter.grad
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return {"apart": max(float(((one - other).abs().max() / other.abs().max()).detach()) for one, other in pairs)}


def _sizes(layer: Any) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else ()


def overlap(device: torch.device) -> dict[str, Any]:
    """Return the seconds of an asynchronous call, and of the slow kernels that are queued before it."""
    tensor = torch.ones(COUNT, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    torch.cuda._sleep(10 * CYCLES)
    work = dist.all_reduce(tensor, async_op=True)
    called_s, is_completed = time.perf_counter() - start, work.is_completed()
    work.wait()
    doubled = 2 * tensor
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - start
    right = bool((doubled == 2 * dist.get_world_size() ** 2).all()) and work.is_completed()
    return {"called_s": called_s, "whole_s": whole_s, "right": right and not is_completed}


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("hpcdist", device_id=device, pg_options=hpcdist.torch.Options(algorithm=sys.argv[2]))
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, globals()[sys.argv[1]](device))
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": result}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
