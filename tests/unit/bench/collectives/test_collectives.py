"""The benchmark of collectives: measurements, detection of wrong results, and the results file."""

import json
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from harness.marks import cases
from hpcdist import collectives as algorithms
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range
from hpcdist.bench.collectives import contenders, results, run
from hpcdist.bench.collectives import report as collectives_report
from hpcdist.bench.collectives.contenders import CollectivesContender
from hpcdist.bench.collectives.results import CellLimits
from hpcdist.bench.collectives.run import CellTiming
from hpcdist.cli.bench.collectives import _valid_names
from hpcdist.cli.bench.group import compare
from hpcdist.cli.runs.report import report
from hpcdist.collectives import SHARDED
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, StorageError, UsageError
from hpcdist.reporting.plotting import check_plot

LIBRARY = "Threads 1.0"


def benchmark_request(**changes):
    settings = {
        "operations": results.OPERATIONS,
        "algorithms": ("ring",),
        "bytes": (100, 3000),
        "dtypes": ("float32",),
        "buffers": ("ordinary",),
        "seconds": 0.01,
        "iterations": 4,
        "warmup": 1,
        "least": 2,
        "check": True,
        "hot": True,  # one slot, so that every iteration is verified and filled again
        "seed": 5,
    }
    return results.CollectivesRequest(**(settings | changes))


def run_benchmark(ranks, **changes):
    """Run a benchmark over threads. Return its configurations and its messages."""
    kept, output = [], []

    def run_on_rank(comm):
        run.run(comm, benchmark_request(**changes), LIBRARY, kept.extend, output.append)

    run_threads(ranks, run_on_rank)
    return kept, output


@cases(
    "texts, expected",
    (["4096"], [4096]),
    (["16K 1M"], [16384, 1 << 20]),
    (["1m,16k"], [16384, 1 << 20]),
    (["4K-32K"], [4096, 8192, 16384, 32768]),
    (["4K-64K x4"], [4096, 16384, 65536]),
    (["4K-70Kx4 1K", "1K"], [1024, 4096, 16384, 65536]),
    (["1G"], [1 << 30]),
)
def test_byte_sizes_are_parsed(texts, expected):
    assert list(results.sizes(texts)) == expected


@pytest.mark.parametrize("text", ["", "4Q", "K", "16K-4K", "0", "4K-64K x1", "4K 1.5M", "-4K", "4K--8K"])
def test_invalid_sizes_are_rejected(text):
    with pytest.raises(UsageError, match="--bytes"):
        results.sizes([text])


@cases(
    "arguments, named",
    ((("allreduce", "gather"), (), ("float32",)), "allreduce, reduce_scatter, all_gather"),
    ((("allreduce",), ("rings",), ("float32",)), "native, ring"),
    ((("alltoallv",), ("node_shared",), ("float32",)), "native, pairwise, hierarchical"),
    ((("allreduce",), (), ("float23",)), "float32"),
)
def test_unknown_names_are_rejected_with_a_list_of_valid_ones(arguments, named):
    with pytest.raises(UsageError, match="choose") as refused:
        _valid_names(*arguments)
    assert named in str(refused.value)


