"""Cluster descriptions: shipped files are consistent and name their sources; errors name the wrong field."""

import dataclasses
import re
import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import (
    Cluster,
    ClusterNode,
    ClusterSite,
    ClusterStorage,
    Device,
    EfficiencyCurve,
    FailureRates,
    LinkLevel,
    MeasuredFit,
)
from hpcdist.reporting.schema import fields_of

GPUS = (
    *("v100-dgx2", "a100-selene", "h100-hgx", "h200-hgx", "mi250x-frontier"),
    *("h100-96gb", "gh200", "b200-dgx", "gb200-nvl72", "gb300-nvl72", "mi300x"),
)
GOOD = toml_file.FOLDER / "v100-dgx2.toml"


def read(text):
    return toml_file.of_tree(tomllib.loads(text), "mine.toml")


def test_expected_clusters_are_shipped():
    assert set(toml_file.names()) == {*GPUS, "workstation"}


@pytest.mark.parametrize("name", toml_file.names())
def test_shipped_clusters_survive_a_dump(name):
    cluster = toml_file.read(name)
    assert cluster.name == name
    assert read(toml_file.dump(cluster)) == cluster
    assert hash((cluster.node, cluster.levels, cluster.storage, cluster.failures, cluster.site))


@pytest.mark.parametrize("name", toml_file.names())
def test_shipped_clusters_name_the_source_of_each_section(name):
    cluster = toml_file.read(name)
    sections = {"device", "matmul", "node", "level", "storage", "failures", "site"}
    assert set(cluster.sources) == sections | ({"fit"} if cluster.fits else set())
    assert all(len(output) > 20 for output in cluster.sources.values())
    flags = toml_file.assumptions(cluster)
    assert flags and all("assumption" in flag for flag in flags)
    assert sum(map(len, flags)) < sum(map(len, cluster.sources.values())), "and not all of it is assumed"


@cases(
    "name, kind, peak, memory_gib, devices_a_node",
    ("v100-dgx2", "float16", 125e12, 32, 16),
    ("a100-selene", "bfloat16", 312e12, 80, 8),
    ("h100-hgx", "bfloat16", 989.4e12, 80, 8),
    ("h200-hgx", "bfloat16", 989.4e12, 143771 / 1024, 8),
    ("mi250x-frontier", "bfloat16", 191.5e12, 64, 8),
    ("h100-96gb", "bfloat16", 989.4e12, 95, 8),
    ("gh200", "float8", 1978.9e12, 95, 4),
    ("b200-dgx", "float8", 4500e12, 180e9 / 2**30, 8),
    ("gb200-nvl72", "bfloat16", 2500e12, 186e9 / 2**30, 4),
    ("gb300-nvl72", "bfloat16", 2500e12, 279e9 / 2**30, 4),
    ("mi300x", "bfloat16", 1307.4e12, 192, 8),
)
def test_peaks_are_dense_and_memory_sizes_are_binary(name, kind, peak, memory_gib, devices_a_node):
    cluster = toml_file.read(name)
    assert cluster.device.peak_flops[kind] == peak
    assert cluster.device.memory_bytes == memory_gib * 2**30
    assert cluster.node.devices == devices_a_node
    assert cluster.nodes * devices_a_node == cluster.devices


def test_volta_has_no_bfloat16():
    assert "bfloat16" not in toml_file.read("v100-dgx2").device.peak_flops


@cases(
    "name, nominal",
    ("v100-dgx2", (150e9, 6.25e9)),
    ("a100-selene", (300e9, 25e9)),
    ("h100-hgx", (450e9, 50e9)),
    ("h200-hgx", (450e9, 50e9)),
    ("mi250x-frontier", (200e9, 100e9, 12.5e9)),
    ("h100-96gb", (450e9, 50e9)),
    ("gh200", (150e9, 25e9)),
    ("b200-dgx", (900e9, 50e9)),
    ("gb200-nvl72", (900e9, 50e9)),
    ("gb300-nvl72", (900e9, 100e9)),
    ("mi300x", (448e9, 50e9)),
)
def test_link_bandwidth_is_a_share_of_the_nominal_bandwidth(name, nominal):
    levels = toml_file.read(name).levels
    for level, most in zip(levels, nominal, strict=True):
        assert 0.65 * most <= level.bytes_per_s <= 0.97 * most
    assert levels[-1].devices == 0
    assert [inner.latency_s <= outer.latency_s for inner, outer in pairwise(levels)] == [True] * (len(levels) - 1)


