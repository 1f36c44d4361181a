"""Directories of Hugging Face: logits as of transformers, any layout, exact round trips, refused settings."""

import json
import shutil

import numpy as np
import pytest

from harness.jobs import call_command
from harness.marks import cases
from harness.trainings import trainer_of
from hpcdist import models
from hpcdist.arrays.piece import Piece, runs
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.convert import families
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.training import inference

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
def exact(monkeypatch):
    """Let transformers compute in float64 where it would convert to float32: norms, angles, softmax."""
    before = torch.get_default_dtype()
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


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
