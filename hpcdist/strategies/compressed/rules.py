"""Rules of compression: which compressors and keys go together, and with which strategies and precisions.

Part of the list of `hpcdist.strategies.rules`, which says what derived keys are. Light: reads ``config`` modules only.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, Rule, each_of, other_than, rule
from hpcdist.strategies.compressed import config
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.config import SUMMING
from hpcdist.strategies.zero.config import STAGES

PUSHED: Final = (*config.QUANTISED, *config.SPARSE)  # compressors of which a server takes payloads
NOT_PUSHED: Final = {
    "auto": "it measures sums that workers make among themselves",
    "powersgd": "its second factor follows from the sum of the first over all workers, and they ask servers once",
}
# Terms of rules.
COMPRESSED: Final = "communication.compression"
MOMENTUM: Final = f"communication.compression={'|'.join(config.OPTIMIZING)}->none"
MIXING: Final = f"parallel.strategy!={'|'.join(SUMMING)}"
SERVED: Final = "parallel.strategy=parameter_server"
SHARDED: Final = f"parallel.strategy={'|'.join(STAGES)}"
IN_16_BITS: Final = "precision.mode=bfloat16|float16->float32"
IN_64_BITS: Final = "precision.mode=float64->float32"
# Reasons and cures.
BSP: Final = "parameter_server.consistency = 'bsp' without backup workers"
ENCODED: Final = UNBUILT + ": what is encoded is float32"
WHOLE_TENSORS: Final = "its factors are of whole tensors"


def _unread() -> Iterator[Rule]:
    """Yield the rules for keys that the compressor would ignore."""
    for item in fields(CompressionConfig):
        readers = config.READ_BY.get(item.name, (*config.COMPRESSORS, *config.OPTIMIZING, "auto"))
        unread = rule(f"compressors!~{'|'.join(readers)} with compression.parameters=none").conditions
        if item.name != "parameters":
            yield Rule(
                {f"compression.{item.name}": other_than(item.default), **rule(f"{COMPRESSED}?").conditions},
                NO_EFFECT,
                f"remove it, or choose one of {', '.join(readers)}",
                given=unread if item.name == "across_nodes" else {"compressors": unread["compressors"]},
            )


RULES: Final = (
    *_unread(),
    rule(
        "compression.bits<8 with compression.error_feedback where compressors~qsgd",
        "qsgd then loses more than there is, and what is fed back would grow without bound",
        "set compression.error_feedback = false (it is unbiased), or compression.bits = 8",
    ),
    # Compressed parameters
    rule(
        "compression.parameters with whole parameters",
        "every rank keeps the parameters whole: what it keeps, and steps, would be rounded",
        "choose zero3, set zero.parameters to the ranks of a node, or compression.parameters to 'none'",
    ),
    *each_of(
        "compression.parameters with *", UNBUILT, "zero.prefetch", "zero.offload_parameters", "communication.overlap"
    ),
    rule("compression.parameters with run.logical_shards", "it would round weights where the ranks cut them"),
    rule(f"compression.parameters with {IN_64_BITS}", ENCODED),
    rule(
        "compression.parameters=float16|bfloat16 with precision.mode=float16|bfloat16",
        "what is gathered has 16 bits already",
        "choose int8 or int4, or set it to 'none'",
    ),
    # Compressors that take the place of an optimizer's momentum
    rule(
        f"parallel.strategy!=allreduce with {MOMENTUM}", "each rank steps all of the model by a momentum that all send"
    ),
    *(
        rule(f"optimizer.name!={optimizer} with {COMPRESSED}={name}->none", "it takes the place of another's momentum")
        for name, optimizer in config.MOMENTUM_OPTIMIZERS.items()
    ),
    rule(
        f"optimizer.normalize_gradient with {MOMENTUM}",
        "it divides by the norm of the summed gradient, which nobody has",
    ),
    rule(f"optimizer.bias_correction!=true with {MOMENTUM}", "it always corrects the moments"),
    rule(
        f"compression.across_nodes with {MOMENTUM}",
        UNBUILT + ": the momentum that each rank keeps has no sum of a node",
    ),
    rule(
        f"{IN_16_BITS} with {MOMENTUM}",
        UNBUILT + ": what ranks step by would be rounded to 16 bits, and no feedback makes up for that",
    ),
    rule(
        f"{COMPRESSED}=onebit with compression.warmup_steps=0",
        "the variance that is frozen is measured in them",
        "set as many as the warm-up of the learning rate has at least, e.g. a fifth of run.steps",
    ),
    # Compressed gradients
    rule(f"{COMPRESSED} with {MIXING}", "its replicas exchange parameters, and no sum of gradients"),
    rule(
        f"{COMPRESSED}? with {SHARDED} where compressors~powersgd",
        WHOLE_TENSORS + ", which all ranks rebuild, and ZeRO sums cuts of them",
        "choose int8, another quantised or a sparse one, or parallel.strategy = 'allreduce'",
    ),
    rule(
        f"{COMPRESSED}!=none|{'|'.join(PUSHED)} with {SERVED}",
        lambda name, _: NOT_PUSHED.get(name, UNBUILT),
        f"choose one of {', '.join(PUSHED)}, or the strategy 'allreduce'",
    ),
    rule(
        f"{COMPRESSED} with parameter_server.backup_workers",
        "a gradient that comes too late is left out, and its worker has already taken it for sent",
    ),
    rule(
        f"{COMPRESSED} with asynchronous workers",
        "a push is clipped by the norm of its worker's own gradient, and what is sent is another one",
        f"set {BSP}, or the compression to 'none'",
    ),
    rule(
        f"{COMPRESSED} with parameter_server.transport=shared->messages",
        "what ranks of a node read in shared memory does not travel, and to encode it costs time",
    ),
    rule(
        f"{COMPRESSED} with parameter_server.transport=rma->messages",
        "servers add what lies in their windows, and do not decode it in this version",
    ),
    rule(
        f"compression.across_nodes with communication.algorithm!=hierarchical where {SERVED}",
        "workers of a node sum before one of them encodes only where the algorithm is 'hierarchical'",
    ),
    *each_of(
        f"{COMPRESSED} with *",
        UNBUILT,
        "zero.offload_parameters",
        "communication.overlap",
        "communication.delayed",
        "run.recompute_every_steps",
        "run.suspicious_factor",
    ),
    rule(f"{COMPRESSED} with run.logical_shards", "bits would depend on which ranks lose what"),
    rule(f"{COMPRESSED} with run.noise_scale_every_steps", "what compression loses would count as noise of the data"),
    rule(
        f"{COMPRESSED} with parallel.sequence_parallel",
        "parts of gradients, which are summed over the tensor axis only later, would be compressed",
    ),
    rule(f"{IN_64_BITS} with {COMPRESSED}", ENCODED),
    rule(
        f"{COMPRESSED}? with parallel.tensor>1 where compressors~powersgd",
        WHOLE_TENSORS + ", and each rank has a part",
        "choose another compressor, or parallel.tensor = 1",
    ),
)
