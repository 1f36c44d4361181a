"""Scores of a trained language model: perplexity of documents, and answers to multiple-choice questions.

Ranks take turns with documents and questions. A document that is longer than the context is cut into windows, and the
first token of a window is not scored.
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


def token_scores(model: TrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Return ln(probability) of each token after the first, given all tokens before it. Local.

    ``tokens`` must not be longer than the context plus 1.
    """
    row = np.array([tokens], np.int64)
    logits = model.logits(row[:, :-1])[0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen: np.ndarray = np.take_along_axis(logits, row[0, 1:, None], axis=-1)[:, 0]
    return chosen - np.log(np.exp(logits).sum(axis=-1))


def score_tokens(model: TrainedModel, tokens: Sequence[int]) -> tuple[float, int]:
    """Return (sum of ln(probability), number of scored tokens) of a document of any length. Local."""
    context, total, scored = model.recipe.data.context, 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        scores = token_scores(model, tokens[start : start + context + 1])
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
    for number, (place, tokens, nbytes) in enumerate(_documents(codec, path, key, lines)):
        if number % comm.size == comm.rank:
            total, scored = score_tokens(model, tokens)
            scores.append((number, DocumentScore(place, -total, scored, len(tokens), nbytes)))
    everything = sorted(one for part in comm.allgather_object(scores) for one in part)
    if not any(score.scored for _, score in everything):
        raise DataError(f"{path} has no document with two tokens, so nothing can be scored; give longer documents")
    return [score for _, score in everything]


def _documents(codec: TextCodec, path: Path, key: str, lines: bool) -> Iterable[tuple[str, list[int], int]]:
    if (path / INDEX_NAME).is_file():
        data = token_files.open_directory(path)
        ends = data.document_ends()
        assert ends is not None
        for number, (start, end) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)):
            tokens = data.tokens[start:end].tolist()
            yield f"{path}, document {number}", tokens, len(codec.decode(tokens).encode())
        return
    reading = Reading(key, lines)
    documents = (one for group in reading.groups([path]) for piece in group for one in reading.documents(piece))
    for number, text in enumerate(documents):
        if isinstance(text, Row):
            raise DataError(
                f"{text.place()}: the row is a chat; tokenize the file with `hpcdist data tokenize`, and score the "
                "directory of its tokens"
            )
        yield f"{path}, document {number}", codec.encode(text), len(text.encode())


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

    If both are longer than the context, the begin of the prompt is left out. Raises DataError for an empty text.
    """
    spaces = len(prompt) - len(prompt.rstrip())  # a space belongs to the token of the next word
    prompt, text = prompt[: len(prompt) - spaces], prompt[len(prompt) - spaces :] + text
    whole, head = codec.encode(prompt + text), codec.encode(prompt)
    if whole[: len(head)] != head:  # a token crosses the border
        whole = [*head, *codec.encode(text)]
    count = len(whole) - len(head)
    context = model.recipe.data.context
    if count < 1 or not head:
        raise DataError("a prompt or a choice is empty; give at least one token for each")
    if count > context:
        raise DataError(f"a choice has {count} tokens, but the model has a context of {context}; give shorter choices")
    row = np.array([whole[-context - 1 :]], np.int64)
    logits = model.logits(row[:, :-1])[0, -count:].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, row[0, -count:, None], axis=-1)[:, 0]
    is_greedy = bool((logits.argmax(axis=-1) == row[0, -count:]).all())
    return float((chosen - np.log(np.exp(logits).sum(axis=-1))).sum()), is_greedy


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
    return [one for _, one in sorted((one for part in comm.allgather_object(answers) for one in part), key=_number)]


def _number(pair: tuple[int, ChoiceScore]) -> int:
    return pair[0]


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