@pytest.mark.parametrize("name", toml_file.names())
def test_efficiency_curves_rise_and_stay_below_95_percent(name):
    for kind, curve in toml_file.read(name).device.matmul.items():
        assert list(curve.shares) == sorted(curve.shares), kind
        assert curve.shares[-1] <= 0.95


def test_cluster_is_read_from_a_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.read_text())
    assert toml_file.read(str(path)) == toml_file.read("v100-dgx2")


def test_error_for_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match="no cluster 'a100-seline'; the nearest is 'a100-selene'; choose"):
        toml_file.read("a100-seline")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"none\.toml: there is no such file"):
        toml_file.read(str(tmp_path / "none.toml"))


def test_name_with_nul_byte_is_rejected():
    with pytest.raises(ConfigurationError, match="is not a valid path of a file"):
        toml_file.read("mi\0ne.toml")


def test_directory_in_place_of_a_file_is_rejected(tmp_path):
    with pytest.raises(StorageError, match="cannot be read: Is a directory"):
        toml_file.read(f"{tmp_path}/")


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"a = " + b"9" * 5000, b"a = " + b"[" * 50_000])
def test_file_with_invalid_toml_is_named(tmp_path, content):
    path = tmp_path / "odd.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"odd\.toml is not valid TOML"):
        toml_file.read(str(path))


