"""Parses documentation pages for tests: code blocks, their commands, and their output."""

import fnmatch
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from hpcdist.cli.main import COMMANDS, group

# What makes the runs of examples short where a command does not set it itself; scripts of a reader take it, too.
SHORT: Final = {
    "HPCDIST_SET__RUN__STEPS": "4",
    "HPCDIST_SET__RUN__GLOBAL_BATCH": "4",
}
# Of 1,024, which take longer than the steps; a script validates itself.
FEW_SAMPLES: Final = {"HPCDIST_SET__RUN__VALIDATION_SAMPLES": "16"}
PROMPT: Final = "$ "
ANY_LINES: Final = "..."
_NUMBER: Final = re.compile(r"(\d[\d,]*(\.\d+)?([eE][-+]?\d+)?|\bnan\b|\binf\b)")
_UNIT: Final = re.compile(r"(?<=# )([KMGT]?i?B|bytes|[mun]?s|min|h|[mkM]?J)\b")
_BAR: Final = re.compile(r"[-─━=|█▇▆▅▄▃▂▁▏▎▍▌▋▊▉]{2,}|[█▇▆▅▄▃▂▁▏▎▍▌▋▊▉]")


@dataclass(frozen=True)
class Block:
    """A code block: its language, the words after it, its lines, and its first line number."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def title(self) -> str:
        """The file name of the block, or "" if it has no name."""
        return next((word.removeprefix("title=") for word in self.words if word.startswith("title=")), "")


def blocks(page: str) -> list[Block]:
    """Return the code blocks of a page in order."""
    result: list[Block] = []
    info, begun, lines = "", 0, []
    for number, line in enumerate(page.splitlines(), start=1):
        if line.startswith("```") and not begun:
            info, begun, lines = line[3:], number, []
        elif line == "```" and begun:
            language, *words = info.split() or [""]
            result.append(Block(language, tuple(words), "\n".join(lines) + "\n", begun))
            begun = 0
        elif begun:
            lines.append(line)
    assert not begun, f"the block in line {begun} has no end"
    return result


def turns(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block, each with its output lines."""
    result: list[tuple[str, list[str]]] = []
    continued = False
    for line in text.splitlines():
        if line.startswith(PROMPT):
            result.append((line.removeprefix(PROMPT), []))
        elif continued:
            result[-1] = (f"{result[-1][0]}\n{line}", [])
        else:
            result[-1][1].append(line)
        continued = line.endswith("\\") and (continued or line.startswith(PROMPT))
    return result


def plain(line: str) -> str:
    """Return a line of output in normal form: numbers, units, bars and blanks are replaced."""
    return " ".join(_BAR.sub("-", _UNIT.sub("unit", _NUMBER.sub("#", line))).split())


def difference(expected: list[str], shown: list[str]) -> str:
    """Return the first ``expected`` line that is missing in ``shown``, in order, or ""."""
    requested = [plain(line) for line in expected]
    rest = [plain(line) for line in shown]
    rest = [line for line in rest if line]
    skips = True  # of what comes before the first line, such as what a first start compiles
    for line in requested:
        if not line:
            continue
        if line == ANY_LINES:
            skips = True
            continue
        at = rest.index(line) if skips and line in rest else 0
        if not rest or rest[at] != line:
            return f"expected {line!r}, got {rest[:3]}"
        rest, skips = rest[at + 1 :], False
    return ""


def commands(text: str) -> list[list[str]]:
    """Return the words of each hpcdist call in a shell block."""
    lines = text.replace("\\\n", " ").splitlines()
    result = []
    for line in lines:
        words = shlex.split(line, comments=True)
        for at in [index for index, word in enumerate(words) if word == "hpcdist" or word.endswith("bin/hpcdist")]:
            call = words[at + 1 :]
            end = next(
                (index for index, word in enumerate(call) if word in ("|", "&&", ";", ">", "2>", "&")), len(call)
            )
            result.append(call[:end])
    return result


def unknown(call: list[str]) -> str:
    """Return the first word of an hpcdist call that is neither a command nor an option, or ""."""
    current: click.Command = group
    reference = _options(group)
    context = click.Context(group, info_name="hpcdist")
    for word in call:
        name = word.split("=")[0].rstrip(";")
        if word == "--":
            return ""
        nested = current.list_commands(context) if isinstance(current, click.Group) else []
        if name in nested or (current.name in ("run", "submit") and name in COMMANDS):
            above = current if name in nested else group
            assert isinstance(above, click.Group)
            child = above.get_command(context, name)
            assert child is not None
            current, reference = child, reference | _options(child)
        elif word.startswith("-") and " " not in word:
            if name not in reference and not re.fullmatch(r"-\d.*|-[a-z]\d+", name):
                return word
        elif current is group:
            return word
    return ""


def _options(command: click.Command) -> set[str]:
    names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return names | {"-h", "--help"}


def figures(page: str) -> list[tuple[str, Path]]:
    """Return the figures of a page that name a result: the number before the comment, and the file."""
    matches = re.findall(r"([\d.]+)[^\d\n]{0,40}<!-- (results/[\w./*-]+) -->", page)
    return [(number.rstrip("."), Path(file)) for number, file in matches]


def rows_of_file(page: str, name: str) -> list[str]:
    """Return the table rows of a page that name a result: by a pattern, with or without suffix, or by folder."""
    rows = {row: re.findall(r"`([^`]+)`", row) for row in page.splitlines() if row.startswith("| ")}
    patterns = {
        row: [each for cell in local_input for each in (cell, f"{cell}*", f"{cell.rstrip('/')}/*")]
        for row, local_input in rows.items()
    }
    return [
        row for row, local_input in patterns.items() if any(fnmatch.fnmatch(name, pattern) for pattern in local_input)
    ]
