"""Chats, and prompts with completions: the text of a row, and the parts of the text that a training learns.

A chat template must only append: the text of the first messages must not change when a message follows. So the trained
part of a message is the difference between two texts: the chat before the message, with the header of an answer, and
the chat with the message. The trained part includes the end of the turn, but not the header.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import DataError
from hpcdist.reporting import regular
from hpcdist.reporting.template import chat_renderer
from hpcdist.training.data.documents import Row

TEMPLATE_NAME: Final = "chat_template.jinja"
CONFIG_NAME: Final = "tokenizer_config.json"
ANSWERS: Final = "assistant"  # role of the messages that are trained
Spans = list[tuple[int, int]]  # [start, stop) of the trained parts of a text


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json in ``folder``, or {} if there is no such file."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return {}
    with regular.damage(path, "is not valid JSON"):
        return dict(json.loads(regular.read(path)))


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a tokenizer."""

    text: str
    tokens: tuple[tuple[str, str], ...]  # (name, text) of special tokens, such as bos_token
    seconds: int = 0  # POSIX time that the template prints as the time of the call

    def render(self, messages: Sequence[Any], *, header: bool = False, tools: Any = None) -> str:
        """Return the text of ``messages``. ``header``: append the header of an answer. Raises DataError."""
        try:
            renderer = _renderer(self.text, self.seconds)
            return renderer(messages=messages, tools=tools, add_generation_prompt=header, **dict(self.tokens))
        except Exception as error:  # operators in a template raise any error
            raise DataError(f"the chat template cannot render the chat: {error}; change one of both") from error


@lru_cache(1)
def _renderer(text: str, seconds: int) -> Any:
    return chat_renderer(text, datetime.fromtimestamp(seconds, UTC))


def open_template(folder: Path) -> tuple[ChatTemplate | None, str]:
    """Return (chat template of the tokenizer in ``folder`` or None, warning or "").

    The file chat_template.jinja has priority over the key chat_template in tokenizer_config.json.
    """
    config, path, warning = tokenizer_config(folder), folder / TEMPLATE_NAME, ""
    text = config.get("chat_template")
    if isinstance(text, list):  # templates by name
        text = next((one.get("template") for one in text if isinstance(one, dict) and one.get("name") == "default"), "")
    if path.is_file():
        with regular.damage(path, "is not text"):
            content = regular.read(path).decode()
        if text and text != content:
            warning = f"{path} differs from chat_template in {CONFIG_NAME}; the file {TEMPLATE_NAME} is used"
        text = content
    if not isinstance(text, str) or not text:
        return None, ""
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    tokens = ((key, value) for key, value in names.items() if key.endswith("_token") and isinstance(value, str))
    return ChatTemplate(text, tuple(tokens)), warning


def marked_text(row: Row, template: ChatTemplate | None) -> tuple[str, Spans]:
    """Return (text of ``row``, trained parts of the text), or ("", []) for an empty row. Raises DataError."""
    if "messages" in row.value:
        return _chat(row, template)
    prompt, completion = row.value["prompt"], row.value["completion"]
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        raise DataError(f"{row.place()}: prompt and completion must be texts; convert messages to one list 'messages'")
    if prompt and not completion:
        raise DataError(f"{row.place()}: the completion is empty, so no token is trained; remove the row")
    text = prompt + completion
    return text, [(len(prompt), len(text))]


def _chat(row: Row, template: ChatTemplate | None) -> tuple[str, Spans]:
    messages = _messages(row)
    if template is None:
        raise DataError(
            f"{row.place()}: a chat needs a chat template, but the folder of the tokenizer has no {TEMPLATE_NAME}, and "
            f"{CONFIG_NAME} has no chat_template; add the {TEMPLATE_NAME} of the model"
        )
    if not messages:
        return "", []
    tools, spans, turn = row.value.get("tools"), [], len(messages)
    try:
        whole = template.render(messages, tools=tools)
        for turn, message in enumerate(messages, 1):
            if message["role"] != ANSWERS:
                continue
            before = template.render(messages[: turn - 1], header=True, tools=tools)
            after = template.render(messages[:turn], tools=tools) if turn < len(messages) else whole
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    "the chat template changes the text of earlier messages when a message follows, so the trained "
                    "part is unknown; use a template that only appends"
                )
            spans.append((len(before), len(after)))
    except DataError as error:
        raise DataError(f"{row.place()}, message {turn}: {error}") from error
    if not any(start < stop for start, stop in spans):
        raise DataError(
            f"{row.place()}: no token is trained, because no message has the role '{ANSWERS}' and a text; remove the "
            "row"
        )
    return whole, spans


def _messages(row: Row) -> list[dict[str, Any]]:
    messages = row.value["messages"]
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        # Parquet stores missing keys as null.
        kept = [{key: value for key, value in one.items() if value is not None} for one in messages]
        if all(isinstance(one.get("role"), str) and ("tool_calls" in one or "content" in one) for one in kept):
            return kept
    raise DataError(
        f"{row.place()}: 'messages' must be a list of objects with the texts 'role' and 'content'; convert the row"
    )


def trained_tokens(offsets: Sequence[tuple[int, int]], spans: Spans) -> np.ndarray:
    """Return a uint8 array: 1 for each token that overlaps one of ``spans``.

    ``offsets``: [start, stop) of each token in the text.
    """
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    trained = np.zeros(len(starts), np.uint8)
    for start, stop in spans:
        trained |= (stops > start) & (starts < stop)
    return trained
