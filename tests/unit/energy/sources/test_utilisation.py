"""Node utilisation from trees like /proc and /sys: shares between readings, other processes, and NaN if unknown."""

import math
import os

import numpy as np
import pytest

from hpcdist.energy.sources.utilisation import (
    BYTES,
    COLUMNS,
    SHARES,
    NetworkCounters,
    NodeUtilisation,
    RankProcess,
    this_process,
)

HEAD = "Inter-|   Receive  |  Transmit\n face |bytes packets|bytes packets\n"
KIB = 1024


class Linux:
    """Trees of /proc and /sys that the test changes."""

    def __init__(self, root):
        self.proc, self.sys = root / "proc", root / "sys"
        (self.proc / "net").mkdir(parents=True)
        (self.sys / "class" / "net").mkdir(parents=True)

    def stat(self, *processors):
        """Write the busy and idle ticks of each processor."""
        whole = [sum(pair[place] for pair in processors) for place in range(2)]
        rows = [("cpu ", whole), *((f"cpu{number}", pair) for number, pair in enumerate(processors))]
        lines = [f"{name} {busy} 0 0 {idle} 0 0 0 0 0 0" for name, (busy, idle) in rows]
        (self.proc / "stat").write_text("\n".join([*lines, "intr 5 6 7", "ctxt 8"]) + "\n")

    def meminfo(self, total_kib, available_kib):
        (self.proc / "meminfo").write_text(
            f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"
        )

    def process(self, pid, started, anonymous_kib, shared_kib):
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        words = " ".join(["S", *["1"] * 18, str(started), "0"])
        (folder / "stat").write_text(f"{pid} (python (x) y) {words}\n")
        (folder / "status").write_text(f"RssAnon:\t{anonymous_kib} kB\nRssFile:\t99 kB\nRssShmem:\t{shared_kib} kB\n")

    def interface(self, name, *, device=True, kind="1", bridge=False):
        folder = self.sys / "class" / "net" / name
        folder.mkdir()
        (folder / "type").write_text(f"{kind}\n")
        for word, expected in (("device", device), ("bridge", bridge)):
            if expected:
                (folder / word).mkdir()

    def counters(self, **interfaces):
        rows = [
            f"{name}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0" for name, (sent, received) in interfaces.items()
        ]
        (self.proc / "net" / "dev").write_text(HEAD + "\n".join(rows) + "\n")

    def port(self, name, sent_words, received_words):
        folder = self.sys / "class" / "infiniband" / name / "ports" / "1" / "counters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "port_xmit_data").write_text(f"{sent_words}\n")
        (folder / "port_rcv_data").write_text(f"{received_words}\n")


@pytest.fixture
def linux(tmp_path):
    return Linux(tmp_path)


def rank(pid, started, cpus=(), space=None):
    return RankProcess(pid, str(started), this_process().space if space is None else space, frozenset(cpus))


def columns_of(look):
    return dict(zip(COLUMNS, look.tolist(), strict=True))


def test_cpu_shares_between_two_readings(linux, rng):
    ticks = rng.integers(0, 10**6, (4, 2))
    spent = rng.integers(1, 1000, (4, 2))
    linux.stat(*ticks.tolist())
    watch = NodeUtilisation([rank(1, 1, {0, 2}), rank(2, 1, {2, 3})], proc=linux.proc, sys=linux.sys)
    linux.stat(*(ticks + spent).tolist())
    result = columns_of(watch.look())
    ours = spent[[0, 2, 3]]
    assert result["cpu"] == pytest.approx(ours[:, 0].sum() / ours.sum())
    assert result["node_cpu"] == pytest.approx(spent[:, 0].sum() / spent.sum())
    again = columns_of(watch.look())
    assert math.isnan(again["cpu"]) and math.isnan(again["node_cpu"]), "no time has passed"


def test_decreasing_idle_time_gives_share_of_at_most_1(linux):
    linux.stat((100, 1000))
    watch = NodeUtilisation([rank(1, 1, {0})], proc=linux.proc, sys=linux.sys)
    linux.stat((150, 995))
    assert columns_of(watch.look())["cpu"] == 1


