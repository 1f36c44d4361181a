"""Stages of the campaign: their commands, time limits and headline figures.

The most important stages come first. ``small`` sizes suit a processor that simulates a GPU.
"""

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import click
import numpy as np

from benchmarks import harness
from benchmarks.__main__ import STUDIES
from benchmarks.harness import Results
from hpcdist.cli.main import group
from hpcdist.cli.train import recipe_from_options, train
from hpcdist.errors import UsageError

OUTPUT: Final = "RESULT"  # placeholder for a command's output file; FOLDER is the placeholder for the stage's folder


@dataclass(frozen=True)
class Command:
    """A Python process: its arguments, the arguments in a small run, and the suffix of its output file.

    ``after`` names the command that writes files this command reads. It is repeated if this command has to run.
    """

    name: str
    line: Sequence[str]
    less: Sequence[str] = ()
    suffix: str = ".h5"
    study: str = ""  # name of the study that wrote the file
    after: str = ""


@dataclass(frozen=True)
class Stage:
    """Commands to run in sequence, and their common time limit in seconds."""

    limit_s: float
    full: Sequence[Command] = field(default_factory=tuple)

    def commands(self, small: bool) -> list[Command]:
        if not small:
            return list(self.full)
        return [replace(command, line=command.less) for command in self.full if command.less]


def study(name: str, module: str, more: str = "", less: str = "") -> Command:
    """Return the command of a study. ``less`` holds the options in a small run; "" leaves the command out."""
    first, last = ("-m", "benchmarks", module), ("-o", OUTPUT, "--anonymous")
    small = (*first, *less.split(), *last) if less else ()
    return Command(name, (*first, *more.split(), *last), small, study=module)


def suite(name: str, more: str, less: str) -> Command:
    first = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", OUTPUT)
    small = (*first, *less.split()) if less else ()
    return Command(name, (*first, *more.split()), small, suffix=".xml")


def tool(name: str, more: str, less: str = "", suffix: str = ".txt", after: str = "") -> Command:
    small = ("-m", "hpcdist", *less.split()) if less else ()
    return Command(name, ("-m", "hpcdist", *more.split()), small, suffix=suffix, after=after)


def check(command: Command) -> None:
    """Parse the options and the recipe of ``command`` without running it, and raise if they are invalid.

    A study raises SystemExit, other programs raise HpcdistError.
    """
    line = [word.replace(OUTPUT, "nowhere.h5") for word in command.line]
    match line:
        case ["-m", "benchmarks", name, *words]:
            module = importlib.import_module(f"benchmarks.{STUDIES[name]}")
            harness.parsed(harness.Study.of(module), module, name, words)
        case ["-m", "pytest", *words]:
            files = [word for word in words if word.startswith("tests/")]
            if missing_files := [word for word in files if not (harness.ROOT / word).exists()]:
                raise UsageError(f"{command.name} names {', '.join(missing_files)}, which does not exist")
        case ["-m", "hpcdist", *words]:
            try:
                context = _context(words)
            except click.ClickException as error:
                raise UsageError(f"{command.name}: {error.format_message()}") from error
            if context.command is train:
                recipe_from_options(context.params)


def _context(words: Sequence[str]) -> click.Context:
    context = group.make_context("hpcdist", list(words))
    while isinstance(context.command, click.Group):
        rest = [*getattr(context, "_protected_args", ()), *context.args]  # click 9 has them all in args
        name, subcommand, rest = context.command.resolve_command(context, rest)
        assert subcommand is not None and name is not None
        context = subcommand.make_context(name, rest, parent=context)
    return context


def headline(command: Command, result: Path, results: Results | None) -> str:
    """Summarise a study's ratios or the test counts. "" means that the last printed line is the summary."""
    if results is None:
        totals = dict(re.findall(r'(tests|failures|errors|skipped)="(\d+)"', result.read_text(errors="replace")[:2000]))
        return ", ".join(f"{number} {kind}" for kind, number in totals.items())
    if not command.study:
        return ""
    ratios = harness.Study.of(importlib.import_module(f"benchmarks.{STUDIES[command.study]}")).ratios(results)
    return ", ".join(f"{name} {np.median(samples):.3g}" for name, samples in ratios.items())


FAST: Final = "kernels maths sparse double"
SLOW: Final = "training collectives job torch energy"
GPT: Final = {"124M": "--layers 12 --hidden 768 --heads 12", "350M": "--layers 24 --hidden 1024 --heads 16"}
TINY: Final = "--layers 1 --hidden 32 --heads 2 --context 16 --samples 2 --vocabulary 17 --steps 2"
TINY_KEYS: Final = "model.layers=1 model.hidden=16 model.heads=2 data.context=8"
OF_CHECKPOINTS: Final = "--layers 12 --hidden 768 --context 512"
OF_TORCH: Final = "--ranks 2 --operations all_reduce --steps ddp"  # gloo supports only all_reduce on GPU tensors
GROUPS: Final = {  # strategies that share a job; an error ends only one job
    "data": "allreduce zero1 zero2 zero3 node_shared ring",
    "others": "servers gossip local_sgd int8 topk powersgd",
    "cut": "gpipe 1f1b zb-h1 tensor tensor-by-rows context experts",
}


def _files(names: str) -> str:
    return " ".join(f"tests/gpu/test_real_{name}.py" for name in names.split())


