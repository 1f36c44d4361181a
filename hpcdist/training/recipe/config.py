"""The ``[data]``, ``[precision]``, ``[run]`` and ``[survival]`` sections of a recipe.

Light: imports no MPI, HDF5 or NumPy.
"""

import glob
import math
import os
from dataclasses import dataclass
from typing import Final

from hpcdist.constants import HALVES, PRECISIONS
from hpcdist.errors import DataError
from hpcdist.models.config import MOST_CONTEXT
from hpcdist.optim.rates import BatchSchedule, staged_batches
from hpcdist.reporting.rules import NO_EFFECT, no_effect, rule
from hpcdist.reporting.schema import check_section, key

ACTIVATIONS: Final = ("float32", "working")
SHARES: Final = ("even", "measured")
DIGESTS: Final = ("whole", "probes")
FLAT_TYPES: Final = ("", "uint16", "uint32")
DEVICES: Final = ("cpu", "gpu")
MOST_SAMPLES: Final = 2**31  # per step


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Table ``[[data.source]]``: a source of a mixture."""

    path: str = key("", "Data of the source, as data.path.", path=True, valid=bool, expected="a path")
    weight: float = key(1.0, "Share of the samples, relative to the sum of all weights.", gt=0)
    dtype: str = key("", "Type of the tokens in flat files, as data.dtype.", choices=FLAT_TYPES)

    def __post_init__(self) -> None:
        check_section((), "data.source", self)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section ``[data]``: the training data.

    Models of kind mlp and convnet need an HDF5 file with ``x`` of shape (rows, ...) and ``y`` of shape (rows,).
    Pictures have the shape (rows, height, width) or (rows, height, width, channels).
    """

    path: str = key(
        "",
        'Text, tokens (directory, .npy, HDF5, Megatron, flat), or HDF5 with x and y. "": source code of Python.',
        path=True,
    )
    source: tuple[DataSource, ...] = key(
        (), "Mixture: tables [[data.source]] with path, weight (default 1) and dtype, in place of path."
    )
    dtype: str = key("", 'Type of the tokens in flat files without header. "": the files store it.', choices=FLAT_TYPES)
    staged: str = key("", "Copy of path on each node, which the ranks read instead of path.", path=True)
    context: int = key(128, "Context length: number of tokens per sample.", ge=1, le=MOST_CONTEXT)
    validation_fraction: float = key(
        0.05, "Fraction of the data, taken from its end, to use for validation. 0: none.", ge=0, le=0.5
    )
    packed: bool = key(False, "Fill samples with whole documents. Attention stays within a document.")
    document_end: int = key(
        -1, "Token that ends a document. -1: no such token; each file of a directory is a document.", ge=-1
    )
    cut_documents: bool = key(False, "Cut documents that are longer than a sample. If false, they are an error.")
    shares: str = key(
        "even", "Division of a step's samples among replicas: evenly, or by measured speed.", choices=SHARES
    )
    digest: str = key(
        "whole", "How a resume checks that the data is unchanged: by all bytes, or by 64 samples.", choices=DIGESTS
    )

    def __post_init__(self) -> None:
        check_section(RULES, "data", self)

    def check_exists(self) -> None:
        """Raise DataError if the training data (files or directories) does not exist. Local."""
        key = "data.source" if self.source else "data.staged" if self.staged else "data.path"
        for path in (self.staged,) if self.staged else self.paths:
            if not (os.path.exists(path) or glob.glob(path) or os.path.exists(f"{path}.idx")):
                raise DataError(f"{key} = {path}: there is no such file or directory; set the key to an existing path")

    @property
    def paths(self) -> tuple[str, ...]:
        """Original paths of the data: of all sources, or the key ``path``. () for the source code of Python."""
        return tuple(source.path for source in self.source) or tuple(filter(None, [self.path]))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Section ``[precision]``: the number formats of parameters, gradients and activations.

    A step whose float16 gradients overflow is skipped. Updates and checkpoints use a float32 master copy.
    """

    mode: str = key(
        "float32", "Type of parameters and gradients. 16-bit types have a float32 master copy.", choices=PRECISIONS
    )
    activations: str = key("float32", "Type in which stages compute. working: the type of mode.", choices=ACTIVATIONS)
    loss_scale: float = key(
        0.0,
        "Fixed loss scale. 0: dynamic.",
        valid=lambda scale: scale == 0 or (1 <= scale <= 2**24 and math.frexp(scale)[0] == 0.5),
        expected="0 or a power of two from 1 to 2^24",
    )
    growth_interval: int = key(2000, "Number of steps without overflow after which the loss scale doubles.", ge=1)
    hysteresis: int = key(2, "Number of consecutive overflows after which the loss scale halves.", ge=1)
    minimum_scale: float = key(
        1.0,
        "Minimum loss scale. 16 consecutive overflows at this scale end the run.",
        valid=lambda scale: 2**-24 <= scale <= 2**16 and math.frexp(scale)[0] == 0.5,
        expected="a power of two from 2^-24 to 2^16",
    )

    @property
    def computes(self) -> str:
        """Data type of updates and checkpoints: "float32" if the key ``mode`` is a 16-bit type, else ``mode``."""
        return "float32" if self.mode in HALVES else self.mode

    @property
    def stages(self) -> str:
        """Data type of the activations that pipeline stages compute and send."""
        return self.mode if self.activations == "working" else self.computes

    @property
    def working(self) -> str | None:
        """16-bit data type of stored and sent parameters and gradients, or None if ``mode`` is not a 16-bit type."""
        return self.mode if self.mode in HALVES else None

    def __post_init__(self) -> None:
        check_section(RULES, "precision", self)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Section ``[run]``: length, batch size, device, and the checks and measurements during a run."""

    steps: int = key(1000, "Length of the run in steps.", ge=1)
    global_batch: int = key(16, "Samples per step, summed over all ranks.", ge=1, le=MOST_SAMPLES)
    seed: int = key(0, "Random seed of the initial parameters and the order of samples.", ge=0)
    device: str = key("cpu", "Device that holds the arrays and computes.", choices=DEVICES)
    cuda_graph: bool = key(False, "On a GPU, launch the forward and backward pass of each layer as one CUDA graph.")
    sentinel_every_steps: int = key(100, "Steps between checks that all replicas are equal. 0: no checks.", ge=0)
    validation_samples: int = key(1024, "Number of samples of the validation loss. 0: all.", ge=0)
    log_every_s: float = key(5.0, "Seconds between log lines.", ge=0)
    batch_warmup: tuple[int, ...] = key(
        (), "Smaller batches at first: [6400, 16, 32000, 64] means 16 to sample 6400, 64 to 32000."
    )
    logical_shards: int = key(
        0, "Parts of a step with a fixed order of sums. 1 to this many ranks give equal bits. 0: off.", ge=0
    )
    suspicious_factor: float = key(
        0.0, "Recompute a step if its norm or loss exceeds this many times the median. 0: never.", gt=1, off=0
    )
    recompute_every_steps: int = key(0, "Steps between recomputed steps, which find silent faults. 0: never.", ge=0)
    noise_scale_every_steps: int = key(0, "Steps between measurements of the gradient noise scale. 0: never.", ge=0)
    init_from: str = key(
        "",
        'Checkpoint, run, Hugging Face directory or GGUF file with the initial parameters (--init-from). "": random.',
        path=True,
    )
    allow_partial: bool = key(
        False, "Initialise tensors randomly if init_from does not have them, or not in this shape."
    )

    def __post_init__(self) -> None:
        check_section(RULES, "run", self)
        assert self.batches.final  # the property raises for an invalid warm-up

    @property
    def batches(self) -> BatchSchedule:
        """Schedule of the global batch size: the number of samples per step."""
        return staged_batches(self.global_batch, self.batch_warmup)

    @property
    def recomputes(self) -> bool:
        """True if some steps may be computed twice, to find silent data corruption."""
        return self.suspicious_factor > 0 or self.recompute_every_steps > 0


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig:
    """Section ``[survival]``: copies of the state at partner ranks, in jobs of `hpcdist run --survive`."""

    every_steps: int = key(
        1, "Steps between copies of the state. A rank failure repeats at most this many steps.", ge=1
    )
    check_every_steps: int = key(0, "Steps between checks of the copies. 0: check them only before use.", ge=0)
    least_ranks: int = key(1, "Least number of ranks; the job ends if fewer are left.", ge=1)

    def __post_init__(self) -> None:
        check_section((), "survival", self)


