"""Decoding with a key-value cache: the logits of whole texts, for every option of a transformer, and its speed."""

import time

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.attention.cache import CachedDecoder, few_rows_product
from hpcdist.models.config import ModelConfig
from hpcdist.training.generation import WindowDecoder

CONTEXT = 24
MODELS = {
    "plain": {},
    "tied, one head": {"tied": True, "heads": 1},
    "grouped, rotary": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "bias": False},
    "windows": {"positions": "rotary", "window": 5, "window_layers": "2"},
    "head norms, scaled rotary": {
        "positions": "rotary", "kv_heads": 1, "query_key_norm": "head", "head_size": 6, "rotary_scaling": "llama3",
        "rotary_factor": 4.0, "rotary_context": 16, "rotary_layers": "1",
    },
    "experts": {"experts": 4, "shared_experts": 1},
}  # fmt: skip


def random_model(rng, dtype="float64", on="cpu", context=CONTEXT, **options):
    """Return a model, its parameters and an arena, with large random weights."""
    config = ModelConfig(**{"layers": 2, "hidden": 16, "heads": 4, "vocabulary": 31, **options})
    model = models.build(config, dtype, context=context)
    values = FlatStore(model.layout, model.dtype)
    model.initialise(values, int(rng.integers(1 << 30)))
    values.array[...] += 0.1 * rng.standard_normal(values.size)
    store = FlatStore(model.layout, model.dtype, on=on)
    store.copy_from(values)
    return model, model.bind(store), Arena(on=on)


def compare(case, rng, on, bound):
    model, parameters, arena = random_model(rng, on=on, **MODELS[case])

    def logits_of(tokens):
        return backend.to_host(model.logits(parameters, backend.place(tokens, on), arena))

    cached, whole = CachedDecoder(model, parameters, arena, 3, CONTEXT), WindowDecoder(logits_of, CONTEXT)
    texts = {index: rng.integers(0, 31, length).tolist() for index, length in enumerate((1, 7, 22))}
    for step in range(30):  # beyond the context of every text
        if step == 12:
            texts.pop(1)  # this text is complete
        if step == 15:
            texts[1] = rng.integers(0, 31, 5).tolist()  # another text takes its memory
        got, expected = cached.logits(texts), whole.logits(texts)
        assert got.keys() == texts.keys()
        for index, row in expected.items():
            np.testing.assert_allclose(got[index], row, rtol=bound, atol=bound, err_msg=f"step {step}, text {index}")
            texts[index].append(int(rng.integers(31)))


@pytest.mark.parametrize("case", MODELS)
def test_cached_logits_match_the_whole_text(case, rng):
    compare(case, rng, "cpu", 1e-11)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9])
def test_products_of_a_few_rows_match_float64(rows, rng):
    for dtype, bound in (("float32", 1e-5), ("float64", 1e-13)):
        a, weight = (rng.standard_normal((count, 67)).astype(dtype) for count in (rows, 131))
        out = np.full((rows, 131), np.nan, dtype)
        few_rows_product(a, weight.T, out)
        np.testing.assert_allclose(out, a.astype(float) @ weight.T.astype(float), rtol=0, atol=67 * bound)


@pytest.mark.parametrize("case", ["plain", "windows"])
@pytest.mark.full_except("windows")
def test_cached_logits_on_a_gpu_match_the_whole_text(gpu, case, rng):
    compare(case, rng, "gpu", 1e-10)


@pytest.mark.full
@pytest.mark.alone
def test_cache_makes_generation_10_times_faster_at_a_long_context(rng):
    model, parameters, arena = random_model(rng, "float32", context=1024, hidden=64, layers=2, positions="rotary")
    tokens = rng.integers(0, 31, 1000).tolist()
    decoders = {
        "cache": CachedDecoder(model, parameters, arena, 1, 1024),
        "whole": WindowDecoder(lambda x: model.logits(parameters, x, arena), 1024),
    }
    seconds = {}
    for name, decoder in decoders.items():
        decoder.logits({0: tokens})
        decoder.logits({0: [*tokens, 0]})
        start = time.perf_counter()
        for count in range(2, 22):
            decoder.logits({0: tokens + [0] * count})
        seconds[name] = time.perf_counter() - start
    assert seconds["whole"] > 10 * seconds["cache"], seconds
