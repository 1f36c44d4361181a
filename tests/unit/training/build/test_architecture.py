"""The line that describes the architecture of a run."""

from pathlib import Path

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import recipe_keys, recipe_of, session_of
from hpcdist import models
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.training.build.assemble import assemble
from hpcdist.training.observe import figures
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import settings


@cases(
    "ranks, keys, expected",
    (1, "", "allreduce, native"),
    (2, "compression=topk", "allreduce, native, gradients as topk"),
    (
        2,
        "strategy=zero3 compression=int4 compression.parameters=int8",
        "zero3, native, gradients as int4, weights gathered as int8",
    ),
    (2, "strategy=zero2 microbatches=3", "zero2, native, 3 micro-batches"),
    (3, "strategy=parameter_server", "parameter_server, 1 dedicated server, bsp"),
    (2, "strategy=parameter_server parameter_server.placement=colocated", "parameter_server, 2 colocated servers, bsp"),
    (
        4,
        "strategy=parameter_server servers=2 transport=shared",
        "parameter_server, 2 dedicated servers, bsp, transport shared",
    ),
    (
        4,
        "strategy=zero3 zero.parameters=2 zero.persistent_below=1000 data.shares=measured",
        "zero3, native, degrees 2, 4, 4, layers below 1,000 elements whole, samples by measured speed",
    ),
    (
        2,
        "strategy=zero3 zero.prefetch=2 overlap=poll algorithm=ring",
        "zero3, ring, 2 gathered ahead, overlapped by polling",
    ),
    (
        2,
        "strategy=zero3 offload_optimizer=file offload_parameters=file offload_directory={here}",
        "zero3, native, optimizer state in files, shards in files",
    ),
    (1, "recompute=true microbatches=2", "allreduce, native, 2 micro-batches, layers recomputed"),
    (2, "strategy=zero1 zero.shared_parameters=true", "zero1, native, parameters shared by a node"),
    (1, "algorithm=ring overlap=poll delayed=true", "allreduce, ring, overlapped by polling, delayed"),
    (2, "pipeline=2 microbatches=4 recompute=true", "allreduce, native, 1f1b of 4 micro-batches, recomputing"),
    (2, "pipeline=2 microbatches=4", "allreduce, native, 1f1b of 4 micro-batches, bubble 20%"),
    (2, "pipeline=2 microbatches=4 schedule=zb-h1", "allreduce, native, zb-h1 of 4 micro-batches, bubble 8%"),
    (
        2,
        "layers=2 pipeline=2 microbatches=4 schedule=interleaved chunks=2",
        "allreduce, native, interleaved of 4 micro-batches, bubble 11%",
    ),
    (2, "pipeline=2 microbatches=1 schedule=zb-h1", "allreduce, native, zb-h1 of 1 micro-batches"),
    (
        4,
        "tensor=2 sequence_parallel=true heads=2 strategy=zero1",
        "zero1, native, tensor by node_shared, activations by rows",
    ),
    (2, "tensor=2 heads=2 algorithm=ring", "allreduce, ring, tensor by ring"),
)
def test_one_line_describes_the_architecture(ranks, keys, expected, tmp_path, rng):
    (tmp_path / "text.txt").write_bytes(rng.integers(32, 127, 5000, np.uint8).tobytes())
    small = {"data.path": tmp_path / "text.txt"} | recipe_keys("layers=1 hidden=8 heads=1 data.context=8")
    recipe = recipe_of(small | recipe_keys(keys.format(here=tmp_path)))

    def body(comm):
        return figures.describe_architecture(assemble(session_of(comm), recipe))

    assert run_threads(ranks, body) == [expected] * ranks


@pytest.mark.parametrize(
    ("kind", "layers", "uncut", "advice"),
    [
        ("given", 4, None, ""),
        ("import", 1, None, ". Wrap a list of smaller stages"),
        ("given", 1, "", ". Pass cut=True to wrap, or wrap a list"),
        ("given", 1, "wrap could not cut the module: reason", ". wrap could not cut the module: reason. Wrap a list"),
    ],
)
def test_zero3_warns_if_one_stage_has_all_parameters(kind, layers, uncut, advice):
    """A user module that is no list of stages is gathered as one unit, so sharding its parameters saves no memory."""

    def body(comm):
        stages = models.build(ModelConfig(kind="mlp", layers=layers, hidden=9), features=5, classes=3).stages
        given = Model(stages[:1] if layers == 1 else stages, "float32", tokens_per_sample=1)
        if uncut is not None:
            given.stages[0].uncut = uncut
        keys = {"model": {"kind": kind, "factory": "a:b" if kind == "import" else ""}, "parallel.strategy": "zero3"}
        recipe = recipes.load(settings.table(keys, "here", recipes.known_keys(), Path()), environment={}).recipe
        return figures.warn_of_whole_gathers(assemble(session_of(comm), recipe, script_model=given))

    lines = run_threads(2, body)
    assert lines[0] == lines[1] and bool(lines[0]) == bool(advice)
    assert not advice or "stage 0 has 100% of the parameters of this rank" in lines[0]
    assert advice in lines[0]


@cases(
    "keys, expected",
    ("run.device=cpu precision.mode=bfloat16", ""),
    (
        "run.device=gpu",
        "activations in float32; precision.mode = 'bfloat16' with precision.activations = 'working' uses tensor cores",
    ),
    ("run.device=gpu precision.mode=float64", "matrix products and activations in float64"),
    (
        "run.device=gpu precision.mode=bfloat16",
        "matrix products and activations in float32, parameters and gradients in bfloat16; precision.mode = ",
    ),
    (
        "run.device=gpu precision.mode=float16 precision.activations=working",
        "activations in float16, their sums and the master weights in float32; without precision.mode, everything",
    ),
)
def test_gpu_description_names_the_type_of_its_products(keys, expected):
    text = figures.describe_precision(recipe_of(recipe_keys(keys)))
    assert expected in text and bool(text) == bool(expected)
