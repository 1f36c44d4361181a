"""Speed of tokenization, cost of many shards and sources in a step, and start with many shards.

    python -m benchmarks data_sources
    python -m benchmarks data_sources --shards 1000 --mib 2 --rounds 3

All times are of one process on one core. "tokenize" is `hpcdist data tokenize` from JSONL to shards; "library" only
encodes the same texts in memory. "mixture" reads a batch of samples from 4 sources in 200 shards; "one file" reads the
same number of samples from one flat file. Reading is not overlapped here, as prefetching would. "step" is a step on
such a batch. "start" opens a token directory whose digest is cached, with one shard or with ``--shards``.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.config import ModelConfig
from hpcdist.training.data import files, open_source, sampler_of, tokenization
from hpcdist.training.data.documents import Reading
from hpcdist.training.data.token_files import INDEX_NAME, read_index
from hpcdist.training.recipe.config import DataConfig, DataSource

SCHEMA: Final = "hpcdist-benchmark-data-sources"
SOURCES, SHARDS_OF_SOURCE = 4, 50
GOALS: Final = {"tokenize / library": 1 / 0.9, "mixture step / step": 1.01}
MOST_START_S: Final = 1.0  # additional seconds with all shards
OPTIONS: Final = {
    "mib": 8,
    "vocabulary": 8192,
    "shards": 10_000,
    "layers": 4,
    "hidden": 256,
    "context": 256,
    "samples": 4,
    "rounds": 7,
}


def write_texts(path: Path, nbytes: int) -> list[str]:
    """Write source texts of Python as JSONL, and return the texts."""
    text, ends, _ = files.text_of_standard_library()
    count = int(np.searchsorted(ends, nbytes)) + 1
    borders = [0, *ends[:count].tolist()]
    texts = [bytes(text[a:b]).decode(errors="replace") for a, b in zip(borders, borders[1:], strict=False)]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return texts


def multiply(source: Path, target: Path, count: int) -> None:
    """Make a token directory of ``count`` shards, which are hard links to the first shard of ``source``."""
    index = read_index(source)
    first = next(shard for shard in index["shards"] if shard["tokens"])
    names = [f"tokens-{number:06d}.h5" for number in range(count)]
    target.mkdir()
    for name in names:
        os.link(source / first["file"], target / name)
    (target / INDEX_NAME).write_text(json.dumps(index | {"shards": [first | {"file": name} for name in names]}))


def reading(data: DataConfig, model: ModelConfig, count: int) -> Callable[[], float]:
    """Return a function that reads one batch of ``count`` samples, and returns the seconds."""
    samples, position = open_source(data, model, solo(), digests=False).training, np.random.default_rng(5)
    sampler = sampler_of(samples, 1)
    return lambda: harness.seconds(lambda: sampler.batch(int(position.integers(samples.count)), count))


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=name, TOKENIZERS_PARALLELISM="false"),
        ExitStack() as stack,
    ):
        values = harness.alternate(_contenders(chosen, session, Path(name), stack), chosen.rounds, warm_up=1)
    times = {"time_s": np.array(list(values.values()))}
    about = {"contenders": "; ".join(values), "shards": chosen.shards}
    return Results(times, {"time_s": "contenders, rounds"}, about)


def _contenders(
    chosen: argparse.Namespace, session: Session, folder: Path, stack: ExitStack
) -> dict[str, Callable[[], float]]:
    texts, model = write_texts(folder / "a.jsonl", chosen.mib << 20), ModelConfig(vocabulary=chosen.vocabulary)
    tokenization.train_tokenizer([folder / "a.jsonl"], chosen.vocabulary, Reading(), folder / "tokenizer.json")
    encoder = tokenization.open_encoder(folder / "tokenizer.json")
    library: Any = tokenization.load_tokenizer(encoder.content)

    def tokenized(**options: int) -> Path:
        out = Path(tempfile.mkdtemp(dir=folder))
        tokenization.tokenize([folder / "a.jsonl"], encoder, Reading(**options), out, session.comm)
        return out

    whole = tokenized()
    sources = [tokenized(piece_bytes=(chosen.mib << 20) // SHARDS_OF_SOURCE) for _ in range(SOURCES)]
    multiply(sources[0], folder / "many", chosen.shards)
    multiply(sources[0], folder / "single", 1)
    mixture = DataConfig(source=tuple(DataSource(path=str(one)) for one in sources), context=chosen.context)
    keys = {"data.path": whole, "model.vocabulary": chosen.vocabulary, "run.global_batch": chosen.samples}
    training = stack.enter_context(closing(turns.Training(session, turns.gpt_keys(chosen, **keys), chosen.rounds + 2)))

    def start(path: Path) -> Callable[[], float]:
        return lambda: harness.seconds(lambda: open_source(DataConfig(path=str(path)), model, solo()))

    return {
        "library": lambda: harness.seconds(lambda: library.encode_batch_fast(texts, add_special_tokens=False)),
        "tokenize": lambda: harness.seconds(tokenized),
        "one file": reading(DataConfig(path=str(whole), context=chosen.context), model, chosen.samples),
        "mixture": reading(mixture, model, chosen.samples),
        "step": lambda: harness.seconds(training.next_step()),
        "start, one shard": start(folder / "single"),
        "start, all shards": start(folder / "many"),
    }


def _times(results: Results) -> dict[str, np.ndarray]:
    return dict(zip(results.names(), results.arrays["time_s"], strict=True))


def ratios(results: Results) -> harness.Ratios:
    times = _times(results)
    step = 1 + (times["mixture"] - times["one file"]) / times["step"]
    return {"tokenize / library": times["tokenize"] / times["library"], "mixture step / step": step}


def failures(results: Results) -> Sequence[str]:
    medians = {name: float(np.median(values)) for name, values in ratios(results).items()}
    missed = [
        f"{name} is {medians[name]:.3f}, above {most:.3f}" for name, most in GOALS.items() if medians[name] > most
    ]
    times = _times(results)
    start_s = float(np.median(times["start, all shards"] - times["start, one shard"]))
    return missed + ([f"the start takes {start_s:.2f} s more"] if start_s > MOST_START_S else [])


def lines(results: Results) -> Sequence[str]:
    figures = [f"{name}: {np.median(values):.3f}" for name, values in ratios(results).items()]
    return [*harness.time_table(results.arrays["time_s"], results.names()), "", *figures]
