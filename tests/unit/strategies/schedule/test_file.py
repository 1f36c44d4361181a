"""Schedules as text: round trips, and invalid files rejected with the line."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.schedule.operation_list import compute_operations, dump, generated, read
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.training.build import pipeline

TWO = """
placement = looped
chunks = 1   # of every rank
F0 F1 I0.0 \\
   W0 I1 W1  # rank 0
F0.0 B0.0 F1.0 B1.0
"""


def test_schedule_file_is_read():
    written = read(TWO, 2, 2)
    assert written.place([range(2), range(2, 3)]).ranks == (0, 1)
    steps = compute_operations(written.passes, 2, written.place([range(2), range(2, 3)]), 0)
    assert [str(op) for op in steps if op.microbatch == 0] == [
        "FORWARD(0, 0)", "FORWARD(0, 1)", "SEND_ACTIVATION(0, 2)", "RECV_GRADIENT(0, 2)",
        "BACKWARD_INPUT(0, 1)", "BACKWARD_INPUT(0, 0)", "BACKWARD_WEIGHT(0, 1)", "BACKWARD_WEIGHT(0, 0)",
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from(["", "two\nlines"]),
)
def test_written_schedule_is_read_back(name, ranks, microbatches, chunks, comment):
    try:
        written = generated(name, ranks, microbatches, chunks)
    except ConfigurationError:
        return
    text = dump(written, comment)
    assert read(text, ranks, microbatches) == written
    assert max(map(len, text.splitlines())) <= 120
    row = SCHEDULES[name]
    parts = [range(unit, unit + 2) for unit in range(0, 2 * ranks * written.chunks, 2)]
    for rank in range(ranks):
        steps = compute_operations(written.passes, microbatches, written.place(parts), rank)
        assert steps == compute_operations(name, microbatches, row.place(parts, ranks), rank)


@cases(
    "change, to, match",
    ("W1", "W1 X0.0", r"^the file, line 4, rank 0: 'X0.0' is not a pass; write a letter .F, B, I or W"),
    ("B1.0", "B1.0.0", r"^the file, line 6, rank 1: 'B1.0.0' is not a pass"),
    ("W1", "", r"^the file, line 4, rank 0: micro-batch 1 has no weight gradient \(W\) pass"),
    ("B1.0", "", r"^the file, line 6, rank 1: micro-batch 1 has no backward pass through local chunk 0"),
    ("F1.0 B1.0", "", r"^the file, line 6, rank 1: micro-batch 1 has no forward pass through local chunk 0"),
    (
        "B1.0",
        "B1.0 B0.0",
        r"^the file, line 6, rank 1: found the pass B0.0, expected no more passes of this micro-batch",
    ),
    ("B1.0", "B1.0 F2.0", r"^the file, line 6, rank 1: the pass F2.0 is out of range; the micro-batches are 0 to 1"),
    (
        "B1.0",
        "B1.0 F1.1",
        r"^the file, line 6, rank 1: the pass F1.1 is out of range.* the chunks of this rank are 0 to 0",
    ),
    ("F0.0 B0.0", "B0.0 F0.0", r"^the file, line 6, rank 1: found the pass B0.0, expected F0.0"),
    ("I1 W1", "W1 I1", r"^the file, line 4, rank 0: found the pass W1.0, expected B1.0 or I1.0 after F1.0"),
    ("F0.0 B0.0 F1.0 B1.0", "", r"^the file has 1 lines of passes, expected 2: one line"),
    ("looped", "circular", r"^the file: placement = circular, chunks = 1; placement must be looped or folded"),
    ("chunks = 1", "chunks = 0", r"^the file: placement = looped, chunks = 0; placement must be looped or folded"),
    ("looped", "folded", r"^the file: placement = folded with chunks = 1"),
    ("chunks = 1", "chunks = ²", r"^the file: placement = looped, chunks = ²; placement must be looped or folded"),
    ("chunks = 1", "chunks = 99999999", r"^the file: chunks = 99999999, but the shortest line has only 4 passes"),
    ("chunks = 1", "ranks = 2", r"^the file, line 3: 'ranks = 2' is not allowed here; the only settings are"),
    ("F0 F1 I0.0 \\\n   W0 I1", "F0 I0 W0 F1 I1", None),
    ("F0.0 B0.0 F1.0 B1.0", "F0 F1 I0 W0 I1 W1\n", None),
)
def test_invalid_schedule_is_rejected_with_its_line(change, to, match):
    assert change in TWO
    text = TWO.replace(change, to)
    if match is None:
        read(text, 2, 2)
        return
    with pytest.raises(ConfigurationError, match=match):
        read(text, 2, 2, "the file")


def test_schedule_with_a_deadlock_is_rejected_with_its_cycle():
    text = "F0 B0 F1 B1\nF0 F1 B0 B1\nF0 B0 F1 B1"
    with pytest.raises(ConfigurationError) as caught:
        read(text, 3, 2, "hangs.txt")
    assert str(caught.value) == (
        "a cyclic wait: hangs.txt, line 1, rank 0 waits before B0.0 for B0.0 of rank 1; "
        "hangs.txt, line 2, rank 1 waits before F1.0 for F1.0 of rank 0"
    )


def test_recompute_of_a_schedule_file_drops_only_unused_activations(tmp_path):
    file = tmp_path / "mine.txt"

    def file_config(text):
        file.write_text(text)
        return ParallelConfig(pipeline=2, microbatches=2, schedule="file", schedule_file=str(file), recompute=True)

    looped = dump(generated("1f1b", 2, 2))
    result = pipeline.read_schedule(file_config(looped), solo())
    assert result is not None and not result.keeps and dump(result) == looped
    one, other = "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0", "F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0"
    for text in (dump(generated("zb-h1", 2, 2)), f"placement = folded\nchunks = 2\n{one}\n{other}\n"):
        with pytest.raises(
            ConfigurationError, match="recompute = true with parallel.schedule_file .* need stored activations"
        ):
            pipeline.read_schedule(file_config(text), solo())
    with pytest.raises(ConfigurationError, match="cannot be read"):
        pipeline.read_schedule(replace(file_config(looped), schedule_file=str(tmp_path / "no")), solo())
