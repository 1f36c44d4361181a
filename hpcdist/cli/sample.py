"""`hpcdist sample`: text from a trained model."""

import os
import sys
from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", default="def ", help="Text to continue.")
@click.option("--tokens", default=400, type=click.IntRange(min=1), help="How many bytes to write.")
@click.option("--temperature", default=0.8, type=click.FloatRange(min=0.0), help="0 takes the likeliest byte.")
@click.option("--top-k", default=0, type=click.IntRange(min=0), help="Keep the k likeliest bytes only; 0 keeps all.")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Seed of the draws.")
def command(run_dir: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print text that the model in RUN_DIR writes. It must be a gpt on bytes (model.vocabulary 256)."""
    from hpcdist.training import inference

    try:
        for part in inference.sample(run_dir, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed):
            sys.stdout.write(part)
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
