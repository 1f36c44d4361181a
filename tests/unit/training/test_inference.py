"""Inspection of a trained model from any layout on any number of ranks, which read only its parameters."""

import json
from pathlib import Path

import numpy as np
import pytest

from harness import jobs, trainings
from harness.trainings import recipe_keys
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import CommunicationError, DataError, StorageError, UsageError
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.training import inference
from hpcdist.training.build import state_source
from hpcdist.training.build.assemble import assemble
from hpcdist.training.generation import WindowDecoder, generate
from hpcdist.training.inference import InspectionSession, load, sample
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 3
# name -> (ranks, keys)
LAYOUTS = {
    "one process": (1, {}),
    "allreduce": (3, {}),
    "zero1": (2, {"parallel.strategy": "zero1"}),
    "zero2": (3, recipe_keys("strategy=zero2 microbatches=2")),
    "zero3, tied": (2, recipe_keys("strategy=zero3 tied=true")),
    "1f1b": (3, recipe_keys("pipeline=3 microbatches=2")),
    "dedicated server": (3, {"parallel.strategy": "parameter_server"}),
    "colocated servers": (2, recipe_keys("strategy=parameter_server parameter_server.placement=colocated")),
    "gpipe x data, tied": (4, recipe_keys("pipeline=2 schedule=gpipe microbatches=2 tied=true")),
}


KEYS = recipe_keys(
    f"layers=2 steps={STEPS} global_batch=8 validation_samples=37 optimizer.name=adamw optimizer.warmup_steps=50"
)


def small_recipe(text, keys):
    return trainings.recipe_of({**trainings.SMALL, **KEYS, "data.path": text, **keys})


def train(text, layout="one process", **keys):
    """Train a few steps. Return the run directory, the validation loss and every tensor."""
    ranks, layout_keys = LAYOUTS[layout]
    recipe = small_recipe(text, layout_keys | keys)
    run = text.parent / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(recipes.dump(recipe))

    def body(comm):
        trainer = assemble(trainings.session_of(comm), recipe)
        trainings.run_steps(trainer, STEPS)
        CheckpointSaver(trainer, run / "checkpoints").save(STEPS)
        pieces = [(piece, piece.array.copy()) for piece in trainer.exchange.pieces() if piece.kind == "parameters"]
        return mean_validation_loss(trainer), [(piece.tensor, piece.flat, values) for piece, values in pieces]

    results = run_threads(ranks, body)
    tensors = {}
    for tensor, flat, values in sorted((p for _, pieces in results for p in pieces), key=lambda p: (p[0], p[1])):
        tensors[tensor] = np.concatenate([tensors.get(tensor, values[:0]), values])
        assert tensors[tensor].size == flat.stop
    return run, results[0][0], tensors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("colocated servers")
def test_any_number_of_ranks_loads_parameters_of_any_layout(layout, text):
    run, loss, tensors = train(text, layout)
    recipe = recipes.load_stored(run / "recipe.toml")

    def body(comm):
        trained = load(comm, run, recipe)
        assert trained.steps == STEPS
        assert {segment.key for segment in trained.model.layout.segments} == set(tensors)
        for key, values in tensors.items():
            assert np.array_equal(trained.parameters.view(key).reshape(-1), values), key
        result = trained.validation_loss()
        peak = trained.ledger.peak
        assert peak["gradients"] == peak["optimizer"] == 0 and peak["parameters"] == trained.parameters.array.nbytes
        return result

    for ranks in (1, 2, 3, 5):
        losses = run_threads(ranks, body)
        assert len(set(losses)) == 1
        assert losses[0] == pytest.approx(loss, rel=1e-6)


def test_each_rank_reads_only_its_share(text, monkeypatch):
    run, _, tensors = train(text)
    recipe = recipes.load_stored(run / "recipe.toml")
    read = {}
    restore = state_source.restore_together

    def body(comm):
        with count_traffic(comm) as traffic:
            load(comm, run, recipe)
        assert traffic.calls["all_gather"] == 1

    def restore_and_count(comm, path, expected):
        read[comm.rank] = sum(piece.flat.size for piece in expected)
        return restore(comm, path, expected)

    monkeypatch.setattr(state_source, "restore_together", restore_and_count)
    run_threads(4, body)
    total = sum(values.size for values in tensors.values())
    assert sum(read.values()) == total and max(read.values()) < total / 3


def test_sample_does_not_open_the_data(text):
    run, _, _ = train(text)
    text.unlink()
    written = "".join(sample(run, ["ab"], 12, temperature=0.7, top_k=5, seed=3))
    assert written.startswith("ab") and written.endswith("\n") and len(written) > 3
    assert written == "".join(sample(run, ["ab"], 12, temperature=0.7, top_k=5, seed=3))
    trained = load(solo(), run, recipes.load_stored(run / "recipe.toml"))
    for decoder in (WindowDecoder(trained.logits, 8), trained.decoder(1)):
        drawn = [token for _, token in generate(decoder, [b"ab"], 12, temperature=0.7, top_k=5, seed=3)]
        assert bytes([*b"ab", *drawn, *b"\n"]).decode("utf-8", "replace") == written


def test_several_samples_equal_single_samples_and_end_before_a_stop_text(text):
    run, _, _ = train(text)
    options = {"temperature": 0.0, "top_k": 0, "seed": 0}
    singles = ["".join(sample(run, [prompt], 30, **options)) for prompt in ("ab", "dc ba", "c")]
    assert "".join(sample(run, ["ab", "dc ba", "c"], 30, **options)) == "---\n".join(singles)
    stop = next(character for character in singles[0][8:] if character.isascii())
    end = singles[0].index(stop, 2)
    assert "".join(sample(run, ["ab"], 30, stops=[stop, "never"], **options)) == singles[0][:end] + "\n"


