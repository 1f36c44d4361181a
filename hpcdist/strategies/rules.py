"""Rules between sections of a recipe: which keys do not go together, why, and how to change them.

See `hpcdist.reporting.rules.rule` for the notation.

`derived` adds keys: "own steps" (the value by which replicas do not make each step together), "asynchronous workers"
(such a value of a parameter server), "whole parameters" and "whole gradients" (the values by which ZeRO does not shard
them), "compressors", "query head" and "shared head" (numbers of heads on a tensor rank), and "data rank" (the number
of data ranks, or 0 if not known yet).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from hpcdist.comm.config import CommunicationConfig
from hpcdist.models.config import BUILT, FOREIGN
from hpcdist.reporting import rules
from hpcdist.reporting.rules import UNBUILT, Rule, Values, each_of, no_effect, rule
from hpcdist.strategies import axis_rules
from hpcdist.strategies.axis_rules import LOCK_STEP
from hpcdist.strategies.compressed import rules as compressed
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.rules import BSP, COMPRESSED, IN_16_BITS, MIXING, SERVED, SHARDED
from hpcdist.strategies.config import PARTIAL, SUMMING
from hpcdist.strategies.data.config import OFFLOADED, STAGES, ZeroConfig
from hpcdist.strategies.decentralised import config as decentralised
from hpcdist.strategies.parameter_server.config import ParameterServerConfig, own_steps

ORDER: Final = "the order of its sums would depend on the ranks"
RECOMPUTING: Final = ("run.suspicious_factor", "run.recompute_every_steps")

DEFAULTS: Final = {
    f"{name}.{item.name}": item.default
    for name, section in {
        "communication": CommunicationConfig,
        "compression": CompressionConfig,
        "parameter_server": ParameterServerConfig,
        "zero": ZeroConfig,
    }.items()
    for item in fields(section)
}


def derived(values: Values) -> dict[str, Any]:
    """Return a copy of the dict ``values`` {recipe key: value}, with additional keys that the rules check.

    The additional values are computed from ``values`` and, for missing keys, from default values.
    """
    get = {**DEFAULTS, **values}.__getitem__
    strategy, compression = get("parallel.strategy"), get("communication.compression")
    chosen = f"parallel.strategy = {strategy!r}"
    ahead = own_steps(*(get(f"parameter_server.{name}") for name in ("consistency", "staleness", "backup_workers")))
    result = dict(values)
    result["asynchronous workers"] = ahead if strategy == "parameter_server" else ""
    result["own steps"] = result["asynchronous workers"] if strategy in SUMMING else chosen
    if {"model.heads", "model.kv_heads", "parallel.tensor"} <= values.keys():
        result["query head"] = values["model.heads"] // values["parallel.tensor"]  # per tensor rank
        result["shared head"] = (values["model.kv_heads"] or values["model.heads"]) // values["parallel.tensor"]
    result["compressors"] = (compression, *(get("compression.candidates") if compression == "auto" else ()))
    for part, cutting in (("parameters", ("zero3",)), ("gradients", ("zero2", "zero3"))):
        degree = get(f"zero.{part}")
        is_cut = degree > 1 if degree else strategy in cutting
        result[f"whole {part}"] = "" if is_cut else chosen + (f" and zero.{part} = 1" if degree else "")
    return result


def refusals(values: Values) -> Iterator[str]:
    """Yield an error message for each rule that rejects ``values``. Skip rules with keys that ``values`` lacks."""
    return rules.refusals(RULES, derived(values))


def check(values: Values) -> None:
    """Raise ConfigurationError for the first rule that rejects the recipe ``values``."""
    rules.check(RULES, derived(values))


def _without_effect() -> Iterator[Rule]:
    stages = {
        **dict.fromkeys(("persistent_below", "prefetch", "offload_parameters", "keep_parameters"), "zero3"),
        "keep_gradients": "zero2 or zero3",
        "shared_parameters": "zero1 or zero2",
    }
    for item in fields(ZeroConfig):
        cure = f"remove it, or choose the strategy {stages.get(item.name, ' or '.join(STAGES))}"
        yield no_effect(f"zero.{item.name}", item.default, "parallel.strategy", STAGES, cure)
    for strategy, names in decentralised.KEYS.items():
        for name in names:
            default = getattr(decentralised.DecentralisedConfig, name)
            yield no_effect(f"decentralised.{name}", default, "parallel.strategy", [strategy])
    for item in fields(ParameterServerConfig):
        yield no_effect(f"parameter_server.{item.name}", item.default, "parallel.strategy", ["parameter_server"])
    for name, strategies in (
        ("bucket_bytes", ("allreduce", *decentralised.STRATEGIES)),
        ("overlap", ("allreduce", *STAGES)),
        ("delayed", ("allreduce",)),
    ):
        default = getattr(CommunicationConfig, name)
        yield no_effect(f"communication.{name}", default, "parallel.strategy", strategies)


def _batches() -> Iterator[Rule]:
    sizes: dict[str, Callable[[Any], Sequence[int]]] = {
        "run.global_batch": lambda batch: (batch,),
        "run.batch_warmup": lambda stages: stages[1::2],
    }
    for key, counts in sizes.items():
        yield rule(
            f"{key} with data rank?",
            "each needs at least one sample of a step",
            "use at least {1} samples, or fewer ranks (parallel.data)",
            relation=lambda batch, ranks, counts=counts: min(counts(batch)) < ranks,
        )
        yield rule(
            f"parallel.microbatches? with {key}",
            "some micro-batches would always be empty",
            lambda _, batch, counts=counts: f"use at most {min(counts(batch))}",
            relation=lambda microbatches, batch, counts=counts: min(counts(batch)) < microbatches,
        )
        yield rule(
            f"{key} with parallel.microbatches? with parallel.pipeline>1",
            "micro-batches of a pipeline must have equal numbers of samples",
            "choose a multiple of {1} samples",
            relation=lambda batch, microbatches, _, counts=counts: any(size % microbatches for size in counts(batch)),
        )


def _cuda_graphs() -> Iterator[Rule]:
    for axis in ("tensor", "context", "expert"):
        yield rule(f"run.cuda_graph with parallel.{axis}>1", "its ranks send messages within a layer")
    yield rule("run.cuda_graph with model.experts", "the host waits for the number of tokens of each expert")
    yield rule("run.cuda_graph with data.packed", "documents begin at different positions in every sample")
    yield rule(
        f"run.cuda_graph with model.kind={'|'.join(FOREIGN)}",
        UNBUILT + ": its kernel launches and memory are not known",
        f"set it to false, or train one of the kinds {', '.join(BUILT)}",
    )


RULES: Final = (
    rule(
        "lora.rank with model.kind!=gpt|encoder",
        "only the blocks of transformers have adapters",
        "set it to 0, and freeze tensors with optimizer.groups",
    ),
    *_without_effect(),
    *_batches(),
    rule(
        "run.logical_shards with data rank?",
        "each needs at least one shard",
        "use at most {0} data ranks (parallel.data), or start the run with more shards",
        relation=lambda shards, ranks: shards < ranks,
    ),
    # The noise scale compares gradients of two batch sizes
    rule(
        "run.noise_scale_every_steps with own steps",
        "no step has both the gradient of all replicas and the gradient of each replica",
        LOCK_STEP,
    ),
    rule(
        "run.noise_scale_every_steps with communication.delayed",
        "the sum of a step's gradients is known one step later",
    ),
    *(
        rule(
            f"run.noise_scale_every_steps with {term}",
            "gradients of norms and biases are summed over replicas before the tensor axis, so no replica has its own",
        )
        for term in PARTIAL
    ),
    rule(
        "run.noise_scale_every_steps with data rank=1 where parallel.microbatches<2 with run.logical_shards<2",
        "its gradient is the gradient of the whole batch, but the noise scale needs two batch sizes",
        "use at least 2 data ranks, or parallel.microbatches of at least 2, or set it to 0",
    ),
    rule(
        "run.noise_scale_every_steps with data rank=1 with parallel.pipeline>1 with model.tied",
        "the gradient of the tied tensor is complete only at the end of a step",
        "use at least 2 data ranks, or set one of the two keys to 0 or false",
    ),
    rule("optimizer.ema_decay with own steps", "replicas differ, so no rank has the parameters to average", LOCK_STEP),
    # Muon
    rule(
        "parallel.strategy=parameter_server with optimizer.name=muon",
        "servers own parts of matrices, but muon updates whole matrices",
        "choose allreduce, zero1, zero2 or zero3, or another optimizer",
    ),
    rule(
        "decentralised.order=combine_first->adapt_first with optimizer.name=muon where parallel.strategy=gossip",
        UNBUILT,
    ),
    *each_of(
        "*!=none with optimizer.name=muon",
        "offloaded state is updated in blocks, but muon updates whole matrices",
        *OFFLOADED,
        cure="set it to 'none', or choose another optimizer",
    ),
    # ZeRO
    *each_of(
        "zero.* with parallel.pipeline>1", UNBUILT, "offload_optimizer", "offload_parameters", "shared_parameters"
    ),
    rule(
        "zero.keep_gradients with whole gradients",
        "gradients are not sharded",
        "remove it, or choose the strategy zero2 or zero3",
    ),
    *each_of(
        "zero.* with zero.offload_parameters",
        "it would keep offloaded state in memory",
        *("keep_gradients", "keep_parameters"),
    ),
    *each_of(
        "zero.* with whole parameters",
        "parameters are not sharded",
        *("persistent_below", "prefetch", "keep_parameters"),
        cure="remove it, or choose the strategy zero3",
    ),
    rule(
        "zero.offload_parameters with parallel.strategy!=zero3",
        "it keeps whole parameters in memory",
        "choose zero3, or set it to 'none'",
    ),
    rule("zero.offload_parameters with zero.persistent_below", UNBUILT),
    *each_of(
        "*=host with run.device!=gpu",
        "the state is in host memory already",
        *OFFLOADED,
        cure="choose 'file' or 'none', or run.device = 'gpu'",
    ),
    rule(
        "zero.shared_parameters with parallel.strategy=zero3",
        "the ranks of a node share whole parameters, but zero3 shards them",
        "choose zero1 or zero2",
    ),
    rule("zero.shared_parameters with run.device!=cpu", "ranks can share only CPU memory"),
    rule(
        "zero.prefetch with communication.overlap=none",
        "no thread or poll would advance the gathers",
        "choose the overlap 'thread' or 'poll', or set zero.prefetch = 0",
    ),
    # Strategies
    rule(
        f"decentralised.moments=reset with optimizer.name={'|'.join(decentralised.CORRECTED)}",
        "its bias correction counts from the start of the run, so the steps after each averaging would be several "
        "times too long",
        "choose keep or average, or another optimizer",
    ),
    *(
        rule(
            f"parameter_server.{term} with parallel.pipeline? with parallel.tensor? where {SERVED}",
            UNBUILT + ": with pipeline or tensor ranks, every rank serves its replicas",
            f"set it to {only}",
            relation=lambda _, pipeline, tensor: pipeline * tensor > 1,
        )
        for term, only in (
            ("placement!=colocated", "'colocated'"),
            ("consistency!=bsp", "'bsp'"),
            ("backup_workers", "0"),
            ("transport!=messages", "'messages'"),
        )
    ),
    rule("communication.overlap with run.device!=cpu", UNBUILT),
    *_cuda_graphs(),
    *axis_rules.of_experts(),
    *axis_rules.of_tensor(),
    *axis_rules.of_context(),
    *axis_rules.of_packed(),
    # Logical shards have their own order of sums
    rule(f"{MIXING} with run.logical_shards", ORDER),
    rule("parameter_server.consistency!=bsp with run.logical_shards where asynchronous workers", ORDER),
    rule(
        "parameter_server.consistency!=bsp with checkpoint.export_every_steps where asynchronous workers",
        "asynchronous workers complete no common step",
        "set checkpoint.export_every_steps = 0, which exports at the end",
    ),
    *each_of(
        "* with run.logical_shards",
        ORDER,
        "parameter_server.backup_workers",
        "parallel.pipeline>1",
        "parallel.microbatches>1",
        "parallel.schedule!=sequential|auto",
        "communication.algorithm!=auto",
        "communication.overlap",
        "communication.delayed",
    ),
    # Samples by speed, and batches that grow
    rule("data.shares!=even with run.logical_shards", "the shards of a rank would depend on its speed"),
    rule(
        "data.shares!=even with own steps",
        "gradients are weighted by samples only if all ranks make each step together",
        LOCK_STEP,
    ),
    rule(
        "run.batch_warmup with own steps", "replicas that make their own steps have no common sample count", LOCK_STEP
    ),
    *each_of(
        "run.batch_warmup with *",
        UNBUILT,
        "run.logical_shards",  # their size, and the shape of every product, would change
        "data.shares!=even",  # measured shares are for one batch size
        "precision.mode=float16->float32",  # a skipped step shifts updates and rates relative to samples
    ),
    # 16-bit working copies
    *each_of(
        f"* with {IN_16_BITS}",
        UNBUILT,
        MIXING,
        "run.logical_shards",
        "communication.delayed",
        "zero.shared_parameters",
        *OFFLOADED,
        "parameter_server.backup_workers",
        "parameter_server.transport!=messages",  # the other transports sum 16-bit values
    ),
    # no chunked reduce-scatter sums in float32, and a node would round before the server does
    rule(f"communication.overlap=poll->none with {IN_16_BITS} where {SHARDED}", UNBUILT),
    rule(f"communication.algorithm=hierarchical->native with {IN_16_BITS} where {SERVED}", UNBUILT),
    rule(f"asynchronous workers with {IN_16_BITS}", UNBUILT, f"set {BSP}, or precision.mode = 'float32'"),
    # CPUs have no such products
    rule(f"run.device!=gpu with precision.activations=working->float32 with {IN_16_BITS}", UNBUILT),
    # Steps that are computed again
    *each_of(
        "* with own steps",
        "ranks without common gradient sums have no common step to recompute",
        *RECOMPUTING,
        cure=LOCK_STEP,
    ),
    *each_of("* with run.device!=cpu", UNBUILT, *RECOMPUTING),  # GPU results were never compared bit by bit
    *each_of("* with communication.delayed", UNBUILT, *RECOMPUTING),  # sums of the previous step are in flight
    *compressed.RULES,
    # Checkpoints and energy
    *each_of(
        "checkpoint.asynchronous with *=file where checkpoint.local_directory=",
        "it would copy the state to memory",
        *OFFLOADED,
        cure="set checkpoint.asynchronous = false, or name a checkpoint.local_directory",
    ),
    rule(
        "energy.shift with asynchronous workers",
        "each worker would have to wait by itself, which is not built",
        f"set it to false, or {BSP}",
    ),
    *each_of(
        "* with asynchronous workers",
        UNBUILT,
        *("checkpoint.mtbf_s", "checkpoint.keep_best"),
        cure=f"set it to 0, or {BSP}",
    ),
    rule(
        "checkpoint.keep_best with data.validation_fraction=0",
        "there is no validation loss",
        "set checkpoint.keep_best = 0, or keep some data for validation",
    ),
    # Jobs that survive: no rank could continue with the state of a dead rank, or on its device
    rule(
        "run.device=gpu with --survive=replace where --spares=0",
        "the GPU of a new process is not known in this version",
        "add --spares N, ranks that have a GPU from the start, or choose --survive shrink",
    ),
    *(
        rule(f"{term} with --survive?", why, f"{cure}, or use --restarts")
        for term, why, cure in (
            (
                "communication.overlap=thread",
                "a multithreaded MPI can deadlock when a rank dies",
                "set it to 'poll' or 'none'",
            ),
            (
                MIXING,
                "each replica has its own parameters, and the parameters of a dead rank are lost",
                "choose another strategy",
            ),
            (
                "asynchronous workers",
                "ranks without common steps have no common state to go back to",
                "choose bsp without backup workers",
            ),
            (COMPRESSED, UNBUILT + ": residuals of a dead rank are lost", "set it to 'none'"),
            ("compression.parameters", UNBUILT, "set it to 'none'"),
            ("parameter_server.transport=rma", UNBUILT, "set it to 'messages'"),
            *((f"{key}=file", UNBUILT, "set it to 'none'") for key in OFFLOADED),
        )
    ),
)
