"""A training in five styles, for the study `kills`: DDP, FSDP2, a checkpoint format of its own, Trainer, Training.

    hpcdist run -n 2 --restarts 5 --out run -- python restarted_script.py STYLE STEPS PAUSE_S

The run directory gets the process id of each rank, the first step of each start, the last step, and at the end the last
loss and a digest of the parameters. Every step sleeps ``PAUSE_S`` seconds.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

EVERY: Final = 5  # steps between two checkpoints
BATCH: Final = 32
OUT: Final = Path(os.environ["HPCDIST_RUN_DIR"])


def network() -> nn.Sequential:
    """Return a model with dropout, so that its losses depend on the random state."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    return nn.Sequential(*layers)


def samples(count: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (count, 16) and targets (count, 1)."""
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.square().sum(1, keepdim=True).sqrt()


def note_begin(step: int, rank: int) -> None:
    """Record that this start begins after ``step`` steps."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"rank-{rank}.pid").write_text(str(os.getpid()))
    if rank == 0:
        with (OUT / "starts.txt").open("a") as file:
            file.write(f"{step}\n")


def note_step(step: int, rank: int, pause_s: float) -> None:
    """Record that ``step`` steps are made, and sleep."""
    if rank == 0:
        (OUT / "last-step.txt").write_text(str(step))
    time.sleep(pause_s)


def note_end(loss: float, parameters: Iterable[Any], rank: int) -> None:
    """Record the last ``loss`` and a digest of ``parameters``, tensors or arrays."""
    digest = hashlib.sha256()
    for parameter in parameters:
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else torch.as_tensor(parameter)
        digest.update(whole.detach().numpy().tobytes())
    if rank == 0:
        (OUT / "final.json").write_text(json.dumps({"loss": float(loss).hex(), "parameters": digest.hexdigest()}))


def with_loop(style: str, steps: int, pause_s: float) -> None:
    """Train with a loop of the script: "ddp" and "fsdp" save with hpcdist.torch, "own" with torch.save."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import hpcdist.torch

    dist.init_process_group("hpcdist")
    rank, world = dist.get_rank(), dist.get_world_size()
    model: nn.Module = network()
    if style == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in (*list(model)[::3], model):  # type: ignore[call-overload]
            fully_shard(layer, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(1 + rank)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "random": hpcdist.torch.RandomState()}
    parts = [model, optimizer, schedule]

    def load() -> int:
        if style != "own":
            saved = hpcdist.torch.load(OUT, state | {"step": 0})
            return int(saved["step"]) if saved else 0
        path = hpcdist.torch.last_saved()
        if path is None:
            return 0
        content = torch.load(path)
        for part, values in zip(parts, content["parts"], strict=True):
            part.load_state_dict(values)
        torch.set_rng_state(content["random"][rank])
        return int(content["step"])

    def save(step: int, background: bool = False) -> None:
        if style != "own":
            hpcdist.torch.save(OUT, state | {"step": step}, step=step, background=background)
            return
        random = [torch.empty_like(torch.get_rng_state()) for _ in range(world)]
        dist.all_gather(random, torch.get_rng_state())
        if rank == 0:
            content = {"parts": [part.state_dict() for part in parts], "random": random, "step": step}
            torch.save(content, OUT / "new.pt")
            os.replace(OUT / "new.pt", path := OUT / f"model-{step}.pt")
            hpcdist.torch.saved(path, step)
            for older in OUT.glob("model-*.pt"):
                if older != path:
                    older.unlink()

    begin = step = load()
    note_begin(begin, rank)
    for number in hpcdist.torch.until_stop(range(begin, steps)):
        inputs, targets = (part[rank::world] for part in samples(seed=number))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step = number + 1
        note_step(step, rank, pause_s)
        hpcdist.torch.log(step, loss=loss, samples=len(inputs))
        if step % EVERY == 0:
            save(step, background=True)
    hpcdist.torch.exit_if_stopped(lambda: save(step))
    note_end(loss.item(), model.parameters(), rank)
    dist.destroy_process_group()


class WithLoss(nn.Module):
    """A model for the Trainer of Hugging Face: its outputs contain the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {"loss": mean squared error}."""
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}


def with_trainer(steps: int, pause_s: float) -> None:
    """Train with the Trainer of Hugging Face."""
    import transformers

    import hpcdist.torch

    dist.init_process_group("hpcdist")
    rank, world = dist.get_rank(), dist.get_world_size()

    class Notes(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            note_begin(state.global_step, rank)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            note_step(state.global_step, rank, pause_s)

    arguments = transformers.TrainingArguments(
        output_dir=str(OUT / "trained"),
        max_steps=steps,
        per_device_train_batch_size=BATCH // world,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=EVERY,
        save_total_limit=2,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"inputs": inputs, "targets": targets} for inputs, targets in zip(*samples(1024), strict=True)]
    callbacks = [hpcdist.torch.trainer_callback(), Notes()]
    trainer = transformers.Trainer(model=WithLoss(), args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=hpcdist.torch.last_saved())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    note_end(losses[-1], trainer.model.parameters(), rank)
    dist.destroy_process_group()


def with_training(steps: int, pause_s: float) -> None:
    """Train with `hpcdist.training.pytorch.Training`."""
    from hpcdist.training.pytorch import Training, recipe_of, wrap

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    recipe = {"run.steps": steps, "run.global_batch": BATCH, "checkpoint.every_steps": EVERY, **recipe_of(optimizer)}
    training = Training(wrap(model, nn.MSELoss(), example=samples()[0][:1]), recipe)
    note_begin(training.done, training.rank)
    for step in training.steps:
        inputs, targets = (part[training.share] for part in samples(seed=step))
        loss = training.step(inputs, targets)
        note_step(step + 1, training.rank, pause_s)
    note_end(loss, training.parameters().values(), training.rank)


if __name__ == "__main__":
    style, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if style == "trainer":
        with_trainer(steps, pause_s)
    elif style == "training":
        with_training(steps, pause_s)
    else:
        with_loop(style, steps, pause_s)
