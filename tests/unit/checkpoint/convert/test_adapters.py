"""Low-rank adapters against PEFT: training, merged export, PEFT's files, in several layouts."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from harness.jobs import call_command
from harness.marks import cases
from harness.trainings import losses, recipe_keys, trainer_of
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS, CONTEXT = 8, 16
SIZES = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
SIZES |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 3e-4}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYOUTS = {
    "tensor": (2, "tensor=2"),
    "tensor by rows x zero3": (4, "tensor=2 sequence_parallel=true strategy=zero3"),
    "pipeline x zero1": (4, "pipeline=2 strategy=zero1 microbatches=2"),
}


@contextmanager
def exact():
    """Let transformers compute in float64 where it would convert to float32: norms, angles, softmax."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(before)


def save_model(folder, rng, **changes):
    """Save a random model, and adapters for it whose product is not zero. Return the model with its adapters."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = transformers.LlamaConfig(**SIZES | changes, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder / "model")
    lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(folder / "adapters")
    return adapted


def recipe_for(folder, rng, **keys):
    np.save(folder / "tokens.npy", rng.integers(0, 97, 2000).astype(np.uint16))
    files = {"run.init_from": folder / "model", "lora.init_from": folder / "adapters", "data.path": folder / "tokens.npy"}
    text = f"run.steps={STEPS} global_batch=4 data.context={CONTEXT} lora.rank=3 lora.alpha=6 precision.mode=float64"
    return {**files, **recipe_keys(f"{text} optimizer.learning_rate=0.02 optimizer.decay=constant optimizer.warmup_steps=0"), **keys}


def train_with_peft(model, trainer):
    """Return the losses of PEFT's model on the batches of ``trainer``."""
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    results = []
    with trainer.batches(STEPS) as batches:
        for inputs, targets in batches:
            logits = model(torch.from_numpy(inputs.astype(np.int64))).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets.astype(np.int64)).flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            results.append(loss.item())
    return results


def export(capsys, folder, name, *options):
    code, _, error = call_command(capsys, "checkpoint", "export", str(folder / "run"), f"{folder / name}/", *options)
    assert code == 0, error


def logits_of(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def trained(folder, keys, ranks=1):
    """Train, save a checkpoint in a run directory, and return the losses."""
    (folder / "run").mkdir()

    def body(comm):
        trainer = trainer_of(comm, keys)
        results = losses(trainer, STEPS)
        if comm.rank == 0:
            (folder / "run/recipe.toml").write_text(recipes.dump(trainer.recipe))
        CheckpointSaver(trainer, folder / "run/checkpoints").save(STEPS)
        return results

    return run_threads(ranks, body)[0]


@pytest.mark.parametrize("layout", ["one process", *LAYOUTS])
def test_training_and_exports_equal_peft(layout, tmp_path, rng, capsys):
    # With tensor ranks: the situation of Megatron-Bridge#2193, in which the merged weights of some ranks were wrong.
    ranks, text = LAYOUTS.get(layout, (1, ""))
    keys = recipe_for(tmp_path, rng)
    tokens = rng.integers(0, 97, (2, 20))
    with exact():
        model = save_model(tmp_path, rng)
        expected = train_with_peft(model, trainer_of(solo(), keys))
        wanted = logits_of(model, tokens)
    np.testing.assert_allclose(trained(tmp_path, keys | recipe_keys(text), ranks), expected, rtol=1e-9)
    export(capsys, tmp_path, "out", "--adapters")
    export(capsys, tmp_path, "merged")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"] == sorted(ALL)
    for result in (
        peft.PeftModel.from_pretrained(loaded(tmp_path / "model"), tmp_path / "out"),
        loaded(tmp_path / "merged"),
    ):
        result = logits_of(result.to(torch.float32), tokens)
        assert np.abs(result - wanted).max() <= 1e-5 * np.abs(wanted).max()


def loaded(path):
    return transformers.LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")
