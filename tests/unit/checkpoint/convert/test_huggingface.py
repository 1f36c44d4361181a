"""Directories of Hugging Face: logits as of transformers, any layout, exact round trips, refused settings."""

import json
import shutil

import numpy as np
import pytest

from harness.jobs import call_command
from harness.marks import cases
from harness.pytorch.exact import in_float64
from harness.trainings import assert_rejected, trainer_of
from hpcdist import models
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.convert import families
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.training.run.saving import build_saver

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6}
SIZES |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 3e-4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "beta_fast": 8.0, "beta_slow": 2.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def rotary(base, **scaling):
    return {"rope_theta": base, "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": base}}


MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama attention bias": ("llama", {"attention_bias": True, "num_key_value_heads": 6, **rotary(5e5)}),
    "llama mlp bias": ("llama", {"mlp_bias": True, **rotary(5e3, rope_type="linear", factor=2.5)}),
    "llama 3": ("llama", {**rotary(5e5, **LLAMA3, original_max_position_embeddings=16), "head_dim": 8}),
    "llama yarn": ("llama", rotary(1e4, **YARN)),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 8, **rotary(1e6)}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {**WINDOW, "tie_word_embeddings": True, **rotary(1e6)}),
    "qwen2 without window": ("qwen2", {**WINDOW, "use_sliding_window": False}),
    "qwen3": ("qwen3", {**WINDOW, "head_dim": 10, "attention_bias": True, **rotary(1e6)}),
    "qwen3 tied": ("qwen3", {"head_dim": 4, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_inner": None}),
    "gpt2 relu": ("gpt2", {"n_inner": 56, "activation_function": "relu", "tie_word_embeddings": False}),
}
GPT2 = {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 48, "layer_norm_epsilon": 3e-4}


@pytest.fixture
def exact():
    with in_float64():
        yield


def new_model(name, dtype="float32", seed=0, **changes):
    """Return a random model of transformers in which no tensor has its trivial initial value."""
    kind, keys = MODELS[name]
    keys = {**(GPT2 if kind == "gpt2" else SIZES), **keys, **changes}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **keys, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.2 * torch.randn(tensor.shape)
    return model.to(getattr(torch, dtype)).eval()


def logits_of_transformers(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def logits_of_directory(path, tokens, dtype):
    with HuggingFaceDirectory(path, dtype) as directory:
        model = models.build(directory.model, dtype, context=families.context_of(directory.config))
        store = FlatStore(model.layout, np.dtype(dtype))
        directory.fill(Piece.of(PARAMETERS, one, one.range, store.range(one.range)) for one in model.layout.segments)
    return model.logits(model.bind(store), tokens, Arena())


def error_of(result, expected):
    return np.abs(result - expected).max() / np.abs(expected).max()


def check_import(name, dtype, tolerance, folder, rng):
    model = new_model(name, dtype, seed=int(rng.integers(1 << 30)))
    tokens = rng.integers(0, 97, (2, 40))
    expected = logits_of_transformers(model, tokens)
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    assert (folder / "model/model.safetensors.index.json").exists()
    assert error_of(logits_of_directory(folder / "model", tokens, dtype), expected) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_imported_logits_equal_transformers(name, tmp_path, rng):
    check_import(name, "float32", 1e-5, tmp_path, rng)


@pytest.mark.parametrize("name", MODELS)
def test_imported_logits_equal_transformers_in_float64(name, tmp_path, rng, exact):
    check_import(name, "float64", 1e-10, tmp_path, rng)


def invoke(capsys, *arguments):
    return call_command(capsys, "checkpoint", *map(str, arguments))


def loaded(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_round_trip_keeps_every_bit_and_the_logits(name, dtype, tmp_path, rng, capsys):
    model = new_model(name, dtype, seed=int(rng.integers(1 << 30)))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert invoke(capsys, "import", tmp_path / "model", tmp_path / "run")[0] == 0
    code, output, _ = invoke(capsys, "export", tmp_path / "run", f"{tmp_path}/out/", "--shard-bytes", "20K", "--json")
    assert code == 0 and str(tmp_path / "out/model.safetensors.index.json") in json.loads(output)["files"]
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    again, expected = loaded(tmp_path / "out").state_dict(), model.state_dict()
    assert again.keys() == expected.keys()
    for key, value in expected.items():
        assert again[key].dtype == value.dtype and torch.equal(again[key], value), key
    tokens = rng.integers(0, 97, (1, 9))
    folders = tmp_path / "out", tmp_path / "model"
    results = [logits_of_transformers(one.to(torch.float32), tokens) for one in map(loaded, folders)]
    assert np.array_equal(*results)


LAYOUTS = {
    "zero3": (3, "llama", {"parallel.strategy": "zero3"}),
    "zero1 bfloat16": (2, "qwen2", {"parallel.strategy": "zero1", "precision.mode": "bfloat16"}),
    "tensor": (3, "llama attention bias", {"parallel.tensor": 3}),
    "tensor, zero2": (4, "qwen3", {"parallel.tensor": 2, "parallel.strategy": "zero2"}),
    "gpt2 tensor, pipeline": (4, "gpt2 relu", {"parallel.tensor": 2, "parallel.pipeline": 2}),
    "gpt2 zero3": (3, "gpt2", {"parallel.strategy": "zero3"}),
    "pipeline": (2, "mistral", {"parallel.pipeline": 2}),
    "context": (2, "llama 3", {"parallel.context": 2}),
    "node writers": (4, "qwen2", {"parallel.tensor": 2, "checkpoint.writers": "1"}),
    "background": (2, "llama", {"checkpoint.asynchronous": "true"}),
}


def training_keys(folder, **keys):
    """Return the recipe keys of a run from the directory ``folder``/model, which exports to ``folder``/out."""
    tokens = np.random.default_rng(3).integers(0, 97, 4000).astype(np.uint16)
    np.save(folder / "tokens.npy", tokens)
    changed = {name.replace("__", "."): value for name, value in keys.items()}
    keys = {"run.init_from": folder / "model", "data.path": folder / "tokens.npy", "run.global_batch": 12}
    return keys | {"run.steps": 1, "checkpoint.export_to": folder / "out", "parallel.microbatches": 2} | changed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_starts_from_a_directory_and_exports_it_bit_by_bit(layout, tmp_path, rng):
    # The odd vocabulary of 97 tokens under 3 tensor ranks is the situation of Megatron-LM#1754.
    ranks, name, keys = LAYOUTS[layout]
    more = {"num_key_value_heads": 3} if layout == "tensor" else {}
    model = new_model(name, seed=int(rng.integers(1 << 30)), **more)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    settings = training_keys(tmp_path) | keys

    def body(comm):
        trainer = trainer_of(comm, settings)
        saver = build_saver(trainer, tmp_path / "run/checkpoints")
        saver.save(1)
        saver.finish()
        trainer.close()

    run_threads(ranks, body)
    again, expected = loaded(tmp_path / "out").state_dict(), model.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[key], value) for key, value in expected.items())
    assert [path.name for path in tmp_path.glob(".out*")] == []


def test_export_replaces_only_its_own_directory(tmp_path, rng, capsys):
    new_model("llama").save_pretrained(tmp_path / "model")
    settings = training_keys(tmp_path) | {"run.steps": 4, "checkpoint.export_every_steps": 2}
    trainer = trainer_of(solo(), settings)
    saver = build_saver(trainer, tmp_path / "run/checkpoints")
    saver.save(1)
    assert not (tmp_path / "out").exists()
    saver.save(2)
    first = loaded(tmp_path / "out").state_dict()
    for piece in trainer.exchange.wanted():
        piece.array[...] += piece.kind == PARAMETERS
    saver.save(4)
    second = loaded(tmp_path / "out").state_dict()
    assert all(torch.allclose(second[key], value + 1) for key, value in first.items())
    with pytest.raises(StorageError, match="out exists already"):
        build_saver(trainer_of(solo(), settings), tmp_path / "other/checkpoints")
    assert_rejected({"checkpoint.export_every_steps": 2}, "has no effect")


def test_failed_export_keeps_the_checkpoint_and_the_old_directory(tmp_path, monkeypatch):
    new_model("llama").save_pretrained(tmp_path / "model")

    def body(comm):
        trainer = trainer_of(comm, training_keys(tmp_path))
        saver = build_saver(trainer, tmp_path / "run/checkpoints")
        saver.save(1)
        if comm.rank == 1:
            saver._export.__dict__["files"] = {name + "x": file for name, file in saver._export.files.items()}
        saver.save(1)

    with pytest.raises(StorageError, match=r"not exported: .*No such file.*the checkpoint .*step-1 is complete"):
        run_threads(2, body)
    assert (tmp_path / "run/checkpoints/step-1/manifest.json").exists()
    assert loaded(tmp_path / "out") is not None and [path.name for path in tmp_path.glob(".out*")] == []


@cases(
    "name, changes, output",
    ("llama", {"model_type": "bert"}, "model_type 'bert' is not supported; supported: llama"),
    ("llama", {"model_type": "gemma3", "text_config": {}}, "'gemma3' with a text_config is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope_type 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, "'linear' has no factor"),
    ("llama", {"rope_parameters": {**YARN, "mscale": 2.0}}, "mscale = '2.0' of rope_type 'yarn' is not supported"),
    ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "truncate = 'False' is not supported"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "per layer type is not supported"),
    ("llama", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor = '0.5'"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = '30.0' of model_type 'llama' is not"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu' or 'swish'"),
    ("llama", {"hidden_size": None}, "hidden_size is 'None', expected a whole number"),
    ("mistral", {"attention_bias": True}, "attention_bias = 'True' of model_type 'mistral' is not supported"),
    ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types = 'linear_attention' is not supported"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = 'True' is not supported"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = 'True' is not supported"),
    ("llama", {"intermediate_size": 44}, r"gate_proj.weight is float32\[40, 24\].* of shape \[44, 24\]"),
    ("llama", {"num_hidden_layers": 4}, "lacks the tensor model.layers.3.input_layernorm.weight"),
    ("llama", {"num_hidden_layers": 2}, "has the tensor model.layers.2.*, which a model of type 'llama' does not"),
)
def test_unsupported_settings_are_refused_by_name(name, changes, output, saved_models, tmp_path):
    shutil.copytree(saved_models[name], tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ConfigurationError, StorageError), match=output), HuggingFaceDirectory(tmp_path / "model"):
        pass


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("models") / name for name in ("llama", "mistral", "qwen2", "gpt2")}
    for name, folder in folders.items():
        new_model(name).save_pretrained(folder, max_shard_size="20KB")
    return folders


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(folder, index["weight_map"])
    path.write_text(json.dumps(index))