MISTAKES = [
    # old, new, what the message says
    ('memory = "32 GiB"', "", 'device.memory is missing; expected for example "80 GiB"'),
    ('memory = "32 GiB"', "memory = 34359738368", "device.memory is 34359738368, without a unit"),
    ('memory = "32 GiB"', 'memory = "32 GB/s"', "the unit of '32 GB/s' is invalid: 'GB/s' is a unit"),
    ('memory = "32 GiB"', 'memory = "32 Gib"', "device.memory: the unit of '32 Gib' is invalid: unknown unit"),
    ('memory = "32 GiB"', 'memory = "32 kB"', "device.memory of 32 kB is not plausible; expected 64 MB to 64 TB"),
    ('memory = "32 GiB"', 'memroy = "32 GiB"', "unknown field device.memroy; the nearest known is 'memory'"),
    ('reserved = "1.5 GiB"', 'reserved = "33 GiB"', "device.reserved of 35.4 GB must be less than device.memory"),
    ('memory_bandwidth = "900 GB/s"', 'memory_bandwidth = "900 GB"', "'GB' is a unit for a number of bytes"),
    ('float16 = "125 TFLOP/s"', 'float16 = "125 GFLOP/s"', "device.flops.float16 of 125 GFLOP/s is not plausible"),
    ('float16 = "125 TFLOP/s"', "float16 = 125", "device.flops.float16 is 125, without a unit"),
    ('float16 = "125 TFLOP/s"', 'floot16 = "125 TFLOP/s"', "device.flops.floot16; the nearest known is 'float16'"),
    ('float16 = "125 TFLOP/s"', "", "device.flops.float16 is missing: device.matmul has a curve for float16"),
    ("[device.matmul.float16]", "[device.matmul.bfloat16]", "device.matmul.float16 is missing"),
    ("[device.flops]", "[device.floaps]", "unknown field device.floaps; the nearest known is 'flops'"),
    ("memory_share = 0.88", "memory_share = 88", "device.memory_share of 88 is not plausible; expected 0.01 to 1"),
    ("memory_share = 0.88", 'memory_share = "0.88"', "expected a number without quotes"),
    ("0.69, 0.755, 0.79]", "0.69, 0.755]", "device.matmul.float16 has 7 sizes and 6 shares"),
    (
        "0.69, 0.755, 0.79]",
        "0.69, 0.755, 86]",
        "device.matmul.float16.shares[6] of 86 is not plausible; expected 1e-06",
    ),
    ("0.69, 0.755, 0.79]", '0.69, 0.755, "a"]', "device.matmul.float16.shares[6] is 'a'; expected a number"),
    ("2048, 4096, 8192]", "4096, 2048, 8192]", "device.matmul.float16.sizes has the value 2048 after 4096"),
    ("2048, 4096, 8192]", "2048, 4096, inf]", "device.matmul.float16.sizes[6] of inf is not plausible"),
    ("2048, 4096, 8192]", "2048, 4096, nan]", "device.matmul.float16.sizes[6] of nan is not plausible"),
    ("sizes = [128", "sizes = [0", "device.matmul.float64.sizes[0] of 0 is not plausible; expected 1 to"),
    ('idle = "60 W"', 'idle = "400 W"', "device.idle of 400 W is more than device.peak of 350 W"),
    ('peak = "350 W"', 'peak = "350 kW"', "device.peak of 350 kW is not plausible"),
    ("[node]\ndevices = 16", "[node]", "node.devices is missing"),
    ("[node]\ndevices = 16", "[node]\ndevices = 16.0", "node.devices is 16.0; expected a count"),
    ("[node]\ndevices = 16", "[node]\ndevices = true", "node.devices is True; expected a count"),
    ("[node]\ndevices = 16", "[nodes]\ndevices = 16", "unknown field nodes; the nearest known is 'node'"),
    ("[storage]", "[storag]", "unknown field storag; the nearest known is 'storage'"),
    ('node_write = "5 GB/s"', 'node_write = "500 GB/s"', "storage.node_write of 500 GB/s is more than storage.write"),
    ('node_mtbf = "154 days"', 'node_mtbf = "154 s"', "failures.node_mtbf of 154 s is not plausible; expected 1 h"),
    ('restart = "10 min"', "", 'failures.restart is missing; expected for example "5 us"'),
    ("pue = 1.25", "pue = 0.8", "site.pue of 0.8 is not plausible; expected 1 to 5"),
    ("pue = 1.25", "pue = 1.25\nkwh_price = 0.2", "the cluster file has a price but no site.currency"),
    ('carbon = "481 g/kWh"', 'carbon = "481 kg/kWh"', "site.carbon of 481 kg/kWh is not plausible"),
    ("carbon_source = ", "carbon_sauce = ", "unknown field site.carbon_sauce; the nearest known is 'carbon_source'"),
    ('bandwidth = "120 GB/s"', 'bandwidth = "960 Gb/s"', "level 1: bandwidth: the unit of '960 Gb/s' is"),
    ('bandwidth = "120 GB/s"', 'bandwidth = "5 GB/s"', "levels must be sorted from the fastest links outwards"),
    ('bandwidth = "120 GB/s"', 'bandwidht = "120 GB/s"', "unknown field level 1: bandwidht; the nearest known is"),
    ('name = "NVLink"\ndevices = 16', 'name = "NVLink"\ndevices = 0', "only the last level may have devices = 0"),
    ('latency = "14 us"', 'latency = "14 s"', "level 2: latency of 14 s is not plausible; expected 10 ns to 100 ms"),
    ('alone_bandwidth = "11.8 GB/s"', 'alone_bandwidth = "1 GB/s"', "must be at least its bandwidth"),
    ("devices = 0", "devices = 32", "the last level 'EDR InfiniBand' joins 32 devices, but the cluster has 400"),
    (
        "devices = 0",
        "devices = 24",
        "do not nest: each level must hold at least two complete groups of the level before",
    ),
    ("devices = 0", "devices = 8", "do not nest"),
    ('name = "EDR InfiniBand"', 'name = "NVLink"', "two [[level]] sections have the name 'NVLink'"),
    ("[node]\ndevices = 16", "[node]\ndevices = 12", "level 'NVLink' joins 16 devices, but a node has 12"),
    ("devices = 400", "devices = 0", "devices of 0 is not plausible; expected 1 to"),
    ("devices = 400", 'devices = "400"', "devices is '400'; expected a count without quotes"),
    ('name = "v100-dgx2"', "name = 7", "name is 7; expected a text"),
    ("\n[sources]", "\n[sauces]", "unknown field sauces; the nearest known is 'sources'"),
    ("\n[sources]\ndevice", "\n[sources]\ndevise", "unknown field sources.devise; the nearest known is 'device'"),
]


