"""Mutated checkpoints are rejected or loaded, without a crash, an endless loop, a stray write or much memory.

300 mutations, or HPCDIST_TEST_MUTATIONS if it is set (10,000 take some minutes).
"""

import copy
import json
import os
import resource
import shutil
import signal
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint, pieces_of
from harness.jobs import call_command
from harness.trainings import trainer_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import listing, manifest
from hpcdist.checkpoint.directory import loss_of
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import HpcdistError, StorageError
from hpcdist.optim.rates import SmoothedNoise
from hpcdist.strategies.core.mixed_precision import DynamicLossScale
from hpcdist.training import inference
from hpcdist.training.build.state import restore_state
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.data import SampleShares
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

MUTATIONS = int(os.environ.get("HPCDIST_TEST_MUTATIONS", "300"))
SPARE_BYTES = 512 << 20  # memory that the child may use in addition to its initial memory
PATIENCE_S = 60  # for one mutation
GUARD = 64

LAYOUT = Layout.of([TensorSpec(0, "table", (40, 7)), TensorSpec(1, "weight", (33, 19)), TensorSpec(1, "bias", (5,))])

NASTY = [
    *(-1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 2**64, 2**200, -(2**63), 1.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "../../canary",
        "/etc/passwd",
        "shard-00000.h5/..",
        "shard-00001.h5",
        "shard-99999.h5\0",
        "..",
        "\ud800",
    ),
    *("ab/shard-00000.h5", "float64", "int8", "complex128", "manifest.json", "a" * 5000, None, True, [], {}, [[]]),
    *([2**40, 2**40], [2**62, 0], [1] * 60, [[0, 2**62]] * 2, [-5, 5], [5, 3], [[5, 3]], {"a": 1}, [0, 10**9]),
]


class Guarded:
    """A store between two guard areas that must not be written."""

    def __init__(self, part):
        self.memory = None
        self.store = FlatStore(LAYOUT, np.dtype("float32"), part, allocate=self._allocate)

    def _allocate(self, size, dtype):
        self.memory = np.full(size + 2 * GUARD, 42, dtype)
        self.memory[GUARD : GUARD + size] = 0
        return self.memory[GUARD : GUARD + size]

    def intact(self):
        return bool((self.memory[:GUARD] == 42).all() and (self.memory[-GUARD:] == 42).all())


def mutate_bytes(rng, path):
    name = str(rng.choice(["shard-00000.h5", "shard-00001.h5", "manifest.json"]))
    data = bytearray((path / name).read_bytes())
    way = int(rng.integers(4))
    if way == 0:
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif way == 1:
        del data[int(rng.integers(len(data))) :]
    elif way == 2:
        data += rng.bytes(int(rng.integers(1, 3000)))
    else:
        offset, size = int(rng.integers(len(data))), int(rng.integers(1, 400))
        data[offset : offset + size] = rng.bytes(size)
    (path / name).write_bytes(data)


def mutate_files(rng, path):
    target = path / str(rng.choice(["shard-00000.h5", "shard-00001.h5", "manifest.json"]))
    target.unlink()
    way = int(rng.integers(5))
    if way == 0:
        target.mkdir()
    elif way == 1:
        os.mkfifo(target)
    elif way == 2:
        target.symlink_to("/dev/zero")
    elif way == 3:
        target.symlink_to(target.name)


