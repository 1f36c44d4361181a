"""Trainings of the study of compression, one after the other, and which it makes next. Nothing here trains.

Every compressor takes the rate that dense gradients were best with, with error feedback and without. Those that the
study makes claims of (`TUNED`) are tried with the same rates as dense gradients, and each of `SEEDED` is trained again
at its own best rate with further seeds, since one per cent means something only beside the spread of the seeds. DGC and
PowerSGD were published for SGD with momentum, and are compared with dense gradients under that, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.config import COMPRESSORS
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import settings
from hpcdist.training.recipe.recipe import Recipe

FOUND: Final = "FOUND "  # what a line of the ranks begins with that is meant for the program that started them
DENSE: Final = "dense"
DENSE_SGD: Final = "dense, sgd"
_SGD: Final = {"optimizer.name": "sgd"}
_WAY: Final = "communication.compression"
# Keys over those of the study. A number of steps may be a share of all of them: `_SHARES`.
CONTENDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    DENSE: {},
    "float16": {_WAY: "float16"},
    "bfloat16": {_WAY: "bfloat16"},
    "int8": {_WAY: "int8"},
    "int4": {_WAY: "int4"},
    "adaptive": {_WAY: "adaptive"},
    "qsgd, 8 bits": {_WAY: "qsgd", "compression.bits": 8},
    "qsgd, 4 bits": {_WAY: "qsgd", "compression.bits": 4},
    "sign": {_WAY: "sign"},
    "top-k 10 %": {_WAY: "topk", "compression.density": 0.1},
    "top-k 1 %": {_WAY: "topk", "compression.density": 0.01},
    "top-k 0.1 %": {_WAY: "topk", "compression.density": 0.001},
    "random-k 1 %": {_WAY: "randomk", "compression.density": 0.01},
    "powersgd 4": {_WAY: "powersgd", "compression.rank": 4},
    "powersgd 8": {_WAY: "powersgd", "compression.rank": 8},
    "powersgd 4, 10 % dense": {_WAY: "powersgd", "compression.rank": 4, "compression.warmup_steps": 0.1},
    "powersgd 4, beta1 0.5": {_WAY: "powersgd", "compression.rank": 4, "optimizer.beta1": 0.5},
    "dense, beta1 0.5": {"optimizer.beta1": 0.5},
    "dgc 10 %": {**_SGD, _WAY: "dgc", "compression.density": 0.1, "compression.warmup_steps": 0.1},
    "dgc 1 %": {**_SGD, _WAY: "dgc", "compression.density": 0.01, "compression.warmup_steps": 0.1},
    "dgc 0.1 %": {**_SGD, _WAY: "dgc", "compression.density": 0.001, "compression.warmup_steps": 0.1},
    "onebit, 30 % dense": {_WAY: "onebit", "compression.warmup_steps": 0.3},
    DENSE_SGD: _SGD,
    "powersgd 4, sgd": {**_SGD, _WAY: "powersgd", "compression.rank": 4},
}
REFERENCES: Final = (DENSE, DENSE_SGD)
TUNED: Final = (
    *("powersgd 4", "powersgd 4, beta1 0.5", "onebit, 30 % dense", "powersgd 4, sgd", "dgc 1 %"),
    "dense, beta1 0.5",
)
SEEDED: Final = (DENSE, "int8", "powersgd 4, beta1 0.5", "onebit, 30 % dense", DENSE_SGD, "powersgd 4, sgd")
SGD_RATES: Final = 25.0  # times those of AdamW
_SHARES: Final = ("compression.warmup_steps",)
COMMON: Final[Mapping[str, Any]] = {
    "model.layers": 2,
    "model.hidden": 192,
    "model.heads": 4,
    "data.context": 64,
    "run.global_batch": 16,
    "run.sentinel_every_steps": 0,
    "run.validation_samples": 256,
    "checkpoint.every_steps": 0,
    "communication.algorithm": "ring",
    "energy.sources": "none",
}


@dataclass(frozen=True)
class Training:
    """A training of the study: which compressor, and what of it is not the same in all."""

    contender: str
    feedback: bool
    learning_rate: float
    seed: int = 0


@dataclass(frozen=True)
class Study:
    """What is asked for: ``steps`` of each training, the ``rates`` to try, ``seeds`` of those that count, ``names``."""

    steps: int
    rates: tuple[float, ...]
    seeds: int
    names: tuple[str, ...] = tuple(CONTENDERS)
    more: tuple[tuple[str, Any], ...] = ()  # keys over those of all

    def keys(self, name: str) -> dict[str, Any]:
        """Return the keys of a recipe that are the contender's own."""
        found = dict(CONTENDERS[name])
        return found | {key: round(found[key] * self.steps) for key in _SHARES if key in found}

    def settings(self, training: Training) -> dict[str, Any]:
        """Return the keys of the recipe of ``training``."""
        own = self.keys(training.contender) | {"optimizer.learning_rate": training.learning_rate}
        if not training.feedback:
            own["compression.error_feedback"] = False
        return {**COMMON, **dict(self.more), "run.steps": self.steps, "run.seed": training.seed, **own}

    def refusal(self, training: Training) -> str:
        """Return why ``training`` is none that hpcdist makes, "" where it is one."""
        try:
            made(self.settings(training))
        except ConfigurationError as error:
            return str(error)
        return ""

    def best(self, name: str, losses: Mapping[Training, float]) -> Training | None:
        """Return the training of lowest loss among those of ``name`` with feedback and the first seed, if any is good.

        NaN, of a training that diverged, is no loss.
        """
        good = [
            training
            for training, loss in losses.items()
            if training.contender == name and training.feedback and training.seed == 0 and loss == loss
        ]
        return min(good, key=lambda training: losses[training], default=None)

    def next(self, losses: Mapping[Training, float], refused: Sequence[Training]) -> list[Training]:
        """Return the trainings that are to be made now, given the ``losses`` of those made; none at the end."""
        stages = (self._of_references, self._everybody, self._other_rates, self._further_seeds, self._without_feedback)
        for stage in stages:
            missing = [one for one in stage(losses) if one not in losses and one not in refused]
            if missing:
                return missing
        return []

    def _of_references(self, losses: Mapping[Training, float]) -> list[Training]:
        return [Training(name, True, rate) for name in self._references for rate in self.rates_of(name)]

    def _everybody(self, losses: Mapping[Training, float]) -> list[Training]:
        return [Training(name, True, self.rate(name, losses)) for name in self._compressors]

    def _other_rates(self, losses: Mapping[Training, float]) -> list[Training]:
        return [Training(name, True, rate) for name in TUNED if name in self.names for rate in self.rates_of(name)]

    def _further_seeds(self, losses: Mapping[Training, float]) -> list[Training]:
        best = [self.best(name, losses) for name in SEEDED if name in self.names]
        return [replace(one, seed=seed) for one in best if one is not None for seed in range(1, self.seeds)]

    def _without_feedback(self, losses: Mapping[Training, float]) -> list[Training]:
        names = [name for name in self._compressors if CONTENDERS[name].get(_WAY, "none") in COMPRESSORS]
        return [Training(name, False, self.rate(name, losses)) for name in names]

    @property
    def _references(self) -> list[str]:
        return [one for one in REFERENCES if any(reference(name) == one for name in self.names)]

    @property
    def _compressors(self) -> list[str]:
        return [name for name in self.names if name not in REFERENCES]

    def rates_of(self, name: str) -> list[float]:
        """Return the rates to try with the optimizer of ``name``."""
        factor = SGD_RATES if reference(name) == DENSE_SGD else 1.0
        return [float(f"{rate * factor:.4g}") for rate in self.rates]

    def rate(self, name: str, losses: Mapping[Training, float]) -> float:
        """Return the rate that dense gradients were best with, under the optimizer of ``name``."""
        best = self.best(reference(name), losses)
        return self.rates_of(name)[0] if best is None else best.learning_rate


def reference(name: str) -> str:
    """Return the dense gradients that ``name`` is compared with: those under the same optimizer."""
    return DENSE_SGD if CONTENDERS[name].get("optimizer.name") == "sgd" else DENSE


def made(keys: Mapping[str, Any]) -> Recipe:
    """Return the recipe of ``keys``: nothing but them and the defaults counts. Raises ConfigurationError."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    known = recipes.defaults()
    return recipes.load(settings.table(tree, "the study", known, Path()), (), {}).recipe
