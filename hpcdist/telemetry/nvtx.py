"""NVTX ranges around what a rank does, for Nsight Systems and other profilers that read them.

`NvtxRanges` makes a range by phase and name. It is coloured by its phase, as in every picture of a step, and lies in a
domain of its own. Without a profiler a range costs less than a microsecond.
"""

from contextlib import AbstractContextManager
from typing import Any, Final

from hpcdist.errors import MissingCapabilityError

DOMAIN: Final = "hpcdist"
COLORS: Final = {
    "compute": 0x4E79A7,
    "communication": 0xF28E2B,
    "update": 0x59A14F,
    "data": 0xEDC948,
    "checkpoint": 0xB07AA1,
    "validation": 0x76B7B2,
    "other": 0xBAB0AC,
    "step": 0x9C755F,
}  # RGB by phase; the same ones in every picture of a step
assert all(color <= 0xFFFFFF for color in COLORS.values())


class NvtxRanges:
    """Ranges of one rank: pushed and popped on the thread that enters them, in a domain of their own.

    Raises MissingCapabilityError where the package is absent.
    """

    def __init__(self, domain: str = DOMAIN) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise MissingCapabilityError(
                f"telemetry.nvtx needs the package nvtx: pip install 'hpcdist[trace]', or set telemetry.nvtx = false "
                f"({error})"
            ) from error
        self._annotate: Any = nvtx.annotate
        self._domain = domain
        # A tool keeps every text for ever. There are as many as different operations in a step: no step is in them.
        self._known: dict[tuple[str, str, int, int], AbstractContextManager[object, bool | None]] = {}

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return the range of what is called ``name``, coloured by its ``phase`` (local)."""
        annotation = self._known.get((phase, name, microbatch, unit))
        if annotation is None:
            annotation = self._annotate(
                label(name, microbatch, unit), color=COLORS[phase], domain=self._domain, category=phase
            )
            self._known[phase, name, microbatch, unit] = annotation
        return annotation


def label(name: str, microbatch: int = -1, unit: int = -1) -> str:
    """Return the text of a range: "FORWARD microbatch 0 unit 3"; without the numbers that are -1."""
    numbers = (("microbatch", microbatch), ("unit", unit))
    return " ".join([name, *(f"{of} {number}" for of, number in numbers if number >= 0)])
