"""Train a U-Net that removes noise from pictures (denoising diffusion), with DDP, restarts and stop requests.

hpcdist run -n 2 --restarts 3 --out runs/unet -- python unet.py
hpcdist run -n 8 --restarts 3 --out runs/unet -- python unet.py --data pictures.npy --steps 20000 --batch 256

The pictures are generated discs and squares, or the array of `--data`: float32 values from -1 to 1, of shape
(pictures, channels, height, width), with height and width divisible by 4. Samples and noise depend on the step, not on
the number of ranks. `hpcdist report runs/unet` shows the loss (mean squared error of the pictures) and the PSNR.
"""

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import hpcdist.torch

FEATURES = 16  # of the noise level
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Two convolutions with a residual connection. The noise level shifts the channels between them."""

    def __init__(self, inputs: int, outputs: int, options: argparse.Namespace) -> None:
        super().__init__()

        def convolution(channels: int, *before: nn.Module) -> nn.Sequential:
            # GroupNorm is exact on any number of ranks. The statistics of BatchNorm are those of a rank's micro-batch.
            norm = nn.GroupNorm(4, channels) if options.norm == "group" else nn.BatchNorm2d(channels)
            return nn.Sequential(norm, nn.SiLU(), *before, nn.Conv2d(channels, outputs, 3, padding=1))

        self.first = convolution(inputs)
        self.level = nn.Linear(FEATURES, outputs)
        self.second = convolution(outputs, nn.Dropout(options.dropout))
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return ``outputs`` channels for ``x`` of shape (samples, inputs, height, width)."""
        return self.skip(x) + self.second(self.first(x) + self.level(level)[:, :, None, None])


