"""Chats: masks as of transformers, losses as of PyTorch, the same bytes on any number of ranks, refused rows."""

import json

import numpy as np
import pytest

from harness import jobs
from harness.models.documents import spans
from harness.pytorch.exact import in_float64
from harness.trainings import losses_and_norms, recipe_keys, trainer_of
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError
from hpcdist.models.config import ModelConfig
from hpcdist.models.stage import IGNORED
from hpcdist.training.data import open_source, packed, sampler_of, token_files
from hpcdist.training.data.chats import TEMPLATE_NAME, open_template
from hpcdist.training.data.documents import Reading
from hpcdist.training.data.tokenization import damaged_shards, open_encoder, tokenize
from hpcdist.training.recipe.config import DataConfig, DataSource

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'hpcdist[tokens]'")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = "{{ m['content'] + '<|im_end|>\\n' }}"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    f"{{% generation %}}{END}{{% endgeneration %}}{{% else %}}{END}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)
UNSTABLE = (  # it removes earlier answers when a message follows
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = 150  # in the longest texts


def words(rng, count):
    return " ".join("".join(rng.choice(list("abcdeé漢🙂\n"), rng.integers(1, 6))) for _ in range(count))


def random_chats(rng, count):
    """Return chats whose prompts and answers have very different lengths."""
    chats = []
    for _ in range(count):
        chat = [{"role": "system", "content": words(rng, 3)}] if rng.random() < 0.5 else []
        for _ in range(int(rng.integers(1, 4))):
            sizes = np.array([1, WORDS // 4])[:: int(rng.choice([-1, 1]))]
            chat.append({"role": "user", "content": words(rng, sizes[0])})
            chat.append({"role": "assistant", "content": words(rng, sizes[1])})
        chats.append(chat)
    return chats


@pytest.fixture
def folder(tmp_path, rng):
    """A tokenizer with a chat template."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)  # as in GPT-2's file
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, show_progress=False, initial_alphabet=byte_level.alphabet()
    )
    tokenizer.train_from_iterator([words(rng, 400)], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0], "chat_template": "of the config"}))
    (path / TEMPLATE_NAME).write_text(TEMPLATE)
    return path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenized(folder, rows, out, **reading):
    """Return the token shards of ``rows``."""
    path = write_rows(folder.parent / "chats.jsonl", rows)
    tokenize([path], open_encoder(folder), Reading(**reading), folder.parent / out, solo())
    return token_files.open_directory(folder.parent / out)


def stored(data):
    ends = data.document_ends().tolist()
    return [(data.tokens[a:b].tolist(), data.trained[a:b].tolist()) for a, b in zip([0, *ends], ends, strict=False)]


def of_transformers(folder, chats):
    """Return (tokens, mask of the trained tokens) of each chat, by transformers."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    marks = {"chat_template": TEMPLATE, "return_assistant_tokens_mask": True, "return_dict": True, "tokenize": True}
    made = [reference.apply_chat_template(chat, **marks) for chat in chats]
    return [(one["input_ids"], one["assistant_masks"]) for one in made]


def test_tokens_and_masks_equal_transformers(folder, rng):
    chats = random_chats(rng, 60)
    data = tokenized(folder, [{"messages": chat} for chat in chats], "out")
    expected = of_transformers(folder, chats)
    assert stored(data) == expected
    assert 0.1 < np.mean(np.concatenate([mask for _, mask in expected])) < 0.9


def test_template_names_equal_transformers(folder, rng):
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- set date = strftime_now('%Y') %}{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'stop' %}{{ raise_exception('no stop') }}{% endif %}\n"
        "    {% if m.role == 'skipped' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}{{ m | tojson(indent=2) }}{% if tools %}{{ tools | tojson }}{% endif %}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}\n\n"
    )
    (folder / TEMPLATE_NAME).write_text(template)
    config = {"bos_token": {"content": "<s>"}, "eos_token": SPECIAL[0], "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token=SPECIAL[0]
    )
    messages = [{"role": role, "content": f"é<'\n{words(rng, 3)}"} for role in ("user", "skipped", "assistant")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    made, warning = open_template(folder)
    assert warning == ""
    for header in (False, True):
        expected = reference.apply_chat_template(
            messages, tools=tools, chat_template=template, add_generation_prompt=header, tokenize=False
        )
        assert made.render(messages, header=header, tools=tools) == expected
    with pytest.raises(DataError, match="no stop"):
        made.render([{"role": "stop", "content": ""}])
    with pytest.raises(DataError, match="unsafe"):
        type(made)("{{ messages.__class__.__mro__ }}", ()).render([])


def test_completion_and_end_are_trained(folder):
    rows = [
        {"prompt": "ab", "completion": " cd🙂"},
        {"prompt": "", "completion": "ab"},
        {"prompt": "", "completion": ""},
    ]
    data = tokenized(folder, rows, "out")
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tokens, trained), (_, of_empty_prompt) = stored(data)
    assert tokens == [*reference.encode("ab cd🙂").ids, reference.token_to_id(SPECIAL[0])]
    assert reference.decode([t for t, one in zip(tokens, trained, strict=True) if one]) == " cd🙂"
    assert trained[-1] == 1 and of_empty_prompt[:2] == [0, 1]  # no token predicts the first token
    index = token_files.read_index(folder.parent / "out")
    assert (index["empty"], index["trained"]) == (1, sum(trained) + sum(of_empty_prompt))


def test_ranks_write_the_same_bytes_and_parquet_the_same_masks(folder, rng):
    rows = [{"messages": chat} for chat in random_chats(rng, 40)] + [{"messages": []}]
    path, contents = write_rows(folder.parent / "chats.jsonl", rows), []
    for size in (1, 3):
        out = folder.parent / f"out{size}"
        run_threads(
            size, lambda comm, out=out: tokenize([path], open_encoder(folder), Reading("text", False, 4000), out, comm)
        )
        contents.append({one.name: one.read_bytes() for one in out.iterdir()})
    assert contents[0] == contents[1] and len(contents[0]) > 5
    assert token_files.read_index(out)["empty"] == 1
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder.parent / "chats.parquet", row_group_size=9)
    tokenize([folder.parent / "chats.parquet"], open_encoder(folder), Reading(), folder.parent / "parquet", solo())
    assert stored(token_files.open_directory(folder.parent / "parquet")) == stored(token_files.open_directory(out))


