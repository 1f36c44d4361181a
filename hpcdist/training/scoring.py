"""Scores of a trained language model: perplexity of documents, and answers to multiple-choice questions.

Ranks take turns with documents and questions. A document that is longer than the context is cut into windows, each of
which begins with the last token of the window before it. So only the first token of a document is not scored.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.errors import DataError
from hpcdist.reporting import regular
from hpcdist.training.data import token_files
from hpcdist.training.data.documents import Reading, Row
from hpcdist.training.data.token_files import INDEX_NAME
from hpcdist.training.inference import TrainedModel
from hpcdist.training.text import TextCodec


@dataclass(frozen=True)
class DocumentScore:
    """Score of one document: the sum of -ln(probability) of its ``scored`` tokens, in nats."""

    place: str
    nats: float
    scored: int
    tokens: int
    bytes: int  # of the document's text in UTF-8

    @property
    def perplexity(self) -> float:
        """exp(mean nats per scored token), or NaN without scored tokens."""
        return math.exp(self.nats / self.scored) if self.scored else math.nan

    def row(self) -> dict[str, Any]:
        """Fields and perplexity, for JSON."""
        return asdict(self) | {"perplexity": self.perplexity}


def token_scores(model: TrainedModel, tokens: Sequence[int], count: int) -> tuple[np.ndarray, bool]:
    """Return ln(probability) of each of the last ``count`` tokens, and True if each token has the largest one. Local.

    Only the last tokens count if ``tokens`` is longer than the context plus 1.
    """
    row = np.array([tokens[-model.recipe.data.context - 1 :]], np.int64)
    logits, targets = model.logits(row[:, :-1])[0, -count:], row[0, -count:]
    scores = np.empty(count)
    for position, target in enumerate(targets):  # in float64, which all rows together might not fit in memory
        values = logits[position].astype(np.float64)
        top = values.max()
        scores[position] = values[target] - top - math.log(np.exp(values - top).sum())
    return scores, bool((logits.argmax(axis=-1) == targets).all())


def score_tokens(model: TrainedModel, tokens: Sequence[int]) -> tuple[float, int]:
    """Return (sum of ln(probability), number of scored tokens) of a document of any length. Local."""
    context, total, scored = model.recipe.data.context, 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        scores, _ = token_scores(model, window, len(window) - 1)
        total, scored = total + float(scores.sum()), scored + len(scores)
    return total, scored


def score_documents(
    model: TrainedModel, codec: TextCodec, path: Path, key: str = "text", lines: bool = False
) -> list[DocumentScore]:
    """Return the score of each document in ``path``, in file order. Collective.

    ``path``: text, JSONL or Parquet, as for `hpcdist data tokenize`, or a directory of tokens. ``key``, ``lines``: as
    in `Reading`. Raises DataError if no document has two tokens.
    """
    comm, scores = model.comm, []
    for number, document in enumerate(_documents(path, key, lines)):
        if number % comm.size == comm.rank:
            is_text = isinstance(document, str)
            tokens = codec.encode_document(document) if is_text else document.tolist()
            text = document if is_text else codec.decode(tokens)
            total, scored = score_tokens(model, tokens)
            place = f"{path}, document {number}"
            scores.append((number, DocumentScore(place, -total, scored, len(tokens), len(text.encode()))))
    everything = _in_order(comm.allgather_object(scores))
    if not any(score.scored for score in everything):
        raise DataError(f"{path} has no document with two tokens, so nothing can be scored; give longer documents")
    return everything


def _in_order(parts: Iterable[list[tuple[int, Any]]]) -> list[Any]:
    # The scores of all ranks, from their pairs (number, score).
    return [score for _, score in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]


def _documents(path: Path, key: str, lines: bool) -> Iterable[Any]:
    # Yields a text, or an array of tokens.
    if (path / INDEX_NAME).is_file():
        data = token_files.open_directory(path)
        ends = data.document_ends()
        assert ends is not None
        yield from (data.tokens[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
        return
    reading = Reading(key, lines)
    for text in (one for group in reading.groups([path]) for piece in group for one in reading.documents(piece)):
        if isinstance(text, Row):
            raise DataError(
                f"{text.place()}: the row is a chat; tokenize the file with `hpcdist data tokenize`, and score the "
                "directory of its tokens"
            )
        yield text


def totals(scores: Sequence[DocumentScore]) -> dict[str, float]:
    """Return the figures of all documents together: nats per token, perplexity and bits per byte."""
    nats, scored = sum(score.nats for score in scores), sum(score.scored for score in scores)
    nbytes = sum(score.bytes for score in scores)
    return {
        "documents": len(scores),
        "tokens": sum(score.tokens for score in scores),
        "scored": scored,
        "loss": nats / scored,
        "perplexity": math.exp(nats / scored),
        "bits_per_byte": nats / math.log(2) / nbytes if nbytes else math.nan,
    }


@dataclass(frozen=True)
class ChoiceScore:
    """Answer of the model to a question: the choice with the largest score, in total and per byte."""

    scores: list[float]  # ln(probability) of each choice after the prompt
    chosen: int
    chosen_per_byte: int
    answer: int


def score_continuation(model: TrainedModel, codec: TextCodec, prompt: str, text: str) -> tuple[float, bool]:
    """Return (ln(probability) of ``text`` after ``prompt``, True if greedy decoding would give ``text``). Local.

    If both are longer than the context, the begin of the prompt is left out. Raises DataError for an empty text, and
    for an empty prompt of a tokenizer without a token that begins or ends texts.
    """
    spaces = len(prompt) - len(prompt.rstrip())  # a space belongs to the token of the next word
    prompt, text = prompt[: len(prompt) - spaces], prompt[len(prompt) - spaces :] + text
    whole, head = codec.encode_document(prompt + text), codec.encode_document(prompt)
    if whole[: len(head)] != head:  # a token crosses the border
        whole = [*head, *codec.encode(text)]
    count, context = len(whole) - len(head), model.recipe.data.context
    if not head:
        whole = [*codec.ends[:1], *whole]
    if count < 1 or len(whole) == count:
        raise DataError("a prompt or a choice is empty; give at least one token for each")
    if count > context:
        raise DataError(f"a choice has {count} tokens, but the model has a context of {context}; give shorter choices")
    scores, is_greedy = token_scores(model, whole, count)
    return float(scores.sum()), is_greedy


def score_choices(model: TrainedModel, codec: TextCodec, path: Path) -> list[ChoiceScore]:
    """Return the answers to the questions in the JSONL file ``path``. Collective.

    Each row has the keys ``prompt`` (text), ``choices`` (list of texts) and ``answer`` (index of the right one).
    """
    comm, answers = model.comm, []
    for number, line in enumerate(regular.text(path).splitlines()):
        place = f"{path}, line {number + 1}"
        prompt, choices, answer = _question(place, line)
        if number % comm.size != comm.rank:
            continue
        try:
            scores = [score_continuation(model, codec, prompt, text)[0] for text in choices]
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        per_byte = [score / len(text.encode()) for score, text in zip(scores, choices, strict=True)]
        answers.append((number, ChoiceScore(scores, int(np.argmax(scores)), int(np.argmax(per_byte)), answer)))
    return _in_order(comm.allgather_object(answers))


def _question(place: str, line: str) -> tuple[str, list[str], int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: invalid JSON: {error}; expected one object on each line") from error
    row = row if isinstance(row, dict) else {}
    prompt, choices, answer = (row.get(name) for name in ("prompt", "choices", "answer"))
    texts = isinstance(choices, list) and len(choices) > 1 and all(isinstance(one, str) and one for one in choices)
    if not (isinstance(prompt, str) and texts and type(answer) is int and 0 <= answer < len(choices or ())):
        raise DataError(
            f'{place}: expected "prompt" (text), "choices" (at least two texts) and "answer" (the index of the right '
            f"choice), got the keys {', '.join(map(json.dumps, row))}"
        )
    assert choices is not None
    return prompt, choices, answer


def accuracy(answers: Sequence[ChoiceScore]) -> dict[str, float]:
    """Return the share of right answers by the total score of a choice, and by its score per byte."""
    count = len(answers)
    return {
        "questions": count,
        "accuracy": sum(one.chosen == one.answer for one in answers) / count if count else math.nan,
        "accuracy_per_byte": sum(one.chosen_per_byte == one.answer for one in answers) / count if count else math.nan,
    }
