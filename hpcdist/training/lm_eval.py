"""Models of hpcdist for lm-eval, the library of language model benchmarks (extra `lm-eval`).

lm_eval.simple_evaluate(hpcdist.training.lm_eval.open_model("runs/tuned"), tasks=["hellaswag"])
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import MissingCapabilityError, UsageError
from hpcdist.training.inference import InspectionSession, TrainedModel, continuations
from hpcdist.training.scoring import score_continuation, score_tokens, token_scores
from hpcdist.training.text import TextCodec, codec_of

EXTRA: Final = "pip install 'hpcdist[lm-eval]'"
MOST_TOKENS: Final = 256  # default length of a generated text, as in other models of lm-eval


def open_model(run: Path | str, tokenizer: Path | str | None = None, *, averaged: bool = False) -> Any:
    """Return the model in the run directory ``run`` as an ``lm_eval.api.model.LM``, in this process. Local.

    ``tokenizer``: see `hpcdist.training.text.codec_of`. ``averaged``: True for the moving average of the parameters.
    Raises HpcdistError.
    """
    try:
        base: Any = importlib.import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise MissingCapabilityError(f"lm_eval cannot be imported ({error}); run {EXTRA}") from error
    with InspectionSession(Path(run), alone=True) as look:
        if look.recipe.model.kind != "gpt":
            raise UsageError(f"{run} has a model of kind {look.recipe.model.kind!r}; lm-eval needs a gpt")
        codec = codec_of(Path(run), look.recipe, None if tokenizer is None else Path(tokenizer))
        model = look.load(averaged=averaged)

    class RunModel(base):
        """Model of a run directory. lm-eval documents the methods."""

        tokenizer_name = f"{run}"

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [score_continuation(model, codec, *request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [_score_text(model, codec, *request.args) for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [_generate(model, codec, *request.args) for request in requests]

        def apply_chat_template(self, chat_history: Sequence[Any], add_generation_prompt: bool = True) -> str:
            return codec.render(chat_history, header=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return codec.template.text if chat_template and codec.template else ""

    return RunModel()


def _score_text(model: TrainedModel, codec: TextCodec, text: str) -> float:
    windows, tokens = importlib.import_module("lm_eval.utils"), codec.encode(text)
    first = [*codec.begin, *codec.ends][:1]  # the context of the first token
    if not first:
        return score_tokens(model, tokens)[0]
    pairs = windows.get_rolling_token_windows(tokens, first[0], model.recipe.data.context, 1)
    disjoint = map(windows.make_disjoint_window, pairs)
    return sum(float(token_scores(model, [*seen, *scored], len(scored))[0].sum()) for seen, scored in disjoint)


def _generate(model: TrainedModel, codec: TextCodec, prompt: str, options: Mapping[str, Any]) -> str:
    until, count = options.get("until") or (), int(options.get("max_gen_toks", MOST_TOKENS))
    drawn = options.get("do_sample", False)
    parts = continuations(
        model,
        codec,
        [codec.encode_document(prompt)[-max(1, model.recipe.data.context - count) :]],
        count,
        stops=[until] if isinstance(until, str) else list(until),
        temperature=float(options.get("temperature", 1.0)) if drawn else 0.0,
        top_k=int(options.get("top_k") or 0),
        top_p=float(options.get("top_p") or 1.0),
        seed=int(options.get("seed") or 0),
    )
    return "".join(part for _, part in parts)