@pytest.mark.parametrize(("old", "new", "output"), MISTAKES)
def test_invalid_field_is_named(old, new, output):
    text = GOOD.read_text()
    assert text.count(old) >= 1
    with pytest.raises(ConfigurationError) as caught:
        read(text.replace(old, new, 1))
    assert str(caught.value).startswith("mine.toml: ")
    assert output in str(caught.value)


def test_implausibly_slow_memory_is_rejected():
    text = GOOD.read_text().replace('"32 GiB"', '"32 TiB"').replace('"900 GB/s"', '"9 GB/s"')
    with pytest.raises(ConfigurationError, match="reading the memory of 35.2 TB once would take more than 1000 s"):
        read(text)


@pytest.mark.parametrize("section", ["device", "node", "storage", "failures", "level"])
def test_missing_section_is_named(section):
    tree = tomllib.loads(GOOD.read_text())
    del tree[section]
    with pytest.raises(ConfigurationError, match=rf"the section \[+{section}\]+ is missing"):
        toml_file.of_tree(tree, "mine.toml")


@pytest.mark.parametrize(("section", "value"), [("device", 3), ("level", 3), ("level", [3]), ("site", "x")])
def test_section_of_a_wrong_type_is_rejected(section, value):
    tree = tomllib.loads(GOOD.read_text())
    tree[section] = value
    with pytest.raises(ConfigurationError, match=rf"{section} is .*; expected (a section|sections)"):
        toml_file.of_tree(tree, "mine.toml")


def test_cluster_without_prices_and_sources_is_read():
    tree = tomllib.loads(GOOD.read_text())
    del tree["site"], tree["sources"]
    cluster = toml_file.of_tree(tree, "mine.toml")
    assert cluster.site.pue is None and cluster.site.carbon_g_per_kwh is None
    assert toml_file.assumptions(cluster) == ()
    assert read(toml_file.dump(cluster)) == cluster


FITS = (
    MeasuredFit(
        operation="allreduce",
        ranks=2,
        until_bytes=(65536.0, 67108864.0),
        latency_s=(8.4e-6, 0.0),
        s_per_byte=(1 / 3e9, 1.83e-10),
        algorithm="ring",
        level="EDR InfiniBand",
        from_bytes=4096.0,
        error=0.0731,
        library="mpi",
    ),
    MeasuredFit(operation="message", ranks=2, until_bytes=(1e6,), latency_s=(1e-6,), s_per_byte=(1e-10,)),
)


def test_measured_fits_survive_a_dump():
    cluster = dataclasses.replace(toml_file.read("v100-dgx2"), fits=FITS, calibrated='by "us" on\t2026-11-22\nin C:\\x')
    assert read(toml_file.dump(cluster)) == cluster


def test_numpy_numbers_are_dumped_as_numbers():
    cluster = toml_file.read("workstation")
    curve = EfficiencyCurve(sizes=tuple(np.array([16.0, 64.0])), shares=tuple(np.array([0.25, 0.5])))
    device = dataclasses.replace(
        cluster.device,
        matmul={"float32": curve},
        peak_flops={"float32": np.float64(140e9)},
        memory_share=np.float64(0.75),
        memory_bytes_per_s=np.float64(1.23456789e10),
    )
    changed = dataclasses.replace(cluster, device=device, devices=np.int64(2))
    assert read(toml_file.dump(changed)) == changed


