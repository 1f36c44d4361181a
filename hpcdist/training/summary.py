"""The figures that a run ends with."""

import math
import statistics
from pathlib import Path
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.grid import ORDER
from hpcdist.training import architecture
from hpcdist.training.energy import described
from hpcdist.training.loop import Outcome
from hpcdist.training.trainer import Trainer


def summarise(
    comm: Communicator, trainer: Trainer, outcome: Outcome, directory: Path, val_loss: float, entropies: dict[str, Any]
) -> dict[str, Any]:
    """Return the summary, the same on every rank. Collective.

    A step takes as long as its slowest rank; bytes are the maximum over the ranks; what was not measured is None, with
    the reason beside it. Medians leave out the first step, which compiles kernels and opens connections.
    """
    own = {"step_s": outcome.step_s, "sent": outcome.sent_bytes, "comm": outcome.communication_s}
    ranks = comm.allgather_object(own | {"peak": trainer.ledger.peak})
    slowest = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    steady = slowest[1:] or slowest
    targets = trainer.recipe.run.global_batch * trainer.model.tokens_per_sample
    median = statistics.median(steady) if steady else float("nan")
    shares = [sum(rank["comm"][1:]) / sum(rank["step_s"][1:]) for rank in ranks if len(rank["step_s"]) > 1]
    sent = [max(counts) for counts in zip(*(rank["sent"] for rank in ranks), strict=True)]
    sent = sent[1:] or sent
    known = bool(sent) and not any(math.isnan(count) for count in sent)
    summary = {
        "steps": outcome.done,
        "world": comm.size,
        "strategy": trainer.recipe.parallel.strategy,
        "architecture": architecture.described(trainer),
        "grid": {axis: getattr(trainer.grid, axis) for axis in ORDER},
        "algorithm": trainer.exchange.algorithm,
        "parameters": trainer.model.layout.parameters,
        "train_loss": _number(outcome.loss),
        "val_loss": _number(val_loss),
        "entropy": entropies,
        "tokens_per_s": _number(targets * len(steady) / sum(steady)) if steady else None,
        "step_s_median": _number(median),
        "comm_fraction": _number(statistics.mean(shares)) if shares else None,
        "bytes_sent_per_step": round(statistics.median(sent)) if known else None,
        "peak_bytes": {kind: max(rank["peak"][kind] for rank in ranks) for kind in trainer.ledger.peak},
        "peak_bytes_total": max(sum(rank["peak"].values()) for rank in ranks),
        "training_s": _number(sum(slowest)),
        "run_dir": str(directory),
        "stopped_by": outcome.wish.name.lower() if outcome.wish is not None else None,
    }
    if not known:
        summary["bytes_sent_reason"] = (
            "the MPI library's own collective was used, and what it sends is not visible; set communication.algorithm "
            "to ring, or any but native, to count"
        )
    return summary


def _number(value: float) -> float | None:
    """NaN is not JSON: what is not a number is null."""
    return None if math.isnan(value) else value


def describe(summary: dict[str, Any]) -> str:
    """Return the summary as the lines that a person reads."""
    peak = summary["peak_bytes_total"] / 2**20
    lines = [
        f"{summary['steps']} steps on {summary['world']} ranks, {summary['parameters']:,} parameters",
        f"train_loss {_shown(summary['train_loss'])}  val_loss {_shown(summary['val_loss'])} nats",
        f"{_shown(summary['tokens_per_s'], ',.0f')} tokens/s  step {_shown(summary['step_s_median'])} s",
        f"communication {_shown(summary['comm_fraction'], '.1%')} ({summary['architecture']})",
        f"peak {peak:.1f} MiB on the rank that holds most",
        described(summary),
        f"run directory {summary['run_dir']}",
    ]
    if summary["bytes_sent_per_step"] is not None:
        lines.insert(3, f"{summary['bytes_sent_per_step']:,} bytes sent a step and rank")
    for name, nats in summary["entropy"].items():
        if nats is not None and summary["val_loss"] is not None:
            side = "below" if summary["val_loss"] < nats else "above"
            lines.insert(2, f"val_loss is {side} the {name} entropy {nats:.3f} of the training text")
    return "\n".join(lines)


def _shown(value: float | None, form: str = ".4f") -> str:
    return "not measured" if value is None else format(value, form)
