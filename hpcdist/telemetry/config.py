"""Configuration of telemetry: the ``[telemetry]`` section of a recipe. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import check_section, finite, must, no_effect, one_of, rule

PROMETHEUS: Final = ("off", "textfile", "http", "push")
PORT: Final = 9464


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Section ``[telemetry]``: outputs of metrics in addition to ``metrics.h5``, and reports of anomalies.

    ``jsonl``: write ``events.jsonl``. ``tensorboard``: write event files for TensorBoard.
    ``prometheus``: "off", "textfile", "http" or "push".
    ``textfile_directory``: for "textfile"; default: ``prometheus`` in the run directory.
    ``port``: for "http", on localhost; 0: any free port. ``gateway``: Pushgateway for "push", as host:port.
    ``nvtx``: mark operations for profilers. ``trace``: record each rank's last operations for `hpcdist trace`.
    ``loss_spike``: report a loss above the median of earlier losses by this number of robust standard deviations.
    ``throughput_drop``: report a speed below (1 - ``throughput_drop``) of the earlier speed. 0 disables a check.
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
        check_section(RULES, "telemetry", self)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535


RULES: Final = (
    one_of("telemetry.prometheus", PROMETHEUS),
    *(
        no_effect(f"telemetry.{name}", getattr(TelemetryConfig, name), "telemetry.prometheus", [mode])
        for name, mode in (("textfile_directory", "textfile"), ("port", "http"), ("gateway", "push"))
    ),
    must("telemetry.port", lambda port: 0 <= port <= 65535, "it must be between 0 (any free port) and 65535"),
    rule(
        "telemetry.gateway? where telemetry.prometheus=push",
        cure="it must be the host:port of a Pushgateway, such as 'login1:9091'",
        relation=lambda text: not _is_address(text),
    ),
    finite("telemetry.loss_spike", lambda spike: spike >= 0, "at least 0 (never)"),
    must("telemetry.throughput_drop", lambda drop: 0 <= drop < 1, "it must be at least 0 (never) and below 1"),
)
