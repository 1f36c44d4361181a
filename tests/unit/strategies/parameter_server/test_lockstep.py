"""A parameter server in lock-step matches one process: every placement, number of servers, optimizer."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from harness.marks import on_threads
from harness.rank_run import RankRun, optimizer_of, text
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.build import server_exchange
from hpcdist.strategies.parameter_server.config import PLACEMENTS, ParameterServerConfig
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange
from hpcdist.strategies.parameter_server.partition import Roles

SAMPLES, STEPS = 7, 4
MODEL = ModelConfig(layers=1, hidden=32, heads=2)
ALONE = ParameterServerConfig(placement="colocated")


class Run(RankRun):
    """A tiny gpt on one rank of a parameter server. ``keys`` are keys of the optimizer."""

    def __init__(self, comm, config, dtype="float64", *, microbatches=1, algorithm="ring", on="cpu", **keys):
        given = {"config": MODEL, "dtype": dtype, "microbatches": microbatches, "optimizer": optimizer_of(**keys)}
        context = {"algorithm": algorithm, "on": on, "total_steps": STEPS}
        super().__init__(comm, partial(server_exchange, config=config), servers=config, **given, **context)
        assert isinstance(self.exchange, LockStepExchange)

    def served(self):
        """Return the bits of all data that this rank serves: parameters and optimizer state."""
        return [piece.array.tobytes() for piece in self.exchange.pieces()]

    def weights(self):
        """Return the bits of every part that this rank holds, by its start."""
        store = self.exchange.parameters
        return {part.start: store.range(part).tobytes() for part in self.exchange.update.parts or store.parts}


def configs(size):
    dedicated = [ParameterServerConfig(servers=servers) for servers in range(1, size)]
    return dedicated + [ParameterServerConfig(servers=s, placement="colocated") for s in range(1, size + 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.full_except("2")
def test_every_placement_matches_one_process(size, rng):
    data = text(rng, STEPS, SAMPLES)
    alone = run_threads(1, lambda comm: Run(comm, ALONE).losses(data))[0]
    for config in configs(size):
        for losses in run_threads(size, lambda comm, config=config: Run(comm, config).losses(data)):
            np.testing.assert_allclose(losses, alone, rtol=1e-12)


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (3, 2), (5, 3)])
@pytest.mark.full_except("3-2", "2-2")
def test_one_sender_per_node_matches_one_process(size, per_node, rng):
    data = text(rng, STEPS, SAMPLES)
    alone = run_threads(1, lambda comm: Run(comm, ALONE).losses(data))[0]

    def body(comm, config):
        run = Run(comm, config, algorithm="hierarchical")
        losses = run.losses(data)
        weights = run.exchange.parameters.array.tobytes() if run.exchange.topology.works else b""
        return losses, len(run.exchange.transport.speakers), run.exchange.transport.speaks, weights

    for config in configs(size):
        results = run_threads(size, lambda comm, config=config: body(comm, config), per_node)
        workers = len(Roles.of(config, size).workers)
        voices = -(-workers // per_node)
        for losses, speakers, _, _ in results:
            np.testing.assert_allclose(losses, alone, rtol=1e-12)
            assert speakers == voices
        assert sum(speaks for _, _, speaks, _ in results) == voices
        assert len({weights for *_, weights in results[:workers]}) == 1, "all workers hold the same bits"


def test_dedicated_server_gets_one_message_per_node(rng):
    data = text(rng, STEPS, SAMPLES)

    def count_receives(comm, algorithm):
        run = Run(comm, ParameterServerConfig(), algorithm=algorithm)
        with count_traffic(comm) as traffic:
            run.losses(data)
        return traffic.calls["irecv"]

    flat = run_threads(5, lambda comm: count_receives(comm, "ring"), 2)[4]
    nodes = run_threads(5, lambda comm: count_receives(comm, "hierarchical"), 2)[4]
    agreement = 2 * STEPS  # recursive doubling of the loss may receive as well
    assert abs(flat - 2 * nodes) <= agreement and nodes < flat


@pytest.mark.parametrize("algorithm", ["rabenseifner", "node_shared", "all_to_all", "recursive_doubling"])
def test_algorithm_without_effect_is_rejected(algorithm):
    with pytest.raises(ConfigurationError, match="workers do not allreduce gradients"):
        run_threads(2, lambda comm: Run(comm, ALONE, algorithm=algorithm))


@pytest.mark.parametrize(("name", "placement"), [("lamb", "dedicated"), ("lars", "colocated")])
def test_layer_wise_rates_with_tensors_split_over_servers(name, placement, rng):
    data = text(rng, STEPS, SAMPLES)
    config = ParameterServerConfig(servers=3, placement=placement)
    alone = run_threads(1, lambda comm: Run(comm, ALONE, name=name).losses(data))[0]
    results = run_threads(5, lambda comm: Run(comm, config, name=name, microbatches=2).losses(data))
    np.testing.assert_allclose(results, [alone] * 5, rtol=1e-11)


def test_workers_and_servers_hold_the_same_bits(rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        run = Run(comm, ParameterServerConfig(servers=2), "float32")
        return run, run.losses(data)

    runs = run_threads(4, body)
    first = runs[0][0].exchange.parameters
    assert first.array.tobytes() == runs[1][0].exchange.parameters.array.tobytes()
    for run, losses in runs[2:]:
        assert losses == runs[0][1]
        assert not run.exchange.traits.identical and run.exchange.parameters.size < first.size
        for part in run.exchange.parameters.parts:
            assert run.exchange.parameters.range(part).tobytes() == first.range(part).tobytes()


def test_sums_are_in_rank_order_for_any_servers(rng):
    """There is no clipping, whose norm is summed over the servers, so the partition changes no bit."""
    data = text(rng, STEPS, SAMPLES)

    def body(comm, config):
        run = Run(comm, config, "float32", clip_norm=0.0)
        run.losses(data)
        return run.exchange.parameters.array.tobytes()

    dedicated = [run_threads(3 + s, lambda comm, s=s: body(comm, ParameterServerConfig(servers=s)))[0] for s in (1, 2)]
    colocated = [
        run_threads(3, lambda comm, s=s: body(comm, ParameterServerConfig(servers=s, placement="colocated")))[2]
        for s in (1, 2, 3)
    ]
    assert len({*dedicated, *colocated}) == 1


def test_sent_bytes_match_the_article(rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm, config):
        run = Run(comm, config, "float32", clip_norm=0.0)
        with count_traffic(comm) as traffic:
            run.losses(data)
        assert not traffic.unknown
        return traffic.sent_bytes, 4 * run.model.layout.size * STEPS

    small = 32 * 3 * STEPS  # what the ranks agree on: four numbers of 8 bytes, in at most three messages a step
    for servers in (1, 2):
        results = run_threads(4, lambda comm, s=servers: body(comm, ParameterServerConfig(servers=s)))
        workers = 4 - servers
        for sent, psi in results[:workers]:
            assert psi <= sent <= psi + small, "a worker sends Psi a step"
        for sent, psi in results[workers:]:
            np.testing.assert_allclose(sent, workers * psi / servers, rtol=0.01, atol=small)
    for size in (2, 3, 4):
        for sent, psi in run_threads(size, lambda comm: body(comm, ALONE)):
            np.testing.assert_allclose(sent, 2 * psi * (size - 1) / size, rtol=0.01, atol=small)


@pytest.mark.parametrize("config", configs(3), ids=str)
@on_threads(3)
def test_saved_pieces_are_disjoint_and_restore_in_any_layout(comm, config, rng):
    data = text(rng, STEPS, SAMPLES)
    run = Run(comm, config, "float32")
    run.losses(data[:2])
    saved = run.state()
    assert {key: values.size for key, values in saved.items()} == {
        (kind, segment.key): segment.range.size for segment in run.model.layout.segments for kind in KINDS
    }
    if not run.exchange.topology.serves:
        assert not run.exchange.pieces()
    fresh = Run(comm, config, "float32")
    fresh.load(saved, run.exchange.state(), 2)
    assert fresh.losses(data[2:]) == run.losses(data[2:]), "resumed bit by bit"
    assert fresh.weights() == run.weights()


KINDS = ("parameters", "optimizer.m", "optimizer.v")


@pytest.mark.parametrize(("transport", "placement"), [("messages", "dedicated"), *product(["rma"], PLACEMENTS)])
def test_nan_names_the_worker_and_updates_nothing(transport, placement, rng):
    data, config = text(rng, STEPS, SAMPLES), ParameterServerConfig(servers=1, transport=transport, placement=placement)

    def body(comm):
        run = Run(comm, config, "float32")
        if comm.rank == 1:
            run.exchange.parameters.view(run.model.layout.segments[4].key)[...] = np.nan
        return run.failure(data[0], 17)

    for why in run_threads(3, body):
        assert "step 17" in why and "rank 1: parameter" in why and "rank 0:" not in why


def test_pushes_overlap_the_backward():
    def body(comm):
        return [op.kind.name for op in Run(comm, ParameterServerConfig()).operations]

    worker, server = run_threads(2, body)
    assert worker.index("PUSH") < len(worker) - 1 - worker[::-1].index("BACKWARD")
    assert "FORWARD" not in server and "PUSH" not in server and "PULL" not in server
    assert worker.count("PUSH") == server.count("COLLECT") == worker.count("PULL") == server.count("PUBLISH")
    assert worker.count("AGREE") == server.count("AGREE") == 1


def test_colocated_server_does_not_send_its_part_to_itself():
    def body(comm):
        return Run(comm, ParameterServerConfig(servers=1, placement="colocated")).exchange.update.parts

    served = run_threads(2, body)
    assert served[1] == [] and len(served[0]) == 1


def configs_with_most_servers(size):
    """Return the configurations with the most servers of each placement."""
    dedicated = [ParameterServerConfig(servers=max(1, size // 2))] if size > 1 else []
    return [*dedicated, ParameterServerConfig(placement="colocated")]


def run_result(comm, config, data, **keys):
    """Return the losses, all parameters that the rank holds, and its optimizer state, as bits."""
    run = Run(comm, config, **keys)
    return run.losses(data), run.weights(), run.served()


@pytest.mark.parametrize("transport", ["shared", "rma"])
@pytest.mark.parametrize(("size", "per_node"), [(1, 1), (2, 2), (3, 2), (5, 2)])
@pytest.mark.full_except("3-2-shared")
def test_every_transport_gives_the_same_bits(transport, size, per_node, rng):
    data = text(rng, STEPS, SAMPLES)
    for config in configs_with_most_servers(size):
        expected = run_threads(
            size, lambda comm, config=config: run_result(comm, config, data, dtype="float32"), per_node
        )
        other = replace(config, transport=transport)
        results = run_threads(
            size, lambda comm, config=other: run_result(comm, config, data, dtype="float32"), per_node
        )
        for ours, theirs in zip(results, expected, strict=True):
            assert ours[0] == theirs[0] and ours[2] == theirs[2]
            assert ours[1].items() >= theirs[1].items()


@pytest.mark.parametrize("transport", ["messages", "shared", "rma"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_every_optimizer_over_every_transport_matches_one_process(transport, name, rng):
    data = text(rng, STEPS, SAMPLES)
    config = ParameterServerConfig(servers=2, placement="colocated", transport=transport)
    alone = run_threads(1, lambda comm: Run(comm, ALONE, name=name).losses(data))[0]
    results = run_threads(3, lambda comm: Run(comm, config, name=name, microbatches=2).losses(data), 2)
    np.testing.assert_allclose(results, [alone] * 3, rtol=1e-11)


def test_node_shares_one_copy_without_messages(rng):
    data = text(rng, STEPS, SAMPLES)
    config = ParameterServerConfig(placement="colocated", transport="shared")

    def body(comm):
        run = Run(comm, config, "float32", clip_norm=0.0)
        with count_traffic(comm) as traffic:
            run.losses(data)
        address = run.exchange.parameters.array.ctypes.data
        return traffic.sent_bytes, run.exchange.loaded_bytes, 4 * run.model.layout.size * STEPS, address

    small = 32 * 3 * STEPS  # what the ranks agree on
    for size in (2, 4):
        results = run_threads(size, body)
        assert len({address for *_, address in results}) == 1
        for sent, loaded, psi, _ in results:
            assert sent <= small
            np.testing.assert_allclose(loaded, 2 * psi * (size - 1) / size, rtol=0.01)
    # Two nodes of two: what comes from elsewhere is received by the first rank, and read by the other.
    for (sent, loaded, psi, _), share in zip(run_threads(4, body, 2), (1 / 2, 1, 1 / 2, 1), strict=True):
        np.testing.assert_allclose(loaded, share * psi, rtol=0.02)
        np.testing.assert_allclose(sent, psi / 2 + psi / 4, rtol=0.02, atol=small)


@pytest.mark.parametrize(
    ("transport", "parameters", "gradients", "optimizer"),
    [("messages", 3, 3, 2), ("shared", 1, 3, 2), ("rma", 3, 3, 2)],
)
@pytest.mark.full_except("shared-1-3-2", "rma-3-3-2")
def test_total_memory_of_all_ranks(transport, parameters, gradients, optimizer):
    """In units of Psi. On one node, three colocated ranks share one copy of the parameters, or have three copies."""
    config = ParameterServerConfig(placement="colocated", transport=transport)

    def body(comm):
        run = Run(comm, config, "float32")
        held = run.ledger.current
        comm.barrier()
        return held, 4 * run.model.layout.size

    results = run_threads(3, body)
    psi = results[0][1]
    for category, expected in (("parameters", parameters), ("gradients", gradients), ("optimizer", optimizer)):
        np.testing.assert_allclose(sum(held[category] for held, _ in results), expected * psi, rtol=1e-3)
    if transport == "rma":  # a slot for each worker
        np.testing.assert_allclose(sum(held["communication"] for held, _ in results), 3 * psi, rtol=1e-3)


def test_one_sided_transport_sends_the_bytes_of_messages(rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        run = Run(comm, ParameterServerConfig(placement="colocated", transport="rma"), "float32", clip_norm=0.0)
        with count_traffic(comm) as traffic:
            run.losses(data)
        return traffic.sent_bytes, 4 * run.model.layout.size * STEPS, dict(traffic.calls)

    for sent, psi, calls in run_threads(3, body):
        np.testing.assert_allclose(sent, 2 * psi * 2 / 3, rtol=0.01, atol=32 * 3 * STEPS)
        assert calls["put"] > 0 < calls["get"] and calls["flush"] > 0


def test_unsupported_transports_are_rejected():
    for transport in ("shared", "rma"):
        used = replace(ALONE, transport=transport)
        with pytest.raises(ConfigurationError, match="with run.device = 'gpu'"):
            run_threads(2, lambda comm, used=used: Run(comm, used, on="gpu"))
    with pytest.raises(ConfigurationError, match="worker per node sends the messages"):
        run_threads(2, lambda comm: Run(comm, replace(ALONE, transport="shared"), algorithm="hierarchical"))


@pytest.mark.parametrize("transport", ["messages", "shared", "rma"])
@pytest.mark.full_except("messages")
def test_failed_step_is_explained_and_the_next_step_succeeds(transport, rng):
    data = text(rng, STEPS, SAMPLES)
    config = ParameterServerConfig(placement="colocated", transport=transport)

    def body(comm):
        run = Run(comm, config)
        store = run.exchange.parameters
        before = store.array.copy()
        comm.barrier()
        store.view(run.model.layout.segments[4].key)[...] = np.nan
        comm.barrier()  # a node may have one copy
        assert "rank 2: parameter" in run.failure(data[0], 17)
        store.array[...] = before
        comm.barrier()
        return run.losses(data)

    assert run_threads(3, body) == run_threads(3, lambda comm: Run(comm, config).losses(data))
