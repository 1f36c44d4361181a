"""Every figure that a run tells while it goes on: its name, with the unit in it, and what it means.

Names follow the conventions of Prometheus: base units, ``_total`` for what only grows. All sinks use them, so that a
figure is found under one name everywhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

GAUGE: Final = "gauge"
COUNTER: Final = "counter"
PREFIX: Final = "hpcdist_"


@dataclass(frozen=True)
class Quantity:
    """A figure. ``kind`` is gauge or counter; ``label`` names what tells several of it apart ("": there is one).

    ``unit`` is in UCUM, as in HDF5 files; ``tag`` is the name that TensorBoard shows.
    """

    name: str
    unit: str
    kind: str
    meaning: str
    tag: str
    label: str = ""

    @property
    def prometheus(self) -> str:
        """The name of the metric for Prometheus."""
        return PREFIX + self.name


def _gauges(*rows: tuple[str, ...]) -> Iterable[Quantity]:
    return (Quantity(row[0], row[1], GAUGE, *row[2:]) for row in rows)


def _counters(*rows: tuple[str, ...]) -> Iterable[Quantity]:
    return (Quantity(row[0], row[1], COUNTER, *row[2:]) for row in rows)


_ALL: Final = (
    *_gauges(
        ("training_loss_nats", "1", "mean training loss of the last step", "loss/training"),
        ("validation_loss_nats", "1", "mean validation loss, when it was last taken", "loss/validation"),
        ("learning_rate", "1", "learning rate of the last step", "optimizer/learning_rate"),
        ("gradient_norm", "1", "norm of the mean gradient before clipping", "optimizer/gradient_norm"),
        ("loss_scale", "1", "the loss is multiplied with this before the backward", "optimizer/loss_scale"),
        ("step_seconds", "s", "time of the last step on its slowest rank", "time/step"),
        ("tokens_per_second", "1/s", "tokens of the last steps over their time", "speed/tokens_per_second"),
        ("phase_seconds", "s", "time a step in a phase, mean over the ranks that compute", "time/phase", "phase"),
        ("communication_ratio", "1", "share of a step in communication that nothing hid", "communication/share"),
        ("hidden_communication_ratio", "1", "share of reductions that nobody waited for", "communication/hidden"),
        ("straggler_ratio", "1", "compute time of the slowest rank over that of the median one", "stragglers/ratio"),
        ("straggler_rank", "1", "the rank with the longest compute time", "stragglers/rank"),
        ("collective_bytes_per_second", "By/s", "bytes of buffers over time, by operation", "communication/bandwidth",
         "operation"),
        ("memory_bytes", "By", "arrays that are alive on the rank that holds most", "memory/now", "category"),
        ("memory_peak_bytes", "By", "the most that was alive at once on a rank", "memory/peak", "category"),
        ("power_watts", "W", "mean power of the job since the last report", "energy/power", "source"),
        ("energy_per_token_joules", "J", "joules of training over its tokens, so far", "energy/per_token"),
        ("utilisation_ratio", "1", "share of a resource in use, mean over the nodes", "utilisation", "resource"),
        ("checkpoint_seconds", "s", "time for which the last checkpoint held up the steps", "checkpoint/seconds"),
        ("checkpoint_bytes", "By", "size of the last checkpoint", "checkpoint/bytes"),
        ("world_ranks", "1", "ranks of the job", "job/ranks"),
        ("nodes", "1", "nodes of the job", "job/nodes"),
        ("last_step_timestamp_seconds", "s", "Unix time at the end of the last step", "job/last_step"),
        ("start_timestamp_seconds", "s", "Unix time of this start of the run", "job/start"),
    ),
    *_counters(
        ("steps_total", "1", "completed optimizer steps", "job/steps"),
        ("tokens_total", "1", "tokens that were trained on", "job/tokens"),
        ("skipped_steps_total", "1", "steps without an update, since their gradient overflowed", "job/skipped_steps"),
        ("sent_bytes_total", "By", "bytes sent in messages, sum over the ranks", "communication/sent"),
        ("collective_seconds_total", "s", "time in an operation, mean over the ranks", "communication/seconds",
         "operation"),
        ("collective_bytes_total", "By", "bytes of buffers in an operation, sum over the ranks", "communication/bytes",
         "operation"),
        ("prefetch_hits_total", "1", "gathers ahead that were there when they were waited for", "prefetch/hits"),
        ("prefetch_misses_total", "1", "gathers ahead that were waited for", "prefetch/misses"),
        ("anomalies_total", "1", "flags: loss spikes, throughput drops and the like", "anomalies", "kind"),
        ("energy_joules_total", "J", "energy of the job over all of its starts", "energy/joules", "source"),
        ("emissions_grams_total", "g", "CO2 equivalents, by the intensity in the recipe", "energy/emissions"),
        ("network_bytes_total", "By", "bytes over the interfaces of the nodes", "network", "direction"),
        ("checkpoints_total", "1", "checkpoints that became complete", "checkpoint/count"),
    ),
)  # fmt: skip

QUANTITIES: Final = {quantity.name: quantity for quantity in _ALL}
assert len(QUANTITIES) == len(_ALL)


def key(name: str, label: str = "") -> str:
    """Return the key of a figure in an event: ``name``, or ``name[label]`` where it has a label."""
    assert bool(QUANTITIES[name].label) == bool(label), name
    return f"{name}[{label}]" if label else name


def split(key: str) -> tuple[str, str | None]:
    """Return name and label of a `key`; None where there is no label."""
    name, bracket, rest = key.partition("[")
    return name, rest.removesuffix("]") if bracket else None
