"""Recipe of a run: all sections, the origin of each value, and the identity of the run.

A key is looked up in the overrides (``--set``), the environment (``HPCDIST_SET__RUN__STEPS``), the recipe file, the
user's file (``$XDG_CONFIG_HOME/hpcdist/config.toml``), the site profile (which ``$HPCDIST_SITE`` names), and last in
the defaults of the dataclasses that stand beside the code they configure. No key is ever ignored.

Identity: operational keys (layout, devices, intervals) may change when a run goes on; all others make another run.
Light: imports nothing that starts MPI or opens HDF5.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.comm.config import CommunicationConfig
from hpcdist.energy.config import EnergyConfig
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.reporting.rules import section_values, written
from hpcdist.reporting.toml_text import toml_lines
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.zero.config import ZeroConfig
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.training.chaos.config import ChaosConfig
from hpcdist.training.recipe import settings
from hpcdist.training.recipe.config import DataConfig, PrecisionConfig, RunConfig, SurvivalConfig

DEFAULT: Final = "default"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe: the complete description of a run; equal resolved recipes are the same run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
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
        """Raise ConfigurationError for keys that do not go together, or with so many data ranks (0: not known yet).

        ``options`` of `hpcdist run` are keys too: "--survive" and "--spares".
        """
        rules.check({**flat(self), "data rank": data_ranks, "feed-forward column": self.model.expert_inner, **options})


@dataclass(frozen=True)
class ResolvedRecipe:
    """Recipe with the place that each value came from, by key."""

    recipe: Recipe
    origin: Mapping[str, str]


@cache
def defaults() -> Mapping[str, Any]:
    """Return every key that a recipe may have, as ``section.name``, with its default."""
    return flat(Recipe())


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the values of ``recipe`` by key."""
    return {
        key: value
        for item in fields(recipe)
        for key, value in section_values(item.name, getattr(recipe, item.name)).items()
    }


def load(
    path: str | os.PathLike[str] | settings.Settings | None = None,
    overrides: Iterable[str] | settings.Settings = (),
    environment: Mapping[str, str] | None = None,
) -> ResolvedRecipe:
    """Return the recipe of the file ``path`` (None: no file) under ``overrides``, each ``section.name=value``.

    Instead of the file or the overrides there may be settings that were checked already, as those of a sweep. A
    relative path, as in ``data.path``, counts from the directory of the file that has it, or else from the current
    directory.
    Raises ConfigurationError for a file that cannot be read, an unknown key, a wrong type or a value that cannot be
    run, and UsageError for an override without a value.
    """
    environment = os.environ if environment is None else environment
    known = defaults()
    sources = [
        settings.site(environment, known),
        settings.user(environment, known),
        path if path is None or isinstance(path, settings.Settings) else settings.file(Path(path), "recipe", known),
        settings.variables(environment, known),
        overrides if isinstance(overrides, settings.Settings) else settings.overrides(overrides, known),
    ]
    return _resolve(sources)


def load_stored(path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe that a run keeps in ``path``, from the file alone. Raises ConfigurationError."""
    return _resolve([settings.file(Path(path), "recipe", defaults())]).recipe


def _resolve(sources: Iterable[settings.Settings | None]) -> ResolvedRecipe:
    values = dict(defaults())
    origin = dict.fromkeys(values, DEFAULT)
    for source in sources:
        if source is not None:
            values.update(source.values)
            origin.update(source.origin)
    try:
        keys: dict[str, dict[str, Any]] = {item.name: {} for item in fields(Recipe)}
        for key, value in values.items():
            section, _, name = key.partition(".")
            keys[section][name] = value
        sections: dict[str, Any] = {item.name: item.default_factory for item in fields(Recipe)}
        recipe = Recipe(**{name: kind(**keys[name]) for name, kind in sections.items()})
    except ConfigurationError as error:
        # A value of another file or the environment is easily forgotten: the message names its place.
        named = [f"{key} is from {place}" for key, place in origin.items() if key in str(error) and place != DEFAULT]
        raise ConfigurationError(f"{error} ({', '.join(named)})" if named else str(error)) from error
    return ResolvedRecipe(recipe, origin)


def dump(recipe: Recipe) -> str:
    """Return ``recipe`` as TOML, with every key: `load_stored` gives an equal recipe."""
    tables = ["\n".join([f"[{section}]", *toml_lines(keys)]) for section, keys in asdict(recipe).items()]
    return "\n\n".join(tables) + "\n"


def digest(recipe: Recipe) -> str:
    """Return a short name for the run that ``recipe`` describes: equal for equal recipes."""
    return hashlib.blake2b(dump(recipe).encode(), digest_size=16).hexdigest()


# Keys that do not make another run: it may go on with other values, in another layout, on other machines.
OPERATIONAL: Final = (
    *("parallel.", "parameter_server.", "zero.", "decentralised.", "communication."),
    *("checkpoint.", "energy.", "telemetry.", "chaos.", "survival."),
    "precision.",  # no bit of the state is rounded: see `contradictions`
)
OPERATIONAL_KEYS: Final = (
    "run.steps",
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
    """Whether a run may go on with another value of ``key`` (local)."""
    return key.startswith(OPERATIONAL) or key in OPERATIONAL_KEYS


def differences(stored: Recipe, recipe: Recipe) -> dict[str, str]:
    """Return, for each key in which the ``stored`` recipe differs, both values as text; none when it is the same run.

    A recipe of an older version lacks keys: they had their defaults.
    """
    before, now = flat(stored), flat(recipe)
    return {
        key: f"{key} = {written(before[key])} there, {written(value)} now"
        for key, value in now.items()
        if before[key] != value
    }


def contradictions(stored: Recipe, recipe: Recipe) -> list[str]:
    """Return the differences that make ``recipe`` another run than the ``stored`` one, as texts; none where none do."""
    rounded = stored.precision.computes != recipe.precision.computes
    return [
        text
        for key, text in differences(stored, recipe).items()
        if not is_operational(key) or (rounded and key == "precision.mode")
    ]


def init_from_hint(run_dir: object, contradictions: Sequence[str]) -> str:
    """Return the options to begin another run with the parameters of this one, "" for another model (local)."""
    if any(text.startswith("model.") for text in contradictions):
        return ""
    return f"; to begin another run with its parameters: --out OTHER --init-from {run_dir}"


def run_id(recipe: Recipe) -> str:
    """Return a short name for the run of ``recipe``: the same for all recipes with which it may go on."""
    identifying = {key: value for key, value in flat(recipe).items() if not is_operational(key)}
    identifying["precision.mode"] = recipe.precision.computes
    return hashlib.blake2b(repr(sorted(identifying.items())).encode(), digest_size=4).hexdigest()