_SCALING: Final = ("loss_scale", "growth_interval", "hysteresis", "minimum_scale")
RULES: Final = (
    rule("data.staged with data.path=", "there is no original file", "set data.path, or leave it out"),
    rule("data.path with data.source", "the sources have their own paths", "make data.path a source, or leave it out"),
    rule("data.staged with data.source", "only data.path can be staged", "leave data.staged out"),
    rule("data.dtype with data.path=", "flat files need a path", "set data.path, or the dtype of each data.source"),
    no_effect("data.document_end", -1, "data.packed", [True]),
    no_effect("data.cut_documents", False, "data.packed", [True]),
    rule(
        "precision.activations=working with precision.mode!={halves}",
        "this mode has no 16-bit working copies",
        f"choose the mode {' or '.join(HALVES)}, or leave it out",
        halves=HALVES,
    ),
    *(
        no_effect(f"precision.{name}", getattr(PrecisionConfig, name), f"precision.{other}", [needed])
        for other, needed, names in (("mode", "float16", _SCALING), ("loss_scale", 0, _SCALING[1:]))
        for name in names
    ),
    no_effect("run.cuda_graph", False, "run.device", ["gpu"]),
    rule(
        "run.allow_partial with run.init_from=",
        NO_EFFECT,
        "all parameters are random; name a checkpoint with run.init_from (--init-from), or set it to false",
    ),
    rule(
        "run.global_batch? with run.logical_shards",
        "all logical shards must have the same number of samples",
        "choose a multiple of {1} samples, or a number of shards that divides {0}",
        relation=lambda batch, shards: batch % shards,
    ),
    rule("run.logical_shards with run.device!=cpu", "a GPU sums the gradients of embedding rows in no fixed order"),
)
