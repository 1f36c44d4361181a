"""Compressed gradients on a parameter server, compared with one process that encodes and decodes for every worker."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from harness.compressed.server import (
    EVEN,
    SOME,
    UNEVEN,
    Case,
    Job,
    OneProcess,
    colocated,
    dedicated,
    float32,
    gradients,
    start,
)
from harness.marks import cases
from harness.trainings import residuals_of
from hpcdist.comm.config import CommunicationConfig
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.config import LOW_RANK, QUANTISED, SPARSE, CompressionConfig
from hpcdist.strategies.compressed.registry import compressor
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.training.recipe.recipe import Recipe

NAMES = (*QUANTISED, *SPARSE)


def train(case, given):
    def body(comm):
        job = Job(comm, case)
        for row in given:
            assert job.step(row[comm.rank])
        job.look()
        return job

    return run_threads(case.ranks, body, case.per_node)


def check_as_one_process(case, given):
    alone = OneProcess(case)
    for row in given:
        alone.step(row)
    jobs = train(case, given)
    for step, expected in enumerate(alone.sums):
        result = sum(job.sums[step] for job in jobs)  # each server has its part
        np.testing.assert_array_equal(result, expected)
    for job in jobs[: len(case.roles.workers)]:
        np.testing.assert_array_equal(job.weights, float32(alone.working))
    speakers = [members[0] for members in case.voices()]
    for voice, rank in enumerate(speakers if case.config.error_feedback else ()):
        np.testing.assert_array_equal(jobs[rank].owed, alone.residual[voice])


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.full_except("sign-True")
def test_ten_steps_match_one_process(name, feedback, rng):
    config = CompressionConfig(density=0.1, error_feedback=feedback)
    for ranks, servers in [(2, dedicated()), (4, colocated(2))] if feedback else [(3, dedicated(1)), (3, colocated())]:
        case = Case(ranks, servers, name, config)
        check_as_one_process(case, gradients(rng, case))


def test_every_placement_matches_one_process(rng):
    for ranks in (1, 2, 4):
        servers = [dedicated(number) for number in range(1, ranks)] + [colocated(n) for n in range(1, ranks + 1)]
        for each, layout in product(servers, (UNEVEN, EVEN)):
            case = Case(ranks, each, "int8", layout=layout)
            check_as_one_process(case, gradients(rng, case, 3))


@pytest.mark.parametrize("name", ["int4", "topk", "randomk"])
@pytest.mark.full_except("topk")
def test_warm_up_updates_are_dense(name, rng):
    for servers in (dedicated(2), colocated()):
        case = Case(4, servers, name, CompressionConfig(density=0.1, warmup_steps=4))
        check_as_one_process(case, gradients(rng, case))


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.full_except("False")
def test_one_worker_per_node_encodes_the_sum_of_its_node(across, rng):
    for ranks, servers in product((3, 4, 5), (dedicated(), colocated(1), colocated())):
        case = Case(ranks, servers, "int8", CompressionConfig(across_nodes=across), per_node=2)
        check_as_one_process(case, gradients(rng, case, 4))


@pytest.mark.parametrize("working", ["float16", "bfloat16"])
@pytest.mark.full
def test_16_bit_gradients_are_encoded_without_their_scale(working, rng):
    for servers, name in product((dedicated(2), colocated()), ("int8", "topk")):
        case = Case(4, servers, name, CompressionConfig(density=0.1), working=working, loss_scale=64.0)
        check_as_one_process(case, gradients(rng, case, 5))


def test_compressed_server_on_the_gpu_has_the_bits_of_the_host(gpu, rng):
    for case in (
        Case(2, dedicated(), "topk", replace(SOME, warmup_steps=1), on="gpu"),
        Case(3, colocated(), "int8", per_node=2, on="gpu"),
        Case(2, colocated(), "int8", working="float16", loss_scale=64.0, on="gpu"),
    ):
        check_as_one_process(case, gradients(rng, case, 2))
    assert gpu.LOG.events


def test_lossless_compressor_has_the_bits_of_no_compression(rng):
    for ranks, servers in [(2, dedicated()), (4, dedicated(2)), (3, colocated()), (4, colocated(2))]:
        case = Case(ranks, servers, "topk", CompressionConfig(density=1.0))
        given = gradients(rng, case, 4)
        for ours, theirs in zip(train(case, given), train(replace(case, name="none"), given), strict=True):
            assert ours.exchange.parameters.array.tobytes() == theirs.exchange.parameters.array.tobytes()


def test_any_number_of_servers_has_the_same_bits_for_equal_splits(rng):
    """Colocated servers encode other parts than dedicated servers, so each placement is compared separately."""
    given = gradients(rng, Case(2, dedicated(), layout=EVEN), 4)
    for name in ("int4", "qsgd", "topk"):
        results = {
            train(Case(2 + servers, dedicated(servers), name, layout=EVEN), pad_servers(given, servers))[0]
            .exchange.parameters.array.tobytes()
            for servers in (1, 2, 4)
        }  # fmt: skip
        assert len(results) == 1
    # Elementwise ones do not even see the cut.
    given = gradients(rng, Case(2, dedicated()), 4)
    results = {
        train(Case(2 + servers, dedicated(servers), "bfloat16"), pad_servers(given, servers))[0]
        .exchange.parameters.array.tobytes()
        for servers in (1, 2, 3)
    }  # fmt: skip
    assert len(results) == 1


def pad_servers(given, servers):
    return np.concatenate([given, np.zeros((len(given), servers, given.shape[2]), np.float32)], axis=1)


@pytest.mark.parametrize("servers", [dedicated(2), colocated()])
@pytest.mark.parametrize("name", ["int8", "topk", "randomk", "sign"])
def test_recorded_bytes_match_the_formula(name, servers, rng):
    case = Case(4, servers, name, CompressionConfig(density=0.1))
    given = gradients(rng, case, 2)
    made = compressor(name, case.config)

    def sent_bytes(comm, case):
        job = Job(comm, case)
        with count_traffic(comm) as traffic:
            for row in given:
                job.step(row[comm.rank])
        return traffic.sent_bytes, job.exchange.topology.messages

    results = run_threads(4, lambda comm: sent_bytes(comm, case))
    dense = run_threads(4, lambda comm: sent_bytes(comm, replace(case, name="none")))
    for rank, ((ours, messages), (theirs, _)) in enumerate(zip(results, dense, strict=True)):
        pushed = [part for part, server in messages if server != rank and rank in case.roles.workers]
        values = sum(part.size for part in pushed)
        payloads = 0
        for part in pushed:
            sizes = [made.payload_bytes(where.size) for _, where in case.layout.within(part)]
            payloads += sum(-(-size // 4) * 4 for size in sizes[:-1]) + sizes[-1]
        assert theirs - ours == len(given) * (4 * values - payloads)
        assert ours < theirs or not pushed


def test_non_finite_gradient_stops_all_before_any_update(rng):
    bad_values = (("int8", np.nan), ("topk", np.inf), ("sign", np.nan), ("float16", np.inf))
    for servers, (name, bad) in product((dedicated(), colocated()), bad_values):
        case = Case(3, servers, name)
        given = gradients(rng, case, 3)
        given[2, 1, 3] = bad

        def body(comm, case=case, given=given):
            job = Job(comm, case)
            assert all(job.step(row[comm.rank]) for row in given[:2])
            before = job.exchange.parameters.array.tobytes()
            assert not job.step(given[2][comm.rank])
            assert job.exchange.parameters.array.tobytes() == before
            residuals = residuals_of(job.exchange)
            assert residuals is None or np.isfinite(residuals.array).all()

        run_threads(3, body)


def test_a_skipped_16_bit_step_changes_no_residual(rng):
    for servers, owes in product((dedicated(), colocated()), (False, True)):
        case = Case(3, servers, "int8", working="float16", loss_scale=256.0)
        given = gradients(rng, case, 3)
        overflowing = given[1].copy()
        overflowing[1, 3] = 1e4  # beyond float16 once it is scaled

        def body(comm, case=case, rows=(), owes=owes):
            job = Job(comm, case)
            this = job.exchange
            for row in rows:
                this.transport.owes = owes
                before = residuals_of(this).array.tobytes(), this.parameters.array.tobytes()
                if not job.step(row[comm.rank]):
                    if owes:  # a save, or else the next step, gives it up
                        this.pieces()
                        now = residuals_of(this).array.tobytes(), this.parameters.array.tobytes()
                        assert before == now
                    assert this.transport.owes == owes
            return this.parameters.array.tobytes() + residuals_of(this).array.tobytes()

        skipping = (given[0], overflowing, given[1], given[2])
        results = [run_threads(3, lambda comm, rows=rows: body(comm, rows=rows)) for rows in (tuple(given), skipping)]
        assert results[0] == results[1]


def test_residuals_of_a_local_range_are_applied_immediately(rng):
    case = Case(2, colocated(), "int8")
    given = gradients(rng, case, 1)
    owed = gradients(rng, case, 1)[0]

    def body(comm):
        job = Job(comm, case)
        this = job.exchange
        residuals_of(this).array[...] = owed[comm.rank]
        this.transport.owes = True
        job.step(given[0][comm.rank])
        for part in this.update.parts:
            assert not residuals_of(this).range(part).any()
        assert not this.transport.owes
        return job.sums[0], residuals_of(this).array.copy()

    sums, residuals = (sum(pair) for pair in zip(*run_threads(2, body), strict=True))
    pushed = given[0].sum(axis=0) + owed.sum(axis=0) + 2 * np.float32(0.1) * start(UNEVEN)
    np.testing.assert_allclose(sums + residuals, pushed, rtol=1e-5, atol=1e-5)


def recipe_of(servers, name, algorithm, across):
    """Return a recipe of these servers with compressed gradients. Raises if it is rejected."""
    return Recipe(
        parallel=ParallelConfig(strategy="parameter_server"),
        parameter_server=servers,
        communication=CommunicationConfig(algorithm=algorithm, compression=name),
        compression=CompressionConfig(across_nodes=across),
    )


@cases(
    "servers, name, algorithm, across, why",
    (ParameterServerConfig(consistency="asp"), "int8", "ring", False, "clipped by the norm of its worker's own"),
    (ParameterServerConfig(consistency="ssp", staleness=2), "topk", "ring", False, "clipped by the norm"),
    (ParameterServerConfig(backup_workers=1), "int8", "ring", False, "residuals assume that it was applied"),
    (ParameterServerConfig(transport="shared"), "int8", "ring", False, "encoding only costs time"),
    (ParameterServerConfig(transport="rma"), "int8", "ring", False, "cannot decode payloads"),
    (ParameterServerConfig(), LOW_RANK[0], "ring", False, "a second exchange"),
    (ParameterServerConfig(), "dgc", "ring", False, "each rank updates the whole model"),
    (ParameterServerConfig(), "int8", "ring", True, "communication.algorithm = 'hierarchical'"),
)
def test_unsupported_compressed_servers_are_rejected(servers, name, algorithm, across, why):
    with pytest.raises(ConfigurationError, match=why):
        recipe_of(servers, name, algorithm, across)


def test_ssp_with_bound_0_allows_compression():
    recipe = recipe_of(ParameterServerConfig(consistency="ssp"), "int8", "hierarchical", across=True)
    assert recipe.parameter_server.lock_step
    with pytest.raises(ConfigurationError):
        recipe_of(ParameterServerConfig(consistency="ssp", staleness=1), "int8", "hierarchical", across=True)


def test_only_sending_workers_keep_residuals():
    def body(comm, case):
        this = Job(comm, case).exchange
        return residuals_of(this).array.size

    whole = UNEVEN.size
    cases = (Case(3, dedicated(), "int8"), Case(4, colocated(), "int8", per_node=2))
    for case, expected in zip(cases, ([whole, whole, 0], [whole, 0, whole, 0]), strict=True):
        assert run_threads(case.ranks, lambda comm, case=case: body(comm, case), case.per_node) == expected
