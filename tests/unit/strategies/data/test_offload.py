"""States in a file, or on the host of a GPU, equal the states of the same run in memory, bit by bit on the CPU."""

import errno
import os
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.devices import OPTIMIZERS
from harness.inputs import random_store
from harness.marks import cases
from harness.trainings import SETTINGS, assemble_trainer, assert_rejected
from hpcdist.arrays import backend, filestore
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.filestore import FileSlice, FileStore
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.optim import norms, optimizer
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.data.cuts import PARAMETERS
from hpcdist.strategies.data.offload import BlockedOptimizer
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

BLOCK = 512  # bytes: every tensor of the tests is cut
LAYOUT = Layout.of(
    [
        TensorSpec(0, "table", (11, 37)),
        TensorSpec(1, "weight", (33, 19)),
        TensorSpec(1, "bias", (5,), adapted=False),
        TensorSpec(2, "scale", (), adapted=False),
        TensorSpec(2, "empty", (0, 3)),
    ]
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(filestore, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(staging, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("hpcdist.strategies.data.offload.BLOCK_BYTES", BLOCK)


def copy_to_file(directory, store):
    result = FileStore(LAYOUT, store.dtype, store.parts, directory=directory)
    result.copy_from(store)
    return result


def content(store):
    return b"".join(block.tobytes() for part in store.parts for block in store.blocks(part))


def test_file_store_holds_the_values_of_a_memory_store(tmp_path, rng):
    ranges = split(LAYOUT.size, 5, 8)
    whole, ledger = random_store(LAYOUT, rng, "float64"), Ledger()
    memory = FlatStore(LAYOUT, np.float64, ranges[1::2])
    stored = FileStore(LAYOUT, np.float64, ranges[1::2], directory=tmp_path, ledger=ledger)
    assert not np.frombuffer(content(stored)).any(), "it begins with zeros"
    assert list(tmp_path.iterdir()) == [] and stored.array.size == 0 and stored.size == memory.size
    for store in (memory, stored):
        store.copy_from(whole)
    for part in ranges[1::2]:
        for a, b in ((0, part.size), (3, part.size - 2), (7, 7), (64, 65)):
            inner = Range(part.start + a, part.start + b)
            values, out = rng.standard_normal(inner.size), np.empty(inner.size)
            for store in (memory, stored):
                store.add(inner, values)
            stored.read(inner, out)
            assert out.tobytes() == memory.range(inner).tobytes()
            for store in (memory, stored):
                store.write(inner, 2.0 * values)
    assert content(stored) == memory.array.tobytes()
    assert ledger.peak_total == BLOCK, "one block of it was ever in memory"
    stored.zero()
    assert not np.frombuffer(content(stored)).any()
    with pytest.raises(AssertionError, match="lies in a file"):
        stored.range(ranges[1])
    with pytest.raises(AssertionError, match="not inside"):
        stored.read(Range(ranges[1].start, ranges[2].stop), np.empty(ranges[1].size + ranges[2].size))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_block_norms_have_the_bits_of_the_whole(tmp_path, rng, dtype):
    whole = random_store(LAYOUT, rng, dtype)
    assert norms.sum_of_squares(copy_to_file(tmp_path, whole)) == norms.sum_of_squares(whole)
    values = rng.standard_normal(1003).astype(dtype)
    cuts = [Range(0, 8), Range(8, 512), Range(512, 1003)]
    expected = norms.sum_of_block_squares([values])
    assert expected == float(norms.kernels.sum_of_squares(values))
    assert norms.sum_of_block_squares(values[part.slice] for part in cuts) == expected
    together = norms.Norms(2)
    for part in cuts:
        together.add(1, part, values[part.slice], values[part.slice] + 1)
    together.add(1, Range(2000, 3003), values, values)  # another stretch of the same tensor
    plus_one = norms.sum_of_block_squares([values + 1])
    np.testing.assert_array_equal(together.sums(), [[0, 0], [2 * expected, plus_one + expected]])
    together.clear()
    assert not together.sums().any()


def test_non_finite_value_in_a_file_is_found(tmp_path, rng):
    stored = copy_to_file(tmp_path, random_store(LAYOUT, rng, "float64"))
    assert norms.first_nonfinite(stored) is None
    place = LAYOUT.by_key["1.weight"].range.stop - 1
    stored.write(Range(place, place + 1), np.array([np.inf]))
    assert norms.first_nonfinite(stored) == "1.weight"


STORES = {"optimizer": (False, True), "everything": (True, True), "weights": (True, False)}


@pytest.mark.parametrize("where", STORES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_by_blocks_equals_the_update_in_memory(tmp_path, rng, name, dtype, where):
    weights_away, slots_away = STORES[where]
    real, parts = np.dtype(dtype), [Range(0, 416), Range(448, LAYOUT.size)]
    plain = optimizer.build(OPTIMIZERS[name], LAYOUT, parts, real, total_steps=5)

    def slot(_):
        return FileStore(LAYOUT, real, parts, directory=tmp_path) if slots_away else FlatStore(LAYOUT, real, parts)

    inner = optimizer.build(OPTIMIZERS[name], LAYOUT, parts, real, total_steps=5, make_slot=slot)
    blocked = BlockedOptimizer(inner)
    assert (blocked.needs_norms, blocked.slots.keys()) == (plain.needs_norms, plain.slots.keys())
    start = random_store(LAYOUT, rng, dtype)
    copied = FlatStore(LAYOUT, real, parts)
    copied.copy_from(start)
    masters = copied, copy_to_file(tmp_path, copied) if weights_away else FlatStore(LAYOUT, real, parts)
    masters[1].copy_from(copied)
    half = np.dtype("float16")
    working = FlatStore(LAYOUT, half, parts), FlatStore(LAYOUT, half, parts)
    for _ in range(5):
        drawn = random_store(LAYOUT, rng, dtype)
        for rule, master, copy in zip((plain, blocked), masters, working, strict=True):
            gradient = FlatStore(LAYOUT, real, parts)
            gradient.copy_from(drawn)
            if rule is blocked and weights_away:
                gradient = copy_to_file(tmp_path, gradient)
            rule.begin_step(0.75)
            for part in parts:
                rule.direction(part, master, gradient, 0.5)
            result = rule.partial_norms() if rule.needs_norms else None
            for part in parts:
                rule.apply(part, master, gradient, copy, result)
    assert content(masters[0]) == content(masters[1])
    assert working[0].array.tobytes() == working[1].array.tobytes() and working[0].array.any()
    assert [content(store) for store in plain.slots.values()] == [content(store) for store in blocked.slots.values()]
    assert plain.state() == blocked.state() and plain.count == 5
    assert blocked.learning_rate == plain.learning_rate
    blocked.restore({"count": 3})
    assert blocked.count == 3


def test_offload_needs_memory_for_three_blocks(tmp_path, rng):
    ledger, real = Ledger(), np.dtype("float64")
    make = lambda name: FileStore(LAYOUT, real, directory=tmp_path)  # noqa: E731
    inner = optimizer.build(OPTIMIZERS["adamw"], LAYOUT, Range(0, LAYOUT.size), real, total_steps=9, make_slot=make)
    blocked = BlockedOptimizer(inner, ledger=ledger)
    master, gradient = (copy_to_file(tmp_path, random_store(LAYOUT, rng, "float64")) for _ in range(2))
    for _ in range(3):
        blocked.begin_step()
        blocked.direction(Range(0, LAYOUT.size), master, gradient)
        blocked.apply(Range(0, LAYOUT.size), master, gradient)
    assert ledger.peak["optimizer"] == ledger.peak_total == 4 * 3 * BLOCK


@pytest.mark.parametrize("fails", ["compute", "write"])
def test_failed_update_leaves_no_transfer_in_flight(fails, tmp_path, rng, monkeypatch):
    real, begun, done = np.dtype("float64"), [], []

    def watch_call(name):
        plain = getattr(FileStore, name)

        def call(store, where, values):
            begun.append(where)
            time.sleep(0.01)  # long enough to be under way when the update fails
            plain(store, where, values)
            done.append(where)
            if name == fails and where.start:
                raise StorageError("no space is left")

        monkeypatch.setattr(FileStore, name, call)

    make = lambda name: FileStore(LAYOUT, real, directory=tmp_path)  # noqa: E731
    inner = optimizer.build(OPTIMIZERS["adamw"], LAYOUT, Range(0, LAYOUT.size), real, total_steps=9, make_slot=make)
    blocked = BlockedOptimizer(inner)
    master, gradient, whole = (
        random_store(LAYOUT, rng, "float64"),
        random_store(LAYOUT, rng, "float64"),
        Range(0, LAYOUT.size),
    )
    watch_call("read")
    watch_call("write")
    plain_apply = inner.apply

    def apply(block, *rest):
        if fails == "compute" and block.start:
            raise ZeroDivisionError("of the second block")
        plain_apply(block, *rest)

    monkeypatch.setattr(inner, "apply", apply)
    blocked.begin_step()
    blocked.direction(whole, master, gradient)
    with pytest.raises(
        ZeroDivisionError if fails == "compute" else StorageError, match="second block|no space is left"
    ):
        blocked.apply(whole, master, gradient)
    assert len(done) == len(begun) > 4, "all that was begun is over"
    assert inner.slots is blocked.slots, "no slot is a block that was there a moment ago"


def test_unusable_offload_directory_is_named(tmp_path, monkeypatch):
    cure = (
        f"set zero.offload_directory to a disk of this node with {LAYOUT.size * 8} free bytes for the optimizer state"
    )
    make = lambda folder: FileStore(LAYOUT, np.float64, directory=folder, what="optimizer state m")  # noqa: E731
    missing = tmp_path / "missing"
    with pytest.raises(
        StorageError, match=re.escape(f"{missing} cannot be written: No such file or directory; {cure}")
    ):
        make(missing)
    stored = make(tmp_path)
    before = len(os.listdir("/proc/self/fd"))

    def raise_disk_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", raise_disk_full)
    with pytest.raises(StorageError, match=f"{tmp_path} cannot store {LAYOUT.size * 8} bytes: No space left") as failed:
        make(tmp_path)
    assert f"bytes are free); {cure}" in str(failed.value) and failed.value.exit_code == 74
    assert len(os.listdir("/proc/self/fd")) == before, "nothing is left open"
    monkeypatch.setattr(os, "pwrite", raise_disk_full)  # a file system that copies on write may still fill up
    with pytest.raises(StorageError, match=f"{tmp_path}: 16 bytes of the optimizer state m could not be written"):
        stored.write(Range(0, 2), np.zeros(2))
    part, real = Range(0, 64), np.dtype("float64")
    inner = optimizer.build(OPTIMIZERS["adamw"], LAYOUT, part, real, total_steps=9, make_slot=lambda _: stored)
    blocked = BlockedOptimizer(inner)
    blocked.begin_step()
    with pytest.raises(StorageError, match="could not be written"):  # in the thread that writes
        blocked.apply(part, FlatStore(LAYOUT, real), FlatStore(LAYOUT, real))


def test_file_is_removed_with_its_store(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    stored = FileStore(LAYOUT, np.float64, directory=tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del stored
    assert len(os.listdir("/proc/self/fd")) == before


REFUSED = {
    "an unknown place": ({"offload_optimizer": "disk"}, "zero3", "cpu", "choose one of none, host, file"),
    "no directory": ({"offload_optimizer": "file"}, "zero1", "cpu", "zero.offload_directory = '' with"),
    "a directory for nothing": (
        {"offload_directory": "/x"},
        "zero1",
        "cpu",
        "has no effect with zero.offload_optimizer = 'none'",
    ),
    "parameters alone": (
        {"offload_parameters": "file", "offload_directory": "/x"},
        "zero3",
        "cpu",
        "offload the optimizer state first",
    ),
    "the host of a cpu": ({"offload_optimizer": "host"}, "zero2", "cpu", "is in host memory already; choose 'file'"),
    "whole parameters": (
        {"offload_optimizer": "file", "offload_parameters": "file", "offload_directory": "/x"},
        "zero2",
        "cpu",
        "keeps whole parameters in memory; choose zero3",
    ),
    "another strategy": (
        {"offload_optimizer": "file", "offload_directory": "/x"},
        "allreduce",
        "cpu",
        "has no effect with parallel.strategy = 'allreduce'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_offload_options_without_effect_are_rejected(case):
    keys, strategy, device, says = REFUSED[case]
    places = {f"zero.{key}": value for key, value in keys.items()}
    assert_rejected(places | {"parallel.strategy": strategy, "run.device": device}, re.escape(says))


def test_separate_degrees_with_offloaded_parameters_are_rejected():
    away = ZeroConfig(offload_optimizer="file", offload_parameters="file", offload_directory="/x")
    with pytest.raises(ConfigurationError, match="'file' with zero.gradients = 2 is not built"):
        replace(away, gradients=2)
    keys = {"offload_optimizer": "file", "offload_parameters": "file", "offload_directory": "/x", "persistent_below": 9}
    zero3 = {f"zero.{key}": value for key, value in keys.items()} | {"parallel.strategy": "zero3"}
    assert_rejected(zero3, "persistent_below = 9 is not built")


# ---- whole trainings

STEPS = 4
OPTIMIZER_AWAY = {"zero.offload_optimizer": "file"}
ALL_AWAY = OPTIMIZER_AWAY | {"zero.offload_parameters": "file"}


@pytest.fixture
def text(text, tmp_path):
    (tmp_path / "scratch").mkdir()
    return {"data.path": text, "parallel.microbatches": 2}


def offload_keys(tmp_path, keys):
    return {**keys, "zero.offload_directory": tmp_path / "scratch"}


def steps(trainer, last=STEPS):
    return trainings.losses(trainer, last)


def state(trainer):
    return {f"{p.name} {p.flat.start}": backend.to_host(p.array).copy().tobytes() for p in trainer.exchange.pieces()}


def run(settings):
    def body(comm):
        trainer = assemble_trainer(comm, settings)
        return steps(trainer), state(trainer), mean_validation_loss(trainer)

    return body


@cases(
    "strategy, keys, ranks, optimizer_name",
    ("zero1", OPTIMIZER_AWAY, 2, "lars"),
    ("zero2", OPTIMIZER_AWAY, 3, "lamb"),
    *(("zero3", ALL_AWAY, 2, name) for name in ("sgd", "lars", "lamb")),
    *(("zero3", ALL_AWAY, ranks, "adamw") for ranks in (1, 4)),
)
@pytest.mark.full_except("zero3-keys5-1-adamw")
def test_run_with_states_in_files_equals_the_run_in_memory(text, tmp_path, strategy, keys, ranks, optimizer_name):
    settings = text | {"parallel.strategy": strategy, "optimizer.name": optimizer_name}
    if ranks == 1:  # in memory, one rank adds up its micro-batches in the backward: other rounding
        settings |= {"parallel.microbatches": 1}
    expected = run_threads(ranks, run(settings))
    assert run_threads(ranks, run(settings | offload_keys(tmp_path, keys))) == expected
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("optimizer_name", "slots", "second_read", "second_write"),
    [("adamw", 2, 0, 0), ("lars", 1, 2, 1), ("lamb", 2, 2, 1)],
)
def test_read_and_written_bytes_of_a_step_match_the_formula(
    text, tmp_path, optimizer_name, slots, second_read, second_write
):
    m = 2
    keys = {"parallel.strategy": "zero3", "optimizer.name": optimizer_name, "model.tied": "false"}
    settings = text | keys | offload_keys(tmp_path, ALL_AWAY)

    def body(comm):
        trainer = assemble_trainer(comm, settings)
        exchange = trainer.exchange
        kept = [exchange.parameters, exchange.gradients, *exchange.update.optimizer.slots.values()]
        before = [sum(getattr(store, name) for store in kept) for name in ("read_bytes", "written_bytes")]
        steps(trainer, 1)
        after = [sum(getattr(store, name) for store in kept) for name in ("read_bytes", "written_bytes")]
        owned = sum(where.size for _, where in exchange.parameters.tensors())
        sizes = [cuts[PARAMETERS].size * 4 for cuts in exchange.reducer.cuts.cuts.values()]
        again = m * sizes[-1] + (m - 1) * sizes[0]  # uses that follow each other: one gather
        return before, after, exchange.parameters.nbytes, owned * 4, again

    for before, after, psi, unpadded, again in run_threads(2, body):
        read, written = np.subtract(after, before).tolist()
        assert read == slots * psi + 2 * m * psi - again + (m - 1) * psi + unpadded + 2 * psi + second_read * psi
        assert written == slots * psi + m * psi + psi + second_write * psi


@pytest.mark.full
def test_checkpoints_move_between_files_and_memory(text, tmp_path, monkeypatch):
    for module in ("manifest", "shard", "restoring.restore"):
        monkeypatch.setattr(f"hpcdist.checkpoint.{module}.BLOCK_BYTES", 1024)
    settings = text | {"parallel.strategy": "zero3", "run.steps": 6}
    files = settings | offload_keys(tmp_path, ALL_AWAY)

    def run_whole(comm):
        trainer = assemble_trainer(comm, settings)
        return steps(trainer, 6), state(trainer)

    def run_half(comm, settings, name):
        trainer = assemble_trainer(comm, settings)
        steps(trainer, 3)
        return CheckpointSaver(trainer, tmp_path / name).save(3)

    def run_rest(comm, settings, path):
        trainer = assemble_trainer(comm, settings, path)
        return steps(trainer, 6), state(trainer)

    expected = [(losses[3:], result) for losses, result in run_threads(2, run_whole)]
    for first, second, name in ((files, settings, "a"), (settings, files, "b"), (files, files, "c")):
        path = run_threads(2, lambda comm, first=first, name=name: run_half(comm, first, name))[0]
        assert run_threads(2, lambda comm, second=second, path=path: run_rest(comm, second, path)) == expected
    other = run_threads(3, lambda comm: run_rest(comm, files, path))  # other cuts than those it was saved with
    np.testing.assert_allclose(other[0][0], expected[0][0], rtol=1e-5)


def test_nan_with_offloaded_states_names_its_rank(text, tmp_path):
    settings = text | {"parallel.strategy": "zero3"} | offload_keys(tmp_path, ALL_AWAY)

    def body(comm):
        trainer = assemble_trainer(comm, settings)
        if comm.rank == 1:
            *_, (_, touched) = trainer.exchange.parameters.tensors()
            trainer.exchange.parameters.write(touched, np.full(touched.size, np.nan, np.float32))
        return trainings.failure_reason(trainer)

    assert all("rank 1: parameter" in messages and "rank 0:" not in messages for messages in run_threads(2, body))


def test_file_slice_has_dtype_and_shape(tmp_path, rng):
    whole = random_store(LAYOUT, rng, "float64")
    where = LAYOUT.by_key["1.weight"].range
    stretch = copy_to_file(tmp_path, whole).contents(where)
    assert isinstance(stretch, FileSlice)
    assert (stretch.dtype, stretch.shape) == (np.float64, (where.size,))
    assert stretch.copy().tobytes() == whole.range(where).tobytes()
    stretch.write(Range(3, 5), np.array([1.0, 2.0]))
    out = np.empty(2)
    stretch.read(Range(3, 5), out)
    assert out.tolist() == [1.0, 2.0]


# ---- a GPU

ON_GPU = {
    "optimizer on the host": ("zero1", {"zero.offload_optimizer": "host"}),
    "all in files": ("zero3", ALL_AWAY),
    "parameters on the host, optimizer in a file": ("zero3", OPTIMIZER_AWAY | {"zero.offload_parameters": "host"}),
}


@pytest.mark.parametrize(("case", "optimizer_name"), [*zip(ON_GPU, ("adamw", "lamb", "lamb"), strict=True)])
@pytest.mark.full  # lamb goes both ways twice
def test_gpu_run_with_offloaded_states_matches_the_cpu(gpu, text, tmp_path, case, optimizer_name):
    strategy, keys = ON_GPU[case]
    settings = text | {"parallel.strategy": strategy, "optimizer.name": optimizer_name, "precision.mode": "float64"}
    places = offload_keys(tmp_path, keys) if "file" in keys.values() else keys
    host = run_threads(2, run(settings))
    results = run_threads(2, run(settings | places | {"run.device": "gpu"}))
    for (losses, pieces, validation), (on_gpu, there, other) in zip(host, results, strict=True):
        np.testing.assert_allclose(on_gpu, losses, rtol=1e-12)
        np.testing.assert_allclose(other, validation, rtol=1e-12)
        for name, values in pieces.items():
            np.testing.assert_allclose(np.frombuffer(there[name]), np.frombuffer(values), rtol=1e-6, atol=1e-9)


assert SETTINGS  # the recipe that `assembled` begins with
