"""Generation of tokens with a key-value cache, relative to recomputing the context and to transformers.

    python -m benchmarks generation
    python -m benchmarks generation --prompt 32 --layers 16 --hidden 1024

    cache          hpcdist with its cache, greedy
    transformers   `generate` of the same weights in float32, with its cache, greedy

One thread, and a llama with random weights. Both draw --tokens tokens after one prompt, and after each of --batch
prompts. The tokens must be equal. A time includes the computation of the prompts. "cached token" and "recomputed token"
are one token of hpcdist at the end of a full context, with and without the cache. Ratios below 1 mean that the cache of
hpcdist is faster. The goals: at most 1 relative to transformers, and at most 0.1 relative to a recomputed token.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.training.generation import Decoder, WindowDecoder, generate
from hpcdist.training.inference import TrainedModel, load
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.use_cases.import_checkpoint import import_directory

SCHEMA, NO_CHECK = "hpcdist-benchmark-generation", "no result is committed"
OPTIONS = {"layers": 8, "hidden": 512, "vocabulary": 8192, "context": 1024, "prompt": 896, "tokens": 64, "rounds": 5}
OPTIONS |= {"batch": 4, "seed": 0}
WAYS = ("cache", "transformers")
TIMED_TOKENS = 3


def make_models(chosen: Namespace, folder: Path, session: Session) -> tuple[TrainedModel, Any]:
    """Return a model with random weights as a model of hpcdist, and as a model of transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingCapabilityError(
            f"the study needs transformers ({error}); run pip install '.[reference]'"
        ) from error
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    config = transformers.LlamaConfig(
        vocab_size=chosen.vocabulary, hidden_size=chosen.hidden, num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.hidden // 64, num_key_value_heads=chosen.hidden // 128,
        intermediate_size=11 * chosen.hidden // 4, max_position_embeddings=chosen.context,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    import_directory(folder / "model", folder / "run", None, [], None)
    return load(session.comm, folder / "run", recipes.load_stored(folder / "run/recipe.toml")), model


def draw(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return ``count`` greedy tokens after each of ``prompts``."""
    texts: list[list[int]] = [[] for _ in prompts]
    for index, token in generate(decoder, prompts, count, temperature=0.0, top_k=0, seed=0):
        texts[index].append(token)
    return texts


def draw_by_transformers(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return ``count`` greedy tokens after each of ``prompts``, which have the same length."""
    import torch

    inputs = torch.tensor(prompts)
    with torch.no_grad():
        drawn = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
    return drawn[:, inputs.shape[1] :].tolist()  # type: ignore[no-any-return]


def measure(chosen: Namespace, session: Session) -> Results:
    harness.at_least(chosen, rounds=1, batch=2, tokens=1)
    if chosen.prompt + chosen.tokens > chosen.context or chosen.hidden % 128:
        raise UsageError("--prompt and --tokens must fit in --context, and --hidden must be a multiple of 128")
    rng = np.random.default_rng(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = make_models(chosen, Path(folder), session)
        calls: dict[str, Callable[[], float]] = {}
        for batch in (1, chosen.batch):
            prompts = rng.integers(0, chosen.vocabulary, (batch, chosen.prompt)).tolist()
            both = contenders(ours, theirs, prompts, chosen.tokens)
            if both[0]() != both[1]():  # also compiles the kernels
                raise StorageError("hpcdist and transformers draw different tokens; use another --seed")
            calls |= {f"{way}, {batch}": partial(harness.seconds, call) for way, call in zip(WAYS, both, strict=True)}
        text = rng.integers(0, chosen.vocabulary, chosen.context).tolist()
        calls["cached token"] = partial(token_seconds, lambda: ours.decoder(1), text)
        calls["recomputed token"] = partial(token_seconds, lambda: WindowDecoder(ours.logits, chosen.context), text)
        values = harness.alternate(calls, chosen.rounds)
    about = {"contenders": ";".join(values), "batch": chosen.batch, "threads": os.environ.get("OMP_NUM_THREADS", "")}
    return Results({"time_s": np.array(list(values.values()))}, {"time_s": "contenders, rounds"}, about)


def contenders(
    ours: TrainedModel, theirs: Any, prompts: Sequence[Sequence[int]], count: int
) -> tuple[Callable[[], list[list[int]]], Callable[[], list[list[int]]]]:
    """Return functions that draw ``count`` tokens after each of ``prompts``: by hpcdist, and by transformers."""
    return (
        lambda: draw(ours.decoder(len(prompts)), prompts, count),
        lambda: draw_by_transformers(theirs, prompts, count),
    )


def token_seconds(make_decoder: Callable[[], Decoder], text: Sequence[int]) -> float:
    """Return the seconds per token of the last tokens of ``text``."""
    decoder = make_decoder()
    decoder.logits({0: text[:-TIMED_TOKENS]})
    ends = range(len(text) - TIMED_TOKENS + 1, len(text) + 1)
    return harness.seconds(lambda: [decoder.logits({0: text[:end]}) for end in ends]) / TIMED_TOKENS


def ratios(results: Results) -> harness.Ratios:
    times = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    over = {f"cache / transformers, {n}": times[f"{WAYS[0]}, {n}"] / times[f"{WAYS[1]}, {n}"] for n in batches(results)}
    return over | {"cached token / recomputed token": times["cached token"] / times["recomputed token"]}


def batches(results: Results) -> tuple[int, int]:
    """Return the numbers of prompts."""
    return 1, int(results.attributes["batch"])


def failures(results: Results) -> Sequence[str]:
    goals = {"cached token / recomputed token": 0.1}
    medians = {name: float(np.median(values)) for name, values in ratios(results).items()}
    return [f"{name} is {value:.3f}" for name, value in medians.items() if value > goals.get(name, 1.0)]


def lines(results: Results) -> Sequence[str]:
    figures = []
    for name, values in ratios(results).items():
        median, low, high = harness.interval(values)
        figures.append(f"{name}: {median:.3f} ({low:.3f} to {high:.3f})")
    return [*harness.time_table(results.arrays["time_s"], results.names()), "", *figures]
