"""Recipes that import their model: trained, saved and inspected, on text, tables and pictures."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import recipe_keys, recipe_of
from hpcdist.checkpoint import manifest
from hpcdist.cli.runs import checkpoint
from hpcdist.comm.start import start_alone
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import UsageError
from hpcdist.training import data
from hpcdist.training.build.assemble import assemble
from hpcdist.training.inference import load
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

pytest.importorskip("torch")

SOURCE = """
import torch
from torch import nn
from hpcdist.adapters.torch.model import wrap

def text(context):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
    loss = lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    return wrap(model, loss, tokens_per_sample=context, example=torch.zeros(1, context, dtype=torch.long))

def table(features, classes):
    torch.manual_seed(4)
    return wrap(nn.Linear(features, classes), nn.CrossEntropyLoss())

def pictures(height, width, channels, classes):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, classes))
    return wrap(model, nn.CrossEntropyLoss())
"""

TIED = """
import torch
from torch import nn
from hpcdist.adapters.torch.model import wrap

def modules():
    model = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 256, bias=False))
    model[2].weight = model[0].weight
    return model

def build(context):
    torch.manual_seed(6)
    loss = lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    return wrap(modules(), loss, tokens_per_sample=context, example=torch.zeros(1, context, dtype=torch.long))
"""


@pytest.fixture
def folder(tmp_path, rng, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    for name, shape in (("table", (90, 6)), ("pictures", (90, 4, 3))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            x = rng.standard_normal(shape).astype(np.float32)
            file["x"], file["y"] = x, x.reshape(90, -1)[:, :3].argmax(axis=1)
    return tmp_path


def check_other_code_is_rejected(folder, recipe):
    """Check that the model file of the training is executed, and that a changed or unsealed file is not."""
    local_data, run = folder / "own.py", folder / "run"
    local_data.write_text(f"{SOURCE}\nopen({str(folder / 'executed')!r}, 'w').close()\n")
    with pytest.raises(
        UsageError, match=r"own.py:.* differs from the file with which this user trained the model; .* --trust"
    ):
        load(solo(), run, recipe)
    path = run / "checkpoints" / "step-12" / "manifest.json"
    sealed = path.read_text()
    stored = manifest.load(path.parent)
    old = {name: value for name, value in stored.about.items() if name != "factory"}
    path.write_text(manifest.encode(replace(stored, about=old)))
    local_data.write_text(SOURCE)
    with pytest.raises(UsageError, match="was not recorded by its training"):
        load(solo(), run, recipe)
    assert not (folder / "executed").exists()
    load(solo(), run, recipe, trust=True)
    path.write_text(sealed)


@cases(
    "kind, file, shape, shown",
    ("text", "text.txt", (8, 12), (8, 12)),
    ("table", "table.h5", (8, 6), (8,)),
    ("pictures", "pictures.h5", (8, 4, 3), (8,)),
)
def test_imported_model_trains_and_can_be_loaded(kind, file, shape, shown, folder):
    keys = {"model.factory": f"{folder}/own.py:{kind}", "data.path": folder / file} | recipe_keys(
        "model.kind=import data.context=12 global_batch=8 steps=12 optimizer.warmup_steps=1 "
        "optimizer.learning_rate=0.02"
    )
    recipe = recipe_of(keys)
    trainer = assemble(start_alone(), recipe)
    losses = []
    with trainer.batches(12) as batches:
        for step, batch in enumerate(batches, start=1):
            assert (batch[0].shape, batch[1].shape) == (shape, shown)
            losses.append(trainer.step(step, trainer.cut(trainer.place(batch)), np.zeros(2)).loss)
    assert np.isfinite(losses).all() and (kind != "text" or losses[-1] < losses[0])  # tables have labels by chance
    CheckpointSaver(trainer, folder / "run" / "checkpoints").save(12)
    (folder / "run" / "recipe.toml").write_text(recipes.dump(recipe))
    trained = load(solo(), folder / "run", recipe)
    check_other_code_is_rejected(folder, recipe)
    source = data.open_source(recipe.data, recipe.model, solo())
    inputs, targets = next(source.validation_batches(recipe, 1, 0))
    expected = trainer.executor.evaluate(inputs, targets)
    logits = trained.logits(inputs).reshape(-1, trained.model.stages[-1].tensors()[-1].shape[0]).astype(np.float64)
    chosen = logits[np.arange(len(logits)), targets.reshape(-1).astype(np.int64)]
    summed = float((np.log(np.exp(logits).sum(axis=1)) - chosen).sum())
    assert expected == pytest.approx(summed, rel=1e-5)


def test_exported_state_dict_has_the_names_of_the_user_modules(folder):
    """An export, also with tied tensors, can be loaded into the wrapped modules, and imported by the same names."""
    import torch

    (folder / "tied.py").write_text(TIED)
    keys = {"model.factory": f"{folder}/tied.py:build", "data.path": folder / "text.txt"} | recipe_keys(
        "model.kind=import data.context=12 global_batch=8 steps=1"
    )
    recipe = recipe_of(keys)
    trainer = assemble(start_alone(), recipe)
    CheckpointSaver(trainer, folder / "run" / "checkpoints").save(0)
    (folder / "run" / "recipe.toml").write_text(recipes.dump(recipe))

    def run(command, *arguments):
        command.main(list(map(str, arguments)), standalone_mode=False)

    run(checkpoint.export, folder / "run", folder / "model.pt")
    from tied import modules  # next to the factory, whose folder is on the path

    torch.manual_seed(99)
    local_data = modules()
    local_data.load_state_dict(torch.load(folder / "model.pt"))
    store = {piece.tensor: piece.array for piece in trainer.exchange.pieces() if piece.kind == "parameters"}
    np.testing.assert_array_equal(local_data[1].weight.detach().numpy().reshape(-1), store["1.1.weight"])
    assert local_data[2].weight is local_data[0].weight
    run(checkpoint.import_, folder / "model.pt", folder / "again", "--recipe", folder / "run/recipe.toml")
    again = load(solo(), folder / "again", recipe, trust=True)  # no training has sealed the factory there
    tokens = np.arange(24, dtype=np.uint8).reshape(2, 12)
    expected = load(solo(), folder / "run", recipe).logits(tokens)
    np.testing.assert_array_equal(again.logits(tokens), expected)
