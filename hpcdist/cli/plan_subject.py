"""What `hpcdist plan` plans: a recipe, a model by name or one in numbers, with its batch and its steps."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.cli.plan_layout import flag, given, laid_out
from hpcdist.cli.plan_options import SHAPE, SHAPE_TOO
from hpcdist.errors import StorageError, UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits import checks
from hpcdist.planner.model.description import ModelDescription, TransformerShape

if TYPE_CHECKING:
    from hpcdist.training.recipe import Recipe

STEPS: Final = 1000  # of a run of which nobody says how long it is
MOST_STEPS: Final = 10**12  # more is a slip of the keyboard
_NEEDED: Final = ("layers", "hidden", "heads", "vocabulary", "context")
_OF_SHAPE: Final = (*SHAPE, "context", *SHAPE_TOO)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, the layout that was asked for, samples and steps; ``notes`` say what the plan leaves out."""

    description: ModelDescription
    layout: ParallelLayout
    global_batch: int
    steps: int
    notes: tuple[str, ...] = ()
    kernels: str | None = None  # whose were asked for
    of_recipe: bool = False  # this toolkit will train it


def with_kernels(found: Subject, on: Cluster, *, always: bool = False) -> Subject:
    """Return ``found`` with the kernels of published trainings, where nobody has measured others on such a device.

    Those are the only ones that estimates for a GPU were held against. Not for what is no transformer, for kernels that
    were asked for, nor for a layout that these cannot have, unless ``always``.
    """
    is_measured = on.calibrated or not on.device.is_accelerator
    if is_measured or found.kernels is not None or found.description.shape is None:
        return found
    library = found.layout.library or ("mpi" if found.of_recipe else "")
    layout = dataclasses.replace(found.layout, implementation="megatron", library=library)
    if not always and any(checks.shape_problems(found.description, layout, on, found.global_batch)):
        return found
    note = (
        f"kernels and memory are those of published trainings, and this toolkit's unmeasured on {on.device.name}: "
        "--implementation hpcdist plans them all the same"
    )
    return dataclasses.replace(found, layout=layout, notes=(*found.notes, note, *checks.unsupported(found.layout)))


def subject(path: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any]) -> Subject:
    """Return what the arguments and options describe.

    Without a recipe or a model it is the default recipe, which `hpcdist train` trains. Raises UsageError for options
    that contradict each other or are missing, ConfigurationError for a recipe or a model that cannot be planned, and
    StorageError for a recipe that is not there.
    """
    named = options.get("model") is not None
    numbers = given(options, _OF_SHAPE)
    if path is not None and (named or numbers):
        raise UsageError(
            f"the recipe {path} and {'--model' if named else numbers[0]} are two models; keep one (--set model.KEY="
            "VALUE changes that of the recipe)"
        )
    if not (named or numbers):
        from hpcdist.training import recipe as recipes

        if path is not None:
            _check_there(path)
        recipe = recipes.load(path, overrides).recipe
        return of_recipe(recipe, "the default recipe" if path is None else path.stem, options)
    if overrides:
        raise UsageError(f"--set {overrides[0]} changes a recipe, and none is given; use the options instead")
    description = _by_name(options) if named else _in_numbers(options)
    if options.get("batch") is None:
        raise UsageError("give --batch, the samples of a step over all replicas: without a recipe nothing says it")
    steps, notes = _steps(options, description, options["batch"])
    base = ParallelLayout()
    return Subject(
        description=description,
        layout=laid_out(options, base),
        global_batch=options["batch"],
        steps=STEPS if steps is None else steps,
        notes=notes,
        kernels=options.get("implementation"),
    )


def _check_there(path: Path) -> None:
    """Raise where there is no file ``path``: UsageError for what looks like a command, else StorageError."""
    if path.exists():
        return
    from hpcdist.cli.plan import COMMANDS

    close = difflib.get_close_matches(str(path), COMMANDS, 1)
    if close:
        raise UsageError(
            f"there is no recipe {str(path)!r}, and no command of that name; did you mean `hpcdist plan {close[0]}`?"
        )
    raise StorageError(f"recipe {path}: there is no such file")


