"""Recipe of a run: all sections, the origin of each value, and the identity of the run.

Sources of a key, by priority: overrides (``--set``), environment (``HPCDIST_SET__RUN__STEPS``), recipe file, user file
(``$XDG_CONFIG_HOME/hpcdist/config.toml``), site profile (``$HPCDIST_SITE``), the ``config.json`` of a Hugging Face
directory in run.init_from, defaults. Light: starts no MPI.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.checkpoint.convert import families
from hpcdist.comm.config import CommunicationConfig
from hpcdist.energy.config import EnergyConfig
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers.lora import LoraConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.reporting.rules import section_values, written
from hpcdist.reporting.schema import Field, fields_of, toml_lines
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.training.recipe import settings
from hpcdist.training.recipe.chaos_config import ChaosConfig
from hpcdist.training.recipe.config import DataConfig, PrecisionConfig, RunConfig, SurvivalConfig

DEFAULT: Final = "default"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    parameter_server: ParameterServerConfig = field(default_factory=ParameterServerConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    decentralised: DecentralisedConfig = field(default_factory=DecentralisedConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    energy: EnergyConfig = field(default_factory=EnergyConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    survival: SurvivalConfig = field(default_factory=SurvivalConfig)

    def __post_init__(self) -> None:
        self.check_world(self.parallel.data)
        self.chaos.check_steps(self.run.steps)

    def check_world(self, data_ranks: int, **options: object) -> None:
        """Raise ConfigurationError if recipe keys contradict each other, or do not fit ``data_ranks`` replicas.

        ``data_ranks`` 0 means that the number is unknown. ``**options``: command-line options to check too, by name.
        """
        rules.check({**flat(self), "data rank": data_ranks, "feed-forward column": self.model.expert_inner, **options})


SECTIONS: Final[Mapping[str, Any]] = {item.name: item.default_factory for item in fields(Recipe)}


@dataclass(frozen=True)
class ResolvedRecipe:
    """Recipe, and the origin of the value of each key: the file, variable or option that sets the value."""

    recipe: Recipe
    origin: Mapping[str, str]


@cache
def known_keys() -> Mapping[str, Field]:
    """Return {"section.name": `Field`} with the declarations of all recipe keys."""
    return {f"{section}.{name}": key for section, kind in SECTIONS.items() for name, key in fields_of(kind).items()}


def check_value(key: str, value: Any) -> None:
    """Raise ConfigurationError if ``value`` is invalid for the recipe key ``key``. Other keys are not checked."""
    section, _, name = key.partition(".")
    rule = known_keys()[key].rule(section)
    if rule is not None and (refusal := rule.refusal({key: value})):
        raise ConfigurationError(refusal)
    if known_keys()[key].key.expected:  # the class of the section checks it
        SECTIONS[section](**{name: value})


@cache
def defaults() -> Mapping[str, Any]:
    """Return {"section.name": default value} of all recipe keys."""
    return flat(Recipe())


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return {"section.name": value} of all keys of ``recipe``."""
    return {key: value for name in SECTIONS for key, value in section_values(name, getattr(recipe, name)).items()}


def load(
    path: str | os.PathLike[str] | settings.Settings | None = None,
    overrides: Iterable[str] | settings.Settings = (),
    environment: Mapping[str, str] | None = None,
) -> ResolvedRecipe:
    """Return the `ResolvedRecipe` in the file ``path``, changed by ``overrides`` such as "run.steps=100".

    ``path`` None means that there is no file. ``environment``: variables that may also set recipe keys. Raises
    ConfigurationError for an invalid file, key or value, and UsageError for an override without a value.
    """
    # A relative path, such as data.path, is relative to the file that sets it, or else to the current directory.
    environment = os.environ if environment is None else environment
    keys = known_keys()
    sources = [
        settings.site(environment, keys),
        settings.user(environment, keys),
        path if path is None or isinstance(path, settings.Settings) else settings.file(Path(path), "recipe", keys),
        settings.variables(environment, keys),
        overrides if isinstance(overrides, settings.Settings) else settings.overrides(overrides, keys),
    ]
    return _resolve([_initial_model(sources), *sources])


def _initial_model(sources: Iterable[settings.Settings | None]) -> settings.Settings | None:
    named = [source.values["run.init_from"] for source in sources if source and "run.init_from" in source.values]
    if not named or not named[-1] or not families.is_source(Path(named[-1])):
        return None
    values = families.recipe_values(Path(named[-1]))
    return settings.Settings(values, dict.fromkeys(values, f"{named[-1]}/{families.CONFIG}"))


