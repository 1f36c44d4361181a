"""Looks for the first value that is not finite, while a step that has gone wrong is computed once more."""

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Scalar
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import clip


class Watch:
    """Asleep until `begin`; then it remembers where this rank's own work first went wrong. Local."""

    def __init__(self) -> None:
        self._awake = False
        self._found: str | None = None

    def begin(self, parameters: FlatStore) -> None:
        """Wake up, with a look at what this rank keeps."""
        tensor = clip.first_nonfinite(parameters)
        self._found = f"parameter {tensor}" if tensor else None
        self._awake = True

    def end(self) -> str | None:
        """Go back to sleep; return what was found first."""
        self._awake = False
        return self._found

    def look(self, what: str, values: Scalar) -> None:
        """Look at ``values``, which this rank has computed."""
        if self._awake and self._found is None and not _finite(values):
            self._found = what

    def look_at_gradients(self, store: FlatStore, part: Range) -> None:
        """Look at the gradients of the tensors in ``part``."""
        if self._awake and self._found is None:
            for segment, touched in store.layout.within(part):
                self.look(f"gradient of {segment.key}", store.range(touched))

    def sees_only_finite(self, values: Array) -> bool:
        """Whether this rank is looking, and ``values``, which it has computed, are as they should be."""
        return self._awake and _finite(values)

    def distrust(self, values: Array) -> None:
        """Stop looking when ``values``, which came from another rank, are bad: what follows is not this rank's."""
        if self._awake and not _finite(values):
            self._awake = False


def _finite(values: Scalar) -> bool:
    return bool(backend.namespace(values).isfinite(values).all())
