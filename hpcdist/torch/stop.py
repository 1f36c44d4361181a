"""Stop requests in a PyTorch script: end the loop early, save, and exit with the code that the scheduler needs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch.distributed as dist

from hpcdist.checkpoint.state import finish_saves
from hpcdist.comm.mpi.world import AnyComm, start_world
from hpcdist.errors import MissingCapabilityError
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
    start_world("cpu").exit(code)


def trainer_callback() -> Any:
    """Return a callback for ``callbacks=[...]`` of the Hugging Face Trainer, on all ranks of the job.

    After a stop request, the Trainer saves a checkpoint after the current step, and the program exits with code 75 or
    130. Checkpoints count as progress of restarts once all ranks have written them: pass
    `resume_from_checkpoint=last_saved()` to `Trainer.train`. Logged values are passed to `log`. Local.
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
