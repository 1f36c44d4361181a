"""What a run says of its slow ranks, at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.strategies.parameter_server.asynchronous.backup_workers import BackupExchange
from hpcdist.strategies.parameter_server.asynchronous.base import AsynchronousServerExchange
from hpcdist.training.trainer import Trainer


def figures(trainer: Trainer, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the summary has of them (local).

    ``samples_by_replica`` are those of the last step where measured speed decides, else None. The others are figures of
    parameter servers whose workers are not in lock-step:
    ``staleness`` is that of the gradients of this start, as the first server counted it. ``dropped_gradients`` came too
    late in this start. ``servers_fullest`` is what the server with most holds, over an even share.
    """
    exchange = trainer.exchange
    found: dict[str, Any] = {"samples_by_replica": workers[0]["shares"]}
    if not isinstance(exchange, AsynchronousServerExchange):
        return found
    found["servers_fullest"] = exchange.fullest
    if isinstance(exchange, BackupExchange):
        return found | {"dropped_gradients": sum(rank["dropped"] for rank in workers)}
    count = sum(rank["count"] for rank in workers)
    if not count:
        return found | {"staleness_mean": None, "staleness_most": None}
    total = sum(rank[part].get("staleness", 0) for rank in workers for part in ("first", "sums"))
    return found | {"staleness_mean": total / count, "staleness_most": max(rank["stalest"] for rank in workers)}


def described(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of a summary that say so, if there is anything to say."""
    lines = []
    if summary.get("samples_by_replica") is not None:
        shares = summary["samples_by_replica"]
        lines.append(f"replicas took {min(shares)} to {max(shares)} of {sum(shares)} samples in the last step")
    if summary.get("staleness_mean") is not None:
        lines.append(f"gradients were {summary['staleness_mean']:.1f} updates old, at most {summary['staleness_most']}")
    if summary.get("dropped_gradients") is not None:
        count = summary["dropped_gradients"]
        one = count == 1
        lines.append(f"{count} gradient{'' if one else 's'} came too late and {'was' if one else 'were'} dropped")
    if summary.get("servers_fullest", 1.0) > 1.01:
        lines.append(f"the server that holds most has {summary['servers_fullest']:.2f} of an even share")
    return lines
