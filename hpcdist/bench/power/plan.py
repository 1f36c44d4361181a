"""Plan of a power sweep: trials over power limits, clocks and keys, their order, and the figures of each.

A trial is one configuration: a recipe on a number of ranks and threads, under limits or with the devices as found.
Its energy and time are those of the training alone, without checkpoints and validation, over the same window; the
first step, which compiles and connects, is in both.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.series import SeriesItem
from hpcdist.bench.sweep.trial import FAILED, TrialOutcome
from hpcdist.errors import ConfigurationError

AS_FOUND: Final = "as found"
GROUP: Final = "power"  # in the summary of a trial
TRAINING: Final = "training"
LIMIT: Final = "limit_w"
CLOCK: Final = "clock_mhz"
THREADS: Final = "threads"

# (settings by key, ranks) -> the recipe as TOML; raises ConfigurationError for what cannot be trained
Resolve = Callable[[Mapping[str, Any], int], str]


@dataclass(frozen=True)
class PowerAxes:
    """What is varied; every combination is a configuration, and so is each without the limits and clocks.

    ``keys`` are recipe keys and their values; ``threads`` of a rank are the launcher's own where there are none.
    """

    ranks: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = ()
    limits_w: tuple[float, ...] = ()
    clocks_mhz: tuple[float, ...] = ()
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def caps(self) -> list[tuple[float | None, float | None]]:
        """The limits and clocks of the trials, (None, None) as found first."""
        if not (self.limits_w or self.clocks_mhz):
            return [(None, None)]
        return [(None, None), *itertools.product(self.limits_w or (None,), self.clocks_mhz or (None,))]


def limits_of(trial: SweepTrial) -> tuple[float | None, float | None]:
    """Return the power limit in W and the clock in MHz of ``trial``; None where neither is changed."""
    return trial.settings.get(LIMIT), trial.settings.get(CLOCK)


def expand(axes: PowerAxes, resolve: Resolve) -> list[SweepTrial]:
    """Return the trials. Raises ConfigurationError for one that cannot be trained, and for two that are the same."""
    found: dict[str, SweepTrial] = {}
    keys = [dict(zip(axes.keys, values, strict=True)) for values in itertools.product(*axes.keys.values())]
    for ranks, threads, settings in itertools.product(axes.ranks, axes.threads or (None,), keys):
        text = resolve(settings, ranks)
        for limit_w, clock_mhz in axes.caps:
            said = {THREADS: threads, LIMIT: limit_w, CLOCK: clock_mhz}
            known = {name: value for name, value in said.items() if value is not None}
            words = repr((ranks, sorted(known.items()), text))
            digest = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
            name = _name(axes, settings, threads, limit_w, clock_mhz)
            if digest in found:
                raise ConfigurationError(
                    f"{found[digest].name!r} and {name!r} on {ranks} ranks are the same; leave one of the values out"
                )
            found[digest] = SweepTrial(digest, name, ranks, {**settings, **known}, text)
    return list(found.values())


def _name(
    axes: PowerAxes, settings: Mapping[str, Any], threads: int | None, limit_w: float | None, clock_mhz: float | None
) -> str:
    leaves = [key.rpartition(".")[2] for key in settings]
    words = [
        f"{leaf if leaves.count(leaf) == 1 else key}={value}"
        for (key, value), leaf in zip(settings.items(), leaves, strict=True)
    ]
    words += [] if threads is None else [f"{THREADS}={threads}"]
    words += [] if limit_w is None else [f"{limit_w:g} W"]
    words += [] if clock_mhz is None else [f"{clock_mhz:g} MHz"]
    if (limit_w, clock_mhz) == (None, None) and (axes.limits_w or axes.clocks_mhz):
        words.append(AS_FOUND)
    return " ".join(words) or "recipe"


def plan(trials: Sequence[SweepTrial], repeats: int, path: Path, retry_failed: bool, seed: int) -> list[SeriesItem]:
    """Return all trials in the order in which they are run.

    Each repeat is a random order (of ``seed``), and every second one that of the repeat before, backwards: so a drift
    of the machine hits all configurations alike. Raises StorageError where ``path`` is there and holds no results.
    """
    known = results.statuses(path) if path.exists() else {}
    items = []
    for repeat in range(repeats):
        order = np.random.Generator(np.random.Philox(key=[seed, repeat // 2])).permutation(len(trials))
        for position in map(int, order if repeat % 2 == 0 else order[::-1]):
            status = known.get((trials[position].id, repeat), "")
            kept = "" if status == FAILED and retry_failed else status
            items.append(SeriesItem(trials[position], position, repeat, kept))
    return items


def figures(outcome: TrialOutcome) -> dict[str, float | str | None]:
    """Return time and energy of the training of a good outcome; what is not known is None, ``energy_reason`` says why.

    ``edp_js`` is the energy-delay product in J s, of the whole training.
    """
    summary = outcome.summary
    seconds = _known(summary.get("seconds_by_phase", {}).get(TRAINING))
    joules = _known(summary.get("energy_j_by_phase", {}).get(TRAINING))
    tokens = float(np.sum(outcome.samples["tokens"].values)) if "tokens" in outcome.samples else 0.0
    reason = ""
    if joules is None:
        said = summary.get("energy_reason_by_phase", {}).get(TRAINING) or summary.get("energy_reason")
        reason = str(said or "the run did not measure it")
    kinds = summary.get("energy_j_by_kind", {})
    per_token = tokens if tokens > 0 else None
    return {
        "training_s": seconds,
        "training_j": joules,
        "tokens": tokens,
        "s_per_token": _over(seconds, per_token),
        "j_per_token": _over(joules, per_token),
        "mean_w": _over(joules, seconds),
        "edp_js": None if joules is None or seconds is None else joules * seconds,
        "total_j": _known(summary.get("energy_j")),
        **{f"{kind}_j": _known(value) for kind, value in kinds.items()},
        "kinds": " + ".join(sorted(kinds)),
        "not_included": "; ".join(map(str, summary.get("energy_not_included", ()))),
        "energy_reason": reason,
    }


def _known(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _over(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by
