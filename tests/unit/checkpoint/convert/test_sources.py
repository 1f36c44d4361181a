"""Models in GGUF files and in directories of torch.distributed.checkpoint: tensors, settings and tokenizer."""

import pickle
import shutil

import numpy as np
import pytest
from unit.checkpoint.convert.test_huggingface import SIZES, loaded, logits_of_directory, logits_of_transformers, rotary

from harness.jobs import call_command
from harness.marks import cases
from hpcdist.checkpoint.convert import dcp, gguf_file
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.errors import ConfigurationError, StorageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TITAN = {hub: titan for titan, hub in dcp._MODULES.items()} | {hub: titan for titan, hub in dcp._OUTER.items()}
GGML = {hub: ggml for ggml, hub in gguf_file.MODULES.items()} | {hub: ggml for ggml, hub in gguf_file._OUTER.items()}
TEXTS = ("It's don't  x=1;\t na\u00efve \n\n 42", "\u65e5\u672c <|end|>user", "a" * 9 + "  \n tail ")


def new_llama(folder, rng, **changes):
    torch.manual_seed(int(rng.integers(1 << 30)))
    keys = SIZES | rotary(5e4) | changes
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys, attn_implementation="eager")).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.2 * torch.randn(tensor.shape)
    model.save_pretrained(folder / "model")
    return model


def adjacent_pairs(key, values):
    """Return query and key rows in the order of Meta's files: rotary pairs are neighbours."""
    heads = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}.get(key.split(".")[-2])
    if heads is None:
        return values
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def renamed(key, names, layer):
    module, _, part = key.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, rest = module.split(".", 3)
        return f"{layer}.{number}.{names[rest]}.{part}"
    return f"{names[module]}.{part}"


def byte_tokens():
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path, model, architecture="llama", pre="smollm", quantized=None, **more):
    """Write ``model`` with the package gguf, and a byte-level tokenizer of 256 bytes, merges and a special token."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [*byte_tokens(), "\u0120t", "ai", "ail", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["\u0120 t", "a i", "ai l"])
    writer.add_eos_token_id(len(tokens) - 1)
    for key, value in more.items():
        writer.add_float32(key.replace("__", "."), value)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = adjacent_pairs(key, value.float().numpy()).copy()
        code = quantized if quantized and array.ndim == 2 else None
        kind = {} if code is None else {"raw_dtype": gguf.GGMLQuantizationType[code]}
        array = array if code is None else gguf.quantize(array, gguf.GGMLQuantizationType[code])
        writer.add_tensor(renamed(key, GGML, "blk"), array, **kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantized", (None, "Q4_1", "Q8_0"))
def test_gguf_file_has_the_logits_and_the_tokenizer_of_transformers(quantized, tmp_path, rng, capsys):
    changes = {"hidden_size": 192, "intermediate_size": 64, "vocab_size": 260, "tie_word_embeddings": quantized is None}
    model = new_llama(tmp_path, rng, **changes)
    path = tmp_path / "small.gguf"
    write_gguf(path, model, quantized=quantized)
    tokens = rng.integers(0, 260, (2, 40))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    result = logits_of_directory(path, tokens, "float32")
    expected = logits_of_transformers(reference, tokens)
    assert np.abs(result - expected).max() <= 1e-4 * np.abs(expected).max()
    if quantized is None:
        stored = logits_of_transformers(model, tokens)
        assert np.abs(result - stored).max() <= 1e-4 * np.abs(stored).max()
    code, _, error = call_command(capsys, "checkpoint", "import", str(path), str(tmp_path / "run"))
    assert code == 0, error
    code, _, error = call_command(capsys, "checkpoint", "export", str(tmp_path / "run"), f"{tmp_path}/out/")
    assert code == 0, error
    assert np.array_equal(logits_of_directory(tmp_path / "out", tokens, "float32"), result)
    encoders = [
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
        transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
    ]
    for text in TEXTS:
        ours, theirs = (encoder(text)["input_ids"] for encoder in encoders)
        assert ours == theirs and encoders[0].decode(ours) == text
    assert encoders[0]("12")["input_ids"] == [byte_tokens().index(digit) for digit in "12"]
    assert encoders[0].eos_token == "<|end|>"


@cases(
    "keys, output",
    ({"architecture": "qwen2"}, "general.architecture = 'qwen2' is not supported; supported: 'llama'"),
    (
        {"pre": "tekken"},
        "tokenizer.ggml.model.* 'tekken' is not supported.*put the tokenizer.json of the model next to",
    ),
    ({"llama__expert_weights_scale": 2.0}, "llama.expert_weights_scale = '2.0' is not supported"),
)
def test_unsupported_gguf_files_are_refused_by_key(keys, output, tmp_path, rng):
    write_gguf(tmp_path / "small.gguf", new_llama(tmp_path, rng), **keys)
    with pytest.raises(ConfigurationError, match=f"small.gguf: {output}"):
        HuggingFaceDirectory(tmp_path / "small.gguf")


def test_damaged_gguf_file_is_refused(tmp_path, rng):
    path = tmp_path / "small.gguf"
    write_gguf(path, new_llama(tmp_path, rng))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(StorageError, match=r"small.gguf cannot be read as GGUF: .*; copy the file again"):
        HuggingFaceDirectory(path)


@cases("titan, dtype", (True, "bfloat16"), (False, "float32"))
def test_directory_of_torch_checkpoint_has_the_logits_of_the_model(titan, dtype, tmp_path, rng, capsys):
    from torch.distributed import checkpoint

    model = new_llama(tmp_path, rng)
    state = {key: value.to(getattr(torch, dtype)) for key, value in model.state_dict().items()}
    model.load_state_dict(state)  # rounded, but with buffers in float32
    if titan:
        state = {renamed(key, TITAN, "layers"): adjacent_pairs(key, value).clone() for key, value in state.items()}
    extra = {"optimizer.state.x.exp_avg": torch.ones(3), "train_state": {"step": torch.tensor(3)}}
    checkpoint.save(state | extra, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(StorageError, match=r"config.json"):
        HuggingFaceDirectory(tmp_path / "dcp")
    shutil.copy(tmp_path / "model/config.json", tmp_path / "dcp")
    tokens = rng.integers(0, SIZES["vocab_size"], (2, 20))
    expected = logits_of_transformers(model, tokens)
    result = logits_of_directory(tmp_path / "dcp", tokens, "float32")
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()
    assert call_command(capsys, "checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "run"))[0] == 0
    assert call_command(capsys, "checkpoint", "export", str(tmp_path / "run"), f"{tmp_path}/out/")[0] == 0
    for key, value in loaded(tmp_path / "out").state_dict().items():
        assert torch.equal(value.float(), model.state_dict()[key]), key


def test_metadata_of_a_torch_checkpoint_runs_no_code(tmp_path, rng):
    new_llama(tmp_path, rng)
    shutil.move(tmp_path / "model", tmp_path / "dcp")
    (tmp_path / "dcp/model.safetensors").unlink()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(shutil.rmtree))
    with pytest.raises(StorageError, match=r"\.metadata names shutil\.rmtree"):
        HuggingFaceDirectory(tmp_path / "dcp")
