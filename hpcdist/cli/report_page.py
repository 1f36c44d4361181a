"""What ``hpcdist report --html`` puts together: the page of a run, its recipe, checkpoints and a text sample."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.errors import HpcdistError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcdist.telemetry.page.run_data import CheckpointEntry, ExternalData, RecipeSetting, TextSample

SAMPLE_TOKENS: Final = 600
SAMPLE_S: Final = 60.0  # a large model on a login node is left in the middle of its sentence
MOST_BYTES: Final = 4 << 30  # of parameters that are loaded for a sample
CHECKPOINTS: Final = 1000


def write(run_dir: Path, file: Path, *, sample: bool, prompt: str) -> None:
    """Write the page of the run in ``run_dir`` into ``file``; with a ``sample`` that begins with ``prompt``."""
    from hpcdist.telemetry.page import document
    from hpcdist.telemetry.page.charts import style

    style.require_matplotlib()  # before a minute goes into a sample
    document.write_page(run_dir, file, beside(run_dir, sample=sample, prompt=prompt))


def beside(run_dir: Path, *, sample: bool, prompt: str) -> "ExternalData":
    """Return what recipe, checkpoints and model have to say of the run; each with the reason where it has nothing."""
    from hpcdist.telemetry.page.run_data import NO_CHECKPOINT, NOT_ASKED, ExternalData, TextSample

    settings, why_no_settings, steps = _settings(run_dir)
    checkpoints, why_no_checkpoints = _checkpoints(run_dir)
    return ExternalData(
        settings=settings,
        settings_reason=why_no_settings,
        planned_steps=steps,
        checkpoints=checkpoints,
        checkpoints_reason=why_no_checkpoints or NO_CHECKPOINT,
        costs=_costs(run_dir),
        sample=_sample(run_dir, checkpoints, prompt) if sample else TextSample(reason=NOT_ASKED),
    )


def _settings(run_dir: Path) -> "tuple[list[RecipeSetting], str, int | None]":
    """Return the keys of the recipe, why there are none, and the steps it asks for."""
    from hpcdist.telemetry.page.run_data import RecipeSetting
    from hpcdist.training import recipe as recipes

    path = run_dir / "recipe.toml"
    if not path.is_file():
        return [], f"The directory has no {path.name}.", None
    try:
        found = recipes.flat(recipes.load_stored(path))
    except HpcdistError as error:
        return [], f"The recipe cannot be read: {error}", None
    known = recipes.defaults()
    rows = [RecipeSetting(key, recipes.toml(value), recipes.toml(known[key])) for key, value in found.items()]
    return rows, "", int(found["run.steps"])


def _costs(run_dir: Path) -> "Callable[[float, float], Mapping[str, Any]]":
    """Return what makes kWh, emissions and costs of joules, as the recipe says."""
    from hpcdist.energy.accounts import energy_metrics
    from hpcdist.energy.config import EnergyConfig
    from hpcdist.training import recipe as recipes
    from hpcdist.training.energy_summary import intensity

    try:
        config = recipes.load_stored(run_dir / "recipe.toml").energy
    except HpcdistError:
        config = EnergyConfig()
    return lambda joules, seconds: energy_metrics.figures(
        joules,
        seconds,
        pue=config.pue,
        intensity=intensity(config),
        price_per_kwh=config.price_per_kwh,
        currency=config.currency,
    )


def _checkpoints(run_dir: Path) -> "tuple[list[CheckpointEntry], str]":
    from hpcdist.checkpoint import listing
    from hpcdist.telemetry.page.run_data import CheckpointEntry

    try:
        found = listing.list_checkpoints(run_dir)[:CHECKPOINTS]
    except StorageError:
        return [], ""  # there are none
    except OSError as error:
        return [], f"the checkpoints cannot be read: {error.strerror or error}"
    return [CheckpointEntry(c.path.name, c.step, c.state, c.written_utc, c.nbytes, c.reason) for c in found], ""


def _sample(run_dir: Path, checkpoints: "list[CheckpointEntry]", prompt: str) -> "TextSample":
    """Return text from the newest checkpoint, or why there is none. Another process draws it, for a minute at most."""
    from hpcdist.checkpoint import listing
    from hpcdist.telemetry.page.run_data import NO_CHECKPOINT, TextSample

    if not any(one.state == listing.COMPLETE for one in checkpoints):
        return TextSample(reason=NO_CHECKPOINT if not checkpoints else "none of the checkpoints is complete")
    try:
        newest = listing.inspect(listing.select(run_dir))
        assert newest.manifest is not None
        nbytes = sum(tensor.nbytes for tensor in listing.stored_tensors(newest.manifest, (listing.PARAMETERS,)))
    except HpcdistError as error:
        return TextSample(reason=str(error))
    if nbytes > MOST_BYTES:
        return TextSample(
            reason=f"the parameters take {nbytes / 2**30:.1f} GiB; hpcdist sample {run_dir} where there is room"
        )
    words = [f"--prompt={prompt}", f"--tokens={SAMPLE_TOKENS}", "--", str(run_dir)]
    line = [sys.executable, "-P", "-m", "hpcdist", "sample", *words]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=SAMPLE_S, check=False)
        text, said, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, said, code = error.stdout or b"", b"it took longer than a minute", 0
    drawn = text.decode(errors="replace")
    if code or len(drawn) <= len(prompt) + 1:
        lines = said.decode(errors="replace").strip().splitlines()
        return TextSample(reason=(lines[-1].removeprefix("Error: ") if lines else f"exit code {code}"))
    return TextSample(text=drawn.rstrip("\n"), prompt=prompt, reason="")
