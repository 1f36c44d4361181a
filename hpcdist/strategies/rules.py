"""Rules between sections of a recipe: which keys do not go together, why, and the change that helps.

One list, asked by the recipe, by the planner with the keys that a layout has, and with the keys ``--survive`` and
``--spares`` by `hpcdist run --survive`; `check` raises for the first rule that refuses. Rules within one section stand
beside it; `hpcdist.reporting.rules.rule` says how one is written. Light: reads ``config`` modules only.

Besides the keys of a recipe, rules read some that `derived` adds: "own steps" (the value by which replicas do not
make each step together), "asynchronous workers" (that of a parameter server), "whole parameters" and "whole
gradients" (the values by which ZeRO does not cut them), and "compressors" (the names that may be used), "query head"
and "shared head" (numbers of them on a tensor rank). "data rank" is the number of data ranks, 0 where it is not known
yet.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from hpcdist.comm.config import CommunicationConfig
from hpcdist.models.config import BUILT, FOREIGN
from hpcdist.reporting import rules
from hpcdist.reporting.rules import UNBUILT, Rule, Values, each_of, no_effect, rule
from hpcdist.strategies.compressed import rules as compressed
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.rules import BSP, COMPRESSED, IN_16_BITS, MIXING, SERVED, SHARDED
from hpcdist.strategies.config import SUMMING
from hpcdist.strategies.core import axis_rules
from hpcdist.strategies.core.axis_rules import LOCK_STEP
from hpcdist.strategies.decentralised import config as decentralised
from hpcdist.strategies.parameter_server.config import ParameterServerConfig, own_steps
from hpcdist.strategies.zero.config import OFFLOADED, STAGES, ZeroConfig

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
    """Return ``values`` with the keys that follow from them; of the sections in `DEFAULTS` any may be absent."""
    get = {**DEFAULTS, **values}.__getitem__
    strategy, compression = get("parallel.strategy"), get("communication.compression")
    chosen = f"parallel.strategy = {strategy!r}"
    ahead = own_steps(*(get(f"parameter_server.{name}") for name in ("consistency", "staleness", "backup_workers")))
    result = dict(values)
    result["asynchronous workers"] = ahead if strategy == "parameter_server" else ""
    result["own steps"] = result["asynchronous workers"] if strategy in SUMMING else chosen
    if {"model.heads", "model.kv_heads", "parallel.tensor"} <= values.keys():
        result["query head"] = values["model.heads"] // values["parallel.tensor"]  # of a tensor rank
        result["shared head"] = (values["model.kv_heads"] or values["model.heads"]) // values["parallel.tensor"]
    result["compressors"] = (compression, *(get("compression.candidates") if compression == "auto" else ()))
    for part, cutting in (("parameters", ("zero3",)), ("gradients", ("zero2", "zero3"))):
        degree = get(f"zero.{part}")
        is_cut = degree > 1 if degree else strategy in cutting
        result[f"whole {part}"] = "" if is_cut else chosen + (f" and zero.{part} = 1" if degree else "")
    return result


def refusals(values: Values) -> Iterator[str]:
    """Yield the message of each rule that refuses ``values``; those with a key that is not known are passed over."""
    return rules.refusals(RULES, derived(values))


def check(values: Values) -> None:
    """Raise ConfigurationError for the first rule that refuses ``values``."""
    rules.check(RULES, derived(values))


def _without_effect() -> Iterator[Rule]:
    """Yield the rules for keys that the strategy, or the compressor, would ignore."""
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
    """Yield the rules for the samples of a step, which a warm-up of the batch has for each of its stages."""
    sizes: dict[str, Callable[[Any], Sequence[int]]] = {
        "run.global_batch": lambda batch: (batch,),
        "run.batch_warmup": lambda stages: stages[1::2],
    }
    for key, of in sizes.items():
        yield rule(
            f"{key} with data rank?",
            "each needs at least one sample of a step",
            "use at least {1} samples, or fewer ranks (parallel.data)",
            relation=lambda batch, ranks, of=of: min(of(batch)) < ranks,
        )
        yield rule(
            f"parallel.microbatches? with {key}",
            "some would always be empty",
            lambda _, batch, of=of: f"use at most {min(of(batch))}",
            relation=lambda microbatches, batch, of=of: min(of(batch)) < microbatches,
        )
        yield rule(
            f"{key} with parallel.microbatches? with parallel.pipeline>1",
            "those of a pipeline have as many samples each",
            "choose a multiple of {1} samples",
            relation=lambda batch, microbatches, _, of=of: any(size % microbatches for size in of(batch)),
        )


def _cuda_graphs() -> Iterator[Rule]:
    """Yield the rules for CUDA graphs, in which nobody waits and the host decides nothing."""
    for axis in ("tensor", "context", "expert"):
        yield rule(f"run.cuda_graph with parallel.{axis}>1", "its ranks send messages within a layer")
    yield rule("run.cuda_graph with model.experts", "the host waits for the number of tokens of each")
    yield rule("run.cuda_graph with data.packed", "documents begin elsewhere in every sample")
    yield rule(
        f"run.cuda_graph with model.kind={'|'.join(FOREIGN)}",
        UNBUILT + ": what such a model launches, and where its memory is, only it knows",
        f"set it to false, or train one of the kinds {', '.join(BUILT)}",
    )


RULES: Final = (
    *_without_effect(),
    *_batches(),
    rule(
        "run.logical_shards with data rank?",
        "each needs at least one",
        "use at most {0} ranks (parallel.data), or as many shards from the start of the run",
        relation=lambda shards, ranks: shards < ranks,
    ),
    # The noise scale, of gradients of two batch sizes
    rule(
        "run.noise_scale_every_steps with own steps",
        "no step has the gradient of all replicas together, to compare with each one's own",
        LOCK_STEP,
    ),
    rule(
        "run.noise_scale_every_steps with communication.delayed",
        "the sum of a step's gradients is known one step later",
    ),
    rule(
        "run.noise_scale_every_steps with parallel.sequence_parallel",
        "gradients of norms and biases are summed over the tensor axis only after the replicas, so none has its own",
    ),
    rule(
        "run.noise_scale_every_steps with data rank=1 where parallel.microbatches<2 with run.logical_shards<2",
        "its gradient is that of the whole batch, and the noise follows from two batch sizes",
        "use 2 data ranks or more, or parallel.microbatches of 2 or more, or set it to 0",
    ),
    rule(
        "run.noise_scale_every_steps with data rank=1 with parallel.pipeline>1 with model.tied",
        "the gradient of the tied tensor is whole once a step, not after the first micro-batch",
        "use 2 data ranks or more, or set one of them to 0 or false",
    ),
    # ZeRO
    *each_of(
        "zero.* with parallel.pipeline>1", UNBUILT, "offload_optimizer", "offload_parameters", "shared_parameters"
    ),
    rule(
        "zero.keep_gradients with whole gradients",
        "no gradients are cut",
        "remove it, or choose the strategy zero2 or zero3",
    ),
    *each_of(
        "zero.* with zero.offload_parameters",
        "what does not fit would be kept in memory",
        *("keep_gradients", "keep_parameters"),
    ),
    *each_of(
        "zero.* with whole parameters",
        "no parameters are cut",
        *("persistent_below", "prefetch", "keep_parameters"),
        cure="remove it, or choose the strategy zero3",
    ),
    rule(
        "zero.offload_parameters with parallel.strategy!=zero3",
        "it keeps the parameters whole in memory",
        "choose zero3, or set it to 'none'",
    ),
    rule("zero.offload_parameters with zero.persistent_below", UNBUILT),
    *each_of(
        "*=host with run.device!=gpu",
        "the state is where it was",
        *OFFLOADED,
        cure="choose 'file' or 'none', or run.device = 'gpu'",
    ),
    rule(
        "zero.shared_parameters with parallel.strategy=zero3",
        "the ranks of a node share whole parameters, and it cuts them",
        "choose zero1 or zero2",
    ),
    rule("zero.shared_parameters with run.device!=cpu", "ranks share the memory of CPUs"),
    rule(
        "zero.prefetch with communication.overlap=none",
        "nothing would move what is gathered ahead",
        "choose the overlap 'thread' or 'poll', or set zero.prefetch = 0",
    ),
    # Strategies
    rule(
        f"decentralised.moments=reset with optimizer.name={'|'.join(decentralised.CORRECTED)}",
        "its correction for moments that begin at zero counts from the start of the run, so the steps after each "
        "averaging would be several times too long",
        "choose keep or average, or another optimizer",
    ),
    *(
        rule(
            f"parameter_server.{term} with parallel.pipeline? with parallel.tensor? where {SERVED}",
            UNBUILT + ": there every rank serves what its replicas share",
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
    # Logical shards, whose sums have an order of their own
    rule(f"{MIXING} with run.logical_shards", ORDER),
    rule("parameter_server.consistency!=bsp with run.logical_shards where asynchronous workers", ORDER),
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
    rule("data.shares!=even with run.logical_shards", "which shards a rank computes would follow its speed"),
    rule(
        "data.shares!=even with own steps",
        "only where all ranks make each step together are gradients weighted by samples",
        LOCK_STEP,
    ),
    rule(
        "run.batch_warmup with own steps",
        "replicas that do not make each step together share no count of samples",
        LOCK_STEP,
    ),
    *each_of(
        "run.batch_warmup with *",
        UNBUILT,
        "run.logical_shards",  # their size, and so every product, would change
        "data.shares!=even",  # a measured share is of batches of one size
        "precision.mode=float16->float32",  # a skipped step moves updates, and their rates, against samples
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
        "parameter_server.transport!=messages",  # the others sum as they send
    ),
    # no reduce-scatter in steps sums them in float32, and a node would round before the server does
    rule(f"communication.overlap=poll->none with {IN_16_BITS} where {SHARDED}", UNBUILT),
    rule(f"communication.algorithm=hierarchical->native with {IN_16_BITS} where {SERVED}", UNBUILT),
    rule(f"asynchronous workers with {IN_16_BITS}", UNBUILT, f"set {BSP}, or precision.mode = 'float32'"),
    # a processor multiplies no such numbers
    rule(f"run.device!=gpu with precision.activations=working->float32 with {IN_16_BITS}", UNBUILT),
    # Steps that are computed again
    *each_of(
        "* with own steps",
        "ranks that do not sum every gradient together agree on no step that could be computed again",
        *RECOMPUTING,
        cure=LOCK_STEP,
    ),
    *each_of("* with run.device!=cpu", UNBUILT, *RECOMPUTING),  # bits of a GPU were never compared
    *each_of("* with communication.delayed", UNBUILT, *RECOMPUTING),  # sums of the step before are under way
    *compressed.RULES,
    # Checkpoints and energy
    *each_of(
        "checkpoint.asynchronous with *=file where checkpoint.local_directory=",
        "it would make a copy in memory",
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
    # Jobs that survive: no rank could go on with the state of a dead one, or on its device
    rule(
        "run.device=gpu with --survive=replace where --spares=0",
        "which GPU a new process should use is not known in this version",
        "add --spares N, ranks that have theirs from the start, or choose --survive shrink",
    ),
    *(
        rule(f"{term} with --survive?", why, f"{cure}, or use --restarts")
        for term, why, cure in (
            (
                "communication.overlap=thread",
                "an MPI that several threads call can wait for itself when a rank dies",
                "set it to 'poll' or 'none'",
            ),
            (
                MIXING,
                "each replica has parameters of its own, and those of a dead rank are gone",
                "choose another strategy",
            ),
            (
                "asynchronous workers",
                "ranks that share no step have no common state to go back to",
                "choose bsp without backup workers",
            ),
            (COMPRESSED, UNBUILT + ": what compression has lost on a dead rank is nowhere else", "set it to 'none'"),
            ("compression.parameters", UNBUILT, "set it to 'none'"),
            ("parameter_server.transport=rma", UNBUILT, "set it to 'messages'"),
            *((f"{key}=file", UNBUILT, "set it to 'none'") for key in OFFLOADED),
        )
    ),
)
