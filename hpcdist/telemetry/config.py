"""Configuration of telemetry: the ``[telemetry]`` section of a recipe. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import no_effect, rule
from hpcdist.reporting.schema import check_section, key

PROMETHEUS: Final = ("off", "textfile", "http", "push")
PORT: Final = 9464


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Recipe section ``[telemetry]``: outputs of metrics in addition to ``metrics.h5``, and reports of anomalies."""

    jsonl: bool = key(False, "Write events.jsonl in the run directory.")
    tensorboard: bool = key(False, "Write TensorBoard event files in the run directory.")
    prometheus: str = key(
        "off", "Export to Prometheus: as a file for node_exporter, by HTTP, or to a Pushgateway.", choices=PROMETHEUS
    )
    textfile_directory: str = key(
        "", 'Directory that node_exporter reads. "": prometheus/ in the run directory.', path=True
    )
    port: int = key(PORT, "Port of the exporter. 0: any free port.", ge=0, le=65535)
    gateway: str = key("", 'Pushgateway, as "host:port".')
    nvtx: bool = key(False, "Mark operations for NVIDIA's profilers.")
    trace: bool = key(True, "Record the last operations of each rank, for `hpcdist trace`.")
    loss_spike: float = key(5.0, "Report a loss this many robust standard deviations above the median. 0: never.", ge=0)
    throughput_drop: float = key(0.5, "Report a drop of the speed by this fraction. 0: never.", ge=0, lt=1)

    def __post_init__(self) -> None:
        check_section(RULES, "telemetry", self)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535


RULES: Final = (
    *(
        no_effect(f"telemetry.{name}", getattr(TelemetryConfig, name), "telemetry.prometheus", [mode])
        for name, mode in (("textfile_directory", "textfile"), ("port", "http"), ("gateway", "push"))
    ),
    rule(
        "telemetry.gateway? where telemetry.prometheus=push",
        cure="it must be the host:port of a Pushgateway, such as 'login1:9091'",
        relation=lambda text: not _is_address(text),
    ),
)
