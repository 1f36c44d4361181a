"""Stop requests in a PyTorch script: end the loop early, save, and exit with the code that the scheduler needs."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch.distributed as dist

from hpcdist.checkpoint.state import finish_saves
from hpcdist.comm.launch.exit_file import announce_completion
from hpcdist.comm.mpi.world import AnyComm, start_world
from hpcdist.errors import INTERRUPTED, MissingCapabilityError
from hpcdist.torch import metrics
from hpcdist.torch.activity import waiting
from hpcdist.torch.state import saved
from hpcdist.training.run import stop_requests

Batch = TypeVar("Batch")
_END: Final[Any] = object()


def should_stop(margin_s: float = stop_requests.MARGIN_S, *, comm: AnyComm = None) -> int:
    """Return the result of `hpcdist.should_stop` with the same arguments, and record the wait for it. Collective.

    The result is 0, 75 (requeue) or 130 (Ctrl-C), equal on all ranks of ``comm``. Call this once per iteration.
    """
    with waiting("should_stop"):
        return stop_requests.should_stop(margin_s, comm=comm)


def until_stop(batches: Iterable[Batch], *, comm: AnyComm = None) -> Iterator[Batch]:
    """Yield ``batches`` until a stop request, such as SIGTERM or the end of the Slurm job. Collective over ``comm``.

    All ranks of ``comm`` need the same number of batches, and stop after the same batch. Call `exit_if_stopped` after
    the loop.
    """
    remaining = iter(batches)
    while True:
        with metrics.phase("data"):
            batch = next(remaining, _END)
        if batch is _END:
            return
        yield batch
        if should_stop(comm=comm):
            return


def exit_if_stopped(save: Callable[[], object]) -> None:
    """If a stop was requested, call ``save()`` and exit: 75 (requeue), or 130 after Ctrl-C.

    Collective over all ranks of the job, which exit together. ``save``: function that saves a checkpoint. The exit
    finalises MPI, so it needs no `destroy_process_group`.
    """
    if code := should_stop():
        save()
        leave(code)


def leave(code: int) -> NoReturn:
    """End the program after a stop request with exit code ``code`` on all ranks. Collective."""
    finish_saves()
    metrics.note_stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    world = start_world("cpu")
    if world.rank == 0:
        step = metrics.last_step()
        after = "" if step is None else f" after step {step}"
        reason = "Ctrl-C" if code == INTERRUPTED else "a stop request"
        text = f"stopped{after} at {reason}; start the same command again to continue"
        if not announce_completion(text):
            print(f"hpcdist: {text}", file=sys.stderr, flush=True)
    world.exit(code)


def trainer_callback() -> Any:
    """Return a callback for ``callbacks=[...]`` of the Hugging Face Trainer, on all ranks of the job.

    After a stop request, the Trainer saves after the current step, and the program exits with code 75 or 130. Logged
    values are passed to `log`. Pass `resume_from_checkpoint=last_saved()` to `Trainer.train`. Local.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingCapabilityError(f"trainer_callback needs the package transformers: {error}") from error

    class StopAndLog(TrainerCallback):  # type: ignore[misc, unused-ignore]
        code, logged = 0, 0
        phase = ExitStack()  # the open phase

        def _begin(self, name: str) -> None:
            self.phase.close()
            self.phase.enter_context(metrics.phase(name))

        def _end(self, *arguments: Any, **more: Any) -> None:
            self.phase.close()

        on_optimizer_step = on_evaluate = on_predict = _end

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self._begin("update")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self._begin("validation")

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.logged = state.global_step
            metrics.start_at(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.code = should_stop()
            if self.code:
                control.should_save = control.should_training_stop = True
            metrics.end_step(state.global_step)  # the Trainer may log only some steps

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            values = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            named = {"loss": "loss", "learning_rate": "learning_rate", "validation_loss": "eval_loss"}
            common = {name: values.pop(key) for name, key in named.items() if key in values}
            if "loss" in common:
                per_step = args.train_batch_size * args.gradient_accumulation_steps
                common["samples"] = per_step * (state.global_step - self.logged)
                self.logged = state.global_step
            metrics.log(state.global_step, **common, **values)

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if dist.is_initialized():
                dist.barrier()  # every rank has written its random state
            saved(Path(args.output_dir) / f"checkpoint-{state.global_step}", state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if self.code:
                leave(self.code)

    return StopAndLog()


class _LightningProgress:
    # Progress of a Trainer of Lightning that `lightning_callback` passes to `log` and `saved`.
    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0
        self.saved_step: int | None = None  # of a checkpoint that Lightning is writing
        self._loss, self._samples = 0.0, 0.0  # since the last step
        self._seen: dict[str, Any] = {}  # values of `self.log` that were passed on

    def add_batch(self, outputs: Any, samples: float) -> None:
        # Lightning has divided the loss of each micro-batch by the number of micro-batches.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = math.nan if loss is None else self._loss + loss.detach()
        self._samples += samples

    def log_step(self, trainer: Any) -> None:
        self.step = trainer.global_step
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else math.nan
        values = self._new_values(trainer) | {"learning_rate": rate, "samples": self._samples, "loss": self._loss}
        metrics.log(self.step, **values)
        self._loss, self._samples = 0.0, 0.0

    def log_validation(self, trainer: Any) -> None:
        values = self._new_values(trainer)
        if values and not trainer.sanity_checking:
            metrics.log(trainer.global_step, validation_loss=values.pop("val_loss", math.nan), **values)

    def _new_values(self, trainer: Any) -> dict[str, Any]:
        # The values of `self.log` since the last call, by name.
        before, self._seen = self._seen, dict(trainer.callback_metrics)  # also has earlier values
        named = {"step", "loss", "samples", "learning_rate"}
        return {key: value for key, value in self._seen.items() if value is not before.get(key) and key not in named}

    def report_saved(self, trainer: Any) -> None:
        # Report the checkpoint that Lightning has written since the last call.
        if self.saved_step is not None:
            newest = getattr(trainer.checkpoint_callback, "best_model_path", "")
            saved(newest or self.path, self.saved_step)
            self.saved_step = None

    def stop(self, trainer: Any, code: int) -> NoReturn:
        trainer.save_checkpoint(self.path)
        if self.saved_step is not None:
            saved(self.path, self.saved_step)
        for logger in trainer.loggers:
            logger.finalize("aborted")
        leave(code)


def lightning_callback(path: str | Path) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of Lightning, on all ranks.

    After a stop request, the callback saves a checkpoint of Lightning in the file ``path`` after the current optimizer
    step, and the program exits with code 75 or 130. Checkpoints of Lightning count as progress of restarts. The loss,
    the batch size, the learning rate and the values of ``self.log`` are passed to `log`; "val_loss" is the validation
    loss. Local.
    """
    try:
        from lightning.fabric.utilities.exceptions import MisconfigurationException
        from lightning.pytorch import Callback
        from lightning.pytorch.utilities.data import extract_batch_size
    except ImportError as error:
        raise MissingCapabilityError(f"lightning_callback needs the package lightning: {error}") from error
    progress = _LightningProgress(Path(path))

    class StopAndLog(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            progress.step = trainer.global_step
            metrics.start_at(progress.step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            progress.report_saved(trainer)
            samples = 0
            with suppress(MisconfigurationException):  # a batch without tensors has no size
                samples = extract_batch_size(batch)
            progress.add_batch(outputs, samples)
            if trainer.global_step == progress.step:
                return  # the next micro-batch belongs to the same step
            progress.log_step(trainer)
            if code := should_stop():
                progress.stop(trainer, code)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            progress.log_validation(trainer)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            progress.saved_step = trainer.global_step

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            progress.report_saved(trainer)

    return StopAndLog()