def cluster(named: str | None) -> Cluster:
    """Return the cluster of a name or a file. Raises UsageError where none is given."""
    from hpcdist.planner.cluster import toml_file

    if named is None:
        raise UsageError(f"give --cluster NAME|FILE: {', '.join(toml_file.names())}, or a file of your own")
    return toml_file.read(named)


def of_recipe(recipe: "Recipe", name: str, options: Mapping[str, Any]) -> Subject:
    """Return a recipe, called ``name``, with what the options say in the place of its own values.

    Raises ConfigurationError where it cannot be planned, and UsageError.
    """
    from hpcdist.cli.plan_recipe import translated

    found = translated(recipe, name)
    batch = options.get("batch") or found.global_batch
    layout = laid_out(options, found.layout)
    if options.get("microbatch") is None:  # a recipe says how many there are, not how large
        many = recipe.parallel.microbatches
        layout = dataclasses.replace(layout, microbatch=max(1, math.ceil(batch / (layout.data * many))))
    steps, _ = _steps(options, found.description, batch)
    notes = list(found.notes)
    if not (recipe.parallel.data or options.get("data") or options.get("devices")):
        notes.append("neither parallel.data nor --devices says how many replicas there are: one is planned")
    return Subject(
        description=found.description,
        layout=layout,
        global_batch=batch,
        steps=found.steps if steps is None else steps,
        notes=tuple(notes),
        kernels=options.get("implementation"),
        of_recipe=True,
    )


def _steps(options: Mapping[str, Any], description: ModelDescription, batch: int) -> tuple[int | None, tuple[str, ...]]:
    """Return the steps that the options say, None where they say none, with a note on them."""
    steps, tokens = options.get("steps"), options.get("tokens")
    if steps is not None and tokens is not None:
        raise UsageError(f"--steps {steps} and --tokens {tokens:g} both say how long the run is; keep one")
    if tokens is not None:
        steps = max(1, math.ceil(tokens / (batch * description.tokens)))
    if steps is not None and steps > MOST_STEPS:
        said = f"--steps {steps}" if tokens is None else f"--tokens {tokens:g}"
        raise UsageError(f"{said}: a plan is made for at most {MOST_STEPS:,} steps")
    if steps is not None:
        return int(steps), ()
    return None, (f"neither --steps nor --tokens is given: the run is planned with {STEPS} steps",)


def _by_name(options: Mapping[str, Any]) -> ModelDescription:
    from hpcdist.planner.model import published
    from hpcdist.planner.model.transformer import describe

    others = given(options, (*SHAPE, *SHAPE_TOO))
    if others:
        raise UsageError(
            f"--model {options['model']} and {others[0]} describe a model twice; keep one (--context alone goes with "
            "a name)"
        )
    found = published.named(options["model"])
    if options.get("context") is not None:
        found = dataclasses.replace(found, context=options["context"])
    return describe(found, options["model"])


def _in_numbers(options: Mapping[str, Any]) -> ModelDescription:
    from hpcdist.planner.model.transformer import describe

    missing = [flag(name) for name in _NEEDED if options.get(name) is None]
    if missing:
        raise UsageError(f"a model in numbers also needs {', '.join(missing)}")
    if options.get("feed_forward") is not None and options.get("mlp_ratio") is not None:
        raise UsageError("--feed-forward and --mlp-ratio say the same; keep one")
    if options.get("experts_per_token") is not None and options.get("experts") is None:
        raise UsageError(f"--experts-per-token {options['experts_per_token']} needs --experts, how many there are")
    values = {name: options[name] for name in _OF_SHAPE if options.get(name) is not None and name != "mlp_ratio"}
    if options.get("mlp_ratio") is not None:
        wide = options["mlp_ratio"] * options["hidden"]
        if not math.isclose(wide, round(wide)) or round(wide) < 1:
            raise UsageError(
                f"--mlp-ratio {options['mlp_ratio']:g} x --hidden {options['hidden']} = {wide:g} is no whole width; "
                "give --feed-forward"
            )
        values["feed_forward"] = round(wide)
    shape = TransformerShape(**values)
    name = f"transformer {shape.layers} x {shape.hidden}"
    return describe(shape, name)
