"""Tokenization: the same bytes on any number of ranks, after kills, and from every input format."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from harness import jobs
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError, StorageError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.training.data import open_source, token_files
from hpcdist.training.data.documents import Reading
from hpcdist.training.data.tokenization import (
    damaged_shards,
    first_texts,
    open_encoder,
    tokenize,
    train_tokenizer,
)
from hpcdist.training.recipe.config import DataConfig

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'hpcdist[tokens]'")
SMALL = 3000  # bytes per shard


@pytest.fixture
def texts(rng):
    """Documents of words, with letters of several bytes and line feeds."""
    words = ["".join(rng.choice(list("abcdefgäß漢🙂"), rng.integers(1, 7))) for _ in range(60)]
    return [" ".join(rng.choice(words, rng.integers(1, 120))) + "\n\nend" for _ in range(120)]


@pytest.fixture
def jsonl(tmp_path, texts):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


@pytest.fixture
def encoder(tmp_path, jsonl):
    assert train_tokenizer([jsonl], 300, Reading(), tmp_path / "tokenizer.json") == 300
    return open_encoder(tmp_path / "tokenizer.json")


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stored_documents(folder):
    data = token_files.open_directory(folder)
    ends = data.document_ends().tolist()
    return [data.tokens[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


def test_shards_have_the_same_bytes_on_any_number_of_ranks(tmp_path, jsonl, encoder):
    folders = []
    for size in (1, 2, 3):
        folders.append(tmp_path / f"out{size}")
        made = run_threads(
            size, lambda comm, out=folders[-1]: tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), out, comm)
        )
        assert set(made) == {-(-jsonl.stat().st_size // SMALL)} and made[0] > 3
    assert content(folders[0]) == content(folders[1]) == content(folders[2])


def test_tokens_equal_those_of_the_library_with_one_end_per_document(tmp_path, jsonl, encoder, texts):
    tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), tmp_path / "out", solo())
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [[*reference.encode(text, add_special_tokens=False).ids, encoder.end] for text in texts]
    assert stored_documents(tmp_path / "out") == expected
    assert first_texts(tmp_path / "out", 3) == texts[:3]
    data = token_files.open_directory(tmp_path / "out")
    assert data.tokens.dtype == np.uint16 and damaged_shards(tmp_path / "out") == []


def test_truncation_padding_and_special_tokens_of_the_file_are_ignored(tmp_path, jsonl, encoder, texts):
    cut = tokenizers.Tokenizer.from_str(encoder.content)
    cut.enable_truncation(5)
    cut.enable_padding(length=9)
    cut.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", encoder.end)]
    )
    cut.save(str(tmp_path / "cut.json"))
    begins = open_encoder(tmp_path / "cut.json", begin="a")
    tokenize([jsonl], begins, Reading(), tmp_path / "cut", solo())
    tokenize([jsonl], encoder, Reading(), tmp_path / "out", solo())
    expected = [[begins.begin, *document] for document in stored_documents(tmp_path / "out")]
    assert stored_documents(tmp_path / "cut") == expected


def test_every_format_gives_the_same_documents(tmp_path, jsonl, encoder, texts):
    packed = {"a.jsonl.gz": gzip.compress(jsonl.read_bytes())}
    for n, text in enumerate(texts):
        packed[f"text/{n:03d}.txt"] = text.encode()
    for name, data in packed.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    inputs = {"gz": [tmp_path / "a.jsonl.gz"], "text": sorted((tmp_path / "text").iterdir())}
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(text.replace("\n", " ") for text in texts).encode()))
    tokenize([tmp_path / "b.txt.gz"], encoder, Reading(lines=True), tmp_path / "lines", solo())
    assert first_texts(tmp_path / "lines", 2) == [text.replace("\n", " ") for text in texts[:2]]
    tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), tmp_path / "plain", solo())
    for name, paths in inputs.items():
        tokenize(paths, encoder, Reading(piece_bytes=SMALL), tmp_path / f"out-{name}", solo())
        assert stored_documents(tmp_path / f"out-{name}") == stored_documents(tmp_path / "plain")


def test_parquet_gives_the_same_documents(tmp_path, jsonl, encoder, texts):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = pytest.importorskip("pyarrow").table({"body": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    reading = Reading(key="body", piece_bytes=SMALL)
    tokenize([tmp_path / "a.parquet"], encoder, reading, tmp_path / "out", solo())
    tokenize([jsonl], encoder, Reading(), tmp_path / "plain", solo())
    assert stored_documents(tmp_path / "out") == stored_documents(tmp_path / "plain")
    with pytest.raises(DataError, match="no column 'text'; it has body"):
        tokenize([tmp_path / "a.parquet"], encoder, Reading(), tmp_path / "other", solo())


def test_zstd_frames_are_read_and_a_truncated_frame_is_an_error(tmp_path, jsonl, encoder):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    raw = jsonl.read_bytes()
    frames = [zstandard.compress(part) for part in (raw[: len(raw) // 3], raw[len(raw) // 3 :])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    tokenize([tmp_path / "a.jsonl.zst"], encoder, Reading(), tmp_path / "out", solo())
    tokenize([jsonl], encoder, Reading(), tmp_path / "plain", solo())
    assert stored_documents(tmp_path / "out") == stored_documents(tmp_path / "plain")
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames)[:-9])
    with pytest.raises(DataError, match=r"b\.jsonl\.zst"):
        tokenize([tmp_path / "b.jsonl.zst"], encoder, Reading(), tmp_path / "other", solo())


def test_kill_keeps_complete_shards_and_the_next_call_makes_the_same_bytes(tmp_path, jsonl, encoder):
    tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), tmp_path / "whole", solo())
    out = tmp_path / "out"
    words = ["data", "tokenize", jsonl, "--tokenizer", tmp_path / "tokenizer.json", "-o", out, "--shard-bytes", SMALL]
    job = subprocess.Popen(jobs.command(*words), stdout=subprocess.DEVNULL)
    while not any(out.glob("tokens-*.h5")):
        assert job.poll() is None
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    (out / ".tokens-000001.h5.0123456789abcdef.new").write_bytes(b"of a killed writer")
    (out / token_files.INDEX_NAME).unlink(missing_ok=True)  # the kill may have come late
    complete = {path: path.stat().st_mtime_ns for path in out.glob("tokens-*.h5")}
    last = max(complete)
    if len(complete) > 1:
        last.unlink()
        del complete[last]
    else:
        last = None
    with pytest.raises(DataError, match="not finished"):
        open_source(DataConfig(path=str(out)), ModelConfig(), solo())
    made = run_threads(2, lambda comm: tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), out, comm))[0]
    assert made == len(list(out.glob("tokens-*.h5"))) - len(complete)
    assert {path: path.stat().st_mtime_ns for path in complete} == complete
    assert content(out) == content(tmp_path / "whole")


def test_input_missing_on_one_rank_ends_all_ranks_with_its_name(tmp_path, jsonl, encoder):
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "a.jsonl").write_bytes(jsonl.read_bytes())
    (tmp_path / "0/b.jsonl").write_text('{"text": "of rank 0"}\n')
    size = jsonl.stat().st_size  # rank 0 makes the shard of the larger file, rank 1 the other shard
    words = (
        f"data tokenize a.jsonl b.jsonl --tokenizer {tmp_path}/tokenizer.json -o {tmp_path}/out --shard-bytes {size}"
    )
    program = f'cd "{tmp_path}/${{OMPI_COMM_WORLD_RANK-$PMI_RANK}}" && exec {sys.executable} -m hpcdist {words}'
    done = jobs.hpcdist("run", "-n", 2, "--", "bash", "-c", program, timeout=60)
    assert done.returncode == 78 and "b.jsonl cannot be read" in done.stderr
    assert not (tmp_path / "out" / token_files.INDEX_NAME).exists()


def test_directory_with_other_tokens_is_rejected(tmp_path, jsonl, encoder):
    tokenize([jsonl], encoder, Reading(), tmp_path / "out", solo())
    assert tokenize([jsonl], encoder, Reading(), tmp_path / "out", solo()) == 0
    with pytest.raises(UsageError, match="other files"):
        tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), tmp_path / "out", solo())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2: invalid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"content": "b"}\n',
            "line 2: no text with the key 'text', .*; the row has content",
        ),
        ("a.jsonl", b'{"text": "a \\ud83d\\ude42"}\n{"text": "a \\ud83d"}\n', "line 2: invalid JSON: .*surrogates"),
        ("a.txt", b"abc\xffd", "byte 3: the text is not UTF-8"),
        ("a.txt", b"abc\0d", "NUL"),
        ("a.txt", b"", "no document with text"),
        ("a.jsonl", b'{"text": ""}\n', "no document with text"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0)[:-4], "cannot be read"),
        ("a.safetensors", b"abc", "is not text"),
    ],
)
def test_invalid_inputs_are_rejected(tmp_path, encoder, name, data, message):
    path = tmp_path / "bad" / name
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        tokenize([path], encoder, Reading(), tmp_path / "out", solo())


def test_empty_documents_are_skipped_and_counted(tmp_path, encoder):
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n{"text": "ab"}\n')
    tokenize([tmp_path / "b.jsonl"], encoder, Reading(), tmp_path / "out", solo())
    index = token_files.read_index(tmp_path / "out")
    assert (index["empty"], index["documents"]) == (1, 1)


def test_unknown_end_token_is_rejected(tmp_path, encoder):
    with pytest.raises(UsageError, match="--eos </s>"):
        open_encoder(tmp_path / "tokenizer.json", end="</s>")
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(UsageError, match="--eos"):
        open_encoder(tmp_path / "other.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    assert open_encoder(tmp_path / "other.json").end == 1
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="invalid"):
        open_encoder(tmp_path / "other.json")


def test_training_reads_the_directory_and_checks_the_vocabulary(tmp_path, jsonl, encoder):
    tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), tmp_path / "out", solo())
    config = DataConfig(path=str(tmp_path / "out"), context=16, validation_fraction=0.1)
    with pytest.raises(DataError, match=re.escape("model.vocabulary = 256; set model.vocabulary to at least 300")):
        open_source(config, ModelConfig(), solo())
    source = open_source(config, ModelConfig(vocabulary=300), solo())
    whole = np.concatenate([np.array(document) for document in stored_documents(tmp_path / "out")])
    stop = len(source.tokens)
    assert np.array_equal(source.tokens[:], whole[:stop]) and whole[stop - 1] == encoder.end
    assert len(whole) - stop >= round(0.1 * len(whole)) and stop > 0.8 * len(whole)


def test_commands_print_the_figures_and_find_a_damaged_shard(tmp_path, jsonl, encoder, texts):
    out = tmp_path / "out"
    words = ["data", "tokenize", jsonl, "--tokenizer", tmp_path / "tokenizer.json", "-o", out, "--json"]
    made = jobs.figures(jobs.hpcdist("run", "-n", 2, *words, "--shard-bytes", SMALL))
    assert made["documents"] == len(texts) and made["new_shards"] == made["shards"] > 3
    shown = json.loads(jobs.invoke_command("data", "show", out, "--texts", 1, "--verify", "--json").stdout)
    assert shown["texts"] == texts[:1] and shown["damaged"] == []
    path = out / "tokens-000002.h5"
    damaged = bytearray(path.read_bytes())
    offset = token_files.read_index(out)["shards"][2]["offset"]
    damaged[offset] ^= 1
    path.write_bytes(damaged)
    verified = jobs.invoke_command("data", "show", out, "--verify")
    assert verified.returncode == 74 and "damaged: tokens-000002.h5" in verified.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=9), "version 9"),
        (lambda index: index["shards"][0].update(file="../a.h5"), "has a directory"),
        (lambda index: index["shards"][1].pop("offset"), "damaged entries"),
        (lambda index: index.pop("shards"), "is damaged"),
        (lambda index: index["shards"][0].update(tokens=10**6), "has .* bytes, but its data ends at"),
    ],
    ids=["version", "directory", "entry", "key", "size"],
)
def test_damaged_index_is_rejected(tmp_path, jsonl, encoder, change, message):
    tokenize([jsonl], encoder, Reading(piece_bytes=SMALL), tmp_path / "out", solo())
    index = token_files.read_index(tmp_path / "out")
    change(index)
    (tmp_path / "out" / token_files.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises((DataError, StorageError), match=message):
        open_source(DataConfig(path=str(tmp_path / "out"), context=16), ModelConfig(vocabulary=300), solo())
