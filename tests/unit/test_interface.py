"""The interface of users: recipe keys, options, exit codes and file formats equal tests/unit/golden/interface.json.

`python tests/unit/test_interface.py` writes the file anew after an intended change.
"""

import json
import re
from pathlib import Path

import click
import pytest

import hpcdist
from hpcdist import errors
from hpcdist.cli.main import group
from hpcdist.telemetry.metrics.quantities import QUANTITIES
from hpcdist.training.recipe import recipe

BASELINE = Path(__file__).parent / "golden" / "interface.json"
# Names of constants that identify or version a file format.
FORMAT_NAME = re.compile(r"^_?(?:[A-Z]+_)?(?:FORMAT|VERSION|SCHEMA|MAGIC): Final = (.+?)(?:  #.*)?$", re.MULTILINE)


def options(command, context, path=()):
    """Yield (command and option, declaration) of a command and its sub-commands."""
    for parameter in command.params:
        declaration = [*parameter.opts, *parameter.secondary_opts, parameter.type.name, f"nargs {parameter.nargs}"]
        if isinstance(parameter, click.Option):
            default = parameter.default if isinstance(parameter.default, str | int | float | bool) else None
            declaration += [f"multiple {parameter.multiple}", f"flag {parameter.is_flag}", f"default {default!r}"]
        if isinstance(parameter.type, click.Choice):
            declaration += map(str, parameter.type.choices)
        yield " ".join([*path, parameter.name or ""]), " ".join(declaration)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from options(command.get_command(context, name), context, (*path, name))


def formats():
    """Yield (module and line, value) of the constants that identify or version a file format."""
    root = Path(hpcdist.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for match in FORMAT_NAME.finditer(path.read_text()):
            yield f"{path.relative_to(root)} {match[0].split(':')[0]}", match[1]


def interface():
    """Return the interface as JSON values."""
    codes = {name: value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    return {
        "recipe": {key: repr(value) for key, value in recipe.defaults().items()},
        "options": dict(options(group, click.Context(group))),
        "exit codes": codes,
        "formats": dict(formats()),
        "quantities": {name: quantity.unit for name, quantity in QUANTITIES.items()},
    }


@pytest.mark.parametrize("part", ["recipe", "options", "exit codes", "formats", "quantities"])
def test_interface_equals_its_baseline(part):
    assert json.loads(json.dumps(interface()[part])) == json.loads(BASELINE.read_text())[part]


def test_every_command_is_in_the_baseline():
    names = {key.split(" ")[0] for key in json.loads(BASELINE.read_text())["options"]}
    assert set(group.list_commands(click.Context(group))) <= names


if __name__ == "__main__":
    BASELINE.write_text(json.dumps(interface(), indent=1) + "\n")