def test_command_counts_trained_tokens_and_finds_a_damaged_mask(folder, rng):
    path = write_rows(folder.parent / "chats.jsonl", [{"talk": chat} for chat in random_chats(rng, 5)])
    out = folder.parent / "out"
    done = jobs.invoke_command("data", "tokenize", path, "--tokenizer", folder, "--key", "talk", "-o", out)
    index = token_files.read_index(out)
    assert f"{index['tokens']} tokens ({index['trained']:,} trained)" in done.stdout
    assert "chat_template.jinja differs from chat_template in tokenizer_config.json" in done.stderr
    assert damaged_shards(out) == []
    content = bytearray((out / "tokens-000000.h5").read_bytes())
    content[index["shards"][0]["trained_offset"] + 3] ^= 1
    (out / "tokens-000000.h5").write_bytes(content)
    assert damaged_shards(out) == ["tokens-000000.h5"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: no token is trained"),
        ({"messages": [{"role": "user"}]}, "line 2: 'messages' must be a list of objects"),
        ({"messages": "text"}, "line 2: 'messages' must be a list of objects"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "line 2, message 1: the chat template cannot render"),
        ({"prompt": "a", "completion": ""}, "line 2: the completion is empty"),
        ({"prompt": "a", "completion": ["b"]}, "line 2: prompt and completion must be texts"),
        ({"prompt": "a"}, "line 2: no text with the key 'text', no messages"),
        ({"text": "a"}, "chats.jsonl: texts and rows with messages or completions cannot be mixed"),
    ],
)
def test_invalid_rows_are_rejected(folder, rng, row, message):
    with pytest.raises(DataError, match=message):
        tokenized(folder, [{"messages": random_chats(rng, 1)[0]}, row], "out")


