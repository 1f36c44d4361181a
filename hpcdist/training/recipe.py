"""A recipe: all sections of a run, and where each of its values came from.

A key is looked up in the overrides (``--set``), the environment (``HPCDIST_SET__RUN__STEPS``), the recipe file, the
user's file (``$XDG_CONFIG_HOME/hpcdist/config.toml``), the site profile (the file that ``$HPCDIST_SITE`` names), and
last in the defaults of the dataclasses that stand beside the code they configure. No key is ever ignored.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.comm.config import BUCKET_BYTES, CommunicationConfig
from hpcdist.energy.config import EnergyConfig
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.tensor.limits import check as check_tensor
from hpcdist.strategies.zero_config import STAGES, ZeroConfig
from hpcdist.training import settings
from hpcdist.training.chaos_config import ChaosConfig
from hpcdist.training.config import DataConfig, PrecisionConfig, RunConfig, written

DEFAULT: Final = "default"
IN_LOGICAL_SHARDS: Final = ("allreduce", *STAGES, "parameter_server")  # strategies whose sums need not follow the ranks


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, completely described: the same resolved recipe is the same run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    parameter_server: ParameterServerConfig = field(default_factory=ParameterServerConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    decentralised: DecentralisedConfig = field(default_factory=DecentralisedConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    energy: EnergyConfig = field(default_factory=EnergyConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)

    def __post_init__(self) -> None:
        self.check_world(self.parallel.data)
        self.zero.check_beside(self.parallel.strategy, self.parallel.pipeline, self.run.device)
        self.decentralised.check_beside(self.parallel.strategy, self.optimizer.name)
        self._refuse_without_effect()
        if self.parallel.strategy == "parameter_server":
            self.parameter_server.check_beside(self.parallel.pipeline, self.parallel.tensor)
        if self.communication.overlap != "none" and self.run.device != "cpu":
            raise ConfigurationError(
                f"communication.overlap = {self.communication.overlap!r} with run.device = {self.run.device!r} is not "
                "built in this version; set it to 'none'"
            )
        if self.zero.prefetch and self.communication.overlap == "none":
            raise ConfigurationError(
                f"zero.prefetch = {self.zero.prefetch} with communication.overlap = 'none': nothing would move what is "
                "gathered ahead; choose the overlap 'thread' or 'poll', or set zero.prefetch = 0"
            )
        self._refuse_beside_logical_shards()
        self._refuse_measured_shares()
        self._refuse_beside_16_bits()
        self._refuse_beside_tensor()
        self.checkpoint.check_beside("file" in (self.zero.offload_optimizer, self.zero.offload_parameters))
        lock_step = self.parallel.strategy != "parameter_server" or self.parameter_server.lock_step
        self.checkpoint.check_steps(lock_step, self.data.validation_fraction > 0)
        microbatches, pipeline = self.parallel.microbatches, self.parallel.pipeline
        if microbatches > self.run.global_batch:
            raise ConfigurationError(
                f"parallel.microbatches = {microbatches} of run.global_batch = {self.run.global_batch} samples: some "
                f"would always be empty; use at most {self.run.global_batch}"
            )
        if pipeline > 1 and self.run.global_batch % microbatches:
            raise ConfigurationError(
                f"run.global_batch = {self.run.global_batch} does not divide into parallel.microbatches = "
                f"{microbatches} for a pipeline of {pipeline}; choose a multiple of {microbatches} samples"
            )

    def _refuse_without_effect(self) -> None:
        """Raise ConfigurationError for keys that the strategy would ignore."""
        strategy = self.parallel.strategy
        elsewhere = replace(self.communication, bucket_bytes=BUCKET_BYTES, overlap="none", delayed=False)
        if strategy in STAGES:
            elsewhere = replace(elsewhere, overlap=self.communication.overlap)
        if strategy in DECENTRALISED:
            elsewhere = replace(elsewhere, bucket_bytes=self.communication.bucket_bytes)
        for section, given, default, needed in (
            ("parameter_server", self.parameter_server, ParameterServerConfig(), "parameter_server"),
            ("communication", self.communication, elsewhere, "allreduce"),
        ):
            changed = [item.name for item in fields(given) if getattr(given, item.name) != getattr(default, item.name)]
            if changed and strategy != needed:
                key, value = f"{section}.{changed[0]}", written(getattr(given, changed[0]))
                raise ConfigurationError(
                    f"{key} = {value} has no effect with parallel.strategy = {strategy!r}; "
                    f"remove it, or choose the strategy {needed!r}"
                )

    def _refuse_beside_logical_shards(self) -> None:
        """Raise ConfigurationError for keys that decide otherwise in which order gradients are summed."""
        if self.run.logical_shards and self.parallel.strategy not in IN_LOGICAL_SHARDS:
            raise ConfigurationError(
                f"parallel.strategy = {self.parallel.strategy!r} with run.logical_shards = {self.run.logical_shards}: "
                f"the order of its sums would depend on the ranks; choose one of {', '.join(IN_LOGICAL_SHARDS)}, or "
                "run.logical_shards = 0"
            )
        servers = self.parameter_server
        for key, given, only in (
            ("parameter_server.backup_workers", servers.backup_workers, 0),
            ("parameter_server.consistency", servers.consistency if servers.bound else "bsp", "bsp"),
            ("parallel.pipeline", self.parallel.pipeline, 1),
            ("parallel.microbatches", self.parallel.microbatches, 1),
            ("parallel.schedule", self.parallel.order, "sequential"),
            ("communication.algorithm", self.communication.algorithm, "auto"),
            ("communication.overlap", self.communication.overlap, "none"),
            ("communication.delayed", self.communication.delayed, False),
        ):
            if self.run.logical_shards and given != only:
                raise ConfigurationError(
                    f"{key} = {written(given)} with run.logical_shards = {self.run.logical_shards}: the order of its "
                    f"sums would depend on the ranks; set {key} = {written(only)}, or run.logical_shards = 0"
                )

    def _refuse_beside_16_bits(self) -> None:
        """Raise ConfigurationError for keys that do not go with 16-bit working copies."""
        others = {
            "parallel.pipeline": (self.parallel.pipeline, 1),
            "run.logical_shards": (self.run.logical_shards, 0),
            "communication.delayed": (self.communication.delayed, False),
            "zero.shared_parameters": (self.zero.shared_parameters, False),
            "zero.offload_optimizer": (self.zero.offload_optimizer, "none"),
            "zero.offload_parameters": (self.zero.offload_parameters, "none"),
        }
        if self.parallel.strategy in STAGES and self.communication.overlap == "poll":
            others["communication.overlap"] = ("poll", "none")  # no reduce-scatter in steps sums them in float32
        if self.precision.mode == "bfloat16":  # cupy has no such numbers
            others["run.device"] = (self.run.device, "cpu")
        self.precision.check_beside(self.parallel.strategy, others)

    def _refuse_beside_tensor(self) -> None:
        """Raise ConfigurationError for models that cannot be cut, and keys that do not go with the cut yet."""
        ranks = self.parallel.tensor
        check_tensor(self.model, ranks, self.data.context, self.parallel.sequence_parallel)
        for key, given, only in (
            ("run.logical_shards", self.run.logical_shards, 0),
            ("precision.mode", self.precision.mode if self.precision.working else "float32", "float32"),
            ("data.shares", self.data.shares, "even"),
            ("communication.delayed", self.communication.delayed, False),
            ("zero.shared_parameters", self.zero.shared_parameters, False),
        ):
            if ranks > 1 and given != only:
                raise ConfigurationError(
                    f"{key} = {written(given)} with parallel.tensor = {ranks} is not built in this version; set {key} "
                    f"= {written(only)}, or parallel.tensor = 1"
                )

    def _refuse_measured_shares(self) -> None:
        """Raise ConfigurationError where samples cannot be shared by speed without another result."""
        if self.data.shares == "even":
            return
        cure = "set data.shares = 'even'"
        if self.run.logical_shards:
            raise ConfigurationError(
                f"data.shares = {self.data.shares!r} with run.logical_shards = {self.run.logical_shards}: which shards "
                f"a rank computes would follow its speed; {cure}, or run.logical_shards = 0"
            )
        served = self.parallel.strategy == "parameter_server"
        if self.parallel.strategy in DECENTRALISED or (served and not self.parameter_server.lock_step):
            raise ConfigurationError(
                f"data.shares = {self.data.shares!r}: only where all ranks make each step together are gradients "
                f"weighted by samples; {cure}, or choose allreduce, zero1, zero2, zero3, or a parameter server with "
                "consistency = 'bsp' and no backup workers"
            )

    def check_world(self, data_ranks: int) -> None:
        """Raise ConfigurationError when a step has fewer samples, or logical shards, than ranks on the data axis."""
        if self.run.global_batch < data_ranks:
            raise ConfigurationError(
                f"run.global_batch = {self.run.global_batch} is fewer samples than the {data_ranks} data ranks "
                f"(parallel.data); each needs at least one: use at least {data_ranks} samples, or fewer ranks"
            )
        if 0 < self.run.logical_shards < data_ranks:
            raise ConfigurationError(
                f"run.logical_shards = {self.run.logical_shards} is fewer than the {data_ranks} data ranks "
                f"(parallel.data); each needs at least one: use at most {self.run.logical_shards} ranks, or as many "
                "shards from the start of the run"
            )


@dataclass(frozen=True)
class Resolved:
    """A recipe and, for every key, the place that its value came from."""

    recipe: Recipe
    origin: Mapping[str, str]


@cache
def defaults() -> Mapping[str, Any]:
    """Return every key that a recipe may have, as ``section.name``, with its default."""
    return flat(Recipe())


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the values of ``recipe`` by key."""
    return {f"{section}.{name}": value for section, keys in asdict(recipe).items() for name, value in keys.items()}


