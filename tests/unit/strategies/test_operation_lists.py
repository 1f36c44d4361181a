"""Each strategy's operation lists equal golden/operations.txt: what each rank does in a step, in order.

`python tests/unit/strategies/test_operation_lists.py` writes the file anew after an intended change.
"""

import re
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from harness.rank_run import RankRun
from harness.trainings import SMALL, run_steps, trainer_of
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.build import build_exchange
from hpcdist.strategies.data import catalogue
from hpcdist.training.build.assemble import strategy_settings
from hpcdist.training.recipe import recipe

BASELINE = Path(__file__).parents[1] / "golden" / "operations.txt"
ZERO3 = "parallel.strategy=zero3"
SERVERS = "parallel.strategy=parameter_server"
SHARDS = "run.logical_shards=4"
OVERLAP = "communication.overlap=thread"
EXPERTS = "parallel.expert=2"
OFFLOAD = [
    "zero.offload_optimizer=file",
    "zero.offload_parameters=file",
    f"zero.offload_directory={tempfile.gettempdir()}",
]
# Strategy -> (ranks, recipe keys).
STRATEGIES = {
    "allreduce": (2, []),
    "allreduce, one rank": (1, []),
    "allreduce, overlap by a thread": (2, [OVERLAP]),
    "allreduce, overlap by polling": (2, ["communication.overlap=poll", "communication.algorithm=ring"]),
    "allreduce, logical shards": (2, [SHARDS]),
    "allreduce, delayed": (2, ["communication.delayed=true", OVERLAP]),
    "zero1": (2, ["parallel.strategy=zero1"]),
    "zero1, one rank": (1, ["parallel.strategy=zero1"]),
    "zero1, overlap": (2, ["parallel.strategy=zero1", OVERLAP]),
    "zero1, logical shards": (2, ["parallel.strategy=zero1", SHARDS]),
    "zero1, shared parameters": (2, ["parallel.strategy=zero1", "zero.shared_parameters=true"]),
    "zero2": (2, ["parallel.strategy=zero2"]),
    "zero2, overlap": (2, ["parallel.strategy=zero2", OVERLAP]),
    "zero2, kept gradients": (2, ["parallel.strategy=zero2", "zero.keep_gradients=true"]),
    "zero3": (2, [ZERO3]),
    "zero3, overlap and prefetch": (2, [ZERO3, OVERLAP, "zero.prefetch=1"]),
    "zero3, kept parameters and gradients": (2, [ZERO3, "zero.keep_gradients=true", "zero.keep_parameters=true"]),
    "zero3, persistent layers": (2, [ZERO3, "zero.persistent_below=40"]),
    "zero3, logical shards": (2, [ZERO3, SHARDS]),
    "zero3, offload": (2, [ZERO3, *OFFLOAD]),
    "zero3, degrees 2 2 2 of 4": (4, [ZERO3, "zero.parameters=2", "zero.gradients=2", "zero.optimizer=2"]),
    "zero3, degrees 2 4 4 of 4": (4, [ZERO3, "zero.parameters=2"]),
    "zero3, degrees 1 2 4 of 4": (4, [ZERO3, "zero.parameters=1", "zero.gradients=2"]),
    "int8": (2, ["communication.compression=int8"]),
    "topk": (2, ["communication.compression=topk"]),
    "powersgd": (2, ["communication.compression=powersgd"]),
    "dgc": (2, ["communication.compression=dgc", "optimizer.name=sgd"]),
    "onebit": (2, ["communication.compression=onebit", "optimizer.name=adamw", "compression.warmup_steps=200"]),
    "zero1, int8": (2, ["parallel.strategy=zero1", "communication.compression=int8"]),
    "zero3, int8 and parameters": (2, [ZERO3, "communication.compression=int8", "compression.parameters=int8"]),
    "zero3, degrees 2 4 4 of 4, int8 parameters": (4, [ZERO3, "zero.parameters=2", "compression.parameters=int8"]),
    "parameter server": (3, [SERVERS]),
    "parameter server, colocated": (2, [SERVERS, "parameter_server.placement=colocated"]),
    "parameter server, logical shards": (2, [SERVERS, "parameter_server.placement=colocated", SHARDS]),
    "parameter server, int8": (3, [SERVERS, "communication.compression=int8"]),
    "parameter server, asynchronous": (3, [SERVERS, "parameter_server.consistency=asp"]),
    "parameter server, backup": (3, [SERVERS, "parameter_server.backup_workers=1"]),
    "gossip": (2, ["parallel.strategy=gossip"]),
    "local_sgd": (2, ["parallel.strategy=local_sgd"]),
    "experts, allreduce": (2, [EXPERTS]),
    "experts, zero1": (2, [EXPERTS, "parallel.strategy=zero1"]),
    "experts, zero2 of 4": (4, [EXPERTS, "parallel.strategy=zero2"]),
    "experts, zero3": (2, [EXPERTS, ZERO3]),
}