def test_template_that_changes_earlier_messages_is_rejected_with_row_and_message(folder, rng):
    (folder / TEMPLATE_NAME).write_text(UNSTABLE)
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert len(stored(tokenized(folder, [{"messages": turn}], "stable"))) == 1
    with pytest.raises(DataError, match="line 2, message 2: the chat template changes the text of earlier messages"):
        tokenized(folder, [{"messages": turn}, {"messages": turn * 2}], "out")


def test_missing_template_is_rejected(folder, rng):
    (folder / TEMPLATE_NAME).unlink()
    assert open_template(folder)[0].text == "of the config"
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(
        DataError, match=r"chats.jsonl, line 1: a chat needs a chat template.*add the chat_template.jinja"
    ):
        tokenized(folder, [{"messages": chat} for chat in random_chats(rng, 1)], "out")


def test_empty_chat_masks_are_rejected_and_not_trained_with_zero_loss(folder, rng):
    """The situation of marin#7237: a template without marks gave empty masks, and the loss was 0."""
    chats = [[message for message in chat if message["role"] != "assistant"] for chat in random_chats(rng, 3)]
    with pytest.raises(DataError, match="line 1: no token is trained"):
        tokenized(folder, [{"messages": chat} for chat in chats], "out")
    tokenized(folder, [{"messages": chat} for chat in random_chats(rng, 3)], "out")
    out = folder.parent / "out"
    index = token_files.read_index(out)
    place = index["shards"][0]["trained_offset"]
    content = bytearray((out / "tokens-000000.h5").read_bytes())
    content[place : place + index["tokens"]] = bytes(index["tokens"])
    (out / "tokens-000000.h5").write_bytes(content)
    config = DataConfig(path=str(out), context=2048, packed=True, validation_fraction=0.0)
    with pytest.raises(DataError, match="no token of the documents is trained"):
        open_source(config, ModelConfig(vocabulary=300), solo())
    (out / "tokens.json").write_text(json.dumps(index | {"trained": 0}))
    with pytest.raises(DataError, match="no token is trained, so there is no loss"):
        open_source(config, ModelConfig(vocabulary=300), solo())


def test_chats_without_packing_and_encoders_are_rejected(folder, rng):
    tokenized(folder, [{"messages": chat} for chat in random_chats(rng, 3)], "out")
    for is_packed, kind in ((False, "gpt"), (True, "encoder")):
        config = DataConfig(path=str(folder.parent / "out"), context=2048, packed=is_packed)
        with pytest.raises(DataError, match="set data.packed = true and model.kind = 'gpt'"):
            open_source(config, ModelConfig(vocabulary=300, kind=kind), solo())


def test_cut_chats_and_mixtures_have_the_targets_of_the_masks(folder, rng, monkeypatch):
    monkeypatch.setattr(packed, "SCANNED_TOKENS", 37)
    rows = [{"messages": chat} for chat in random_chats(rng, 20)]
    data = tokenized(folder, rows, "chats")
    path = folder.parent / "text.npy"
    text = np.where(rng.random(4000) < 0.02, 0, rng.integers(3, 300, 4000)).astype(np.uint16)
    np.save(path, text)
    sources = DataSource(path=str(folder.parent / "chats")), DataSource(path=str(path))
    keys = {"context": 24, "packed": True, "cut_documents": True, "validation_fraction": 0.0, "document_end": 0}
    source = open_source(DataConfig(source=sources, **keys), ModelConfig(vocabulary=300), solo())
    _, targets = source.training.take(np.arange(source.training.count), 0)
    seen = np.bincount(targets[targets != IGNORED], minlength=300)
    tokens = data.tokens[:][data.trained[:] == 1], text[1:][text[:-1] != 0]
    assert np.array_equal(seen, sum(np.bincount(part, minlength=300) for part in tokens))
    assert ((targets != IGNORED).sum(axis=1) > 0).all()
    assert source.training.targets(np.arange(source.training.count)) == seen.sum()


