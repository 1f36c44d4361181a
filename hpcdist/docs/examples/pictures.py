"""Train a PyTorch residual network on images, with any parallel strategy and number of ranks.

mpirun -n 2 python pictures.py
HPCDIST_SET__PARALLEL__STRATEGY=zero3 mpirun -n 2 python pictures.py
HPCDIST_SET__PARALLEL__PIPELINE=2 HPCDIST_SET__PARALLEL__MICROBATCHES=4 mpirun -n 2 python pictures.py

The images are generated discs and squares; index your own dataset in the same way.
"""

import torch
from torch import nn

from hpcdist.training.pytorch import Training, recipe_of, wrap

STEPS, BATCH, SIZE = 60, 64, 16


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.past = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output channels for ``x``, of shape (samples, outputs, height / stride, width / stride)."""
        return torch.relu(self.body(x) + self.past(x))


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (noisy images of shape (count, 1, SIZE, SIZE), classes): class 0 is a disc, class 1 is a square."""
    kinds = torch.randint(2, (count,))
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centre = torch.randint(5, SIZE - 5, (2, count, 1, 1))
    radius = torch.randint(3, 5, (count, 1, 1))
    away = torch.stack([(y - centre[0]).abs(), (x - centre[1]).abs()])
    disc, square = away.pow(2).sum(0) <= radius**2, away.amax(0) <= radius
    drawn = torch.where(kinds.view(-1, 1, 1) == 0, disc, square).float()
    return (drawn + 0.2 * torch.randn(count, SIZE, SIZE)).unsqueeze(1), kinds


torch.manual_seed(0)  # the same on all ranks
inputs, targets = pictures(2048)
model = nn.Sequential(
    Block(1, 16, 1), Block(16, 32, 2), Block(32, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
recipe = {"run.steps": STEPS, "run.global_batch": BATCH, **recipe_of(optimizer)}

with Training(wrap(model, nn.CrossEntropyLoss(), example=inputs[:1]), recipe) as training:
    for step in training.steps:
        chosen = torch.randint(len(inputs) - 256, (BATCH,), generator=torch.Generator().manual_seed(step))
        rows = chosen[training.share]
        loss = training.step(inputs[rows], targets[rows])
        if step % 20 == 19 and training.rank == 0:
            print(f"step {step + 1}: loss {loss:.3f}")
    held_out = torch.arange(len(inputs) - 256, len(inputs))[training.data_rank :: training.data_size]
    loss = training.evaluate(inputs[held_out], targets[held_out])
    if training.rank == 0:
        print(f"held out: loss {loss:.3f}")
