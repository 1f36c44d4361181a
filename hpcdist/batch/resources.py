"""Locate the files of ``slurm/`` and ``modulefiles/``: inside an installed package, else beside the clone."""

from importlib.resources import files
from pathlib import Path
from typing import Final

import hpcdist
from hpcdist.errors import MissingCapabilityError

TEMPLATES: Final = "templates"
MODULEFILES: Final = "modulefiles"

_IN_CLONE: Final = {TEMPLATES: "slurm", MODULEFILES: "modulefiles"}  # as setup.cfg maps them


def folder(name: str) -> Path:
    """Return the folder of TEMPLATES or MODULEFILES. Raises MissingCapabilityError where there is none."""
    clone = Path(hpcdist.__file__).resolve().parents[1]
    places = [Path(str(files("hpcdist.batch"))) / name, clone / _IN_CLONE[name]]
    for place in places:
        if place.is_dir():
            return place
    raise MissingCapabilityError(
        f"this installation has no {name} of hpcdist (looked in {places[0]} and {places[1]}); install the wheel again, "
        "or use a complete clone"
    )
