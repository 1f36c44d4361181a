"""Text of a language model: the tokenizer of a run, its chat template and end tokens, and the text of drawn tokens."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcdist.checkpoint.convert.huggingface import SETTINGS
from hpcdist.errors import UsageError
from hpcdist.reporting import regular
from hpcdist.training.data.chats import ChatTemplate, open_template, tokenizer_config
from hpcdist.training.data.token_files import INDEX_NAME, read_index
from hpcdist.training.data.tokenization import TOKENIZER_NAME, load_tokenizer
from hpcdist.training.recipe.recipe import Recipe

BYTES: Final = 256
CONTEXT: Final = 8  # tokens of a prompt with which the first drawn tokens are decoded
REPLACEMENT: Final = "\ufffd"  # decoded from an incomplete character


@dataclass(frozen=True)
class TextCodec:
    """Conversion between text and tokens.

    ``ends``: tokens that end a text. ``begin``: tokens before a text that is not a chat. ``template``: chat template,
    or None. ``warning``: about the template, or "".
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    template: ChatTemplate | None = None
    warning: str = ""

    def encode_document(self, text: str) -> list[int]:
        """Return the tokens of ``text`` after the tokens ``begin``, which a rendered chat has already."""
        tokens, count = self.encode(text), len(self.begin)
        return tokens if tuple(tokens[:count]) == self.begin else [*self.begin, *tokens]

    def chat(self, prompt: str) -> list[int]:
        """Return the tokens of a chat with ``prompt`` as the user's message, up to the answer. Raises HpcdistError."""
        return self.encode(self.render([{"role": "user", "content": prompt}], header=True))

    def render(self, messages: Sequence[Any], *, header: bool) -> str:
        """Return the text of a chat. ``header``: append the header of an answer. Raises HpcdistError."""
        if self.template is None:
            raise UsageError("a chat needs a chat template, which the tokenizer of this run lacks; leave out --chat")
        if self.warning:
            print(f"hpcdist: {self.warning}", file=sys.stderr)
        return self.template.render(messages, header=header)


BYTE_CODEC: Final = TextCodec(lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace"))


def codec_of(run: Path, recipe: Recipe, tokenizer: Path | None = None) -> TextCodec:
    """Return the `TextCodec` of the model in the run directory ``run``. Raises HpcdistError.

    The tokenizer is in ``tokenizer``, in the imported directory, in the directory of the training's tokens, or in
    run.init_from. A model of 256 tokens without a tokenizer reads bytes.
    """
    for folder in [tokenizer] if tokenizer is not None else _folders(run, recipe):
        file = tokenizer if tokenizer is not None and tokenizer.is_file() else folder / TOKENIZER_NAME
        if file.is_file():
            return _codec(file, recipe)
    if recipe.model.vocabulary != BYTES or tokenizer is not None:
        raise UsageError(
            f"{tokenizer or run} has no {TOKENIZER_NAME}, and the model has {recipe.model.vocabulary} tokens; name its "
            "tokenizer with --tokenizer"
        )
    return BYTE_CODEC


def _folders(run: Path, recipe: Recipe) -> Iterator[Path]:
    yield run / SETTINGS
    yield from map(Path, recipe.data.paths)
    if recipe.run.init_from:
        yield Path(recipe.run.init_from)
        yield Path(recipe.run.init_from) / SETTINGS


def _codec(file: Path, recipe: Recipe) -> TextCodec:
    content = regular.read(file, 1 << 30).decode()
    begin, tokenizer = _begin(file.parent, content), load_tokenizer(content)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > recipe.model.vocabulary:
        raise UsageError(
            f"{file} has {size} tokens, but model.vocabulary = {recipe.model.vocabulary}; use the tokenizer of this "
            "model"
        )

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    return TextCodec(encode, tokenizer.decode, _ends(file.parent, tokenizer), begin, *open_template(file.parent))


def _begin(folder: Path, content: str) -> tuple[int, ...]:
    if (folder / INDEX_NAME).is_file():  # as in the documents of the training
        begin = read_index(folder)["begin"]
        return () if begin is None else (int(begin),)
    encoding = load_tokenizer(content, adds_tokens=True).encode("a", add_special_tokens=True)
    count = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
    return tuple(encoding.ids[:count])


def _ends(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    if (folder / INDEX_NAME).is_file():
        return (int(read_index(folder)["end"]),)
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            with regular.damage(folder / name, "is not valid JSON"):
                value = json.loads(regular.read(folder / name)).get("eos_token_id")
                if value is not None:
                    return tuple(map(int, value if isinstance(value, list) else [value]))
    name = tokenizer_config(folder).get("eos_token", "")
    end = tokenizer.token_to_id(name.get("content", "") if isinstance(name, dict) else name)
    return () if end is None else (end,)


class TextStream:
    """Text of the tokens drawn after ``prompt``. Characters that may begin one of the texts ``stops`` are held back."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._decode, self._stops, self._held = decode, [stop for stop in stops if stop], ""
        self._tokens = list(prompt[-CONTEXT:])
        # Tokens before `_read` are decoded. `_begin` is a little before: decoders drop the space of a first token.
        self._begin, self._read = 0, len(self._tokens)
        self.ended = False  # after a stop

    def add(self, token: int) -> str:
        """Add one drawn token. Return the text that is now complete, which may be empty."""
        self._tokens.append(token)
        before, text = (self._decode(self._tokens[self._begin : end]) for end in (self._read, len(self._tokens)))
        if text.endswith(REPLACEMENT):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return self._ready(text[len(before) :])

    def _ready(self, text: str) -> str:
        self._held += text
        stops = [at for at in map(self._held.find, self._stops) if at >= 0]
        if stops:
            ready, self._held, self.ended = self._held[: min(stops)], "", True
            return ready
        begun = (n for n in range(len(self._held), 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops))
        cut = len(self._held) - next(begun, 0)
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def finish(self) -> str:
        """Return the end of the text, without a stop."""
        if self.ended:
            return ""
        before, text = (self._decode(self._tokens[self._begin : end]) for end in (self._read, len(self._tokens)))
        return self._ready(text[len(before) :]) + self._held
