"""`hpcdist data`: tokenize files for training, show token directories, train tokenizers."""

import json
from pathlib import Path
from typing import Any, Final

import click

from hpcdist.cli.common import BYTE_SIZE, DIRECTORY, EXISTING_DIRECTORY, FILE, PATH, json_option, stacked
from hpcdist.errors import OK, STORAGE
from hpcdist.reporting.units import counted

_LEAST_VOCABULARY: Final = 257  # of a byte-level tokenizer: all bytes, and the end of a document
_files = click.argument("files", nargs=-1, required=True, type=FILE)
_reading = stacked(
    click.option("--key", default="text", help="Key of the text or messages: of JSONL objects, or a Parquet column."),
    click.option("--lines", is_flag=True, help="Each line of a text file is a document. Otherwise, each file is one."),
)


@click.group()
def command() -> None:
    """Tokenize files for training, show token directories, and train tokenizers."""


@command.command()
@_files
@click.option("--tokenizer", required=True, type=PATH, help="The tokenizer.json of a model, or its directory.")
@click.option("-o", "--output", required=True, type=DIRECTORY, help="Directory of the token shards.")
@_reading
@click.option("--eos", default="", help="Token after each document.  [default: as in the tokenizer's files]")
@click.option("--bos", default="", help="Token before each document.  [default: no token]")
@click.option("--shard-bytes", type=BYTE_SIZE, default="64M", help="Size of the input of a shard.")
@json_option
def tokenize(
    files: tuple[Path, ...],
    tokenizer: Path,
    output: Path,
    key: str,
    lines: bool,
    eos: str,
    bos: str,
    shard_bytes: int,
    as_json: bool,
) -> int:
    """Tokenize FILES (text, .jsonl, .parquet, also .gz and .zst) into a directory for data.path.

    Of rows with `messages`, or with `prompt` and `completion`, only the answers are trained.

    Runs on all ranks of the launcher: `hpcdist run -n 8 data tokenize ...`. The shards have the same bytes on any
    number of ranks. After a kill, the same command continues, and keeps the complete shards.
    """
    from hpcdist.comm.start import start
    from hpcdist.training.data import token_files, tokenization
    from hpcdist.training.data.documents import Reading

    session = start()
    encoder = tokenization.open_encoder(tokenizer, eos, bos)
    made = tokenization.tokenize(files, encoder, Reading(key, lines, shard_bytes), output, session.comm)
    if session.comm.rank == 0:
        index = token_files.read_index(output)
        if encoder.warning and "trained" in index:
            click.echo(f"hpcdist: {encoder.warning}", err=True)
        if as_json:
            click.echo(json.dumps(_figures(index) | {"new_shards": made}))
        else:
            click.echo(f"{output}: {_summary(index)}; {counted(made, 'new shard')}")
    session.leave(OK)


@command.command()
@click.argument("folder", metavar="DIR", type=EXISTING_DIRECTORY)
@click.option("--texts", type=click.IntRange(min=0), default=2, help="Number of documents to decode.")
@click.option("--verify", is_flag=True, help="Compare all shards with their digests.")
@json_option
def show(folder: Path, texts: int, verify: bool, as_json: bool) -> int:
    """Show the documents, tokens and shards of DIR, an output of `hpcdist data tokenize`.

    With --verify, the exit code is 74 if a shard is damaged.
    """
    from hpcdist.training.data import token_files, tokenization

    index = token_files.read_index(folder)
    damaged = tokenization.damaged_shards(folder) if verify else []
    decoded = tokenization.first_texts(folder, texts) if texts else []
    if as_json:
        click.echo(json.dumps(_figures(index) | {"texts": decoded} | ({"damaged": damaged} if verify else {})))
    else:
        click.echo(f"{_summary(index)}, {index['dtype']}\ntokenizer {index['tokenizer']}")
        for text in decoded:
            click.echo(f"  {text[:200]!r}")
        if verify:
            click.echo(f"damaged: {', '.join(damaged)}" if damaged else "all shards are intact")
    return STORAGE if damaged else OK


@command.command("train-tokenizer")
@_files
@click.option("--vocabulary", required=True, type=click.IntRange(min=_LEAST_VOCABULARY), help="Number of tokens.")
@click.option("-o", "--output", required=True, type=FILE, help="The new tokenizer.json.")
@_reading
def train_tokenizer(files: tuple[Path, ...], vocabulary: int, output: Path, key: str, lines: bool) -> None:
    """Train a byte-level BPE tokenizer on FILES, with <|endoftext|> as the end of a document."""
    from hpcdist.training.data import tokenization
    from hpcdist.training.data.documents import Reading

    count = tokenization.train_tokenizer(files, vocabulary, Reading(key, lines), output)
    click.echo(f"{output}: {counted(count, 'token')}")


def _figures(index: dict[str, Any]) -> dict[str, Any]:
    names = ("documents", "tokens", "trained", "empty", "vocabulary", "dtype", "end", "begin", "tokenizer")
    return {name: index[name] for name in names if name in index} | {"shards": len(index["shards"])}


def _summary(index: dict[str, Any]) -> str:
    empty = f" ({index['empty']:,} empty documents skipped)" if index["empty"] else ""
    documents, tokens = counted(index["documents"], "document"), counted(index["tokens"], "token")
    trained = f" ({index['trained']:,} trained)" if "trained" in index else ""
    return f"{documents}{empty}, {tokens}{trained} in {counted(len(index['shards']), 'shard')}"
