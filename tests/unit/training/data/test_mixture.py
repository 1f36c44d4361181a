"""Mixtures: shares of the sources, their epochs, and the same samples on any number of ranks and after a resume."""

from collections import Counter

import numpy as np
import pytest

from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, DataError
from hpcdist.models.config import ModelConfig
from hpcdist.training.data import Prefetcher, open_source
from hpcdist.training.data.mixture import MixedSampler, MixedSamples, SourceOrder, floor_sum, sampler_of
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.config import DataConfig, DataSource, RunConfig


class Numbers:
    """Samples whose input is the pair (source, number)."""

    shifts = 1

    def __init__(self, source, count):
        self.source, self.count = source, count

    def take(self, indices, shift):
        return np.stack([np.full(len(indices), self.source), indices], axis=1), indices.copy()


def test_floor_sum_equals_the_sum(rng):
    for _ in range(200):
        count, divisor, factor, offset = (int(n) for n in rng.integers(1, 60, 4))
        assert floor_sum(count, divisor, factor, offset) == sum((factor * i + offset) // divisor for i in range(count))


def test_counts_of_the_sources_equal_the_drawn_sources(rng):
    for _ in range(20):
        order = SourceOrder(int(rng.integers(1 << 40)), tuple(rng.random(rng.integers(1, 6)) + 1e-3))
        first, count = int(rng.integers(5000)), int(rng.integers(3000))
        sources = np.concatenate([order.sources(0, first), order.sources(first, count)])
        assert np.array_equal(sources, order.sources(0, first + count))
        drawn = np.bincount(sources, minlength=len(order.weights)).tolist()
        assert order.before(first + count) == drawn and order.before(0) == [0] * len(order.weights)


@pytest.mark.parametrize("samples", [100, 10_000, 10**12])
def test_shares_differ_from_the_weights_by_few_samples(samples, rng):
    weights = tuple(rng.random(4) + 0.01)
    counts = SourceOrder(int(rng.integers(1 << 40)), weights).before(samples)
    assert sum(counts) == samples
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) <= 3 + np.log2(samples)


def test_every_source_has_whole_epochs_in_new_orders(rng):
    sizes = [7, 20, 3]
    samples = MixedSamples([Numbers(n, size) for n, size in enumerate(sizes)], [1.0, 2.0, 0.5])
    x, _ = sampler_of(samples, int(rng.integers(1 << 40))).batch(0, 400)
    for n, size in enumerate(sizes):
        numbers = x[x[:, 0] == n, 1].tolist()
        epochs = [tuple(numbers[start : start + size]) for start in range(0, len(numbers) - size + 1, size)]
        assert len(epochs) > 5 and len(set(epochs)) > 1
        assert all(Counter(epoch) == Counter(range(size)) for epoch in epochs)


def test_batches_do_not_depend_on_their_borders_and_agree_with_the_indices(rng):
    samples = MixedSamples([Numbers(n, size) for n, size in enumerate((11, 5))], rng.random(2) + 0.1)
    sampler = sampler_of(samples, int(rng.integers(1 << 40)))
    assert isinstance(sampler, MixedSampler)
    whole, _ = sampler.batch(0, 90)
    borders = [0, *sorted(rng.integers(0, 90, 5).tolist()), 90]
    parts = [sampler.batch(a, b - a)[0] for a, b in zip(borders, borders[1:], strict=False)]
    assert np.array_equal(np.concatenate(parts), whole)
    taken, _ = samples.take(np.array(sampler.indices(0, 90)), 0)
    assert np.array_equal(taken, whole)


@pytest.fixture
def files(tmp_path, rng):
    """Two files: one of digits and one of letters."""
    paths = []
    for name, low, high, size in (("digits", 48, 58, 3000), ("letters", 97, 123, 5000)):
        path = tmp_path / f"{name}.txt"
        path.write_bytes(rng.integers(low, high, size).astype(np.uint8).tobytes())
        paths.append(path)
    return paths


def mixture_of(files, **keys):
    sources = tuple(DataSource(path=str(path), weight=weight) for path, weight in zip(files, (3.0, 1.0), strict=True))
    return DataConfig(source=sources, context=8, **keys)


def test_ranks_share_a_mixture_and_another_number_of_ranks_continues_it(files, rng):
    recipe = recipes.Recipe(data=mixture_of(files), run=RunConfig(global_batch=7, seed=int(rng.integers(1000))))

    def batches(comm, first=0):
        with Prefetcher(open_source(recipe.data, recipe.model, comm), recipe, comm, first, 120) as ahead:
            return [x for x, _ in ahead]

    alone = batches(solo())
    letters = np.mean(np.concatenate(alone)[:, 0] >= 97)
    assert letters == pytest.approx(0.25, abs=0.01)
    for size, first in ((2, 0), (3, 50)):
        parts = run_threads(size, lambda comm, first=first: batches(comm, first))
        for step, whole in enumerate(alone[first:]):
            assert np.array_equal(np.concatenate([part[step] for part in parts]), whole)