class UNet(nn.Module):
    """U-Net of three resolutions that returns the clean pictures for noisy pictures and their noise levels."""

    def __init__(self, channels: int, options: argparse.Namespace) -> None:
        super().__init__()
        one, two, four = (factor * options.width for factor in (1, 2, 4))
        self.stem = nn.Conv2d(channels, one, 3, padding=1)
        self.down = nn.ModuleList([Block(one, one, options), Block(one, two, options)])
        self.middle = Block(two, four, options)
        self.up = nn.ModuleList([Block(four + two, two, options), Block(two + one, one, options)])
        self.head = nn.Conv2d(one, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return pictures of the shape of ``x``. ``level``: (samples,), from 0 (clean) to 1 (only noise)."""
        angles = level[:, None] * 2.0 ** torch.arange(FEATURES // 2, device=level.device)
        features = torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype)
        x, skips = self.stem(x), []
        for block in self.down:
            skips.append(block(x, features))
            x = functional.avg_pool2d(skips[-1], 2)
        x = self.middle(x, features)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), skips.pop()], 1), features)
        return self.head(x)


class NoisyPictures(Dataset[Sample]):
    """Samples (noisy picture, noise level, clean picture). The noise depends on the step and the index."""

    def __init__(self, pictures: torch.Tensor) -> None:
        self.pictures = pictures

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """Return the sample of ``key``: (step, index)."""
        step, index = key
        clean = self.pictures[index]
        generator = torch.Generator().manual_seed(step * len(self.pictures) + index)
        level = torch.rand((), generator=generator, dtype=clean.dtype)
        noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
        angle = level * math.pi / 2
        return angle.cos() * clean + angle.sin() * noise, level, clean


def discs_and_squares(count: int, size: int = 16) -> torch.Tensor:
    """Return generated pictures of shape (count, 1, size, size): 1 inside of a disc or a square, -1 outside."""
    generator = torch.Generator().manual_seed(0)
    is_disc = torch.rand((count, 1, 1), generator=generator) < 0.5
    centre = torch.randint(5, size - 5, (2, count, 1, 1), generator=generator)
    radius = torch.randint(2, 5, (count, 1, 1), generator=generator)
    distance = (torch.stack(torch.meshgrid(2 * [torch.arange(size)], indexing="ij"))[:, None] - centre).abs()
    inside = torch.where(is_disc, distance.square().sum(0) <= radius**2, distance.amax(0) <= radius)
    return inside.float().mul(2).sub(1).unsqueeze(1)


def indices(first: int, count: int, options: argparse.Namespace) -> Iterator[list[tuple[int, int]]]:
    """Yield this rank's (step, index) pairs of each step from ``first`` on. The order is new in each epoch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    steps_per_epoch = count // options.batch
    for step in range(first, options.steps):
        epoch, within = divmod(step, steps_per_epoch)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        chosen = order[within * options.batch : (within + 1) * options.batch]
        yield [(step, index) for index in chosen[rank::world].tolist()]


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Return the parameter groups of ``model``: no weight decay for biases and norms, which have one dim."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.01},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]


def rate_factor(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the learning rate in ``step``: linear warm-up, then half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def psnr(squared_error: float) -> float:
    """Return the peak signal-to-noise ratio of pictures in dB. Their values range from -1 to 1."""
    return 10 * math.log10(4 / squared_error)


def held_out_error(average: AveragedModel, data: NoisyPictures, device: torch.device) -> float:
    """Return the mean squared error of ``average`` on ``data``. Every rank computes its share. Collective."""
    for buffer in average.buffers():  # statistics of BatchNorm differ by rank; the checkpoint has those of rank 0
        dist.broadcast(buffer, 0)
    average.eval()
    total = torch.zeros(2, dtype=torch.float64)
    share = [(0, index) for index in range(len(data.pictures))][dist.get_rank() :: dist.get_world_size()]
    with torch.no_grad():
        for noisy, level, clean in DataLoader(data, batch_size=32, sampler=share, generator=torch.Generator()):
            error = (average(noisy.to(device), level.to(device)).cpu() - clean).square()
            total += torch.tensor([error.sum(), error.numel()], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(options: argparse.Namespace) -> None:
    """Train, and resume if the run directory has a checkpoint. Collective."""
    dist.init_process_group("hpcdist")
    rank, world, out = dist.get_rank(), dist.get_world_size(), os.environ.get("HPCDIST_RUN_DIR", "out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float64 if options.precision == "float64" else torch.float32

    pictures = torch.from_numpy(np.load(options.data)) if options.data else discs_and_squares(640)
    train, held_out = (NoisyPictures(part.to(dtype)) for part in (pictures[:-128], pictures[-128:]))

    torch.manual_seed(0)
    model = UNet(pictures.shape[1], options).to(device, dtype)
    if options.norm == "batch" and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # PyTorch has it only for GPUs
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(groups(model), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, 10, options.steps))
    torch.manual_seed(rank)  # for dropout, which differs by rank

    state = {"model": parallel, "average": average, "optimizer": optimizer, "schedule": schedule}
    state["random"] = hpcdist.torch.RandomState()
    saved = hpcdist.torch.load(out, state | {"step": 0})
    begin = saved["step"] if saved else 0
    if rank == 0:
        print(f"from step {begin} on {world} ranks", flush=True)

    def save(steps: int, background: bool = False) -> None:
        hpcdist.torch.save(out, state | {"step": steps}, step=steps, background=background)

    # The loader draws a seed. Drawn from PyTorch's default generator, it would change dropout after a resume.
    batches = indices(begin, len(train.pictures), options)
    loader = DataLoader(train, batch_sampler=batches, generator=torch.Generator())
    step = begin
    for batch in hpcdist.torch.until_stop(loader):
        parallel.train()
        micro_batches = list(zip(*(tensor.to(device).chunk(options.accumulate) for tensor in batch), strict=True))
        loss = torch.zeros((), device=device, dtype=dtype)
        for number, (noisy, level, clean) in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else parallel.no_sync():  # exchange gradients once in a step
                with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
                    error = functional.mse_loss(parallel(noisy, level), clean) / len(micro_batches)
                error.backward()
            loss += error.detach()
        with hpcdist.torch.phase("update"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        step += 1
        error = loss.item()
        samples = options.batch / world
        hpcdist.torch.log(step, loss=error, samples=samples, learning_rate=rate, psnr=psnr(error), gradient_norm=norm)
        if step % options.every == 0:
            save(step, background=True)
            with hpcdist.torch.phase("validation"):
                error = held_out_error(average, held_out, device)
            hpcdist.torch.log(step, validation_loss=error, held_out_psnr=psnr(error))
            if rank == 0:
                print(f"step {step}: held-out PSNR {psnr(error):.2f} dB", flush=True)
    hpcdist.torch.exit_if_stopped(lambda: save(step))

    save(step)
    error = held_out_error(average, held_out, device)
    if rank == 0:
        torch.save(average.module.state_dict(), Path(out) / "unet.pt")
        print(f"{step} steps: held-out error {error:.6g}, PSNR {psnr(error):.2f} dB")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="file of pictures (.npy)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step on all ranks together")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a rank in a step")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--norm", choices=["group", "batch"], default="group")
    parser.add_argument("--precision", choices=["bfloat16", "float32", "float64"], default="bfloat16")
    main(parser.parse_args())
