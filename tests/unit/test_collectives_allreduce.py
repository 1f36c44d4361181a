"""Every allreduce algorithm against the float64 sum: sizes, dtypes, reductions, numbers of ranks, volumes."""

from collections.abc import Callable

import numpy as np
import pytest

from hpcdist.arrays.dtypes import BFLOAT16, FLOATS, is_16bit_float
from hpcdist.collectives import ALLREDUCE, allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.recording import recording
from hpcdist.comm.solo import solo
from hpcdist.comm.threads import run_threads
from hpcdist.errors import UsageError

ALGORITHMS = sorted(ALLREDUCE)
SIZES = [1, 2, 3, 4, 5, 7, 8]


def together(size: int, algorithm: str, parts: list[np.ndarray], op: str = "sum") -> list[np.ndarray]:
    def body(comm: Communicator) -> np.ndarray:
        mine = parts[comm.rank].copy()
        allreduce(comm, mine, algorithm, op)
        return mine

    return run_threads(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float_sums_at_awkward_counts(algorithm: str, size: int, rng: np.random.Generator) -> None:
    for count in (0, 1, size - 1, size, size + 1, 17, 1009):
        parts = [rng.standard_normal(count).astype(np.float32) for _ in range(size)]
        exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
        scale = np.sum([np.abs(part) for part in parts], axis=0)
        results = together(size, algorithm, parts)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on all ranks"
        assert (np.abs(results[0] - exact) <= scale * size * 6e-8).all()


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "uint8", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whole_numbers_are_exact_in_every_dtype(algorithm: str, dtype: str, rng: np.random.Generator) -> None:
    parts = [rng.integers(0, 50, 333).astype(dtype) for _ in range(5)]
    expected = np.sum(parts, axis=0, dtype=dtype)
    assert all(np.array_equal(result, expected) for result in together(5, algorithm, parts))


@pytest.mark.parametrize(("op", "reference"), [("max", np.max), ("min", np.min)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extrema(
    algorithm: str, op: str, reference: Callable[..., np.ndarray], rng: np.random.Generator
) -> None:
    parts = [rng.standard_normal(100) for _ in range(3)]
    assert all(np.array_equal(r, reference(parts, axis=0)) for r in together(3, algorithm, parts, op))


@pytest.mark.parametrize("dtype", [FLOATS["float16"], BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_16_bit_floats_are_summed_wide_and_rounded_once(
    algorithm: str, dtype: np.dtype, rng: np.random.Generator
) -> None:
    parts = [rng.standard_normal(5000).astype(dtype) for _ in range(4)]
    once = np.sum([part.astype(np.float64) for part in parts], axis=0).astype(dtype)
    results = together(4, algorithm, parts)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    different = np.mean(results[0].view(np.uint16) != once.view(np.uint16))
    assert results[0].dtype == dtype and different < 1e-3, "a ring that rounds at each hop differs in a fifth of them"


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
def test_bandwidth_optimal_volume(algorithm: str, size: int) -> None:
    count = size * 16 * 100

    def body(comm: Communicator) -> int:
        with recording(comm) as traffic:
            allreduce(comm, np.zeros(count, np.float32), algorithm)
        assert not traffic.unknown
        return traffic.sent_bytes

    assert run_threads(size, body) == [2 * (size - 1) * count * 4 // size] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rabenseifner_sends_what_the_ring_sends_in_fewer_messages(size: int) -> None:
    count = size * 16 * 10

    def body(comm: Communicator) -> tuple[int, int]:
        with recording(comm) as traffic:
            allreduce(comm, np.zeros(count, np.float32), "rabenseifner")
        return traffic.sent_bytes, traffic.calls["sendrecv"]

    steps = 2 * (size.bit_length() - 1)
    assert run_threads(size, body) == [(2 * (size - 1) * count * 4 // size, steps)] * size


def test_recursive_doubling_volume_and_latency() -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        with recording(comm) as traffic:
            allreduce(comm, np.zeros(100), "recursive_doubling")
        return traffic.sent_bytes, traffic.calls["sendrecv"]

    assert run_threads(8, body) == [(3 * 800, 3)] * 8


def test_16_bits_on_the_wire_only_with_all_to_all() -> None:
    def body(comm: Communicator) -> list[int]:
        sent = []
        for algorithm in ("ring", "all_to_all"):
            with recording(comm) as traffic:
                allreduce(comm, np.zeros(6400, np.float16), algorithm)
            sent.append(traffic.sent_bytes)
        return sent

    assert run_threads(4, body) == [[2 * 3 * 6400, 3 * 6400]] * 4


def test_node_shared_sends_no_message_and_refuses_several_nodes() -> None:
    def body(comm: Communicator) -> None:
        comm.nodes()
        for count in (10, 5000, 3):  # the window grows, and is used again
            data = np.full(count, comm.rank + 1.0)
            with recording(comm) as traffic:
                allreduce(comm, data, "node_shared")
            assert traffic.sent_bytes == 0 and (data == 6.0).all()

    run_threads(3, body)
    with pytest.raises(UsageError, match="hierarchical"):
        run_threads(4, lambda comm: allreduce(comm, np.zeros(4), "node_shared"), ranks_per_node=2)


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(UsageError, match="'rign' is unknown; choose one of native, ring"):
        allreduce(solo(), np.zeros(3), "rign")
    with pytest.raises(UsageError, match="mean"):
        allreduce(solo(), np.zeros(3), "ring", "mean")
    assert all(is_16bit_float(dtype) == (dtype.itemsize == 2) for dtype in FLOATS.values())