def _steps() -> tuple[Command, ...]:
    sizes = "--context 1024 --vocabulary 50304"
    shape = "model.layers=12 model.hidden=768 model.heads=12 data.context=512 run.global_batch={} model.dropout={}"
    halves = "precision.mode=bfloat16 precision.activations=working"
    tiny = f"--sides gpu graph --steps 2 --set {TINY_KEYS} run.global_batch=2"
    compared = tuple(
        study(
            f"gpt-{name}-{dtype}",
            "gpu.eager",
            f"{GPT[name]} {sizes} --samples {samples} --dtype {dtype} --steps {steps}",
            f"{TINY} --dtype {dtype} --sides eager --where cpu" if (name, dtype) == ("124M", "bfloat16") else "",
        )
        for name, dtype, samples, steps in (
            ("124M", "bfloat16", 16, 15),
            ("350M", "bfloat16", 8, 10),
            ("124M", "float32", 8, 8),
            ("350M", "float32", 4, 6),
        )
    )
    graphs = tuple(
        study(
            f"graphs-{name}",
            "gpu.step",
            f"--sides gpu graph --steps 10 --set {shape.format(samples, dropout)} {halves} {more}",
            f"{tiny} {more}",
        )
        for name, samples, dropout, more in (
            ("few-samples", 2, 0, "parallel.microbatches=1"),  # limited by the host
            ("micro-batches", 16, 0.1, "parallel.microbatches=2"),
        )
    )
    return compared + graphs


def _strategies() -> tuple[Command, ...]:
    return tuple(
        study(
            f"{group}-on-{ranks}",
            "gpu.strategies",
            f"--ranks {ranks} --only {names}",
            f"--only zero3 --steps 2 --set {TINY_KEYS} run.global_batch=4" if (group, ranks) == ("data", 2) else "",
        )
        for ranks in (2, 4)
        for group, names in GROUPS.items()
    )


def _energy() -> tuple[Command, ...]:
    sizes = "--set model.layers=12 --set model.hidden=768 --set model.heads=12 --set data.context=512"
    tiny = "--set model.layers=1 --set model.hidden=16 --set model.heads=2 --set data.context=8"
    length = "--set run.steps={} --set run.global_batch={} --set run.device=gpu --set energy.sources={}"
    return (
        study("counter", "gpu.energy", "--side 8192", "--seconds 0.4 --warm 0.1 --side 16"),
        tool(
            "train",
            f"train --json --out FOLDER/run {sizes} {length.format(150, 16, 'nvml')} --set energy.shift=true",
            f"train --json --out FOLDER/run {tiny} {length.format(3, 2, 'auto')} --set run.validation_samples=2",
        ),
        tool("report", "energy report FOLDER/run", "energy report FOLDER/run", after="train"),
    )


def _rest() -> tuple[Command, ...]:
    tiny = f"--set {TINY_KEYS} run.global_batch=2 parallel.microbatches=2 --steps 1"
    calibrate = "plan calibrate --device gpu --dtype float32 --seconds 20 -o FOLDER/gpu.toml"
    plans = "own_runs --device gpu --turns 2 --cluster FOLDER/gpu.toml --ranks 1 --anonymous -o FOLDER/own-runs"
    return (
        study(
            "attention", "gpu.attention", "", "--context 16 --tokens 16 --heads 2 --head-size 16 --rounds 2 --where cpu"
        ),
        study("pipeline", "gpu.pipeline", "--steps 10", tiny),
        tool("calibrate", f"{calibrate} --points RESULT", suffix=".h5"),
        Command("own-runs", ("-m", "benchmarks", *plans.split()), after="calibrate"),
        suite("slow", _files(SLOW), ""),
        study("sanitizer", "gpu.sanitizer", "--programs kernels", "--programs kernels --tools memcheck"),
    )


STAGES: Final[dict[str, Stage]] = {
    "device": Stage(
        120,
        (
            tool("doctor", "doctor --launch", "doctor"),
            study(
                "kernels", "gpu.kernels", "--tokens 4096 --rounds 20", "--tokens 3 --hidden 64 --rounds 2 --copied 4096"
            ),
            study(
                "step",
                "gpu.step",
                "--steps 5 --set model.layers=4 model.hidden=256 model.heads=4 data.context=128 run.global_batch=8",
                f"--steps 1 --set {TINY_KEYS} run.global_batch=2",
            ),
        ),
    ),
    "tests": Stage(240, (suite("fast", _files(FAST), f"{_files('sparse')} -k one_bit_adam"),)),
    "step": Stage(300, _steps()),
    "collectives": Stage(
        180,
        (
            study("on-2", "gpu.collectives", "--ranks 2 --bytes 64M 1M 64K", "--ranks 2 --bytes 4096 --repetitions 2"),
            study(
                "torch-on-2",
                "wrapped.process_groups",
                f"{OF_TORCH} --where cuda --rounds 8 --hidden 768 --heads 12 --context 512 --bytes 65536 67108864",
                f"{OF_TORCH} --rounds 2 --layers 1 --hidden 32 --heads 2 --context 16 --batch 2 --bytes 8",
            ),
            study("on-4", "gpu.collectives", "--ranks 4 --bytes 64M 1M 64K"),
        ),
    ),
    "strategies": Stage(180, _strategies()),
    "energy": Stage(120, _energy()),
    "checkpoint": Stage(
        120,
        (
            study(
                "one-rank",
                "background_saves",
                f"--device gpu {OF_CHECKPOINTS}",
                "--device gpu --layers 1 --hidden 64 --context 8 --samples 2 --rounds 1 --plain 2",
            ),
            study("two-ranks", "background_saves", f"--device gpu {OF_CHECKPOINTS} --ranks 2 --rounds 2"),
        ),
    ),
    "rest": Stage(420, _rest()),
}