def test_bus_factors_match_nccl_tests():
    """The factors of nccl-tests, doc/PERFORMANCE.md."""
    by_hand = {"allreduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1.0, "all_to_all": 0.75}
    by_hand |= {"alltoallv-uniform": 0.75, "alltoallv-zipf": 0.75, "alltoallv-hot": 0.75}
    assert {op: results.bus_factor(op, 4) for op in results.OPERATIONS} == by_hand
    assert all(results.bus_factor(op, 1) == 0 for op in by_hand)


def test_cells_are_rounded_and_shuffled_by_seed():
    cells, notes = results.cells(benchmark_request(bytes=(101, 1000), dtypes=("float32", "bfloat16")), 3)
    again, _ = results.cells(benchmark_request(bytes=(101, 1000), dtypes=("float32", "bfloat16")), 3)
    other, _ = results.cells(benchmark_request(bytes=(101, 1000), dtypes=("float32", "bfloat16"), seed=6), 3)
    assert cells == again != other and set(cells) == set(other)
    assert {cell.bytes for cell in cells if (cell.op, cell.dtype) == ("allreduce", "float32")} == {100, 1000}
    # equal parts for each of 3 ranks
    assert {cell.bytes for cell in cells if (cell.op, cell.dtype) == ("all_to_all", "float32")} == {96, 996}
    assert any("101 bytes are no whole number of float32 elements; 100 are measured" in note for note in notes)


def test_buffer_slots_exceed_the_cache_within_the_memory():
    assert contenders.slots(1 << 20, 32 << 20, 1 << 30, hot=False) == 65
    assert contenders.slots(256 << 20, 32 << 20, 1 << 30, hot=False) == 2
    assert contenders.slots(256 << 20, 32 << 20, 300 << 20, hot=False) == 1
    assert contenders.slots(1 << 20, 32 << 20, 16 << 20, hot=False) == 16
    assert contenders.slots(1 << 20, 32 << 20, 1 << 30, hot=True) == 1


def test_any_size_fits_in_the_allocated_memory():
    memory = run.PoolMemory({}, np.empty(1 << 20, np.uint8), cache_bytes=1 << 14, hot=False)
    for nbytes in (64, 100, 1 << 13, 1 << 19, 1 << 20):
        count = memory.slots(nbytes)
        assert count >= 1
        assert count * -(-nbytes // 64) * 64 <= 1 << 20


def test_memory_is_sized_for_the_rounded_size():
    many = SimpleNamespace(size=32, nodes=lambda: SimpleNamespace(intra=SimpleNamespace(size=32)))
    many.allgather_object = lambda mine: [mine]
    assert (
        run.take_memory(many, benchmark_request(operations=("all_to_all",), bytes=(8,)), []).slots(128) == 1
    )  # a float32 for each of 32 ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float64"])
def test_buffer_contents_detect_one_changed_element(dtype, rng):
    kind, size, ranks = dtype_of(dtype), 40_000, 5
    contents = contenders.BufferContents(ranks, kind)
    parts = [np.empty(size, kind) for _ in range(ranks)]
    for rank, part in enumerate(parts):
        contents.fill(part, rank, first_element=3)
        assert contents.first_difference(part, rank, 3) == -1
    total = np.sum([part.astype(np.float64) for part in parts], axis=0).astype(kind)
    assert contents.first_difference(total, None, 3) == -1
    assert contents.first_difference(total, None, 4) >= 0, "another slot's sum must not pass"
    assert contents.first_difference(parts[0], 1, 3) >= 0, "another rank's data must not pass"
    index = int(rng.integers(size))
    total[index] += kind.type(1)
    assert contents.first_difference(total, None, 3) == index
    assert contents.first_difference(total[17:], None, 3 + 17) == index - 17 or index < 17


@pytest.mark.parametrize(("count", "size"), [(1, 7), (126, 3), (127, 5), (300, 16), (5, 16_256), (5, 16_257)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pool_fills_each_slot_from_its_phase(count, size, dtype):
    kind = dtype_of(dtype)
    contents = contenders.BufferContents(3, kind)
    stride = -(-size * kind.itemsize // 64) * 64
    memory = [np.full(count * stride + 64, 255, np.uint8) for _ in range(2)]
    pool = contenders.BufferPool(*memory, size, kind, count)
    pool.fill(contents, rank=2)
    for slot in range(count):
        expected = np.empty(size, kind)
        contents.fill(expected, 2, slot)
        np.testing.assert_array_equal(pool.buffer(slot), expected)
    gaps = memory[0][: count * stride].reshape(count, stride)[:, size * kind.itemsize :]
    assert (gaps == 255).all() and (memory[0][count * stride :] == 255).all(), "bytes outside the slots were written"


def test_uneven_parts_are_verified_and_use_no_shared_buffers():
    kept, _ = run_benchmark(
        2, operations=("alltoallv-zipf",), algorithms=("hierarchical",), buffers=("ordinary", "shared")
    )
    actual = {(one.key.algorithm, one.key.buffers): (one.wrong, one.verified) for one in kept if not one.reference}
    assert actual == {("native", "ordinary"): ("", 4), ("hierarchical", "ordinary"): ("", 4)}


def test_part_sizes_are_skewed_as_requested():
    assert results.part_sizes("alltoallv-uniform", 120, 4) == results.part_sizes("all_to_all", 120, 4) == [30] * 4
    assert results.part_sizes("alltoallv-zipf", 120, 4) == [30, 15, 10, 7]
    hot = results.part_sizes("alltoallv-hot", 120, 4)
    assert hot == [30, 2, 2, 2] and hot[0] == pytest.approx(0.8 * sum(hot), rel=0.05)
    assert results.part_sizes("alltoallv-hot", 120, 1) == [120]
    assert _valid_names(("alltoallv",), (), ("float32",))[0] == results.OPERATIONS[-3:]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_operation_is_measured_and_verified(ranks):
    kept, output = run_benchmark(ranks)
    assert {one.key.op for one in kept} == set(results.OPERATIONS)
    assert [one.wrong for one in kept if one.wrong] == []
    for one in kept:
        assert one.time_s.shape == one.start_s.shape == (4, ranks)
        assert (one.time_s > 0).all() and (one.start_s.min(axis=1) == 0).all()
        assert one.verified == (0 if one.reference else 4)
        assert (one.key.ranks, one.key.cache, one.key.mpi_library) == (ranks, "hot", LIBRARY)
    assert {one.key.algorithm for one in kept if one.key.op == "allreduce"} == {"native", "ring", "memcpy"}
    assert any("nothing is exchanged" in line for line in output) == (ranks == 1)


def test_cold_buffers_are_verified_before_reuse(monkeypatch):
    monkeypatch.setattr(contenders, "last_level_cache_bytes", lambda: 8192)
    kept, _ = run_benchmark(2, operations=("allreduce",), bytes=(3000,), iterations=9, hot=False)
    assert {(one.slots, one.key.cache, one.wrong) for one in kept} == {(7, "cold", "")}


@pytest.mark.full
def test_all_algorithms_are_measured_by_default():
    kept, output = run_benchmark(2, operations=("allreduce",), algorithms=(), bytes=(400,), iterations=1)
    assert {one.key.algorithm for one in kept if not one.reference} == {*algorithms.ALLREDUCE, "auto"}
    assert any(line.startswith("auto is ") for line in output)


def test_wire_is_measured_between_nodes():
    kept, output = [], []

    def run_on_rank(comm):
        run.run(comm, benchmark_request(operations=("allreduce",), bytes=(400,)), LIBRARY, kept.extend, output.append)

    run_threads(4, run_on_rank, ranks_per_node=2)
    (wire,) = [one for one in kept if one.key.algorithm == "wire"]
    assert wire.key.nodes == 2
    assert np.isnan(wire.time_s[:, [1, 3]]).all() and np.isfinite(wire.slowest_s).all()
    assert np.isnan(wire.start_s).all(), "two nodes have no common clock"


@pytest.mark.full
def test_unsupported_algorithm_is_skipped_unless_named(monkeypatch):
    def raise_handover_error(*_):
        raise BufferHandoverError("not these")

    for name, sharding in SHARDED.items():
        monkeypatch.setitem(SHARDED, name, replace(sharding, reduce_scatter=raise_handover_error))
    kept, output = run_benchmark(2, operations=("reduce_scatter", "allreduce"), dtypes=("bfloat16",), algorithms=())
    assert {one.key.op for one in kept} == {"allreduce"}
    assert any(line.startswith("ring is left out of reduce_scatter of bfloat16: ") for line in output)
    with pytest.raises(UsageError, match="ring does not run reduce_scatter of bfloat16 here"):
        run_benchmark(2, operations=("reduce_scatter",), dtypes=("bfloat16",))


def test_wrong_result_is_reported_without_speed(monkeypatch):
    right = algorithms.allreduce

    def allreduce(comm, buffer, algorithm):
        right(comm, buffer, "native" if algorithm == "wrong" else algorithm)
        if algorithm == "wrong" and comm.rank == 1 and buffer.size == 750:
            buffer[7] += 1

    monkeypatch.setitem(algorithms.ALLREDUCE, "wrong", allreduce)
    monkeypatch.setattr(algorithms, "allreduce", allreduce)
    kept, _ = run_benchmark(2, operations=("allreduce",), algorithms=("wrong", "ring"))
    actual = {(one.key.algorithm, one.key.bytes): one.wrong for one in kept if one.wrong}
    assert list(actual) == [("wrong", 3000)]
    assert actual["wrong", 3000].startswith("rank 1: element 7 is ")
    table = collectives_report.rows(kept)
    line = next(line for line in collectives_report.text(table).splitlines() if "WRONG RESULT" in line)
    assert "wrong" in line and "3000" in line and "GB" not in line
    assert any("wrong, allreduce of 3000 bytes of float32: rank 1" in note for note in collectives_report.notes(table))
    unchecked, _ = run_benchmark(2, operations=("allreduce",), algorithms=("wrong",), check=False)
    assert {(one.wrong, one.verified) for one in unchecked} == {("", 0)}


def test_all_ranks_alternate_contenders_in_the_same_order():
    order = {0: [], 1: []}

    def run_on_rank(comm):
        def run(name):
            return lambda buffer, result: order[comm.rank].append(name)

        memory = [np.zeros(64 * 4, np.uint8) for _ in range(2)]
        pool = contenders.BufferPool(*memory, 16, np.dtype(np.float32), 4)
        contents = contenders.BufferContents(2, np.dtype(np.float32))
        both = [CollectivesContender(name, "ordinary", run(name), None) for name in ("a", "b", "c")]
        CellTiming(comm, both, {"ordinary": pool}, contents, check=False).run(CellLimits(1.0, 20, 0, 1), (3, 4))

    run_threads(2, run_on_rank)
    rounds = [tuple(order[0][start : start + 3]) for start in range(0, 60, 3)]
    assert order[0] == order[1]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 1


def test_time_limit_has_minimum_and_maximum_iterations(monkeypatch):
    kept, _ = run_benchmark(2, operations=("allreduce",), bytes=(100,), iterations=None, seconds=1e-9, least=6)
    assert {len(one.time_s) for one in kept} == {6}
    monkeypatch.setattr("hpcdist.bench.collectives.run.MOST_ITERATIONS", 20)
    kept, _ = run_benchmark(2, operations=("allreduce",), bytes=(100,), iterations=None, seconds=1000.0)
    assert {len(one.time_s) for one in kept} == {20}


def key(**changes):
    settings = {
        "op": "allreduce",
        "dtype": "float32",
        "bytes": 1_000_000,
        "ranks": 4,
        "nodes": 1,
        "algorithm": "native",
        "buffers": "ordinary",
        "cache": "cold",
        "implementation": "hpcdist",
        "mpi_library": LIBRARY,
    }
    return results.ConfigurationKey(**(settings | changes))


def configuration(times_s, **changes):
    """Return a configuration in which the last rank is the slowest and takes ``times_s``."""
    times = np.asarray(times_s)[:, None] * np.array([0.5, 0.25, 0.75, 1.0])
    start = np.tile([0.0, 1e-6, 2e-6, 3e-6], (len(times), 1))
    return results.CollectivesConfiguration(
        key(**changes), False, 9, len(times), "", times, start, np.zeros(len(times))
    )


def test_table_figures_match_hand_calculation():
    native = configuration([4e-3, 1e-3, 2e-3, 3e-3, 5e-3])
    first, second = collectives_report.rows([configuration([1e-3] * 3, algorithm="ring"), native])
    assert (first.algorithm, first.median_s, first.quartiles_s, first.x_native) == ("native", 3e-3, (2e-3, 4e-3), 1.0)
    assert first.p95_s == pytest.approx(4.8e-3)
    assert (second.x_native, second.algorithm_bandwidth) == (pytest.approx(3.0), pytest.approx(1e9))
    assert second.bus_bandwidth == pytest.approx(1.5e9)
    assert second.skew_s == pytest.approx(3e-6)
    line = collectives_report.text([first, second]).splitlines()[-1].split()
    assert line[:5] == ["allreduce", "float32", "4", "1000000", "ring"]
    assert line[-3:] == ["3.00", "1.000", "1.500"]


@cases(
    "libraries, labels",
    (["Open MPI v5.0.11, package: x"], ["ring"]),
    (["Open MPI v5.0.11, package: x", "MPICH Version:      5.0.2"], ["ring, MPICH", "ring, Open MPI"]),
    (["Open MPI v5.0.11, a", "Open MPI v4.1.4, b"], ["ring, Open MPI v4.1.4", "ring, Open MPI v5.0.11"]),
)
def test_labels_distinguish_libraries(libraries, labels):
    actual = [configuration([1e-3], algorithm="ring", mpi_library=library) for library in libraries]
    assert [row.label for row in collectives_report.rows(actual)] == labels


def test_results_file_layout(tmp_path):
    path = tmp_path / "c.h5"
    one = configuration([1e-3, 2e-3, 3e-3])
    results.append(path, [one], {"git_commit": "c1"})
    results.append(path, [configuration([4e-3]), configuration([9e-3], algorithm="ring")], {"git_commit": "c2"})
    with h5py.File(path) as file:
        assert dict(file.attrs)["schema"] == "hpcdist.collectives" and file.attrs["schema_version"] == 1
        assert file.attrs["git_commit"] == "c1"
        group = file["configurations"][one.key.id]
        assert (group.attrs["NX_class"], group.attrs["signal"]) == ("NXdata", "time_s")
        assert list(group.attrs["axes"]) == ["iteration", "rank"]
        times = group["time_s"]
        assert times.shape == (4, 4)
        np.testing.assert_array_equal(times[:, 3], [1e-3, 2e-3, 3e-3, 4e-3])
        assert [dim[0].name.rpartition("/")[2] for dim in times.dims] == ["iteration", "rank"]
        assert times.attrs["units"] == "s" and "barrier" in times.attrs["long_name"]
        assert group["iteration"].is_scale and list(group["iteration"]) == [0, 1, 2, 3]
        assert list(group["session"]) == [0, 0, 0, 1]
        assert (group.attrs["bytes"], group.attrs["verified"]) == (1_000_000, 4)
    result = results.read(path)
    assert result.provenance == {"git_commit": "c1"}
    assert {one.key.algorithm: len(one.slowest_s) for one in result.configurations} == {"native": 4, "ring": 1}
    assert json.loads(json.dumps(collectives_report.jsonable(result)))["configurations"][0]["median_s"] == 2.5e-3


@pytest.mark.full
def test_plot_has_one_line_per_algorithm(tmp_path):
    pytest.importorskip("matplotlib")
    kept, _ = run_benchmark(2, operations=("allreduce", "broadcast"), algorithms=("ring",))
    picture = tmp_path / "c.svg"
    collectives_report.plot(collectives_report.rows(kept), picture)
    text = picture.read_text()
    assert all(f"<!-- {name} -->" in text for name in ("native", "ring", "memcpy"))
    with pytest.raises(UsageError, match="nothing"):
        collectives_report.plot([], picture)
    with pytest.raises(StorageError, match="cannot be written"):
        check_plot(tmp_path / "missing" / "c.svg")
    with pytest.raises(UsageError, match="choose a file name extension from .*png"):
        check_plot(tmp_path / "c.h5")


def test_hierarchical_shares_are_verified_in_their_order():
    """Hierarchical shares are not in rank order: each rank must hold the share of the algorithm's own order."""
    kept, output = [], []

    def run_on_rank(comm):
        asked = benchmark_request(
            operations=("reduce_scatter", "all_gather"), algorithms=("hierarchical",), bytes=(4000,)
        )
        run.run(comm, asked, LIBRARY, kept.extend, output.append)

    run_threads(4, run_on_rank, ranks_per_node=2)
    checked = [one for one in kept if one.key.algorithm == "hierarchical"]
    assert {(one.key.op, one.wrong, one.verified) for one in checked} == {
        ("reduce_scatter", "", 4),
        ("all_gather", "", 4),
    }


def test_results_file_can_be_reported_and_compared(tmp_path):
    kept, _ = run_benchmark(2, operations=("allreduce",), iterations=8)
    path = tmp_path / "c.h5"
    results.append(path, kept, {})
    shown = CliRunner().invoke(report, [str(path)], standalone_mode=False)
    assert shown.exception is None and sum("ring" in line for line in shown.stdout.splitlines()) == 2
    done = CliRunner().invoke(compare, [str(path), str(path), "--json"], standalone_mode=False)
    assert done.return_value == 0, done.output
    assert {one["ratio"] for one in json.loads(done.stdout)["changes"]} == {1.0}


def test_wrong_last_element_of_last_slot_is_detected():
    """A check of the verification itself: the last element of the last slot counts."""
    contents = contenders.BufferContents(2, np.dtype(np.int64))
    memory = [np.zeros(64 * 3, np.uint8) for _ in range(2)]
    pool = contenders.BufferPool(*memory, 8, np.dtype(np.int64), 3)
    pool.fill(contents, rank=1)
    for _ in range(3):
        buffer, _ = pool.take(0)
    assert pool.is_used_up
    whole = [contenders.ExpectedResult(Range(0, 8), 1, 0)]
    assert pool.first_wrong(contents, 0, whole) == ""
    buffer[-1] += 1
    assert pool.first_wrong(contents, 0, whole).startswith("element 7 is ")
    assert pool.first_wrong(contents, 1, whole) == "", "another contender is not blamed"