@cases(
    "old, new, output",
    ('operation = "allreduce"', 'operation = "allredoos"', "fit 1 has the unknown operation 'allredoos'; choose"),
    ("ranks = 2", "ranks = 0", "fit 1: ranks of 0 is not plausible"),
    (
        "until = [",
        'until = ["3 GB", ',
        "fit 1 has 3 values of `until`, 2 of `latency` and 2 of `slowness`; expected one value of each",
    ),
    ('"1 MB"]', "[]]", "fit 2: until[0] is [], without a unit"),
    ('level = "EDR', 'level = "HDR', "fit 1 has the unknown level 'HDR InfiniBand'; choose one of NVLink"),
    ("from = ", 'from = "1 TB"\n# ', "`from` of fit 1 is 1 TB, but must be at most the last value"),
    ('library = "mpi"', 'library = "gloo"', "fit 1 has the unknown library 'gloo'; choose mpi, nccl, or omit"),
    ("from = ", "form = ", "unknown field fit 1: form; the nearest known is 'from'"),
    ('slowness = ["100 ps/B"]', 'slowness = "100 ps/B"', "fit 2: slowness is '100 ps/B'; expected a list"),
)
def test_invalid_fit_is_rejected(old, new, output):
    text = toml_file.dump(dataclasses.replace(toml_file.read("v100-dgx2"), fits=FITS))
    assert old in text
    text = text.replace(old, new, 1)
    with pytest.raises(ConfigurationError) as caught:
        read(text)
    assert output in str(caught.value)


def test_pieces_of_a_fit_must_ascend():
    wrong = dataclasses.replace(FITS[0], until_bytes=(67108864.0, 65536.0))
    text = toml_file.dump(dataclasses.replace(toml_file.read("v100-dgx2"), fits=(wrong,)))
    with pytest.raises(ConfigurationError, match="`until` of fit 1 has the value 65536 after 6.71089e.07"):
        read(text)


def test_commented_file_shows_every_field_and_is_valid():
    """Users copy this file, so each line that is commented out must also be valid."""
    text = (toml_file.FOLDER / "workstation.toml").read_text()
    lines = [re.sub(r"^# (?=[a-z_]+ = |\[\[fit)", "", line) for line in text.splitlines()]
    full = read("\n".join(lines))
    assert full.fits and full.node.network_w == 400 and full.site.currency == "EUR"
    assert full.levels[0].alone_bytes_per_s == 6e9
    kinds = (
        Cluster,
        Device,
        EfficiencyCurve,
        ClusterNode,
        LinkLevel,
        ClusterStorage,
        FailureRates,
        ClusterSite,
        MeasuredFit,
    )
    reference = {key for kind in kinds for key, field in fields_of(kind).items() if field.is_leaf}
    assert reference <= {line.split(" = ")[0] for line in lines if " = " in line}


def test_fit_with_a_large_error_is_read():
    """A busy machine can measure such fits. The file records the error."""
    cluster = toml_file.read("a100-selene")
    output = toml_file.dump(dataclasses.replace(cluster, fits=(dataclasses.replace(cluster.fits[0], error=366.9),)))
    assert toml_file.of_tree(tomllib.loads(output), "here").fits[0].error == pytest.approx(366.9)


def test_falling_curves_and_peaks_in_the_wrong_unit_are_rejected(tmp_path):
    text = toml_file.dump(toml_file.read("h100-hgx"))
    (tmp_path / "a.toml").write_text(text.replace("0.766", "0.466"))
    with pytest.raises(ConfigurationError, match=r"falls from 0.744 to 0.466 at the size 8192; larger products"):
        toml_file.read(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text(text.replace("989.4 TFLOP/s", "989.4 PFLOP/s"))
    with pytest.raises(ConfigurationError, match=r"b.toml.*flops"):
        toml_file.read(str(tmp_path / "b.toml"))
    measured = replace(toml_file.read("h100-hgx"), calibrated="here, today")
    (tmp_path / "c.toml").write_text(toml_file.dump(measured).replace("0.766", "0.466"))
    assert toml_file.read(str(tmp_path / "c.toml")).calibrated
