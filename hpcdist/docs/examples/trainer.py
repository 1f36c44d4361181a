"""Hugging Face Trainer over MPI: train a small, randomly initialised model on a text.

hpcdist run -n 2 --out run --restarts 2 -- python trainer.py TEXT

Two lines differ from a torchrun script: the import of hpcdist.torch, and init_process_group. The callback saves and
exits after a stop request such as SIGTERM, and logs to the run directory. The script resumes from the newest checkpoint
that all ranks have written; a crash can leave an incomplete one.
Needs pip install 'transformers' 'accelerate'.
"""

import sys
from pathlib import Path

import torch
import transformers

import hpcdist.torch

torch.distributed.init_process_group("hpcdist")
Path("trained").mkdir(exist_ok=True)

CONTEXT, STEPS, BATCH = 64, 40, 4
bytes_of_text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
rows = bytes_of_text[: len(bytes_of_text) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
config = transformers.GPT2Config(
    vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
)
torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(config)
options = transformers.TrainingArguments(
    output_dir="trained",
    max_steps=STEPS,
    per_device_train_batch_size=BATCH,
    learning_rate=3e-3,
    logging_steps=10,
    save_steps=10,
    save_total_limit=2,  # at least 2: a crash can leave the newest incomplete
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = transformers.Trainer(
    model=model,
    args=options,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[hpcdist.torch.trainer_callback()],
)
trainer.train(resume_from_checkpoint=hpcdist.torch.last_saved())
if torch.distributed.get_rank() == 0:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f} on {trainer.accelerator.num_processes} ranks")
    trainer.save_model("trained")
torch.distributed.destroy_process_group()
