"""ZeRO with compressed messages matches its definition in every step, and its replicas compute with one model."""

import numpy as np
import pytest

from harness.compressed.zero import (
    RATE,
    DefinedExchange,
    DrivenExchange,
    compare,
    cuts_of,
    draw_gradients,
    rounded_weights,
)
from harness.marks import cases, on_threads
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.data.config import ZeroConfig

STEPS = 10
HPZ = ZeroConfig(parameters=2)


NAMES = ("float16", "bfloat16", "int8", "int4", "adaptive", "qsgd", "sign", "topk", "randomk")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.full_except("qsgd")
def test_ten_steps_match_the_definition(name, rng):
    stage, size = 1 + NAMES.index(name) % 3, 1 + NAMES.index(name) % 4
    draw = int(rng.integers(1 << 31))

    def body(comm):
        keys = {"density": 0.1} if name in ("topk", "randomk") else {}
        driven = DrivenExchange(comm, stage, name=name, draw=draw, **keys)
        compare(driven, DefinedExchange(driven.exchange.traits.degrees, comm.size, name, **keys), STEPS)

    run_threads(size, body)


MIXED = ZeroConfig(parameters=1, gradients=2, optimizer=4)
WITH_REPLICAS = ZeroConfig(parameters=1, gradients=2, optimizer=2)


@cases(
    "zero, name, microbatches, keys",
    (ZeroConfig(), "int8", 3, {}),
    (ZeroConfig(), "qsgd", 2, {"error_feedback": False}),
    (ZeroConfig(keep_gradients=True), "int4", 3, {}),
    (HPZ, "int4", 2, {}),
    (MIXED, "int8", 2, {}),
    (WITH_REPLICAS, "int8", 2, {}),
    (WITH_REPLICAS, "topk", 1, {"density": 0.1}),
    (ZeroConfig(parameters=2, gradients=2, optimizer=2), "randomk", 2, {"density": 0.1}),
    (HPZ, "int8", 2, {"across_nodes": True}),
    (MIXED, "int4", 2, {"across_nodes": True}),
    (ZeroConfig(parameters=2, gradients=2, optimizer=2), "sign", 1, {"across_nodes": True}),
)
@on_threads(4, ranks_per_node=2)
@pytest.mark.full_except("zero6-topk-1-keys6")
def test_all_degrees_and_micro_batches_match_the_definition(comm, zero, name, microbatches, keys):
    driven = DrivenExchange(comm, 3, zero, name, microbatches=microbatches, **keys)
    degrees, across = driven.exchange.traits.degrees, keys.get("across_nodes", False)
    blocks = degrees.parameters, degrees.gradients, degrees.optimizer

    def between(level):  # the first two ranks of a block are on a node
        return not across or level == 3 or blocks[level] > 2

    compare(driven, DefinedExchange(degrees, comm.size, name, between, **keys), 4)


@pytest.mark.parametrize("working", [None, "bfloat16"])
@cases(
    "zero, bits, across, levels",
    (ZeroConfig(), 8, False, (0,)),
    (HPZ, 4, False, (0, 1)),
    (HPZ, 8, True, (1,)),
    (ZeroConfig(parameters=2, gradients=2, optimizer=2), 8, False, (0,)),
    (ZeroConfig(parameters=2, gradients=2, persistent_below=1100), 8, False, (0, 2)),
)
def test_ranks_compute_with_decoded_and_owners_save_exact_weights(zero, bits, across, levels, working):
    def body(comm):
        run = DrivenExchange(comm, 3, zero, "none", working, parameters=f"int{bits}", across_nodes=across)
        plain = DrivenExchange(comm, 3, zero, "none", working)
        for driven in (run, plain):
            for _ in range(3):
                driven.run()
                driven.computed_with()  # gathers change nothing
        exact, saved = run.saved(), plain.saved()
        assert exact.keys() == saved.keys()
        for key, values in saved.items():
            assert exact[key].tobytes() == values.tobytes(), f"{key} was rounded"
        return run.computed_with(), exact, run.exchange.traits.degrees

    results = run_threads(4, body, 2)
    computed, exact, degrees = results[0]
    assert all(other.tobytes() == computed.tobytes() for other, *_ in results)
    layout = run_threads(1, lambda comm: DrivenExchange(comm).layout)[0]
    whole = np.zeros(layout.size, np.float32)
    small = [part for part in layout.units.values() if part.size < zero.persistent_below]
    for part in layout.units.values():
        for segment, where in layout.within(part):
            whole[where.slice] = exact["parameters", segment.key]
    dtype = dtype_of(working or "float32")
    held = whole.astype(dtype).astype(np.float32)
    expected = rounded_weights(layout, held, degrees, bits, levels, dtype)
    for part in small:
        expected[part.slice] = held[part.slice]
    assert not np.array_equal(expected, held)
    assert computed.tobytes() == expected.tobytes()


