"""Configuration of telemetry: the ``[telemetry]`` section of a recipe. Imports nothing but the errors."""

import math
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

PROMETHEUS: Final = ("off", "textfile", "http", "push")
PORT: Final = 9464
# Keys with one place each: elsewhere they would have no effect.
_OF_MODE: Final = {"textfile_directory": "textfile", "port": "http", "gateway": "push"}


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Section ``[telemetry]``: the sinks of a run's figures beside ``metrics.h5``, and those that are printed.

    ``jsonl`` writes ``events.jsonl``, ``tensorboard`` event files, both into the run directory. ``prometheus`` is
    "off", "textfile" (for a node_exporter that looks into ``textfile_directory``; "": the directory ``prometheus`` of
    the run), "http" (an exporter on ``port`` of this machine's own address, 0: any free one) or "push" (to the
    Pushgateway at ``gateway``, host:port). ``nvtx`` marks the operations of a step for profilers. ``trace`` keeps the
    last operations of each rank with their times, for `hpcdist trace`.

    A loss is reported as a spike where it is more than ``loss_spike`` robust standard deviations above the median of
    those before (0: never); a drop of throughput, where tokens/s are below (1 - ``throughput_drop``) of what they were
    (0: never).
    """

    jsonl: bool = False
    tensorboard: bool = False
    prometheus: str = "off"
    textfile_directory: str = ""
    port: int = PORT
    gateway: str = ""
    nvtx: bool = False
    trace: bool = True
    loss_spike: float = 5.0
    throughput_drop: float = 0.5

    def __post_init__(self) -> None:
        if self.prometheus not in PROMETHEUS:
            raise ConfigurationError(
                f"telemetry.prometheus = {self.prometheus!r}; choose one of {', '.join(PROMETHEUS)}"
            )
        for name, mode in _OF_MODE.items():
            if getattr(self, name) != getattr(TelemetryConfig, name) and self.prometheus != mode:
                raise ConfigurationError(
                    f"telemetry.{name} = {getattr(self, name)!r} has no effect with telemetry.prometheus = "
                    f"{self.prometheus!r}; remove it, or choose {mode!r}"
                )
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"telemetry.port = {self.port}; it must be between 0 (any free one) and 65535")
        if self.prometheus == "push" and not _is_address(self.gateway):
            raise ConfigurationError(
                f"telemetry.gateway = {self.gateway!r}; it must be the host:port of a Pushgateway, such as "
                "'login1:9091'"
            )
        if not (math.isfinite(self.loss_spike) and self.loss_spike >= 0):
            raise ConfigurationError(
                f"telemetry.loss_spike = {self.loss_spike}; it must be finite and at least 0 (never)"
            )
        if not 0 <= self.throughput_drop < 1:
            raise ConfigurationError(
                f"telemetry.throughput_drop = {self.throughput_drop}; it must be at least 0 (never) and below 1"
            )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535