def paths_of_values(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths_of_values(child, (*path, key))


def value_at(body, path):
    for key in path:
        body = body[key]
    return body


def forge_manifest(rng, path):
    """Change random fields of the manifest, with a valid digest."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("digest")
    for _ in range(int(rng.integers(1, 4))):
        results = [place for place in paths_of_values(body) if place]
        *above, last = results[int(rng.integers(len(results)))]
        parent = value_at(body, above)
        way = int(rng.integers(5))
        if way == 0:
            del parent[last]
        elif way == 1:
            parent[last] = copy.deepcopy(value_at(body, results[int(rng.integers(len(results)))]))
        else:
            parent[last] = copy.deepcopy(NASTY[int(rng.integers(len(NASTY)))])
    way = int(rng.integers(8))
    text = json.dumps(body | {"digest": manifest.digest_of(body)}) if way < 4 else manifest.seal(body)
    if way == 0:
        text = text.replace("{", '{"version": 1, ', 1)  # twice
    elif way == 1:
        text = text[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    elif way == 2:
        text = text[:-1] + ', "x": ' + "9" * 10_000 + "}"
    (path / "manifest.json").write_text(text)


def mutate_and_load(rng, run, original):
    """Mutate a copy of the checkpoint and load it. Return True if it was loaded."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    path = run / "checkpoints/step-7"
    path.parent.mkdir()
    shutil.copytree(run / "good", path)
    way = [mutate_bytes, mutate_files, forge_manifest, forge_manifest][int(rng.integers(4))]
    way(rng, path)
    loaded = 0
    for part in (Range(0, LAYOUT.size), split(LAYOUT.size, 3, 4)[1]):
        into = Guarded(part)
        try:
            restore(path, pieces_of(into.store, part))
            loaded += 1
            if way is not forge_manifest:
                assert into.store.array.tobytes() == original[part.slice].tobytes()
        except StorageError:
            pass
        assert into.intact()
    with suppress(manifest.NewerVersionError):
        assert newest_intact_checkpoint(run) in (None, path)
    return loaded


def try_mutations(seed, run, original, count):
    """Try mutations in this child process, which has limited memory and time."""
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + SPARE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the messages about skipped checkpoints
    loaded = 0
    for number in range(count):
        (run / "number").write_text(str(number))
        signal.alarm(PATIENCE_S)
        loaded += mutate_and_load(np.random.Generator(np.random.Philox(key=[seed, number])), run, original)
    (run / "loaded").write_text(str(loaded))


@pytest.mark.timeout(3600)
@pytest.mark.full
def test_mutated_checkpoints_are_rejected_or_loaded(tmp_path, rng):
    store = FlatStore(LAYOUT, np.dtype("float32"))
    for segment in LAYOUT.segments:
        store.range(segment.range)[...] = rng.standard_normal(segment.range.size).astype("f4")

    def body(comm):
        part = split(LAYOUT.size, comm.size, 4)[comm.rank]
        return save(tmp_path / "saved", 7, pieces_of(store, part), {"step": 7, "list": [1, {"a": None}]}, comm)

    run = tmp_path / "run"
    shutil.copytree(run_threads(2, body)[0], run / "good")
    (tmp_path / "canary").write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*") if run not in path.parents)
    seed = int(rng.integers(2**60))
    child = os.fork()
    if not child:
        try:
            try_mutations(seed, run, store.array, MUTATIONS)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            (run / "failure").write_text(traceback.format_exc())
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    failure = (run / "failure").read_text() if (run / "failure").exists() else ""
    assert code == 0, f"mutation {(run / 'number').read_text()} with seed {seed} ended with {code}: {failure}"
    loaded = int((run / "loaded").read_text())
    assert 0 < loaded < MUTATIONS, "some mutations are harmless, such as a flipped byte of the HDF5 headers"
    assert (tmp_path / "canary").read_text() == "mine"
    assert sorted(str(path) for path in tmp_path.rglob("*") if run not in path.parents) == before


FORGED = ["x", "", -1, 0, 2**62, 2**200, 1.5, float("nan"), float("inf"), [], [[-1, "x"]], {}, {"x": []}, None, True]
ASSEMBLED = {"world", "ranks_per_node", "algorithm", "compression", "stage_units"}  # read before the restore
EVALUATED = {"steps", "data", "model_inputs"}
SMALL = {"model.kind": "mlp", "model.layers": 1, "model.hidden": 8, "run.global_batch": 8}


@pytest.fixture
def small_run(tmp_path, rng):
    """A run whose newest checkpoint has every scalar that a run can save, and its trainer."""
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file["x"], file["y"] = rng.standard_normal((40, 3)).astype("f4"), np.arange(40) % 3
    keys = SMALL | {"data.path": tmp_path / "table.h5", "data.validation_fraction": 0.2}
    trainer = trainer_of(solo(), keys)
    shares, noise = SampleShares(trainer.recipe.run.global_batch, 1), SimpleNamespace(smoothed=SmoothedNoise())
    trainer = replace(trainer, shares=shares, noise=noise)
    trainer.executor.loss_scale = DynamicLossScale()
    path = CheckpointSaver(trainer, tmp_path / "run/checkpoints").save(3, val_loss=1.5)
    (tmp_path / "run/recipe.toml").write_text(recipes.dump(trainer.recipe))
    body = json.loads((path / manifest.FILE_NAME).read_text())
    assert body["scalars"].keys() >= {"shares", "noise_scale", "loss_scale", "model_inputs"}
    body["scalars"] |= {"stage_units": [1, 2]}
    body["scalars"]["optimizer"] |= {"rate": 0.1, "pending": False, "frozen": 0, "residuals": 1, "clocks": [1]}
    del body["digest"]
    return keys, trainer, path, body


def checkpoint_command(capsys, *arguments):
    code, _, err = call_command(capsys, "checkpoint", *arguments)
    assert "Traceback" not in err
    return code


def run_or_reject(work):
    """Call ``work``, which may raise a short error with exit code 74 or 78. Any other error is a failure."""
    try:
        return work()
    except HpcdistError as error:
        if error.exit_code not in (74, 78) or len(str(error)) > 1000:
            raise
        return None


@pytest.mark.full
def test_every_forged_manifest_field_is_rejected_or_harmless(small_run, tmp_path, rng, capsys):
    """Each field in turn gets another value and a valid digest. All commands reject the checkpoint or work."""
    keys, trainer, path, body = small_run
    recipe, run = trainer.recipe, path.parents[1]
    body["about"] = {"topology": body["about"]["topology"]}
    fields = [place for place in paths_of_values(body) if place and (place[0] != "pieces" or place[1:2] in ((), (0,)))]
    taken = 0
    for place in fields:
        chosen = int(rng.integers(len(FORGED)))
        for number, value in enumerate(FORGED):
            changed = copy.deepcopy(body)
            value_at(changed, place[:-1])[place[-1]] = value
            (path / manifest.FILE_NAME).write_text(manifest.seal(changed))
            result = listing.inspect(path)
            json.dumps(listing.summary(result))
            assert place[0] != "scalars" or len(place) == 1 or result.manifest is not None
            if place[0] == "scalars":
                loss_of(path)
                again = run_or_reject(lambda: (restore_state(trainer, CheckpointSource(path)), trainer.shares.of(5)))
                taken += again is not None
            if set(place[1:2]) & ASSEMBLED:
                run_or_reject(lambda: trainer_of(solo(), keys, path))
            if number == chosen or set(place[1:2]) & EVALUATED:
                run_or_reject(lambda: inference.load(solo(), run, recipe).validation_loss())
                capsys.readouterr()
            if number == chosen:
                assert checkpoint_command(capsys, "ls", run) == 0
                assert checkpoint_command(capsys, "show", path, "--tensors") in (0, 74)
                assert checkpoint_command(capsys, "verify", path) in (0, 1)
                nothing = (2,) if place == ["pieces"] or place == ("pieces",) else ()  # usage error: no parameters
                assert checkpoint_command(capsys, "export", path, tmp_path / "out.safetensors") in (0, 74, *nothing)
                (tmp_path / "out.safetensors").unlink(missing_ok=True)
    assert taken > 0.2 * len(FORGED), "some changed fields are harmless"
