"""What a person sees while a run goes on: a bar on a terminal, one line every few seconds in a log."""

import sys
import time

from tqdm import tqdm


class Progress:
    """Console of rank 0; the other ranks are silent.

    ``first`` is the step from which this process goes on, ``every_s`` the seconds between two lines of a log.
    """

    def __init__(self, steps: int, first: int, every_s: float, shown: bool) -> None:
        self._steps, self._first, self._every_s, self._shown = steps, first, every_s, shown
        self._start = self._last = time.monotonic()
        self._targets = 0
        terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=first, unit="step", file=sys.stderr, leave=True) if terminal else None

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def step(self, done: int, loss: float, targets: int, communication: float) -> None:
        """Report that ``done`` steps are complete; ``targets`` were predicted in the last, by all ranks together.

        Those whose gradient came too late are none of them. The rate that is shown is the mean since this start, the
        first step included, which compiles; reports and benchmarks leave that one out.

        ``communication`` is the share of its time that the last step spent in messages.
        """
        if not self._shown:
            return
        self._targets += targets
        now = time.monotonic()
        rate = self._targets / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s, comm {communication:.0%}", refresh=False)
            self._bar.update(1)
        elif now - self._last >= self._every_s or done in (self._first + 1, self._steps):
            self._last = now
            remaining = (self._steps - done) * (now - self._start) / (done - self._first)
            print(
                f"step {done}/{self._steps}  loss {loss:.4f}  {rate:,.0f} tokens/s  comm {communication:.0%}  "
                f"ETA {remaining:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
