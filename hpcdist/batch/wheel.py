"""Wheels and the machines they are for, as pip names both (PEP 427, 503, 600)."""

import difflib
import email.parser
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hpcdist.errors import UsageError

BUILT_FROM: Final = ("LICENSE", "README.md", "hpcdist", "modulefiles", "pyproject.toml", "setup.cfg", "slurm")

_OWN: Final = "hpcdist"
_PLATFORM: Final = re.compile(r"manylinux_2_(\d+)_(x86_64|aarch64|ppc64le)")
_OLDEST: Final = {"x86_64": 5, "aarch64": 17, "ppc64le": 17}  # minor version of glibc in the oldest tag
_ALIASES: Final = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True)
class Wheel:
    """A wheel by its file name; ``read`` also knows what is in it."""

    path: Path
    name: str  # normalised: lower case, with hyphens
    version: str
    extras: tuple[str, ...] = field(default=())
    python: str = ""  # Requires-Python

    @classmethod
    def named(cls, path: Path) -> "Wheel":
        """Return what the file name says. Raises UsageError for a name that is none of a wheel."""
        parts = path.name.removesuffix(".whl").split("-")
        if path.suffix != ".whl" or len(parts) not in (5, 6):
            raise UsageError(f"{path} is no wheel: expected a name like hpcdist-0.2.0-py3-none-any.whl")
        return cls(path, re.sub(r"[-_.]+", "-", parts[0]).lower(), parts[1])

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        """Return what its name and its metadata say. Raises UsageError for a file that is no wheel of hpcdist."""
        named = cls.named(path)
        if named.name != _OWN:
            raise UsageError(f"{path} is a wheel of {named.name}; expected one of {_OWN}")
        try:
            with zipfile.ZipFile(path) as archive:
                (inside,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
                message = email.parser.BytesParser().parsebytes(archive.read(inside))
        except (zipfile.BadZipFile, ValueError) as error:
            raise UsageError(f"{path} is damaged, or no wheel: {error}; build it again with `pip wheel`") from error
        extras = tuple(message.get_all("Provides-Extra") or ())
        return cls(path, named.name, named.version, extras, str(message.get("Requires-Python", "")))

    def check(self, *, extras: Sequence[str], python: str) -> None:
        """Refuse extras that the wheel does not have, with the nearest one, and a Python that is too old for it."""
        for extra in extras:
            if extra not in self.extras:
                near = difflib.get_close_matches(extra, self.extras, n=1)
                guess = f"did you mean {near[0]}? " if near else ""
                raise UsageError(f"hpcdist has no extra {extra!r}; {guess}it has {', '.join(sorted(self.extras))}")
        least = re.search(r">=\s*(\d+)\.(\d+)", self.python)
        if least and tuple(map(int, python.split("."))) < tuple(map(int, least.groups())):
            raise UsageError(
                f"hpcdist {self.version} needs Python {self.python}, and the wheels asked for are for {python}"
            )


def expanded(platform: str) -> tuple[str, ...]:
    """Return every tag that a machine of ``platform`` takes, the newest first: manylinux_2_28, 2_27, ..., 2_17, 2014.

    pip takes a tag to the letter, and would miss the wheels that are built for older machines. Raises UsageError.
    """
    match = _PLATFORM.fullmatch(platform)
    if match is None:
        raise UsageError(
            f"--platform {platform!r}: expected manylinux_2_N_ARCH, with N of the glibc of the compute nodes (`ldd "
            f"--version` there says 2.N) and ARCH one of {', '.join(_OLDEST)}: for example manylinux_2_28_x86_64"
        )
    newest, machine = int(match[1]), match[2]
    tags = []
    for minor in range(newest, _OLDEST[machine] - 1, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _ALIASES:
            tags.append(f"{_ALIASES[minor]}_{machine}")
    if not tags:
        raise UsageError(f"--platform {platform}: the oldest on {machine} is manylinux_2_{_OLDEST[machine]}_{machine}")
    return tuple(tags)


def arguments(platform: str, python_version: str) -> list[str]:
    """Return pip's options for wheels of another machine; none for this one."""
    words = ["--implementation", "cp", "--python-version", python_version] if python_version else []
    for tag in expanded(platform) if platform else ():
        words += ["--platform", tag]
    return words
