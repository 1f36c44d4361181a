"""A Hugging Face directory is trained on two ranks, exported, and loaded by both major versions of transformers."""

import json
import os
import sys

import numpy as np
import pytest

from harness import jobs
from harness.jobs import hpcdist

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

OLD = ("transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub<1")  # installed without their dependencies
LOGITS = """
import sys
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager").eval()
with torch.no_grad():
    logits = model(torch.load(sys.argv[2])).logits
torch.save({"version": transformers.__version__, "logits": logits}, sys.argv[3])
"""
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
SIZES = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
SIZES |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 32}
FAMILIES = {
    "llama": {"rope_parameters": {**ROPE, "original_max_position_embeddings": 16}},
    "mistral": {"sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}


def save_model(family, folder, seed):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_imported_model_is_trained_on_two_ranks_and_exported(tmp_path, rng):
    save_model("llama", tmp_path / "model", int(rng.integers(1 << 30)))
    tokens = np.tile(np.arange(0, 97, 7, dtype=np.uint16), 200)
    np.save(tmp_path / "tokens.npy", tokens)
    keys = {"run.init_from": tmp_path / "model", "data.path": tmp_path / "tokens.npy", "run.global_batch": 4}
    keys |= {"run.steps": 60, "parallel.strategy": "zero3", "optimizer.learning_rate": 0.01, "data.context": 32}
    keys |= {"checkpoint.export_to": tmp_path / "out"}
    trained = hpcdist("run", "-n", 2, "train", *jobs.settings(keys), "--out", tmp_path / "run", "--json", timeout=300)
    assert trained.returncode == 0, trained.stderr

    def loss_of(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # The last windows of the text are held out. All windows have the same tokens, but for the beginning.
        batch = torch.from_numpy(tokens[: 14 * 33].astype(np.int64)).reshape(14, 33)
        with torch.no_grad():
            logits = model(batch[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()

    val_loss = json.loads(trained.stdout.splitlines()[-1])["val_loss"]
    assert loss_of(tmp_path / "out") < 0.8 * loss_of(tmp_path / "model")
    assert loss_of(tmp_path / "out") == pytest.approx(val_loss, rel=0.02)
    for options, code in (((), 1), (("--replace",), 0)):
        exported = hpcdist("checkpoint", "export", tmp_path / "run", f"{tmp_path}/out/", *options)
        assert (exported.returncode == 0) == (code == 0), exported.stderr
        assert code == 0 or f"{tmp_path}/out exists already" in exported.stderr
    assert loss_of(tmp_path / "out") == pytest.approx(val_loss, rel=0.02)


@pytest.mark.full
def test_export_has_the_same_logits_in_transformers_4_and_5(tmp_path, rng):
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "old", *OLD]
    installed = jobs.run([sys.executable, *install])
    if installed.returncode:
        pytest.skip(f"transformers 4 cannot be installed: {installed.stderr[-200:]}")
    tokens = torch.from_numpy(rng.integers(0, 97, (2, 30)))
    torch.save(tokens, tmp_path / "tokens.pt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "old")}
    for family in FAMILIES:
        folder, run = tmp_path / f"{family}-model", tmp_path / f"{family}-run"
        save_model(family, folder, int(rng.integers(1 << 30)))
        for line in (("import", folder, run), ("export", run, f"{tmp_path}/{family}/")):
            done = hpcdist("checkpoint", *line)
            assert done.returncode == 0, done.stderr
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            expected = model(tokens).logits
        words = [tmp_path / family, tmp_path / "tokens.pt", tmp_path / "logits.pt"]
        # -P of `jobs.python` keeps the variable.
        jobs.python(LOGITS, *words, env=environment, check=True)
        old = torch.load(tmp_path / "logits.pt")
        assert old["version"] == "4.57.6"
        assert torch.allclose(old["logits"], expected, rtol=0, atol=1e-5 * float(expected.abs().max())), family
