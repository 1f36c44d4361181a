"""Fine-tune a causal language model from Hugging Face on a text, with any parallel strategy.

mpirun -n 2 python finetune.py TEXT [MODEL]
HPCDIST_SET__PARALLEL__STRATEGY=zero2 mpirun -n 4 python finetune.py TEXT MODEL

MODEL is a directory from `save_pretrained`, or a name that `transformers` can load. Without MODEL a small GPT-2 on
bytes is trained from random weights.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hpcdist.training.pytorch import Training, load, recipe_of, wrap

STEPS, BATCH, CONTEXT = 40, 8, 64


class Logits(nn.Module):
    """Wrapper of a transformers model. It takes only tokens, and returns only logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (samples, positions, vocabulary) for ``tokens`` of shape (samples, positions)."""
        return self.model(input_ids=tokens, use_cache=False).logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of ``logits`` for ``targets``, the next tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
text = Path(sys.argv[1]).read_text(errors="replace")
if sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], torch_dtype=torch.float32)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(sys.argv[2])(text).input_ids)
else:
    sizes = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "n_positions": CONTEXT,
        "vocab_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    tokens = torch.tensor(list(text.encode()))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
recipe = {"run.steps": STEPS, "run.global_batch": BATCH, **recipe_of(optimizer)}
function = Logits(model)
wrapped = wrap(function, loss_of, example=tokens[None, :CONTEXT], tokens_per_sample=CONTEXT)
with Training(wrapped, recipe) as training:
    for step in training.steps:
        begins = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
        rows = begins[training.share, None] + torch.arange(CONTEXT + 1)
        loss = training.step(tokens[rows[:, :-1]], tokens[rows[:, 1:]])
        if step % 10 == 9 and training.rank == 0:
            print(f"step {step + 1}: loss {loss:.3f}")

load(function, training.parameters())
if training.rank == 0:
    model.save_pretrained("finetuned")
    print("saved in finetuned")
