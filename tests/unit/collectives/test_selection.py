"""Algorithm tables by size: their text form, their choices, and calls with the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist import collectives
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import UsageError

TEXT = "recursive_doubling<=4096,native<=262144,ring"
NAMES = st.sampled_from(sorted(collectives.ALLREDUCE))


@given(st.dictionaries(st.integers(0, 1 << 50), NAMES, max_size=6), NAMES)
def test_table_text_round_trip(limits, last):
    choice = AlgorithmTable((*(limits[limit] for limit in sorted(limits)), last), tuple(sorted(limits)))
    assert parse_algorithm(str(choice)) == choice
    assert str(parse_algorithm(str(choice))) == str(choice)


def test_row_limits_are_inclusive():
    choice = parse_algorithm(TEXT)
    sizes = {0: "recursive_doubling", 4096: "recursive_doubling", 4097: "native", 262144: "native", 262145: "ring"}
    assert {size: choice.at(size) for size in sizes} == sizes
    assert parse_algorithm("ring").at(0) == parse_algorithm("ring").at(1 << 60) == "ring"


def test_adjacent_rows_of_one_algorithm_are_merged():
    assert str(AlgorithmTable.of([(64, "ring"), (256, "ring"), (1024, "native"), (0, "native")])) == "ring<=256,native"
    assert str(AlgorithmTable.of([(64, "ring"), (0, "ring")])) == "ring"


@cases(
    "text",
    *("", ",", "ring,", "ring<=4096", "ring,native", "ring<=x,native", "ring<=-1,native", "ring<=4, native", "RING"),
    *("ring<=8,native<=4,ring", "ring<=8,native<=8,ring", "ring<=08,native", "ring<4,native", "ring<=1e3,native"),
    *("auto", "nothing", "nothing<=8,ring", "ring<=8,nothing", "ring<=" + "9" * 19 + ",native", "ring<=1," * 1000),
)
def test_invalid_texts_are_rejected(text):
    with pytest.raises(UsageError, match=r"allreduce"):
        parse_algorithm(text)
    with pytest.raises(UsageError, match=r"allreduce"):
        run_threads(1, lambda comm: collectives.allreduce(comm, np.ones(1), text))


def test_invalid_limits_are_rejected():
    for names, limits in (((), ()), (("ring",), (1,)), (("ring", "ring", "ring"), (2, 1))):
        with pytest.raises(UsageError, match="limits"):
            AlgorithmTable(names, limits)


@pytest.mark.parametrize("algorithm", [TEXT, parse_algorithm(TEXT)])
def test_table_can_be_used_as_an_algorithm(rng, algorithm):
    inputs = {size: rng.standard_normal((3, size)).astype(np.float32) for size in (1024, 1025, 65537)}

    def body(comm):
        result = []
        with count_traffic(comm) as traffic:
            for data in inputs.values():
                buffer = data[comm.rank].copy()
                collectives.allreduce(comm, buffer, algorithm)
                result.append(buffer.tobytes())
        return result, {name for name in traffic.calls if name.endswith("_allreduce")}

    def run_by_name(comm):
        result = []
        for data, name in zip(inputs.values(), ("recursive_doubling", "native", "ring"), strict=True):
            buffer = data[comm.rank].copy()
            collectives.allreduce(comm, buffer, name)
            result.append(buffer.tobytes())
        return result

    table, by_name = run_threads(3, body), run_threads(3, run_by_name)
    assert [result for result, _ in table] == by_name
    assert table[0][1] == {"recursive_doubling_allreduce", "native_allreduce", "ring_allreduce"}