LAYOUTS = {
    "one rank": (1, ""),
    "two ranks": (2, "strategy=zero2"),
    "pipeline": (2, "pipeline=2"),
    "tensor": (2, "tensor=2"),
    "ring": (2, "parallel.context=2"),
}


@pytest.fixture
def exact():
    with in_float64():
        yield pytest.importorskip("torch")


def test_losses_and_gradients_equal_pytorch_in_every_layout(folder, rng, exact):
    """Micro-batches and ranks have very different numbers of trained tokens; the mean is over the global batch."""
    torch, transformers = exact, pytest.importorskip("transformers")
    chats = random_chats(rng, 30)
    tokenized(folder, [{"messages": chat} for chat in chats], "out")
    masks = {tuple(tokens[:-1]): (tokens, mask) for tokens, mask in of_transformers(folder, chats)}
    longest = max(map(len, masks))
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": longest + longest % 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager"))
    model.save_pretrained(folder.parent / "model")
    keys = recipe_keys(
        "steps=3 global_batch=6 microbatches=2 precision.mode=float64 data.packed=true validation_samples=0 "
        "optimizer.name=sgd optimizer.learning_rate=0.5 optimizer.momentum=0 optimizer.weight_decay=0 "
        "optimizer.warmup_steps=0 optimizer.decay=constant optimizer.clip_norm=0"
    )
    keys |= {"run.init_from": folder.parent / "model", "data.path": folder.parent / "out"}
    keys |= {"data.context": longest + longest % 2}
    samples, expected = trainer_of(solo(), keys).source.training, []

    def ratio(seed):
        """Return the ratio of the numbers of targets in the two halves of the first batch."""
        first, second = (samples.targets(np.array(sampler_of(samples, seed).indices(part, 3))) for part in (0, 3))
        return first / second

    keys["run.seed"] = seed = max(range(300), key=ratio)
    assert ratio(seed) > 2
    sampler = sampler_of(samples, seed)
    for step in range(3):
        x, _ = sampler.batch(6 * step, 6)
        inputs, places, filled = x.arrays
        total, count = 0.0, 0
        for row, where in spans(places):
            if where.start < filled[row]:
                tokens, mask = masks[tuple(inputs[row, where].tolist())]
                labels = torch.tensor([token if one else -100 for token, one in zip(tokens, mask, strict=True)][1:])
                logits = model(torch.tensor([tokens[:-1]])).logits[0]
                total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                count += sum(mask[1:])
        loss = total / count
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.sqrt(sum((one**2).sum() for one in gradients)).item()
        expected.append((loss.item(), norm))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    for ranks, changed in LAYOUTS.values():

        def body(comm, changed=changed):
            trained = trainer_of(comm, keys | recipe_keys(changed))
            output = losses_and_norms(trained, 3)
            trained.close()
            return output

        for output in run_threads(ranks, body):
            np.testing.assert_allclose(output, expected, rtol=1e-10)


def test_held_out_loss_is_the_mean_over_trained_tokens(folder, rng):
    tokenized(folder, [{"messages": chat} for chat in random_chats(rng, 30)], "out")
    keys = recipe_keys("layers=1 hidden=16 heads=2 vocabulary=300 data.packed=true validation_samples=0 global_batch=4")
    keys |= {"data.path": folder.parent / "out", "data.context": 1500, "data.validation_fraction": 0.3}
    results = [
        run_threads(size, lambda comm: _held_out(trainer_of(comm, keys | {"run.global_batch": 4})))[0]
        for size in (1, 2)
    ]
    trainer = trainer_of(solo(), keys)
    x, y = trainer.source.validation.take(np.arange(trainer.source.validation.count), 0)
    assert 0 < (y != IGNORED).sum() < x.arrays[2].sum()
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def _held_out(trainer):
    recipe = trainer.recipe
    batches = trainer.source.validation_batches(recipe, trainer.comm.size, trainer.comm.rank)
    loss = trainer.evaluate([[trainer.place(batch)] for batch in batches])
    trainer.close()
    return loss