def load_stored(path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe in the file ``path``, without environment and site settings. Raises ConfigurationError."""
    return _resolve([settings.file(Path(path), "recipe", known_keys())]).recipe


def _resolve(sources: Iterable[settings.Settings | None]) -> ResolvedRecipe:
    values = dict(defaults())
    origin = dict.fromkeys(values, DEFAULT)
    for source in sources:
        if source is not None:
            values.update(source.values)
            origin.update(source.origin)
    try:
        by_section: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, value in values.items():
            section, _, name = key.partition(".")
            by_section[section][name] = value
        recipe = Recipe(**{name: kind(**by_section[name]) for name, kind in SECTIONS.items()})
    except ConfigurationError as error:
        # A value from another file or the environment is easily forgotten: the message names its origin.
        text = str(error).partition(". Meaning: ")[0]  # the meaning of a key may name other keys
        named = [f"{key} is from {place}" for key, place in origin.items() if key in text and place != DEFAULT]
        raise ConfigurationError(f"{error} ({', '.join(named)})" if named else str(error)) from error
    return ResolvedRecipe(recipe, origin)


def dump(recipe: Recipe) -> str:
    """Return ``recipe`` as a TOML text with all keys. `load_stored` can read this text."""
    tables = ["\n".join([f"[{section}]", *toml_lines(keys)]) for section, keys in asdict(recipe).items()]
    return "\n\n".join(tables) + "\n"


def digest(recipe: Recipe) -> str:
    """Return a hexadecimal hash of all values of ``recipe``, to detect a changed recipe."""
    return hashlib.blake2b(dump(recipe).encode(), digest_size=16).hexdigest()


# Operational keys: a run may resume with other values, in another layout, on other machines.
OPERATIONAL: Final = (
    *("parallel.", "parameter_server.", "zero.", "decentralised.", "communication."),
    *("checkpoint.", "energy.", "telemetry.", "chaos.", "survival."),
    "precision.",  # changes that would round the state are rejected by `contradictions`
)
OPERATIONAL_KEYS: Final = (
    "run.steps",
    "optimizer.decay_steps",
    "data.digest",
    "data.shares",
    "data.staged",
    "run.device",
    "run.cuda_graph",
    "run.logical_shards",
    "run.sentinel_every_steps",
    "run.suspicious_factor",
    "run.recompute_every_steps",
    "run.noise_scale_every_steps",
    "run.log_every_s",
)


def is_operational(key: str) -> bool:
    """Return True if a run may be resumed with another value of the recipe key ``key``. Local."""
    return key.startswith(OPERATIONAL) or key in OPERATIONAL_KEYS


def differences(stored: Recipe, recipe: Recipe) -> dict[str, str]:
    """Return {key: text with both values} for the keys in which the recipes ``stored`` and ``recipe`` differ."""
    before, now = flat(stored), flat(recipe)
    return {
        key: f"{key} = {written(before[key])} there, {written(value)} now"
        for key, value in now.items()
        if before[key] != value
    }


def contradictions(stored: Recipe, recipe: Recipe) -> list[str]:
    """Return a list of texts, one for each changed recipe key that prevents ``recipe`` from resuming a run.

    ``stored``: recipe with which the run was started.
    """
    rounded = stored.precision.computes != recipe.precision.computes
    return [
        text
        for key, text in differences(stored, recipe).items()
        if not is_operational(key) or (rounded and key == "precision.mode")
    ]


def init_from_hint(run_dir: object, contradictions: Sequence[str]) -> str:
    """Return a hint for users to start another run from the model in ``run_dir``, or "" if the model differs.

    ``contradictions``: result of the function `contradictions`, which shows if the model differs.
    """
    if any(text.startswith("model.") for text in contradictions):
        return ""
    return f"; to start another run with its parameters: --out OTHER --init-from {run_dir}"


def run_id(recipe: Recipe) -> str:
    """Return the run's name, a short hash of ``recipe`` without the keys that may change in a resume."""
    identifying = {key: value for key, value in flat(recipe).items() if not is_operational(key)}
    identifying["precision.mode"] = recipe.precision.computes
    return hashlib.blake2b(repr(sorted(identifying.items())).encode(), digest_size=4).hexdigest()