def operation_lists(ranks, keys):
    """Return the list of every rank in a step of two micro-batches, as lines of text."""
    if EXPERTS in keys:
        layout = {"model.hidden": 4, "model.experts": 2, "model.expert_hidden": 3, "parallel.microbatches": 2}
        recipe_keys = {**SMALL, **layout, "optimizer.name": "lamb", **dict(key.split("=") for key in keys)}
        return run_threads(ranks, lambda comm: " ".join(map(str, trainer_of(comm, recipe_keys).operations)))
    overrides = ["run.global_batch=8", "optimizer.name=lamb", *keys]
    settings = recipe.load(None, overrides, {}).recipe

    def body(comm):
        server = settings.parameter_server if settings.parallel.strategy == "parameter_server" else None
        run = RankRun(
            comm,
            lambda context: build_exchange(context, strategy_settings(settings, settings.communication.compression)),
            config=ModelConfig(kind="mlp", layers=1, hidden=7),
            dtype="float32",
            optimizer=settings.optimizer,
            parallel=replace(settings.parallel, microbatches=2),
            servers=server,
            bucket_bytes=100,
            overlap=settings.communication.overlap,
        )
        with run:
            lines = [str(operation) for operation in run.operations]
            if run.exchange.traits.lock_step:
                run.exchange.close()
        return " ".join(lines)

    return run_threads(ranks, body)


def text(name):
    """Return the golden text of the strategy ``name``: a title and a line per rank."""
    lists = operation_lists(*STRATEGIES[name])
    return "\n".join([f"# {name}", *(f"{rank}: {line}" for rank, line in enumerate(lists))])


@pytest.mark.parametrize("name", STRATEGIES)
def test_operation_list_equals_its_baseline(name):
    baseline = {block.split("\n")[0][2:]: block for block in BASELINE.read_text().strip().split("\n\n")}
    assert text(name) == baseline[name]


@pytest.mark.parametrize("column", [0, 1])
def test_path_of_a_gradient_is_the_documented_path(column, monkeypatch):
    rows = [re.findall(r"\S+\.py", line) for line in catalogue.__doc__.split("Path of a gradient")[1].split("\n")]
    documented = [row[column] for row in rows if len(row) > column]
    keys = [{"parallel.strategy": "zero1"}, {"parallel.strategy": "zero3", "communication.compression": "int8"}][column]
    paths = set()

    def recording(call):
        def record(*args, **keywords):
            frames = [frame for frame in traceback.extract_stack() if "/hpcdist/" in frame.filename]
            names = [frame.name for frame in frames]
            if "_reduce" in names:
                files = [frame.filename.rpartition("/hpcdist/")[2] for frame in frames[names.index("_reduce") :]]
                paths.add((*dict.fromkeys(files), "comm/communicator.py"))
            return call(*args, **keywords)

        return record

    for name in ("isend", "sendrecv"):
        monkeypatch.setattr(Communicator, name, recording(getattr(Communicator, name)))
    run_threads(2, lambda comm: run_steps(trainer_of(comm, {**SMALL, "communication.algorithm": "ring", **keys}), 1))
    assert paths == {(documented[0], *documented[2 - column :])}  # zero1 calls the reducer directly


if __name__ == "__main__":
    BASELINE.write_text("\n\n".join(map(text, STRATEGIES)) + "\n")