def payload_bytes(n, bits):
    return -(-n // 256) * 4 + -(-n * bits // 8)


def message_bytes(run, part, bits):
    """Return the bytes of the payloads of a part's tensors, each aligned to a word."""
    end = 0
    for _, where in run.layout.within(part):
        end = -(-end // 4) * 4 + payload_bytes(where.size, bits)
    return end


@pytest.mark.parametrize(("bits", "size"), [(8, 3), (4, 4)])
@on_threads("size")
def test_sent_bytes_match_the_formula(comm, bits, size):
    run = DrivenExchange(comm, 3, name=f"int{bits}", microbatches=2, parameters=f"int{bits}")
    run.run()
    run.computed_with()
    expected = owned = 0
    for layer in run.layout.units.values():
        cuts = [cuts_of(layer, run.exchange.traits.degrees, rank)[-1] for rank in range(size)]
        messages = [message_bytes(run, cut, bits) for cut in cuts]
        expected += sum(messages) - messages[comm.rank]  # to each owner its own
        owned += (size - 1) * messages[comm.rank]  # to everybody the same
    plan = run.exchange.plan()
    reduces = [op for op in plan if op.kind is Kind.REDUCE]
    run.exchange.begin([*reduces, *plan])
    with count_traffic(comm) as traffic:
        for _ in range(2):
            for op in reduces:
                run.fill(op, run.gradients(1, 0), 1.0)
                run.exchange.handlers[op.kind](op)
    assert traffic.sent_bytes == 2 * expected
    with count_traffic(comm) as traffic:
        run.computed_with()
    agreed = 2 * 8 * 2  # the order of these gathers may be agreed on anew: two numbers
    assert owned <= traffic.sent_bytes <= owned + agreed


RESUMED = (
    (2, ZeroConfig(), "int8", None, {}),
    (3, HPZ, "int4", None, {"parameters": "int8"}),
    (3, HPZ, "topk", "bfloat16", {"density": 0.2, "parameters": "int8", "across_nodes": True}),
    (1, ZeroConfig(gradients=2), "qsgd", None, {"error_feedback": False}),
)


@pytest.mark.parametrize(("stage", "zero", "name", "working", "keys"), RESUMED)
@on_threads(4, ranks_per_node=2)
@pytest.mark.full_except("1-zero3-qsgd-None-keys3")
def test_resumed_run_has_the_same_bits(comm, stage, zero, name, working, keys):
    given = stage, zero, name, working, 2
    run, resumed = DrivenExchange(comm, *given, **keys), DrivenExchange(comm, *given, **keys)
    run.run(3)
    state, numbers = run.saved(), run.exchange.state()
    assert ("residual.0" in {kind for kind, _ in state}) == keys.get("error_feedback", True)
    resumed.load(state, numbers, 3)
    assert run.run(3) == resumed.run(3)
    assert run.computed_with().tobytes() == resumed.computed_with().tobytes()
    state, again = run.saved(), resumed.saved()
    assert state.keys() == again.keys()
    for key, values in state.items():
        assert values.tobytes() == again[key].tobytes(), key


def total_residuals(state):
    """Return the residuals of all ranks together, by tensor."""
    results = {}
    for (kind, tensor), values in state.items():
        if kind.startswith("residual."):
            results[tensor] = results.get(tensor, 0) + values.astype(np.float64)
    return results


@pytest.mark.parametrize(("size", "stage", "zero"), [(1, 2, ZeroConfig()), (3, 3, ZeroConfig()), (4, 3, HPZ)])
def test_another_number_of_ranks_applies_the_residuals(size, stage, zero):
    def save_before(comm):
        run = DrivenExchange(comm, 2, name="int4")
        run.run(3)
        return run.saved(), run.exchange.state()

    state, numbers = run_threads(4, save_before)[0]
    lost = total_residuals(state)
    assert sum(np.abs(values).sum() for values in lost.values()) > 0

    def run_after(comm):
        run = DrivenExchange(comm, stage, zero, "int4")
        run.load(state, numbers, 3)
        for tensor, values in total_residuals(run.saved()).items():
            np.testing.assert_allclose(values, lost[tensor], rtol=1e-5, atol=1e-6)
        run.run(2)
        left, saved = total_residuals(run.saved()), run.saved()
        fresh = sum(draw_gradients(run.layout, step, 0, rank, size) for step in (4, 5) for rank in range(size))
        for layer in run.layout.units.values():
            for segment, where in run.layout.within(layer):
                key = ("parameters", segment.key)
                due = fresh[where.slice].astype(np.float64) + lost[segment.key] - left[segment.key]
                np.testing.assert_allclose((state[key] - saved[key]) / RATE, due, atol=2e-4)
        if size == 1:
            assert not any(values.any() for values in left.values()), "nothing is lost where nothing travels"

    run_threads(size, run_after, 2 if size == 4 else None)


def test_residuals_are_applied_by_the_first_successful_step():
    def save_before(comm):
        run = DrivenExchange(comm, 2, name="int4", working="float16")
        run.run(2)
        return run.saved(), run.exchange.state()

    state, numbers = run_threads(2, save_before)[0]

    def run_after(comm):
        run = DrivenExchange(comm, 2, name="int4", working="float16")
        run.load(state, numbers, 2)
        due = total_residuals(run.saved())
        assert not np.isfinite(run.run(bad=0)[0])
        for tensor, values in total_residuals(run.saved()).items():
            assert values.tobytes() == due[tensor].tobytes()
        assert np.isfinite(run.run()[0])
        assert not any(values.any() for values in total_residuals(run.saved()).values())

    run_threads(1, run_after)


@on_threads(2)
def test_uncompressed_checkpoint_starts_without_residuals(comm):
    dense, run = DrivenExchange(comm, 2, name="none"), DrivenExchange(comm, 2)
    dense.run(2)
    run.load(dense.saved(), dense.exchange.state(), 2)
    assert not any(values.any() for values in total_residuals(run.saved()).values())
    assert np.isfinite(run.run()[0])


@pytest.mark.parametrize("name", ["sign", "topk"])
@on_threads(4)
@pytest.mark.full_except("sign")
def test_overflow_on_one_rank_changes_no_state_on_any_rank(comm, name):
    keys = {"density": 0.2} if name == "topk" else {}
    run, other = (DrivenExchange(comm, 3, HPZ, name, "float16", 2, parameters="int8", **keys) for _ in range(2))
    for driven in (run, other):
        driven.run(2, scale=64.0)
    before, numbers = run.saved(), run.exchange.state()
    for at in (4.0, 64.0):
        (norm,) = run.run(bad=1, scale=at)
        assert not np.isfinite(norm)
    run.step -= 2
    after = run.saved()
    for key, values in before.items():
        assert after[key].tobytes() == values.tobytes(), key
    assert run.exchange.state() == numbers
    assert run.run(2, scale=64.0) == other.run(2, scale=64.0)
    assert run.computed_with().tobytes() == other.computed_with().tobytes()


@on_threads(3)
def test_bad_gradient_is_detected_by_all_without_rollback(comm):
    run = DrivenExchange(comm, 2, name="sign")
    run.run()
    weights_before = run.exchange.parameters.array.tobytes()
    (norm,) = run.run(bad=2)
    assert not np.isfinite(norm)
    assert run.exchange.parameters.array.tobytes() == weights_before
    assert np.isfinite(run.exchange.pieces()[-1].array).all()


@on_threads(2)
def test_residuals_are_stored_without_the_loss_scale(comm):
    one, other = (DrivenExchange(comm, 2, name="int8", working="bfloat16") for _ in range(2))
    assert [one.run(scale=scale) for scale in (8.0, 64.0, 1.0)] == [other.run(scale=1.0) for _ in range(3)]
    state, again = one.saved(), other.saved()
    for key, values in state.items():
        assert values.tobytes() == again[key].tobytes(), key


@on_threads(2)
def test_warm_up_updates_are_dense(comm):
    run, dense = DrivenExchange(comm, 2, name="int4", warmup_steps=2), DrivenExchange(comm, 2, name="none")
    assert run.run(2) == dense.run(2)
    assert run.exchange.parameters.array.tobytes() == dense.exchange.parameters.array.tobytes()
    assert run.run() != dense.run()


@on_threads(4, ranks_per_node=2)
def test_levels_across_mixed_nodes_or_whole_parameters_are_rejected(comm):
    for zero, keys in ((ZeroConfig(), {}), (ZeroConfig(gradients=4), {"parameters": "int8"})):
        with pytest.raises(ConfigurationError, match=r"neither all on one node.*zero.parameters or zero.gradients"):
            DrivenExchange(comm, 3, zero, across_nodes=True, **keys)
    with pytest.raises(ConfigurationError, match=r"each of the 4 data ranks keeps all parameters"):
        DrivenExchange(comm, 3, ZeroConfig(parameters=1), parameters="int8")


@pytest.mark.parametrize(("name", "working"), [("int4", "bfloat16"), ("topk", None)])
@pytest.mark.full
def test_compressed_zero_on_the_gpu_has_the_bits_of_the_cpu(gpu, name, working):
    keys = {"density": 0.2} if name == "topk" else {}

    def body(comm, on):
        run = DrivenExchange(comm, 3, HPZ, name, working, 2, on=on, parameters="int8", **keys)
        return run.run(2), run.computed_with(), run.saved()

    host, device = (run_threads(4, lambda comm, on=on: body(comm, on))[0] for on in ("cpu", "gpu"))
    np.testing.assert_allclose(device[0], host[0], rtol=1e-12)
    assert device[1].tobytes() == host[1].tobytes()
    for key, values in host[2].items():
        assert device[2][key].tobytes() == values.tobytes(), key
