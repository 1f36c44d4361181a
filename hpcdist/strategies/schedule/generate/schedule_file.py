"""The schedule file: a schedule as text that can be written by hand, or written out, changed and read back.

    # 1F1B of two ranks and three micro-batches
    placement = looped
    chunks = 1
    F0.0 F1.0 B0.0 F2.0 B1.0 B2.0
    F0.0 B0.0 F1.0 B1.0 F2.0 B2.0

``placement`` is ``looped`` or ``folded`` (see `placement`), ``chunks`` how many every rank has. Then comes a line for
each rank of the pipeline, from 0, with its passes in their order: a letter, the micro-batch and the rank's own chunk,
both counted from 0 (".0" may be left out). F forward; B backward; or, split, I the gradient of the input and later W
those of the weights. A line that ends with a backslash goes on in the next one; what follows a # is not read.

What is read is proven (`hpcdist.strategies.schedule.verify.pass_order.prove`): every micro-batch of the run goes
through every chunk, once, and no rank waits in a circle. Gradients of micro-batches are added as their B, or W, come:
in another order than 0, 1, 2 ... sums round differently than in other schedules.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.strategies.schedule.generate.passes import LETTERS, Pass, Passes, spell
from hpcdist.strategies.schedule.generate.registry import SCHEDULES, check_schedule
from hpcdist.strategies.schedule.placement import StagePlacement, folded, looped
from hpcdist.strategies.schedule.verify import pass_order

PLACEMENTS: Final = {"looped": looped, "folded": folded}
_PASSES: Final = {letter: way for way, letter in LETTERS.items()}
_TOKEN: Final = re.compile(rf"([{''.join(_PASSES)}])(\d+)(?:\.(\d+))?")
_LINE: Final = 110  # characters


@dataclass(frozen=True)
class ScheduleText:
    """What a file has: the name of its placement, the chunks of every rank, and the passes of each."""

    placement: str
    chunks: int
    passes: tuple[Passes, ...]

    @property
    def splits(self) -> bool:
        """Whether a backward is done in two passes."""
        return any(way is Pass.BACKWARD_WEIGHT for steps in self.passes for way, _, _ in steps)

    @property
    def keeps(self) -> bool:
        """Whether activations cannot be dropped: for a second pass, or as the input of a neighbouring chunk."""
        return self.splits or self.placement == "folded"

    def place(self, parts: Sequence[range]) -> StagePlacement:
        """Return the placement of ``parts`` of consecutive units, `chunks` for each rank."""
        return PLACEMENTS[self.placement](parts, len(self.passes))


def read(text: str, ranks: int, microbatches: int, name: str = "the schedule file") -> ScheduleText:
    """Return the schedule in ``text``, the contents of the file ``name`` (local).

    Raises ConfigurationError, with line, rank and token, where it is not one of ``ranks`` and ``microbatches``.
    """
    header: dict[str, str] = {}
    passes: list[Passes] = []
    lines: list[str] = []
    for number, line in _lines(text):
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals:
            if key not in ("placement", "chunks") or key in header or passes:
                raise ConfigurationError(
                    f"{name}, line {number}: {line!r}; before the ranks, and once each, come placement = looped or "
                    "folded, and chunks = their number on every rank"
                )
            header[key] = value
        else:
            lines.append(f"{name}, line {number}, rank {len(passes)}")
            passes.append([_pass(token, lines[-1]) for token in line.split()])
    placement, chunks = header.get("placement", "looped"), header.get("chunks", "1")
    if placement not in PLACEMENTS or not chunks.isdecimal() or int(chunks) < 1:
        raise ConfigurationError(
            f"{name}: placement = {placement}, chunks = {chunks}; the first is looped or folded, the second 1 or more"
        )
    if placement == "folded" and chunks != "2":
        raise ConfigurationError(
            f"{name}: placement = folded with chunks = {chunks}; forth and back is 2 on every rank"
        )
    if len(passes) != ranks:
        raise ConfigurationError(f"{name} has the passes of {len(passes)} ranks, one a line; the pipeline has {ranks}")
    if int(chunks) > min(map(len, passes)):
        raise ConfigurationError(
            f"{name}: chunks = {chunks}, more than the {min(map(len, passes))} passes of a rank; every micro-batch "
            "goes through each of them"
        )
    found = ScheduleText(placement, int(chunks), tuple(passes))
    units = [range(unit, unit + 1) for unit in range(ranks * found.chunks)]
    try:
        pass_order.prove(passes, found.place(units), microbatches, lines)
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error  # whoever wrote the file can change it
    return found


def generated(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> ScheduleText:
    """Return one of `SCHEDULES` as if it had been read (local). Raises ConfigurationError where it cannot run so."""
    chunks = check_schedule(schedule, ranks, microbatches, chunks)
    row = SCHEDULES[schedule]
    passes = tuple(row.passes(rank, ranks, microbatches, chunks) for rank in range(ranks))
    return ScheduleText("folded" if row.folded else "looped", chunks, passes)


def dump(written: ScheduleText, comment: str = "") -> str:
    """Return the text that `read` takes back."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"placement = {written.placement}", f"chunks = {written.chunks}"]
    for steps in written.passes:
        row = ""
        for token in map(spell, steps):
            if len(row) + len(token) > _LINE:
                lines.append(f"{row} \\")
                row = " "
            row += f" {token}" if row else token
        lines.append(row)
    return "\n".join(lines) + "\n"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, line) of all that are not empty, those that go on joined."""
    begun, first = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.partition("#")[0].strip()
        first = first or number
        begun += " " + line.removesuffix("\\")
        if not line.endswith("\\"):
            if begun.strip():
                yield first, begun.strip()
            begun, first = "", 0


def _pass(token: str, where: str) -> tuple[Pass, int, int]:
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise ConfigurationError(
            f"{where}: {token!r} is no pass; one is F, B, I or W, a micro-batch and a chunk of the rank, as F3.1"
        )
    letter, microbatch, chunk = found.groups(default="0")
    return _PASSES[letter], int(microbatch), int(chunk)
