"""Rules of compression: which compressors and keys go together, and with which strategies and precisions.

Part of `hpcdist.strategies.rules`, which defines the derived keys. Imports ``config`` modules only.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, Rule, each_of, other_than, rule
from hpcdist.strategies.compressed import config
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.config import PARTIAL, SUMMING
from hpcdist.strategies.data.config import STAGES

PUSHED: Final = (*config.QUANTISED, *config.SPARSE)  # compressors whose payloads a server can decode
NOT_PUSHED: Final = {
    "auto": "it measures sums that workers make among themselves",
    "powersgd": "its second factor depends on the sum of the first over all workers, which needs a second exchange",
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
ENCODED: Final = UNBUILT + ": only float32 values can be encoded"
WHOLE_TENSORS: Final = "its factors need whole tensors"


def _unread() -> Iterator[Rule]:
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
        "qsgd then loses more than the gradient itself, so the residuals would grow without bound",
        "set compression.error_feedback = false (it is unbiased), or compression.bits = 8",
    ),
    # Compressed parameters
    rule(
        "compression.parameters with whole parameters",
        "every rank keeps whole parameters, and its copy would be rounded",
        "choose zero3, set zero.parameters to the ranks of a node, or compression.parameters to 'none'",
    ),
    *each_of(
        "compression.parameters with *", UNBUILT, "zero.prefetch", "zero.offload_parameters", "communication.overlap"
    ),
    rule("compression.parameters with run.logical_shards", "rounding would depend on where the ranks divide weights"),
    rule(f"compression.parameters with {IN_64_BITS}", ENCODED),
    rule(
        "compression.parameters=float16|bfloat16 with precision.mode=float16|bfloat16",
        "gathered parameters have 16 bits already",
        "choose int8 or int4, or set it to 'none'",
    ),
    # Compressors that replace the optimizer's momentum
    rule(
        f"parallel.strategy!=allreduce with {MOMENTUM}", "each rank updates the whole model by the exchanged momentum"
    ),
    *(
        rule(f"optimizer.name!={optimizer} with {COMPRESSED}={name}->none", f"it replaces the momentum of {optimizer}")
        for name, optimizer in config.MOMENTUM_OPTIMIZERS.items()
    ),
    rule(
        f"optimizer.normalize_gradient with {MOMENTUM}",
        "it divides by the norm of the summed gradient, which no rank has",
    ),
    rule(f"optimizer.bias_correction!=true with {MOMENTUM}", "it always corrects the moments"),
    rule(f"compression.across_nodes with {MOMENTUM}", UNBUILT + ": the local momentum cannot be summed within a node"),
    rule(f"{IN_16_BITS} with {MOMENTUM}", UNBUILT + ": the update would be rounded to 16 bits, without error feedback"),
    rule(
        f"{COMPRESSED}=onebit with compression.warmup_steps=0",
        "the frozen variance is measured in the warm-up steps",
        "set it to at least the length of the learning rate's warm-up, e.g. a fifth of run.steps",
    ),
    # Compressed gradients
    rule(f"{COMPRESSED} with {MIXING}", "its replicas exchange parameters, not sums of gradients"),
    rule(
        f"{COMPRESSED}? with {SHARDED} where compressors~powersgd",
        WHOLE_TENSORS + ", but ZeRO sums shards of tensors",
        "choose int8 or another quantised or sparse compressor, or parallel.strategy = 'allreduce'",
    ),
    rule(
        f"{COMPRESSED}!=none|{'|'.join(PUSHED)} with {SERVED}",
        lambda name, _: NOT_PUSHED.get(name, UNBUILT),
        f"choose one of {', '.join(PUSHED)}, or the strategy 'allreduce'",
    ),
    rule(
        f"{COMPRESSED} with parameter_server.backup_workers",
        "a late gradient is dropped, but its worker's residuals assume that it was applied",
    ),
    rule(
        f"{COMPRESSED} with asynchronous workers",
        "a push is clipped by the norm of its worker's own gradient, but the sent gradient differs",
        f"set {BSP}, or the compression to 'none'",
    ),
    rule(
        f"{COMPRESSED} with parameter_server.transport=shared->messages",
        "ranks of a node read gradients from shared memory, so encoding only costs time",
    ),
    rule(
        f"{COMPRESSED} with parameter_server.transport=rma->messages",
        "servers cannot decode payloads in their windows in this version",
    ),
    rule(
        f"compression.across_nodes with communication.algorithm!=hierarchical where {SERVED}",
        "only with algorithm 'hierarchical' do the workers of a node sum before one of them encodes",
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
    rule(f"{COMPRESSED} with run.logical_shards", "bits would depend on the compression errors of each rank"),
    rule(f"{COMPRESSED} with run.noise_scale_every_steps", "compression errors would count as noise of the data"),
    *(
        rule(
            f"{COMPRESSED} with {term}",
            "partial gradients would be compressed before they are summed over the tensor axis",
        )
        for term in PARTIAL
    ),
    rule(f"{IN_64_BITS} with {COMPRESSED}", ENCODED),
    rule(
        f"{COMPRESSED}? with parallel.tensor>1 where compressors~powersgd",
        WHOLE_TENSORS + ", but each tensor rank has a shard",
        "choose another compressor, or parallel.tensor = 1",
    ),
)