def test_mlp_inputs_are_known_without_the_data(text):
    run, loss, _ = train(text, **{"model.kind": "mlp"})
    hidden = text.rename(text.with_suffix(".hidden"))
    trained = load(solo(), run, recipes.load_stored(run / "recipe.toml"))
    assert trained.logits(np.zeros((1, 8), np.uint8)).shape == (1, 256)
    hidden.rename(text)
    assert trained.validation_loss() == pytest.approx(loss, rel=1e-6)
    with pytest.raises(UsageError, match="holds a model of kind 'mlp'; only a gpt can generate text"):
        next(sample(run, ["ab"], 1, temperature=1, top_k=0, seed=0))


def test_other_data_is_rejected_on_every_rank(text):
    run, _, _ = train(text)
    text.write_text(text.read_text()[:-9] + "abcdefghi")
    recipe = recipes.load_stored(run / "recipe.toml")

    def body(comm):
        with pytest.raises(DataError, match="other data"):
            load(comm, run, recipe).validation_loss()

    run_threads(3, body)


def folders(run):
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def test_inspection_leaves_no_files(text, monkeypatch):
    run, _, _ = train(text)
    (run / "recorder").mkdir()
    with InspectionSession(run) as look:
        look.load()
        local_values = [name for name in folders(run) if name.startswith(inference.RECORDER_PREFIX)]
        assert len(local_values) == 1 and (run / local_values[0] / "recorder" / "rank-00000.rec").exists()
        assert look.session.watchdog is not None and look.session.recorder is not None
        assert look.session.comm.events is look.session.recorder
    assert folders(run) == ["checkpoints", "recorder"], "the records of the training stay alone"
    look.session.comm.barrier()  # operations after the record have nowhere to go, and do no harm
    with pytest.raises(UsageError, match="prompt is empty"):
        next(sample(run, [""], 1, temperature=1, top_k=0, seed=0))
    parts = sample(run, ["ab"], 100, temperature=1, top_k=0, seed=0)
    assert next(parts) == "ab"
    parts.close()  # whoever reads has seen enough
    assert folders(run) == ["checkpoints", "recorder"]


def test_records_of_a_failed_inspection_are_kept(text):
    run, _, _ = train(text)

    def interrupt(look):
        with look:
            look.load()
            raise CommunicationError("a message was lost")

    look = InspectionSession(run)
    with pytest.raises(CommunicationError):
        interrupt(look)
    assert look.session.watchdog is not None
    look.session.watchdog.stop()
    kept = [name for name in folders(run) if name.startswith(inference.RECORDER_PREFIX)]
    assert len(kept) == 1 and (run / kept[0] / "recorder" / "rank-00000.rec").exists()


def test_read_only_run_can_be_inspected(text, tmp_path, monkeypatch):
    run, _, _ = train(text)
    make, made = inference.tempfile.mkdtemp, []

    def make_read_only(prefix, **where):
        if where:
            raise PermissionError(13, "Permission denied", str(where["dir"]))
        made.append(make(prefix=prefix, dir=tmp_path))
        return made[-1]

    monkeypatch.setattr(inference.tempfile, "mkdtemp", make_read_only)
    with InspectionSession(run) as look:
        look.load()
        assert folders(run) == ["checkpoints"] and Path(made[0], "recorder", "rank-00000.rec").exists()
    assert not Path(made[0]).exists()


def test_run_without_a_checkpoint_is_rejected(text):
    run, _, _ = train(text)
    (run / "checkpoints" / f"step-{STEPS}" / "manifest.json").unlink()
    with pytest.raises(StorageError, match="no valid checkpoint"), InspectionSession(run) as look:
        look.load()
    assert folders(run) == ["checkpoints"]


def test_only_the_first_rank_of_a_job_prints(text, monkeypatch):
    run, _, _ = train(text)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert list(sample(run, ["ab"], 5, temperature=1, top_k=0, seed=0)) == []
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "".join(sample(run, ["ab"], 5, temperature=1, top_k=0, seed=0)).startswith("ab")


def test_averaged_parameters_are_evaluated_and_exported(text):
    run, loss, tensors = train(text, "zero1", **{"optimizer.ema_decay": 0.5})
    recipe = recipes.load_stored(run / "recipe.toml")
    averaged = load(solo(), run, recipe, averaged=True)
    checkpoint = listing.select(run)
    store = FlatStore(averaged.model.layout, averaged.model.dtype)
    restore(checkpoint, pieces_of({"optimizer.ema": store}, store.parts))
    np.testing.assert_array_equal(averaged.parameters.array, store.array)
    assert averaged.validation_loss() != pytest.approx(loss, rel=1e-9)
    evaluated = json.loads(jobs.hpcdist("evaluate", run, "--averaged", "--json").stdout)
    assert evaluated["val_loss"] == pytest.approx(averaged.validation_loss(), rel=1e-6)
    done = jobs.hpcdist("checkpoint", "export", run, run / "averaged.safetensors", "--averaged")
    assert done.returncode == 0, done.stderr
    content = (run / "averaged.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header.keys() - {"__metadata__"} == set(tensors)
    for name in tensors:
        first, last = header[name]["data_offsets"]
        assert content[8 + size + first : 8 + size + last] == store.view(name).tobytes(), name