def test_shared_memory_is_counted_once(linux):
    linux.stat((1, 1))
    linux.meminfo(1000, 250)
    linux.process(11, 5, 100, 60)
    linux.process(12, 6, 40, 80)
    linux.process(13, 99, 500, 500)  # another process with the pid of an ended rank
    watch = NodeUtilisation([rank(11, 5), rank(12, 6), rank(13, 7), rank(14, 8)], proc=linux.proc, sys=linux.sys)
    result = columns_of(watch.look())
    assert result["memory_bytes"] == (100 + 40 + 80) * KIB and result["memory"] == pytest.approx(0.22)
    assert result["available_bytes"] == 250 * KIB and result["node_memory"] == pytest.approx(0.75)


def test_pids_of_another_container_are_ignored(linux):
    linux.stat((1, 1))
    linux.meminfo(1000, 250)
    linux.process(11, 5, 100, 60)
    result = columns_of(NodeUtilisation([rank(11, 5, space="pid:[1]")], proc=linux.proc, sys=linux.sys).look())
    assert math.isnan(result["memory"]) and result["node_memory"] == pytest.approx(0.75)


def test_unknown_values_are_nan(tmp_path):
    result = NodeUtilisation([rank(11, 5, {0})], proc=tmp_path, sys=tmp_path).look()
    named = columns_of(result)
    assert all(math.isnan(value) for name, value in named.items() if name != "memory_bytes")
    assert result.dtype == np.float64 and (*SHARES, *BYTES) == COLUMNS


def test_real_machine_reports_plausible_values():
    result = columns_of(NodeUtilisation([this_process()]).look())
    assert result["memory_bytes"] > 1 << 20 and 0 < result["memory"] < 1 and 0 < result["node_memory"] < 1
    assert this_process().pid == os.getpid() and this_process().cpus


def test_network_bytes_count_only_devices(linux):
    for name in ("eth0", "eth1"):
        linux.interface(name)
    for name in ("bond0", "docker0", "veth7", "lo"):
        linux.interface(name, device=False)
    linux.counters(lo=(900, 900), eth0=(10, 20), eth1=(1, 2), bond0=(11, 22), docker0=(5, 5), veth7=(5, 5))
    network = NetworkCounters(linux.proc, linux.sys)
    assert network.read() == (0, 0)
    linux.counters(lo=(9000, 9000), eth0=(110, 220), eth1=(2, 4), bond0=(500, 500), docker0=(50, 50), veth7=(50, 50))
    assert network.read() == (101, 202)


def test_container_interface_without_device_is_counted(linux):
    linux.interface("eth0", device=False)
    linux.interface("br0", device=False, bridge=True)
    linux.counters(eth0=(10, 20), br0=(1, 1))
    network = NetworkCounters(linux.proc, linux.sys)
    linux.counters(eth0=(15, 40), br0=(900, 900))
    assert network.read() == (5, 20)


def test_infiniband_is_counted_in_words_and_ipoib_is_skipped(linux):
    linux.interface("eth0")
    linux.interface("ib0", kind="32")
    linux.counters(eth0=(0, 0), ib0=(0, 0))
    linux.port("mlx5_0", 100, 200)
    linux.port("mlx5_1", 1, 2)
    network = NetworkCounters(linux.proc, linux.sys)
    linux.counters(eth0=(7, 9), ib0=(5000, 5000))
    linux.port("mlx5_0", 1100, 2200)
    assert network.read() == (7 + 4000, 9 + 8000)


def test_reset_network_counter_continues_from_new_value(linux):
    linux.interface("eth0")
    linux.counters(eth0=(1000, 1000))
    network = NetworkCounters(linux.proc, linux.sys)
    for sent, received, expected in ((1500, 1000, (500, 0)), (3, 1010, (500, 10)), (10, 1010, (507, 10))):
        linux.counters(eth0=(sent, received))
        assert network.read() == expected


def test_network_without_interface_is_none(linux):
    linux.counters(lo=(1, 1))
    assert NetworkCounters(linux.proc, linux.sys).read() is None
