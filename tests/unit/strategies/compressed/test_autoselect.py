"""`auto`: measurements select the compressor, the same on all ranks, and a resumed run keeps it."""

import threading
from dataclasses import replace

import pytest

from harness.rank_run import seat
from hpcdist import collectives, models
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.compression.compressor import Compressor
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.compressed import autoselect, reduction
from hpcdist.strategies.compressed.autoselect import CandidateTiming, CompressionDecision, decide
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.core.operations import StagePlacement

MODEL = ModelConfig(layers=1, hidden=16, heads=2, vocabulary=64)


class Time:
    """A clock for each thread that advances only on request, so that other work of the machine cannot change a test."""

    def __init__(self):
        self._own = threading.local()

    def __call__(self):
        return float(getattr(self._own, "now", 0.0))

    def pass_(self, seconds):
        self._own.now = self() + seconds


@pytest.fixture
def costs(monkeypatch):
    """The clock, on which a dense sum, a compressed sum and the encoding of a bucket take fixed times."""
    time, taken = Time(), {"dense": 0.0, "compressed": 0.0, "codec": 0.0}
    monkeypatch.setattr(autoselect, "MOST", autoselect.FEWEST)

    def slower(call, what):
        def called(*args, **keys):
            time.pass_(taken[what])
            return call(*args, **keys)

        return called

    monkeypatch.setattr(collectives, "allreduce", slower(collectives.allreduce, "dense"))
    monkeypatch.setattr(
        reduction.QuantisedReduction, "allreduce", slower(reduction.QuantisedReduction.allreduce, "compressed")
    )
    monkeypatch.setattr(reduction.GradientCoder, "encode", slower(reduction.GradientCoder.encode, "codec"))
    return time, taken


def seat_of(comm):
    return seat(comm, models.build(MODEL, "float32", context=8), OptimizerConfig())


def run_decision(time, ranks=2, **keys):
    config = CompressionConfig(**keys)
    results = run_threads(ranks, lambda comm: decide(seat_of(comm), config, 1, halved=False, clock=time))
    assert all(local_data == results[0] for local_data in results), "the same on all ranks, figures included"
    return results[0]


def test_slow_network_selects_compression(costs):
    time, taken = costs
    taken |= {"dense": 0.1, "compressed": 0.02, "codec": 0.001}
    result = run_decision(time)
    assert (result.name, result.source) == ("int8", "measured")
    dense, row = result.rows
    assert (dense.name, dense.seconds, dense.codec_s) == ("none", pytest.approx(0.1), 0.0)
    assert row.codec_s == pytest.approx(0.001) and row.seconds >= 0.02
    assert (
        "int8 is" in result.described() and "faster" in result.described() and "dense 100.00 ms" in result.described()
    )


@pytest.mark.parametrize(("dense", "compressed", "output"), [(0.001, 0.02, "slower"), (0.1, 0.094, "not worth")])
def test_unprofitable_compression_is_off_with_the_reason(costs, dense, compressed, output):
    time, taken = costs
    taken |= {"dense": dense, "compressed": compressed, "codec": 0.002}
    result = run_decision(time)
    assert result.name == "none" and output in result.described() and "encoding and decoding" in result.described()
    assert result.numbers()["measured"][1]["name"] == "int8"


def test_fastest_candidate_is_selected(costs):
    time, taken = costs
    taken |= {"dense": 0.5, "compressed": 0.2}  # topk takes no time on this clock
    assert run_decision(time, candidates=("int8", "topk")).name == "topk"


def test_one_data_rank_measures_nothing(costs):
    result = run_decision(costs[0], ranks=1)
    assert (result.name, result.rows) == ("none", ()) and "no gradients are sent" in result.described()


def test_every_candidate_runs_on_several_nodes_and_by_halves():
    config = CompressionConfig(candidates=("int8", "topk", "randomk", "powersgd"), across_nodes=True, density=0.1)
    half = CompressionConfig(candidates=("int8", "topk"), density=0.1, error_feedback=False)

    def run(comm):
        context = seat_of(comm)
        kept = {"budget_s": 0.0}
        return [decide(context, config, 1, halved=False, **kept), decide(context, half, 1, halved=True, **kept)]

    for result in run_threads(4, run, ranks_per_node=2):
        assert [[row.name for row in each.rows] for each in result] == [
            ["none", *config.candidates],
            ["none", *half.candidates],
        ]
        assert all(row.seconds > 0 for each in result for row in each.rows)
        assert all(row.codec_s > 0 for each in result for row in each.rows[1:])


def test_one_node_measures_nothing_across_nodes():
    config = CompressionConfig(across_nodes=True)
    for result in run_threads(2, lambda comm: decide(seat_of(comm), config, 1, halved=False)):
        assert (result.name, result.rows) == (
            "none",
            (),
        ) and "no gradients are sent between nodes" in result.described()


def test_stages_with_different_buckets_select_the_same(costs):
    """Factors belong to whole layers, whose share of a bucket differs from stage to stage."""
    time, taken = costs
    taken |= {"dense": 0.1}  # and factors, which are summed by two of them, take 0.2 times their part
    config = CompressionConfig(candidates=("powersgd",))
    model = models.build(replace(MODEL, vocabulary=512), "float32", context=8)
    placement = StagePlacement((range(1), range(1, len(model.stages))), (0, 1), model.skips)

    def run(comm):
        data, pipeline = comm.split(comm.rank % 2), comm.split(comm.rank // 2)
        given = replace(seat_of(comm), data=data, pipeline=pipeline, model=model, placement=placement)
        context = replace(given, bucket_bytes=1 << 14)  # less than the embeddings, which are one layer
        return decide(context, config, 1, halved=False, clock=time), autoselect._Candidate(
            context, "powersgd", config, 1, False
        ).share

    results = run_threads(4, run)
    assert len({share for _, share in results}) == 2
    assert all(one == results[0][0] for one, _ in results)


def test_repeated_measurements_encode_finite_values(monkeypatch):
    """Repeated sums on many ranks soon exceed float32. The measurement must not encode such values."""
    monkeypatch.setattr(autoselect, "MOST", 140)

    def raise_if_measured(*args):
        raise AssertionError("nothing was to be measured of values that are not finite")

    monkeypatch.setattr(Compressor, "poison", raise_if_measured)
    config = CompressionConfig(error_feedback=False)
    results = run_threads(2, lambda comm: decide(seat_of(comm), config, 1, halved=False, budget_s=1e9))
    assert [row.name for row in results[0].rows] == ["none", "int8"]


def test_only_automatic_selections_are_described():
    assert CompressionDecision("int8", "recipe").described() == ""
    kept = CompressionDecision("int8", "checkpoint").described()
    assert "kept from the checkpoint" in kept and "int8" in kept
    assert str(CandidateTiming("int8", 0.002, 0.0005)) == "int8 2.00 ms (0.50 of it encoding and decoding)"
    assert autoselect.CLEARLY < 1
