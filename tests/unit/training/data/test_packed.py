"""Documents packed into samples: document ends, each document exactly once, little padding; rejected data."""

import numpy as np
import pytest

from harness.models.documents import visibility_mask
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import DataError
from hpcdist.models.config import ModelConfig
from hpcdist.models.stage import IGNORED
from hpcdist.models.transformer import masked_predictions
from hpcdist.training.data.packed import PackedSamples, best_fit
from hpcdist.training.data.sampler import SampleOrder, Sampler
from hpcdist.training.data.source import open_source
from hpcdist.training.recipe.config import DataConfig

GPT = ModelConfig()


def draw_documents(rng, count=200, most=60):
    """Return a text in which no two documents start alike, and the documents."""
    documents = [
        np.concatenate([[number], rng.integers(300, 400, rng.integers(0, most))]).astype(np.uint16)
        for number in range(count)
    ]
    return np.concatenate(documents), documents


def ends_of(documents):
    return np.cumsum([len(document) for document in documents])


def documents_in(batch):
    """Return inputs and targets of each document of a batch, including padding."""
    tokens, places, _ = batch[0].arrays
    for row in range(len(tokens)):
        borders = [*np.flatnonzero(places[row] == 0), tokens.shape[1]]
        for start, end in zip(borders, borders[1:], strict=False):
            yield tokens[row, start:end], batch[1][row, start:end]


@pytest.mark.parametrize("context", [1, 7, 64, 1000])
def test_best_fit_keeps_all_documents_within_the_context(context, rng):
    sizes = rng.integers(1, context + 1, 300)
    sample_of, count = best_fit(sizes, context)
    filled = np.bincount(sample_of, sizes, minlength=count)
    assert filled.min() >= 1 and filled.max() <= context and len(filled) == count
    by_hand = []  # free places of samples, each document into the fullest that has room
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [free for free in by_hand if free >= size]
        if fits:
            by_hand.remove(min(fits))
        by_hand.append((min(fits) if fits else context) - size)
    assert sorted(by_hand) == sorted((context - filled).astype(int).tolist())


def test_every_document_occurs_exactly_once(rng):
    text, documents = draw_documents(rng)
    samples = PackedSamples(text, 0, ends_of(documents), 64, predicting=True, cut=False)
    seen = {}
    for inputs, targets in documents_in(samples.take(np.arange(samples.count), 0)):
        if targets[0] != IGNORED:
            seen[int(inputs[0])] = np.append(inputs, targets[-1])
            assert (inputs[1:] == targets[:-1]).all()
        else:
            assert (targets == IGNORED).all() and (inputs == 0).all()
    assert all((seen[number] == documents[number]).all() for number in seen)
    assert set(seen) == {number for number, document in enumerate(documents) if len(document) > 1}
    tokens = sum(len(document) - 1 for document in documents)
    assert samples.targets(np.arange(samples.count)) == tokens
    assert samples.padding == pytest.approx(1 - tokens / (64 * samples.count))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 9), (False, 0)])
def test_visible_pairs_are_inside_documents(causal, window, rng):
    """All samples are counted one by one, including the pairs of padding, which are computed."""
    text, documents = draw_documents(rng)
    samples = PackedSamples(text, 0, ends_of(documents), 64, predicting=True, cut=False)
    places = samples.take(np.arange(samples.count), 0)[0].arrays[1]
    within, number = visibility_mask(places, causal), np.arange(64)
    assert within.shape == (samples.count, 64, 64)
    looked = within & (number[:, None] - number < (window or 64))
    result = samples.pairs(causal=causal, window=window)
    assert result.seen == pytest.approx(looked.sum() / samples.count, rel=1e-12)
    lengths = [len(inputs) for inputs, _ in documents_in(samples.take(np.arange(samples.count), 0))]
    assert result.every == pytest.approx(sum(n * min(window or n, n) for n in lengths) / samples.count, rel=1e-12)


def test_longer_documents_are_rejected_or_cut(rng):
    text, documents = draw_documents(rng, 30, 200)
    ends = ends_of(documents)
    longest = max(map(len, documents))
    with pytest.raises(
        DataError, match=rf"of {longest} tokens is longer .*= 40; set data.context to .*{longest - 1}, or"
    ):
        PackedSamples(text, 0, ends, 40, predicting=True, cut=False)
    samples = PackedSamples(text, 0, ends, 40, predicting=True, cut=True)
    parts = [targets for _, targets in documents_in(samples.take(np.arange(samples.count), 0)) if targets[0] != IGNORED]
    assert sum(map(len, parts)) == sum(len(document) - 1 for document in documents)
    assert sorted(np.concatenate(parts).tolist()) == sorted(
        token for document in documents for token in document[1:].tolist()
    )


def test_masks_hide_only_tokens_of_documents(tmp_path, rng):
    text, _ = draw_documents(rng, 60, 20)
    np.save(tmp_path / "tokens.npy", np.where(text < 300, 300, text).astype(np.uint16))
    config = DataConfig(path=f"{tmp_path / 'tokens.npy'}", context=32, packed=True, document_end=300, digest="probes")
    source = open_source(config, ModelConfig(kind="encoder", vocabulary=401), solo())
    sampler = Sampler(source.training, 5)
    inputs, targets = sampler.batch(0, 2 * source.training.count)
    tokens, _, filled = inputs.arrays
    order = SampleOrder(5, source.training.count).epoch_indices(0, 0, source.training.count)[0]
    np.testing.assert_array_equal(filled[: source.training.count], source.training.filled(order))
    for row, size in enumerate(filled.tolist()):
        assert (targets[row, :size] != IGNORED).sum() == masked_predictions(size)
        assert (targets[row, size:] == IGNORED).all() and (tokens[row, size:] == 0).all()
    first, second = np.split(targets, 2)
    targets = source.targets * source.training.count
    assert (first != IGNORED).sum() == (second != IGNORED).sum() == pytest.approx(targets)


def open_data(path, **keys):
    return open_source(DataConfig(path=str(path), context=24, packed=True, **keys), GPT, solo())


def test_documents_are_files_or_end_with_a_token(tmp_path, rng):
    lines = ["".join(rng.choice(list("abc"), rng.integers(1, 20))) + "\n" for _ in range(50)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    source = open_data(tmp_path / "lines.txt", document_end=10, validation_fraction=0.2)
    assert source.training.documents + source.validation.documents == 50
    last = [targets[-1] for _, targets in documents_in(source.training.take(np.arange(3), 0)) if targets[0] != IGNORED]
    assert set(last) == {10}
    folder = tmp_path / "files"
    folder.mkdir()
    for number, line in enumerate(lines):
        (folder / f"{number}.txt").write_text(line)
    (folder / "binary").write_bytes(b"\0 no text")
    (folder / "empty.txt").write_bytes(b"")
    source = open_data(folder, validation_fraction=0.2)
    assert source.training.documents + source.validation.documents == 50
    assert open_data(folder, validation_fraction=0.2).fingerprint == source.fingerprint
    (folder / "0.txt").write_text(lines[0][:-1])
    (folder / "z").write_text("more")
    assert open_data(folder, validation_fraction=0.2).fingerprint != source.fingerprint


def test_data_without_documents_is_rejected(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two three")
    with pytest.raises(DataError, match=r"ends of documents in .* are unknown; set data.document_end .*directory"):
        open_data(path)
    with pytest.raises(DataError, match=r"data.document_end = 10: .*text.txt has only one document; set"):
        open_data(path, document_end=10)
    path.write_text("one\n\n")
    with pytest.raises(DataError, match="every document has only one token"):
        open_data(path, document_end=10, validation_fraction=0.4)
