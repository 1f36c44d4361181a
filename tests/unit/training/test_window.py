"""Training with a sliding attention window: it matches one rank, and the receptive field of a sampled token."""

import numpy as np
import pytest

from harness.inputs import write_text
from harness.trainings import check_training, recipe_keys, run_single_process, trainer_of
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.models.arena import Arena
from hpcdist.training.generation import WindowDecoder, generate

STEPS, WINDOW = 8, 7
KEYS = recipe_keys(
    f"layers=2 hidden=16 heads=4 vocabulary=257 data.context=40 window={WINDOW} steps={STEPS} global_batch=5 "
    "validation_samples=11 optimizer.warmup_steps=3 optimizer.clip_norm=0.7 precision.mode=float64"
)
CASES = {  # ranks, keys
    "tensor by rows x zero3, dropping": (4, "tensor=2 sequence_parallel=true strategy=zero3 dropout=0.2"),
    "pipeline x ring, recomputing": (4, "pipeline=2 microbatches=5 recompute=true parallel.context=2 dropout=0.1"),
    "ring of 3, packed": (3, "parallel.context=3 positions=rotary kv_heads=2 data.packed=true document_end=32"),
    # of the full tier
    "heads for tokens x zero1": (4, "parallel.context=2 context_method=all_to_all strategy=zero1 dropout=0.2"),
    "ring of 4": (4, "parallel.context=4 kv_heads=1 tied=true"),
    "ring x tensor": (4, "parallel.context=2 tensor=2 positions=rotary dropout=0.1"),
    "zb-h1, packed": (2, "pipeline=2 schedule=zb-h1 microbatches=5 data.packed=true document_end=32"),
    "zero2 of 3, experts": (3, "strategy=zero2 microbatches=2 experts=4 expert_hidden=16 dropout=0.1"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text.txt", np.random.default_rng(3))


@pytest.mark.full_except(*list(CASES)[:3])
@pytest.mark.parametrize("case", CASES)
def test_windowed_training_matches_one_rank(case, text):
    ranks, changed = CASES[case]
    keys = {**KEYS, "data.path": text, **recipe_keys(changed)}
    expected = run_single_process(keys, STEPS)

    def body(comm):
        together = trainer_of(comm, keys)
        check_training(together, expected, STEPS, 1e-12)
        together.close()

    run_threads(ranks, body)


def test_sampled_token_depends_on_the_windows_of_all_layers(text):
    trainer = trainer_of(solo(), {**KEYS, "data.path": text, "model.positions": "rotary"})
    model, store = trainer.model, trainer.exchange.parameters
    store.array[...] *= 9
    reach, prompt = 2 * (WINDOW - 1) + 1, np.arange(97, 137, dtype=np.uint8)  # of two layers

    def drawn(context):
        logits = []

        def logits_of(tokens):
            logits.append(model.logits(model.bind(store), tokens, Arena())[0, -1].copy())
            return logits[-1][None, None]

        list(generate(WindowDecoder(logits_of, context), [prompt], 20, temperature=1.0, top_k=0, seed=5))
        return np.array(logits)

    whole = drawn(40)
    np.testing.assert_allclose(drawn(reach), whole, rtol=1e-9, atol=1e-9)
    assert np.abs(drawn(reach - 1) - whole).max() > 1e-3
    trainer.close()
