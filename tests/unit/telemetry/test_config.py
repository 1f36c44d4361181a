"""The telemetry section of a recipe rejects values without effect."""

import math

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.telemetry.config import TelemetryConfig


@cases(
    "values, message",
    ({"prometheus": "pull"}, "choose one of off, textfile, http, push"),
    ({"port": 9000}, "no effect with telemetry.prometheus = 'off'"),
    ({"prometheus": "http", "textfile_directory": "there"}, "set telemetry.prometheus = 'textfile'"),
    ({"prometheus": "http", "port": 65536}, "port = 65536"),
    ({"prometheus": "push"}, "host:port"),
    ({"prometheus": "push", "gateway": "login1"}, "host:port"),
    ({"prometheus": "push", "gateway": "login1:0"}, "host:port"),
    ({"loss_spike": -1.0}, "loss_spike"),
    ({"loss_spike": math.nan}, "loss_spike"),
    ({"throughput_drop": 1.0}, "throughput_drop"),
)
def test_invalid_telemetry_values_are_rejected(values, message):
    with pytest.raises(ConfigurationError, match=message):
        TelemetryConfig(**values)


def test_valid_telemetry_values_are_accepted():
    assert TelemetryConfig(prometheus="push", gateway="login1:9091").gateway == "login1:9091"
    assert TelemetryConfig(prometheus="http", port=0).port == 0
