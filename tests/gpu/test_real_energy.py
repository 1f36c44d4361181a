"""The energy counter of a real GPU compared with its integrated power, and the output of the command line for both."""

import json
import sys
import time

import pytest

from harness import jobs
from hpcdist.arrays.gpu import device
from hpcdist.energy.sources import nvml
from hpcdist.energy.sources.counters import CounterReader, IntegratedPower
from hpcdist.errors import MissingCapabilityError

WATCHED_S = 60.0
EVERY_S = 0.02
APART = 0.05


@pytest.fixture
def driver():
    """The real NVIDIA driver. A container may have a GPU without the driver's library for measurements."""
    try:
        opened = nvml.NvmlDriver()
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    with opened:
        yield opened


def test_counter_and_integrated_power_agree_over_a_minute(cupy, driver):
    """The GPU multiplies without a pause. A sensor that samples only a part of the time measures such a load well."""
    uuid = driver.at(device.bus_id())
    counter, sensor = driver.counter(uuid, 1, EVERY_S), driver.sensor(uuid)
    if not sensor.field or isinstance(counter, IntegratedPower):
        pytest.skip(f"{counter.about.model} has no counter of energy, or tells no power")
    power = IntegratedPower(uuid, sensor.power_mw, counter.about, EVERY_S)
    one = cupy.random.random((4096, 4096), dtype=cupy.float32)
    other = cupy.empty_like(one)
    counted, integrated, began_s = CounterReader(counter), CounterReader(power), time.monotonic()
    first_mj = then_mj = None
    while time.monotonic() - began_s < WATCHED_S:
        cupy.matmul(one, one, out=other)
        device.synchronise()
        now_ns = time.monotonic_ns()
        energy_mj, power_mj = counted.read(now_ns), integrated.read(now_ns)
        if time.monotonic() - began_s < 2:  # until it is as warm, and draws as much, as it will
            first_mj, then_mj = energy_mj, power_mj
        time.sleep(EVERY_S / 10)
    assert not counted.explain() and not integrated.explain()
    assert None not in (first_mj, then_mj, energy_mj, power_mj)
    by_counter_j, by_power_j = (energy_mj - first_mj) / 1e3, (power_mj - then_mj) / 1e3
    print(f"{counter.about.model}: {by_counter_j:.1f} J counted, {by_power_j:.1f} J of its {sensor.field} power")
    assert by_counter_j > WATCHED_S, "a GPU at work draws more than a watt"
    assert by_power_j == pytest.approx(by_counter_j, rel=APART)
    assert 0.0 <= sensor.use() <= 1.0 and 0 < sensor.memory_share() <= 1


def test_energy_commands_list_and_watch_the_gpu(driver):
    uuid = driver.at(device.bus_id())
    line = [sys.executable, "-m", "hpcdist", "energy", "sources", "--json"]
    done = jobs.run(line, check=True)
    row = next(row for row in json.loads(done.stdout)["sources"] if row["name"] == uuid)
    assert row["readable"] or row["reason"]
    watched = jobs.run([*line[:-2], "watch", "--seconds", "3"])
    assert watched.returncode == (0 if row["readable"] else 69) and (uuid in watched.stdout) is row["readable"]