def test_validation_has_the_held_out_samples_of_every_source(files):
    config = mixture_of(files)
    source = open_source(config, ModelConfig(), solo())
    parts = [open_source(DataConfig(path=str(path), context=8), ModelConfig(), solo()) for path in files]
    recipe = recipes.Recipe(data=config, run=RunConfig(validation_samples=0, global_batch=6))
    inputs = np.concatenate([x for x, _ in source.validation_batches(recipe, 1, 0)])
    expected = [part.validation.take(np.arange(part.validation.count), 0)[0] for part in parts]
    assert np.array_equal(inputs, np.concatenate(expected))
    assert source.training.count == sum(part.training.count for part in parts)


def test_packed_sources_mix_whole_documents_and_weighted_figures(files, rng):
    for path in files:
        text = np.fromfile(path, np.uint8)
        text[rng.integers(0, len(text), len(text) // 4)] = 10
        path.write_bytes(text.tobytes())
    keys = {"packed": True, "document_end": 10, "cut_documents": True}
    source = open_source(mixture_of(files, **keys), ModelConfig(), solo())
    parts = [open_source(DataConfig(path=str(path), context=8, **keys), ModelConfig(), solo()) for path in files]
    for name in ("padding", "targets"):
        digits, letters = (getattr(part, name) for part in parts)
        assert getattr(source, name) == pytest.approx(0.75 * digits + 0.25 * letters)
    assert source.documents.seen == pytest.approx(0.75 * parts[0].documents.seen + 0.25 * parts[1].documents.seen)
    sampler = sampler_of(source.training, int(rng.integers(1000)))
    (x, y), indices = sampler.batch(3, 40), np.array(sampler.indices(3, 40))
    assert (y >= 0).sum() == source.training.targets(indices) == x.arrays[2].sum()
    assert np.array_equal(source.training.filled(indices), x.arrays[2])
    assert np.array_equal(source.training.take(indices, 0)[0].arrays[0], x.arrays[0])


def test_changed_source_has_another_fingerprint_and_digest(files):
    before = open_source(mixture_of(files), ModelConfig(), solo())
    files[1].write_bytes(files[1].read_bytes()[::-1])
    after = open_source(mixture_of(files), ModelConfig(), solo())
    assert before.fingerprint != after.fingerprint and before.digest != after.digest


def test_recipe_has_source_tables_with_paths_relative_to_the_file(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text("[[data.source]]\npath = 'a'\nweight = 3\n[[data.source]]\npath = 'b'\ndtype = 'uint16'\n")
    recipe = recipes.load(file, environment={}).recipe
    expected = DataSource(path=str(tmp_path / "a"), weight=3.0), DataSource(path=str(tmp_path / "b"), dtype="uint16")
    assert recipe.data.source == expected
    (tmp_path / "stored.toml").write_text(recipes.dump(recipe))
    assert recipes.load_stored(tmp_path / "stored.toml") == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[data.source]]\npath = 'a'\nweight = 0\n", "data.source.weight = 0.0.*above 0"),
        ("[[data.source]]\npath = 'a'\nwieght = 1\n", "wieght.*weight"),
        ("[[data.source]]\nweight = 1\n", "data.source.path = ''.*a path"),
        ("[data]\npath = 'a'\nsource = [{path = 'b'}]\n", "data.path = .*data.source"),
        ("[data]\nsource = 3\n", "expected sections"),
        ("[data]\ndtype = 'uint16'\n", "data.dtype = 'uint16'"),
    ],
)
def test_invalid_sources_are_rejected(text, message, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        recipes.load(file, environment={})


def test_source_missing_on_one_rank_is_rejected_on_all_ranks(files):
    configs = mixture_of(files), mixture_of([files[0], files[1].with_name("missing.txt")])

    def assert_rejected(comm):
        with pytest.raises(DataError, match=r"data.source = .*missing.txt: there is no such file"):
            open_source(configs[comm.rank % 2], ModelConfig(), comm)

    run_threads(3, assert_rejected)


def test_missing_source_is_rejected(files):
    files[1].unlink()
    with pytest.raises(DataError, match=r"data.source = .*letters.txt: there is no such file"):
        open_source(mixture_of(files), ModelConfig(), solo())
