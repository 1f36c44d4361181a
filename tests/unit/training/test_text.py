"""Text with the tokenizer of a run: samples, perplexity and choices, compared with transformers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from harness import jobs
from harness.jobs import call_command
from harness.marks import cases
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError, UsageError
from hpcdist.training import scoring
from hpcdist.training.data.documents import Reading
from hpcdist.training.data.tokenization import open_encoder, tokenize, train_tokenizer
from hpcdist.training.generation import generate
from hpcdist.training.inference import load, sample
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.text import TextStream, codec_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

VOCABULARY, CONTEXT = 300, 48
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
SIZES |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 7, "head_dim": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 10},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": CONTEXT},
}


@pytest.fixture
def documents(rng):
    words = ["".join(rng.choice(list("abcdefgäß漢🙂"), rng.integers(1, 7))) for _ in range(40)]
    return [" ".join(rng.choice(words, rng.integers(1, 60))) for _ in range(11)] + ["a"]


@pytest.fixture
def make_run(tmp_path, documents, rng, capsys):
    """Return a function that makes a model of transformers, and the run directory of its import."""

    def make(family="llama", **changes):
        path = tmp_path / "text.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        torch.manual_seed(int(rng.integers(1 << 30)))
        sizes = {"vocab_size": VOCABULARY} if family == "gpt2" else SIZES
        config = transformers.AutoConfig.for_model(family, **sizes | FAMILIES[family] | changes)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for tensor in model.parameters():
            torch.nn.init.normal_(tensor, std=0.3)
        model.save_pretrained(tmp_path / "model")
        train_tokenizer([path], VOCABULARY, Reading(), tmp_path / "model/tokenizer.json")
        (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
        (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
        code, _, error = call_command(capsys, "checkpoint", "import", str(tmp_path / "model"), str(tmp_path / "run"))
        assert code == 0, error
        return model, tmp_path / "run"

    return make


def recipe_of_run(run):
    return recipes.load_stored(run / "recipe.toml")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_samples_equal_transformers(family, make_run):
    model, run = make_run(family)
    codec = codec_of(run, recipe_of_run(run))
    assert codec.ends == (5, 7)
    prompts = ["ab", "a longer prompt of words", "c"]
    texts = "".join(sample(run, prompts, 12, temperature=0, top_k=0, seed=0)).rstrip("\n").split("\n---\n")
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([codec.encode(prompt)])
        drawn = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, eos_token_id=[5, 7],
            pad_token_id=0,
        )[0, tokens.shape[1] :].tolist()  # fmt: skip
        assert text == prompt + codec.decode([token for token in drawn if token not in (5, 7)])


def test_chats_and_stop_texts(make_run):
    _, run = make_run()
    codec = codec_of(run, recipe_of_run(run))
    assert codec.decode(codec.chat("hi")) == "<user>hi<assistant>"
    options = {"temperature": 0, "top_k": 0, "seed": 0}
    answer = "".join(sample(run, ["hi"], 12, chat=True, **options))
    whole = "".join(sample(run, ["<user>hi<assistant>"], 12, **options))
    assert whole == "<user>hi<assistant>" + answer
    stop = answer[4:6]
    assert "".join(sample(run, ["hi"], 12, chat=True, stops=[stop], **options)) == answer[: answer.index(stop)] + "\n"


def test_streamed_text_equals_the_decoded_tokens(make_run, documents):
    _, run = make_run()
    codec = codec_of(run, recipe_of_run(run))
    for text in documents:
        stream = TextStream(codec.decode)
        parts = [stream.add(token) for token in codec.encode(text)]
        assert "".join(parts) + stream.finish() == text
        assert not any("\ufffd" in part for part in parts)


def add_begin_token(run):
    """Change the tokenizer of ``run`` to add a begin token to texts. Return the token."""
    content = tokenizers.Tokenizer.from_file(str(run / "huggingface/tokenizer.json"))
    begin = content.token_to_id("<|endoftext|>")
    content.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    content.save(str(run / "huggingface/tokenizer.json"))
    return begin


def test_begin_token_of_the_tokenizer_precedes_prompts_and_documents_but_not_chats(make_run, tmp_path):
    model, run = make_run()
    begin = add_begin_token(run)
    codec, loaded = codec_of(run, recipe_of_run(run)), load(solo(), run, recipe_of_run(run))
    assert codec.encode_document("ab") == [begin, *codec.encode("ab")]
    assert codec.encode_document("<|endoftext|>ab") == [begin, *codec.encode("ab")], "a chat template wrote the token"
    assert begin not in codec.chat("ab")
    (tmp_path / "one.txt").write_text("ab abc")
    (score,) = scoring.score_documents(loaded, codec, tmp_path / "one.txt")
    assert score.scored == len(codec.encode("ab abc")) == score.tokens - 1
    assert score.nats == pytest.approx(expected_nats(model, codec.encode_document("ab abc")), rel=1e-4)


def test_space_of_the_first_drawn_word_is_kept():
    vocabulary = {"<unk>": 0, "\u2581a": 1, "\u2581b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    stream = TextStream(tokenizer.decode, (), [1])
    assert [stream.add(token) for token in (2, 3, 1)] + [stream.finish()] == [" b", "c", " a", ""]


def test_differing_chat_templates_are_reported(make_run, capsys):
    _, run = make_run()
    (run / "huggingface/tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    list(sample(run, ["hi"], 1, chat=True, temperature=0, top_k=0, seed=0))
    assert "differs from chat_template in tokenizer_config.json" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8, "temperature": 1.7}])
def test_sampled_tokens_follow_the_distribution_of_transformers(options, rng):
    options = {"temperature": 0.7, "top_k": 0, "top_p": 1.0} | options
    logits = rng.standard_normal(40) * 2
    warpers = [transformers.TemperatureLogitsWarper(options["temperature"])]
    if options["top_k"]:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    scores = torch.tensor(logits)[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = scores.softmax(-1)[0].numpy()

    class Fixed:
        def logits(self, texts):
            return dict.fromkeys(texts, logits)

    count = 20_000
    drawn = [token for _, token in generate(Fixed(), [(0,)], count, seed=int(rng.integers(1 << 30)), **options)]
    shares = np.bincount(drawn, minlength=40) / count
    assert not shares[expected == 0].any()
    # 6 standard deviations of each share
    assert (np.abs(shares - expected) <= 6 * np.sqrt(expected * (1 - expected) / count) + 1e-12).all()


def expected_nats(model, tokens):
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, CONTEXT):
            window = torch.tensor([tokens[start : start + CONTEXT + 1]])
            logits = model(window[:, :-1]).logits[0].double()
            total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    return total


def test_perplexity_of_documents_equals_transformers(make_run, documents, tmp_path):
    model, run = make_run()
    codec = codec_of(run, recipe_of_run(run))
    path = tmp_path / "text.jsonl"

    def body(comm):
        return scoring.score_documents(load(comm, run, recipe_of_run(run)), codec, path)

    scores = body(solo())
    assert run_threads(3, body) == [scores] * 3
    for text, score in zip(documents, scores, strict=True):
        tokens = codec.encode(text)
        nats = expected_nats(model, tokens)
        assert score.nats == pytest.approx(nats, rel=1e-4) and score.bytes == len(text.encode())
        mean = nats / (len(tokens) - 1) if len(tokens) > 1 else math.nan
        assert score.perplexity == pytest.approx(math.exp(mean), rel=1e-3, nan_ok=True)
    figures = jobs.figures(jobs.hpcdist("evaluate", run, "--data", path, "--json"))
    assert figures["documents"] == 12 and len(figures["by_document"]) == 12
    assert figures["by_document"][-1]["perplexity"] is None, "the only token of a document has no score"
    nats = sum(score.nats for score in scores)
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(len(t.encode()) for t in documents))
    tokenize([path], open_encoder(tmp_path / "model", "<|endoftext|>"), Reading(), tmp_path / "tokens", solo())
    again = scoring.score_documents(load(solo(), run, recipe_of_run(run)), codec, tmp_path / "tokens")
    assert [one.tokens for one in again] == [one.tokens + 1 for one in scores], "tokens end with the end token"


def test_choices_are_scored_as_by_transformers(make_run, tmp_path, documents):
    model, run = make_run()
    codec = codec_of(run, recipe_of_run(run))
    path = tmp_path / "questions.jsonl"
    rows = [
        {"prompt": f"{text[:20]}:" + " " * (n % 2), "choices": [" ab", " cdefg ab", "漢"], "answer": n % 3}
        for n, text in enumerate(documents)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = jobs.figures(jobs.hpcdist("evaluate", run, "--choices", path, "--json"))
    assert figures["questions"] == 12
    right = 0
    for row, answer in zip(rows, figures["answers"], strict=True):
        scores = []
        for choice in row["choices"]:
            head = codec.encode(row["prompt"].rstrip())
            whole = codec.encode(row["prompt"] + choice)
            assert whole[: len(head)] == head
            with torch.no_grad():
                chances = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            scores.append(sum(chances[at - 1, whole[at]].item() for at in range(len(head), len(whole))))
        np.testing.assert_allclose(answer["scores"], scores, rtol=1e-4)
        right += int(np.argmax(scores)) == row["answer"]
    assert figures["accuracy"] == pytest.approx(right / 12)


@cases(
    "row, output",
    ({"prompt": "a", "choices": ["b"], "answer": 0}, r'expected "prompt" .text., "choices" .at least two texts.'),
    ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, r'"answer" .the index'),
    ({"prompt": " ", "choices": ["b", ""], "answer": 0}, r'"choices" .at least two texts.'),
    ({"prompt": "", "choices": ["b", "c"], "answer": 0}, "line 1: a prompt or a choice is empty"),
    ({"prompt": "a", "choices": ["b", "c " * 90], "answer": 0}, "but the model has a context of 48"),
)
def test_invalid_questions_are_refused_with_their_place(row, output, make_run, tmp_path):
    _, run = make_run()
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    model = load(solo(), run, recipe_of_run(run))
    with pytest.raises(DataError, match=output):
        scoring.score_choices(model, replace(codec_of(run, recipe_of_run(run)), ends=()), tmp_path / "q.jsonl")


def test_a_missing_or_larger_tokenizer_is_refused(make_run, tmp_path):
    _, run = make_run()
    recipe = recipe_of_run(run)
    (run / "huggingface/tokenizer.json").unlink()
    with pytest.raises(
        UsageError, match=r"run has no tokenizer.json, and the model has 300 tokens; name its tokenizer"
    ):
        codec_of(run, recipe)
    train_tokenizer([tmp_path / "text.jsonl"], 320, Reading(), tmp_path / "large.json")
    with pytest.raises(UsageError, match=r"large.json has 320 tokens, but model.vocabulary = 300"):
        codec_of(run, recipe, tmp_path / "large.json")
