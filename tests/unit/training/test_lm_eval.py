"""Models of hpcdist in lm-eval, compared with the model of lm-eval for transformers."""

import json
import sys

import pytest
from unit.training.test_text import CONTEXT, add_begin_token, documents, make_run  # noqa: F401  (fixtures)

from hpcdist.errors import MissingCapabilityError
from hpcdist.training import lm_eval as adapter

TASK = {
    "task": "letters", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip


def test_missing_library_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(
        MissingCapabilityError, match=r"lm_eval cannot be imported .*; run pip install .hpcdist.lm-eval"
    ):
        adapter.open_model(tmp_path)


@pytest.fixture
def models(make_run):  # noqa: F811
    """Return the same model in lm-eval: of hpcdist, and of transformers."""
    library = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    model, run = make_run()
    add_begin_token(run)
    end = "<|endoftext|>"
    file = str(run / "huggingface/tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, bos_token=end, eos_token=end, pad_token=end)
    (run / "huggingface/generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    theirs = HFLM(model, tokenizer=tokenizer, max_length=CONTEXT, add_bos_token=True, device="cpu", batch_size=1)
    return library, adapter.open_model(run), theirs


def requests_of(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_likelihoods_and_texts_equal_those_of_transformers(models, documents):  # noqa: F811
    _, ours, theirs = models
    words = [text.split(" ") for text in documents]
    pairs = [(" ".join(one[:4]), " " + " ".join(one[4:6])) for one in words if len(one) > 6]
    pairs += [("", "ab"), ("a b ", "c")]  # the end token is the context of a text alone
    pairs.append((documents[0] + " " * 2 + " ".join(documents), "abc"))  # longer than the context
    scores = (model.loglikelihood(requests_of("loglikelihood", *pairs)) for model in models[1:])
    for mine, other in zip(*scores, strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-4) and mine[1] == other[1]
    texts = [(text,) for text in documents]
    theirs.add_bos_token = False  # HFLM would score a begin token after the begin token of the first window
    rolling = (model.loglikelihood_rolling(requests_of("loglikelihood_rolling", *texts)) for model in models[1:])
    assert next(rolling) == pytest.approx(next(rolling), rel=1e-4)
    theirs.add_bos_token = True
    options = {"until": ["b"], "max_gen_toks": 9, "do_sample": False}
    prompts = [(text[:15], options) for text in documents]
    mine, other = (model.generate_until(requests_of("generate_until", *prompts)) for model in (ours, theirs))
    assert mine == other


def test_a_task_has_the_results_of_transformers(models, documents, tmp_path):  # noqa: F811
    library, ours, theirs = models
    path = tmp_path / "questions.jsonl"
    rows = [
        {"prompt": text[:20], "choices": ["ab", "cd efg", "fa"], "answer": n % 3} for n, text in enumerate(documents)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK | {"dataset_kwargs": {"data_files": str(path), "cache_dir": str(tmp_path / "cache")}}
    results = [library.simple_evaluate(model, tasks=[dict(task)], bootstrap_iters=0) for model in (ours, theirs)]
    mine, other = (result["results"]["letters"] for result in results)
    assert mine["acc,none"] == other["acc,none"] and mine["acc_norm,none"] == other["acc_norm,none"]
    assert mine["sample_len"] == len(documents)
