"""Rules between recipe keys: refuse combinations that do not work, with the change that helps.

One function for each subject: keys without effect, logical shards, 16-bit copies, tensor parallelism, measured
shares, growing batches, noise scale, recomputation, survival, compressed gradients and compressed parameters. Called
when a `Recipe` is made; `refuse_beside_survival` by `hpcdist run --survive` and at the start of such a job.
"""

from dataclasses import fields, replace
from typing import Final, Protocol

from hpcdist.comm.config import BUCKET_BYTES, CommunicationConfig
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.compressed import config
from hpcdist.strategies.compressed.config import LOW_RANK, OPTIMIZING, CompressionConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.config import check_tensor_parallel as check_tensor
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.zero.config import STAGES, ZeroConfig
from hpcdist.training.recipe.config import DataConfig, PrecisionConfig, RunConfig, written

IN_LOGICAL_SHARDS: Final = ("allreduce", *STAGES, "parameter_server")  # strategies whose sums need not follow the ranks


class RecipeSections(Protocol):
    """Protocol of the sections of a recipe that the rules read; `recipe.recipe.Recipe` has them all."""

    @property
    def communication(self) -> CommunicationConfig:
        """Section ``[communication]``."""

    @property
    def compression(self) -> CompressionConfig:
        """Section ``[compression]``."""

    @property
    def data(self) -> DataConfig:
        """Section ``[data]``."""

    @property
    def model(self) -> ModelConfig:
        """Section ``[model]``."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """Section ``[optimizer]``."""

    @property
    def parallel(self) -> ParallelConfig:
        """Section ``[parallel]``."""

    @property
    def parameter_server(self) -> ParameterServerConfig:
        """Section ``[parameter_server]``."""

    @property
    def precision(self) -> PrecisionConfig:
        """Section ``[precision]``."""

    @property
    def run(self) -> RunConfig:
        """Section ``[run]``."""

    @property
    def zero(self) -> ZeroConfig:
        """Section ``[zero]``."""


def refuse_without_effect(recipe: RecipeSections) -> None:
    """Raise ConfigurationError for keys that the strategy would ignore."""
    strategy = recipe.parallel.strategy
    elsewhere = replace(recipe.communication, bucket_bytes=BUCKET_BYTES, overlap="none", delayed=False)
    if strategy in STAGES:
        elsewhere = replace(elsewhere, overlap=recipe.communication.overlap)
    if strategy in DECENTRALISED:
        elsewhere = replace(elsewhere, bucket_bytes=recipe.communication.bucket_bytes)
    for section, given, default, needed in (
        ("parameter_server", recipe.parameter_server, ParameterServerConfig(), "parameter_server"),
        ("communication", recipe.communication, elsewhere, "allreduce"),
    ):
        changed = [item.name for item in fields(given) if getattr(given, item.name) != getattr(default, item.name)]
        if changed and strategy != needed:
            key, value = f"{section}.{changed[0]}", written(getattr(given, changed[0]))
            raise ConfigurationError(
                f"{key} = {value} has no effect with parallel.strategy = {strategy!r}; "
                f"remove it, or choose the strategy {needed!r}"
            )


def refuse_beside_logical_shards(recipe: RecipeSections) -> None:
    """Raise ConfigurationError for keys that order the sums of gradients otherwise than logical shards."""
    if recipe.run.logical_shards and recipe.parallel.strategy not in IN_LOGICAL_SHARDS:
        raise ConfigurationError(
            f"parallel.strategy = {recipe.parallel.strategy!r} with run.logical_shards = {recipe.run.logical_shards}: "
            f"the order of its sums would depend on the ranks; choose one of {', '.join(IN_LOGICAL_SHARDS)}, or "
            "run.logical_shards = 0"
        )
    servers = recipe.parameter_server
    for key, given, only in (
        ("parameter_server.backup_workers", servers.backup_workers, 0),
        ("parameter_server.consistency", servers.consistency if servers.bound else "bsp", "bsp"),
        ("parallel.pipeline", recipe.parallel.pipeline, 1),
        ("parallel.microbatches", recipe.parallel.microbatches, 1),
        ("parallel.schedule", recipe.parallel.order, "sequential"),
        ("communication.algorithm", recipe.communication.algorithm, "auto"),
        ("communication.overlap", recipe.communication.overlap, "none"),
        ("communication.delayed", recipe.communication.delayed, False),
    ):
        if recipe.run.logical_shards and given != only:
            raise ConfigurationError(
                f"{key} = {written(given)} with run.logical_shards = {recipe.run.logical_shards}: the order of its "
                f"sums would depend on the ranks; set {key} = {written(only)}, or run.logical_shards = 0"
            )


def refuse_beside_16_bits(recipe: RecipeSections) -> None:
    """Raise ConfigurationError for keys that do not go with 16-bit working copies."""
    others = {
        "run.logical_shards": (recipe.run.logical_shards, 0),
        "communication.delayed": (recipe.communication.delayed, False),
        "zero.shared_parameters": (recipe.zero.shared_parameters, False),
        "zero.offload_optimizer": (recipe.zero.offload_optimizer, "none"),
        "zero.offload_parameters": (recipe.zero.offload_parameters, "none"),
    }
    if recipe.parallel.strategy in STAGES and recipe.communication.overlap == "poll":
        others["communication.overlap"] = ("poll", "none")  # no reduce-scatter in steps sums them in float32
    if recipe.parallel.strategy == "parameter_server":
        servers = recipe.parameter_server
        others["parameter_server.consistency"] = ("bsp" if servers.bound == 0 else servers.consistency, "bsp")
        others["parameter_server.backup_workers"] = (servers.backup_workers, 0)
        others["parameter_server.transport"] = (servers.transport, "messages")  # the others sum as they send
        others["parameter_server.mirrored"] = (servers.mirrored, False)
        if recipe.communication.algorithm == "hierarchical":
            others["communication.algorithm"] = ("hierarchical", "native")  # a node would round before the server does
    stages = {
        "run.device": (recipe.run.device, "gpu"),  # a processor multiplies no such numbers
        "parallel.microbatches": (recipe.parallel.microbatches, 1),  # sums of gradients would be rounded
        "parallel.tensor": (recipe.parallel.tensor, 1),  # so would the softmax's, over the ranks' vocabularies
    }
    recipe.precision.check_beside(recipe.parallel.strategy, others, stages)


def refuse_beside_tensor(recipe: RecipeSections) -> None:
    """Raise ConfigurationError for models that cannot be cut, and keys that do not go with the cut yet."""
    ranks = recipe.parallel.tensor
    check_tensor(recipe.model, ranks, recipe.data.context, recipe.parallel.sequence_parallel)
    for key, given, only in (
        ("run.logical_shards", recipe.run.logical_shards, 0),
        ("data.shares", recipe.data.shares, "even"),
        ("communication.delayed", recipe.communication.delayed, False),
        ("zero.shared_parameters", recipe.zero.shared_parameters, False),
    ):
        if ranks > 1 and given != only:
            raise ConfigurationError(
                f"{key} = {written(given)} with parallel.tensor = {ranks} is not built in this version; set {key} "
                f"= {written(only)}, or parallel.tensor = 1"
            )


def refuse_measured_shares(recipe: RecipeSections) -> None:
    """Raise ConfigurationError where samples cannot be shared by speed without another result."""
    if recipe.data.shares == "even":
        return
    cure = "set data.shares = 'even'"
    if recipe.run.logical_shards:
        raise ConfigurationError(
            f"data.shares = {recipe.data.shares!r} with run.logical_shards = {recipe.run.logical_shards}: which shards "
            f"a rank computes would follow its speed; {cure}, or run.logical_shards = 0"
        )
    served = recipe.parallel.strategy == "parameter_server"
    if recipe.parallel.strategy in DECENTRALISED or (served and not recipe.parameter_server.lock_step):
        raise ConfigurationError(
            f"data.shares = {recipe.data.shares!r}: only where all ranks make each step together are gradients "
            f"weighted by samples; {cure}, or choose allreduce, zero1, zero2, zero3, or a parameter server with "
            "consistency = 'bsp' and no backup workers"
        )


def refuse_batch_warmup(recipe: RecipeSections) -> None:
    """Raise ConfigurationError where steps cannot take fewer samples at first."""
    if not recipe.run.batch_warmup:
        return
    asked, strategy = f"run.batch_warmup = {list(recipe.run.batch_warmup)}", recipe.parallel.strategy
    if strategy in DECENTRALISED or (strategy == "parameter_server" and not recipe.parameter_server.lock_step):
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: replicas that do not make each step together share no "
            "count of samples; choose allreduce, zero1, zero2, zero3, or a parameter server with consistency = 'bsp' "
            "and no backup workers, or leave it empty"
        )
    for key, given, only in (
        ("run.logical_shards", recipe.run.logical_shards, 0),  # their size, and so every product, would change
        ("data.shares", recipe.data.shares, "even"),  # a measured share is of batches of one size
        ("precision.mode", recipe.precision.mode if recipe.precision.mode == "float16" else "float32", "float32"),
    ):
        if given != only:  # a skipped float16 step moves updates, and their rates, against samples
            raise ConfigurationError(
                f"{asked} with {key} = {written(given)} is not built in this version; set {key} = {written(only)}, or "
                "leave it empty"
            )


def refuse_noise_scale(recipe: RecipeSections, data_ranks: int) -> None:
    """Raise ConfigurationError where a step has no gradients of two batch sizes. 0 ``data_ranks``: not known yet."""
    if not recipe.run.noise_scale_every_steps:
        return
    asked = f"run.noise_scale_every_steps = {recipe.run.noise_scale_every_steps}"
    strategy, parallel = recipe.parallel.strategy, recipe.parallel
    if strategy in DECENTRALISED or (strategy == "parameter_server" and not recipe.parameter_server.lock_step):
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: no step has the gradient of all replicas together, to "
            "compare with each one's own; choose allreduce, zero1, zero2, zero3, or a parameter server with "
            "consistency = 'bsp' and no backup workers, or set run.noise_scale_every_steps = 0"
        )
    if recipe.communication.delayed:
        raise ConfigurationError(
            f"{asked} with communication.delayed = true: the sum of a step's gradients is known one step later; set "
            "one of them to 0 or false"
        )
    if parallel.sequence_parallel:
        raise ConfigurationError(
            f"{asked} with parallel.sequence_parallel = true: gradients of norms and biases are summed over the tensor "
            "axis only after the replicas, so none has its own; set one of them to 0 or false"
        )
    if data_ranks == 1 and max(parallel.microbatches, recipe.run.logical_shards) < 2:
        raise ConfigurationError(
            f"{asked} with one data rank: its gradient is that of the whole batch, and the noise follows from two "
            "batch sizes; use 2 data ranks or more, or parallel.microbatches of 2 or more, or set it to 0"
        )
    if data_ranks == 1 and parallel.pipeline > 1 and recipe.model.tied:
        raise ConfigurationError(
            f"{asked} with one data rank, parallel.pipeline = {parallel.pipeline} and model.tied = true: the gradient "
            "of the tied tensor is whole once a step, not after the first micro-batch; use 2 data ranks or more, or "
            "set one of them to 0 or false"
        )


def refuse_recomputation(recipe: RecipeSections) -> None:
    """Raise ConfigurationError where a step that is computed again would not have the same bits, or cannot be."""
    if not recipe.run.recomputes:
        return
    key = "suspicious_factor" if recipe.run.suspicious_factor else "recompute_every_steps"
    asked, strategy = f"run.{key} = {getattr(recipe.run, key)}", recipe.parallel.strategy
    served = strategy == "parameter_server"
    if strategy in DECENTRALISED or (served and not recipe.parameter_server.lock_step):
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: ranks that do not sum every gradient together agree on no "
            "step that could be computed again; choose allreduce, zero1, zero2, zero3, or a parameter server with "
            f"consistency = 'bsp' and no backup workers, or set run.{key} = 0"
        )
    for other, given, only in (
        ("run.device", recipe.run.device, "cpu"),  # bits of a GPU were never compared
        ("communication.delayed", recipe.communication.delayed, False),  # sums of the step before are under way
    ):
        if given != only:
            raise ConfigurationError(
                f"{asked} with {other} = {written(given)} is not built in this version; set {other} = {written(only)}, "
                f"or run.{key} = 0"
            )


def refuse_beside_survival(recipe: RecipeSections, mode: str, spares: int) -> None:
    """Raise ConfigurationError where no rank could go on with the state of a dead one, or on its device (local)."""
    if recipe.run.device == "gpu" and mode == "replace" and not spares:
        raise ConfigurationError(
            "run.device = 'gpu' with --survive replace: which GPU a new process should use is not known in this "
            "version; add --spares N, ranks that have theirs from the start, or choose --survive shrink"
        )
    parallel, servers = recipe.parallel, recipe.parameter_server
    served = parallel.strategy == "parameter_server"
    if parallel.strategy in DECENTRALISED:
        raise ConfigurationError(
            f"parallel.strategy = {parallel.strategy!r} with --survive: each replica has parameters of its own, and "
            "those of a dead rank are gone; choose another strategy, or --restarts"
        )
    if served and not servers.lock_step:
        raise ConfigurationError(
            f"parameter_server.consistency = {servers.consistency!r}"
            f"{f', backup_workers = {servers.backup_workers}' if servers.backup_workers else ''} with --survive: ranks "
            "that share no step have no common state to go back to; choose bsp without backup workers, or --restarts"
        )
    if recipe.communication.compression != "none":
        raise ConfigurationError(
            f"communication.compression = {recipe.communication.compression!r} with --survive is not built in this "
            "version: what compression has lost on a dead rank is nowhere else; set it to 'none', or use --restarts"
        )
    if recipe.compression.parameters != "none":
        raise ConfigurationError(
            f"compression.parameters = {recipe.compression.parameters!r} with --survive is not built in this version; "
            "set it to 'none', or use --restarts"
        )
    for key, given, refused, other in (
        ("parameter_server.transport", servers.transport if served else "", "rma", "messages"),
        ("zero.offload_optimizer", recipe.zero.offload_optimizer, "file", "none"),
        ("zero.offload_parameters", recipe.zero.offload_parameters, "file", "none"),
    ):
        if given == refused:
            raise ConfigurationError(
                f"{key} = {written(given)} with --survive is not built in this version; set it to {written(other)}, or "
                "use --restarts"
            )


COMPRESSIBLE_STRATEGIES: Final = ("allreduce", "parameter_server", *STAGES)  # whose gradients can be compressed
_WHY_NOT_COMPRESSED: Final = {
    "gossip": "its replicas exchange parameters, and no sum of gradients",
    "local_sgd": "its replicas exchange parameters, and no sum of gradients",
}


def refuse_beside_compression(recipe: RecipeSections) -> None:
    """Raise ConfigurationError for keys that do not go with ``communication.compression``."""
    name = recipe.communication.compression
    _refuse_beside_parameter_compression(recipe)
    if name == "none":
        return
    asked = f"communication.compression = {name!r}"
    strategy = recipe.parallel.strategy
    if name in OPTIMIZING:
        config.check_momentum_compressor(
            name, recipe.compression, recipe.optimizer, strategy=strategy, mode=recipe.precision.mode
        )
    if strategy not in COMPRESSIBLE_STRATEGIES:
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: "
            f"{_WHY_NOT_COMPRESSED.get(strategy, 'not built in this version')}; "
            f"choose one of {', '.join(COMPRESSIBLE_STRATEGIES)}, or set it to 'none'"
        )
    if strategy in STAGES:
        for each in recipe.compression.candidates if name == "auto" else (name,):
            recipe.zero.check_compressed(each)
    if strategy == "parameter_server":
        across = recipe.compression.across_nodes
        recipe.parameter_server.check_compressed(name, recipe.communication.algorithm, across_nodes=across)
    for key, given, only, why in (
        ("communication.overlap", recipe.communication.overlap, "none", "is not built in this version"),
        ("communication.delayed", recipe.communication.delayed, False, "is not built in this version"),
        ("run.logical_shards", recipe.run.logical_shards, 0, "would make bits depend on which ranks lose what"),
        (
            "run.noise_scale_every_steps",
            recipe.run.noise_scale_every_steps,
            0,
            "would count what compression loses as noise of the data",
        ),
        ("run.recompute_every_steps", recipe.run.recompute_every_steps, 0, "is not built in this version"),
        ("run.suspicious_factor", recipe.run.suspicious_factor, 0.0, "is not built in this version"),
        (
            "parallel.sequence_parallel",
            recipe.parallel.sequence_parallel,
            False,
            "would compress parts of gradients that are summed over the tensor axis only later",
        ),
        ("precision.mode", "float64" if recipe.precision.mode == "float64" else "float32", "float32", _FLOAT64),
    ):
        if given != only:
            raise ConfigurationError(
                f"{asked} with {key} = {written(given)} {why}; set {key} = {written(only)}, or "
                "communication.compression = 'none'"
            )
    meant = recipe.compression.candidates if name == "auto" else (name,)
    if recipe.parallel.tensor > 1 and set(meant) & set(LOW_RANK):
        raise ConfigurationError(
            f"{asked} with parallel.tensor = {recipe.parallel.tensor}: its factors are of whole tensors, and each rank "
            "has a part; choose another compressor, or parallel.tensor = 1"
        )


_FLOAT64: Final = "is not built in this version: what is encoded is float32"


def _refuse_beside_parameter_compression(recipe: RecipeSections) -> None:
    """Raise ConfigurationError for keys that do not go with ``compression.parameters``."""
    way = recipe.compression.parameters
    if way == "none":
        return
    recipe.zero.check_compressed_parameters(way, recipe.parallel.strategy)
    for key, given, only, why in (
        ("communication.overlap", recipe.communication.overlap, "none", "is not built in this version"),
        ("run.logical_shards", recipe.run.logical_shards, 0, "would round weights where the ranks cut them"),
        ("precision.mode", "float64" if recipe.precision.mode == "float64" else "float32", "float32", _FLOAT64),
    ):
        if given != only:
            raise ConfigurationError(
                f"compression.parameters = {way!r} with {key} = {written(given)} {why}; set {key} = {written(only)}, "
                "or compression.parameters = 'none'"
            )
    if recipe.precision.mode in ("float16", "bfloat16") and way in ("float16", "bfloat16"):
        raise ConfigurationError(
            f"compression.parameters = {way!r} with precision.mode = {recipe.precision.mode!r}: what is gathered has "
            "16 bits already; choose int8 or int4, or set it to 'none'"
        )