def load(
    path: str | os.PathLike[str] | settings.Settings | None = None,
    overrides: Iterable[str] | settings.Settings = (),
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the recipe of the file ``path`` (None: no file) under ``overrides``, each ``section.name=value``.

    Either may be settings that were checked already, as those of a sweep, in the place of the file or the overrides.
    A relative ``data.path`` or ``zero.offload_directory`` counts from the directory of the file that has it, or else
    from the current directory.
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
    """Return the recipe that a run keeps in ``path``: nothing but the file counts. Raises ConfigurationError."""
    return _resolve([settings.file(Path(path), "recipe", defaults())]).recipe


def _resolve(sources: Iterable[settings.Settings | None]) -> Resolved:
    values = dict(defaults())
    origin = dict.fromkeys(values, DEFAULT)
    for source in sources:
        if source is not None:
            values.update(source.values)
            origin.update(source.origin)
    try:
        sections = {item.name: item.default_factory for item in fields(Recipe)}
        recipe = Recipe(**{name: kind(**_section(values, name)) for name, kind in sections.items()})  # type: ignore[operator]
    except ConfigurationError as error:
        # A value of another file or the environment is easily forgotten: say where it stands.
        named = [f"{key} is from {place}" for key, place in origin.items() if key in str(error) and place != DEFAULT]
        raise ConfigurationError(f"{error} ({', '.join(named)})" if named else str(error)) from error
    return Resolved(recipe, origin)


def _section(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(section + ".")}


def dump(recipe: Recipe) -> str:
    """Return ``recipe`` as TOML, with every key: `load_stored` gives an equal recipe."""
    tables = []
    for section, keys in asdict(recipe).items():
        tables.append("\n".join([f"[{section}]", *(f"{name} = {toml(value)}" for name, value in keys.items())]))
    return "\n\n".join(tables) + "\n"


def toml(value: bool | int | float | str | tuple[int, ...]) -> str:
    """Return ``value`` as it is written in TOML. Raises ConfigurationError for text that is not Unicode."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf, nan and exponents are written alike in both languages
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{value!r} is not valid Unicode; rename the file or directory") from None
    # A TOML basic string is a JSON string in which DEL must be escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def digest(recipe: Recipe) -> str:
    """Return a short name for the run that ``recipe`` describes: equal for equal recipes."""
    return hashlib.blake2b(dump(recipe).encode(), digest_size=16).hexdigest()
