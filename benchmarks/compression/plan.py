"""Order of the trainings in the compression study. Nothing here trains.

Every compressor uses the best rate of dense gradients, with error feedback and without. The contenders in `TUNED`, on
which the study makes claims, also try all rates of dense gradients. The contenders in `SEEDED` train with further seeds
at their best rate, since a difference of 1 % is meaningful only relative to the spread of the seeds. DGC and PowerSGD
were published for SGD with momentum, so they are also compared with dense gradients under SGD.
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

FOUND: Final = "FOUND "  # prefix of output lines of the ranks that the parent process parses
DENSE: Final = "dense"
DENSE_SGD: Final = "dense, sgd"
_SGD: Final = {"optimizer.name": "sgd"}
_WAY: Final = "communication.compression"
# Keys that override the study's. A number of steps may be given as a share of all steps: `_SHARES`.
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
SGD_RATES: Final = 25.0  # factor from the rates of AdamW to the rates of SGD
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
    """A training of the study: the contender and the settings that differ between trainings."""

    contender: str
    feedback: bool
    learning_rate: float
    seed: int = 0


@dataclass(frozen=True)
class Study:
    """Settings of the study: ``steps`` per training, ``rates`` to try, ``seeds`` of `SEEDED`, contender ``names``."""

    steps: int
    rates: tuple[float, ...]
    seeds: int
    names: tuple[str, ...] = tuple(CONTENDERS)
    more: tuple[tuple[str, Any], ...] = ()  # recipe keys that override `COMMON`

    def keys(self, name: str) -> dict[str, Any]:
        overrides = dict(CONTENDERS[name])
        return overrides | {key: round(overrides[key] * self.steps) for key in _SHARES if key in overrides}

    def settings(self, training: Training) -> dict[str, Any]:
        keys = self.keys(training.contender) | {"optimizer.learning_rate": training.learning_rate}
        if not training.feedback:
            keys["compression.error_feedback"] = False
        return {**COMMON, **dict(self.more), "run.steps": self.steps, "run.seed": training.seed, **keys}

    def refusal(self, training: Training) -> str:
        """Return the reason why hpcdist rejects ``training``, or ""."""
        try:
            made(self.settings(training))
        except ConfigurationError as error:
            return str(error)
        return ""

    def best(self, name: str, losses: Mapping[Training, float]) -> Training | None:
        """Return the training of ``name`` with the lowest loss, or None. Diverged trainings (NaN) are ignored.

        Only trainings with error feedback and seed 0 count.
        """
        good = [
            training
            for training, loss in losses.items()
            if training.contender == name and training.feedback and training.seed == 0 and loss == loss
        ]
        return min(good, key=lambda training: losses[training], default=None)

    def next(self, losses: Mapping[Training, float], refused: Sequence[Training]) -> list[Training]:
        """Return the next trainings to run after those in ``losses`` and ``refused``; empty when all are done."""
        stages = (self._of_references, self._everybody, self._other_rates, self._further_seeds, self._without_feedback)
        for stage in stages:
            missing = [training for training in stage(losses) if training not in losses and training not in refused]
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
        return [replace(item, seed=seed) for item in best if item is not None for seed in range(1, self.seeds)]

    def _without_feedback(self, losses: Mapping[Training, float]) -> list[Training]:
        names = [name for name in self._compressors if CONTENDERS[name].get(_WAY, "none") in COMPRESSORS]
        return [Training(name, False, self.rate(name, losses)) for name in names]

    @property
    def _references(self) -> list[str]:
        return [dense for dense in REFERENCES if any(reference(name) == dense for name in self.names)]

    @property
    def _compressors(self) -> list[str]:
        return [name for name in self.names if name not in REFERENCES]

    def rates_of(self, name: str) -> list[float]:
        factor = SGD_RATES if reference(name) == DENSE_SGD else 1.0
        return [float(f"{rate * factor:.4g}") for rate in self.rates]

    def rate(self, name: str, losses: Mapping[Training, float]) -> float:
        best = self.best(reference(name), losses)
        return self.rates_of(name)[0] if best is None else best.learning_rate


def reference(name: str) -> str:
    return DENSE_SGD if CONTENDERS[name].get("optimizer.name") == "sgd" else DENSE


def made(keys: Mapping[str, Any]) -> Recipe:
    """Build a recipe from ``keys`` and the defaults only. Raises ConfigurationError."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return recipes.load(settings.table(tree, "the study", recipes.known_keys(), Path()), (), {}).recipe
