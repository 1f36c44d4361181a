"""Low-rank adapters against PEFT: training, merged export, PEFT's files, in several layouts."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from harness.jobs import call_command
from harness.marks import cases
from harness.pytorch.exact import in_float64
from harness.trainings import losses, recipe_keys, session_of, trainer_of
from hpcdist.checkpoint.convert import families
from hpcdist.checkpoint.convert.adapters import config_of as adapters_config
from hpcdist.checkpoint.convert.adapters import mapped_adapters
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers.lora import LoraConfig
from hpcdist.training.build.assemble import assemble
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
load_file = pytest.importorskip("safetensors.torch").load_file

STEPS, CONTEXT = 8, 16
SIZES = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
SIZES |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 3e-4}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYOUTS = {
    "tensor": (2, "tensor=2"),
    "tensor by rows x zero3": (4, "tensor=2 sequence_parallel=true strategy=zero3"),
    "pipeline x zero1": (4, "pipeline=2 strategy=zero1 microbatches=2"),
}


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
    files = {
        "run.init_from": folder / "model",
        "lora.init_from": folder / "adapters",
        "data.path": folder / "tokens.npy",
    }
    text = f"run.steps={STEPS} global_batch=4 data.context={CONTEXT} lora.rank=3 lora.alpha=6 precision.mode=float64"
    return {
        **files,
        **recipe_keys(f"{text} optimizer.learning_rate=0.02 optimizer.decay=constant optimizer.warmup_steps=0"),
        **keys,
    }


def train_with_peft(model, trainer):
    """Return the losses of PEFT's model on the batches of ``trainer``."""
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    results = []
    with trainer.batches(STEPS) as batches:
        for inputs, targets in batches:
            logits = model(torch.from_numpy(inputs.astype(np.int64))).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), torch.from_numpy(targets.astype(np.int64)).flatten()
            )
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
    with in_float64():
        model = save_model(tmp_path, rng)
        expected = train_with_peft(model, trainer_of(solo(), keys))
        reference = logits_of(model, tokens)
    np.testing.assert_allclose(trained(tmp_path, keys | recipe_keys(text), ranks), expected, rtol=1e-9)
    export(capsys, tmp_path, "out", "--adapters")
    export(capsys, tmp_path, "merged")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"] == sorted(ALL)
    for result in (
        peft.PeftModel.from_pretrained(loaded(tmp_path / "model"), tmp_path / "out"),
        loaded(tmp_path / "merged"),
    ):
        result = logits_of(result.to(torch.float32), tokens)
        assert np.abs(result - reference).max() <= 1e-5 * np.abs(reference).max()


def loaded(path):
    return transformers.LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")


@cases(
    "change, keys, output",
    ({"use_dora": True}, {}, "use_dora is True, which hpcdist does not support"),
    ({"r": 5}, {}, r"lora.rank is 3, but .*adapter_config.json has 5; set lora.rank = 5"),
    ({"lora_alpha": 9}, {}, r"lora.alpha is 6.0, but .* has 9; set lora.alpha = 9"),
    ({"use_rslora": True}, {}, r"lora.alpha is 6.0, but .* has 10.39"),
    ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'; only LORA is supported"),
    (
        {},
        {"lora.targets": "['query']"},
        "but None in the model of the recipe; set lora.targets to .'down_proj'",
    ),
    ({"peft_type": None}, {"lora.init_from": "/nowhere"}, "/nowhere/adapter_config.json cannot be read"),
)
def test_adapters_of_another_kind_are_refused_by_name(change, keys, output, adapters, tmp_path, rng):
    shutil.copytree(adapters, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "adapters/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ConfigurationError, StorageError), match=output):
        run_threads(2, lambda comm: trainer_of(comm, recipe_for(tmp_path, rng) | keys))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder, np.random.default_rng(3))
    return folder


def test_an_earlier_run_with_adapters_is_continued_and_exported_while_it_trains(adapters, tmp_path, rng, capsys):
    shutil.copytree(adapters, tmp_path, dirs_exist_ok=True)
    keys = recipe_for(tmp_path, rng) | {"checkpoint.export_to": tmp_path / "inline", "parallel.strategy": "zero2"}
    trained(tmp_path, keys, 2)
    export(capsys, tmp_path, "out", "--adapters")
    inline, out = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("inline", "out"))
    assert inline.keys() == out.keys() and all(torch.equal(inline[key], out[key]) for key in out)
    recipe = replace(recipes.load_stored(tmp_path / "run/recipe.toml"), lora=LoraConfig(rank=3, alpha=6.0))
    checkpoint = replace(recipe.checkpoint, export_to="")
    recipe = replace(recipe, run=replace(recipe.run, init_from=str(tmp_path / "run")), checkpoint=checkpoint)
    trainer = assemble(session_of(solo()), recipe)
    (tensor,) = (one for one in trainer.pieces() if one.tensor == "1.kv.value.lora_b" and one.kind == PARAMETERS)
    stored = out["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].numpy()
    np.testing.assert_allclose(tensor.array.reshape(stored.shape), stored, rtol=1e-6)


def test_parts_of_one_module_of_gpt2_have_no_peft_files(tmp_path):
    config = families.config_of(ModelConfig(layers=1), 8, "gpt2")
    assert config["model_type"] == "gpt2"
    mapped = mapped_adapters("gpt2", ModelConfig(layers=1), 8, LoraConfig(rank=2, targets=("o_proj", "down", "up")))
    names = sorted(name for one in mapped.values() for name in one.stack.names)
    assert names[0] == "base_model.model.transformer.h.0.attn.c_proj.lora_A.weight"
    settings = adapters_config("gpt2", LoraConfig(rank=2), [*mapped], "")
    assert settings["target_modules"] == ["attn.c_proj", "mlp.c_fc", "mlp.c_proj"] and settings["fan_in_fan_out"]
    with pytest.raises(ConfigurationError, match="attn.c_attn has several matrices, for which PEFT has only one"):
        mapped_adapters("gpt2", ModelConfig(layers=1), 8, LoraConfig(rank=2))