def save_tensors(folder, name, change):
    """Change the tensors of the file that has the tensor ``name``."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@cases(
    "break_, output",
    (lambda folder: change_index(folder, lambda _, names: names.update({NORM: "../x.safetensors"})), r"'\.\./x"),
    (lambda folder: change_index(folder, lambda _, names: names.update({NORM: "/etc/passwd"})), "'/etc/passwd'"),
    (lambda folder: change_index(folder, lambda _, names: names.update({"a.b": names[NORM]})), "has no tensor a.b"),
    (lambda folder: change_index(folder, lambda _, names: names.pop(NORM)), f"lacks the tensor {NORM}"),
    (lambda folder: next(folder.glob("model-00002*")).unlink(), "No such file.*model-00002"),
    (lambda folder: save_tensors(folder, NORM, lambda all_: all_[NORM].fill_(float("nan"))), f"{NORM} is NaN"),
    (lambda folder: save_tensors(folder, NORM, lambda all_: all_.pop(NORM)), f"has no tensor {NORM}"),
)
def test_damaged_files_are_refused_by_name(break_, output, saved_models, tmp_path):
    shutil.copytree(saved_models["llama"], tmp_path / "model")
    break_(tmp_path / "model")
    with pytest.raises(StorageError, match=output):
        run_threads(2, lambda comm: trainer_of(comm, training_keys(tmp_path)))


def test_truncated_or_pickled_files_are_refused(saved_models, tmp_path):
    shutil.copytree(saved_models["llama"], tmp_path / "model")
    last = sorted((tmp_path / "model").glob("model-*"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    with (
        pytest.raises(StorageError, match=f"{last.name}: tensors end at byte"),
        HuggingFaceDirectory(tmp_path / "model"),
    ):
        pass
    for path in (tmp_path / "model").glob("model*"):
        path.unlink()
    (tmp_path / "model/pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(StorageError, match=r"pytorch_model.bin is not read: convert it"):
        HuggingFaceDirectory(tmp_path / "model")


def test_head_of_a_tied_model_must_equal_the_embedding(saved_models, tmp_path, rng):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    new_model("llama", seed=5).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for shift in (0, 1):
        head = tensors[EMBEDDING].clone()
        head[-1, -1] += shift
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        if not shift:
            with HuggingFaceDirectory(folder) as directory:
                assert directory.left_out == ["lm_head.weight"]
    with pytest.raises(StorageError, match="lm_head.weight differs from model.embed_tokens.weight"):
        HuggingFaceDirectory(folder)


def test_recipe_that_contradicts_the_directory_is_refused(saved_models, tmp_path):
    shutil.copytree(saved_models["llama"], tmp_path / "model")
    for key, value, output in (
        ("model.hidden", 48, "model.hidden is 48, but 24"),
        ("model.norm_epsilon", 1e-6, "model.norm_epsilon is 1e-06, but 0.0003"),
        ("run.allow_partial", "true", "allow_partial is not supported"),
    ):
        with pytest.raises(ConfigurationError, match=output):
            trainer_of(solo(), training_keys(tmp_path) | {key: value})


ROTARY = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}


@cases(
    "keys, result",
    ({"biased": "all"}, "gpt2"),
    (ROTARY | {"window": 4}, "mistral"),
    (ROTARY | {"bias": True, "biased": "qkv"}, "qwen2"),
    (ROTARY | {"query_key_norm": "head", "window": 4, "window_layers": "3-4"}, "qwen3"),
    (ROTARY | {"hidden": 24, "heads": 5, "head_size": 8}, "mistral"),
    (ROTARY | {"activation": "gelu"}, "model.activation = 'gelu'"),
    (ROTARY | {"window": 4, "window_layers": "1-2"}, "model.window"),
    (ROTARY | {"rotary_layers": "1-2"}, "model.rotary_layers = '1-2'"),
    ({"experts": 4}, "model.experts = 4"),
    ({"kind": "encoder"}, "model.kind = 'encoder'"),
)
def test_export_selects_a_family_or_names_what_is_lacking(keys, result):
    if result in families.FAMILIES:
        assert families.config_of(ModelConfig(**keys), 64)["model_type"] == result
        return
    with pytest.raises(ConfigurationError, match=result):
        families.config_of(ModelConfig(**keys), 64)


@pytest.mark.parametrize("name", [name for name in MODELS if "gpt2" not in name])
@pytest.mark.parametrize("type_key", ("rope_type", "type"))
def test_config_of_transformers_4_has_the_same_meaning(name, type_key, tmp_path):
    new_model(name).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    keys = families.model_keys(config)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype", "float32")}
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    if "layer_types" in config:
        del config["layer_types"]
    assert families.model_keys(config) == keys
    with pytest.raises(ConfigurationError, match="rope_parameters has factor = 3.0, but rope_scaling has 2.0"):
        families.model_keys(config | {"rope_parameters": {"factor": 3.0}, "rope_scaling": {"factor": 2.0}})


def test_missing_keys_have_the_defaults_of_transformers():
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        config = transformers.AutoConfig.for_model(kind, num_attention_heads=32).to_dict()
        config = {key: value for key, value in config.items() if key in families.FAMILIES[kind].defaults}
        short = {key: config[key] for key in needed} | {"model_type": kind}
        expected = families.model_keys(config | {"model_type": kind})
        assert families.model_keys(short) == expected, kind
        assert families.context_of(short) == config["max_position_embeddings"], kind
    short = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "model_type": "gpt2"}
    assert families.model_keys(short) == families.model_keys(transformers.GPT2Config().to_dict())
