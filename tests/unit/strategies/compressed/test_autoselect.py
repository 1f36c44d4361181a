"""`auto`: what is measured decides, the same on all ranks, and a resumed run keeps it."""

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
from hpcdist.strategies.schedule.operations import StagePlacement

MODEL = ModelConfig(layers=1, hidden=16, heads=2, vocabulary=64)


class Time:
    """A clock for each thread that goes only where it is told to: what a machine does beside cannot change a test."""

    def __init__(self):
        self._own = threading.local()

    def __call__(self):
        return float(getattr(self._own, "now", 0.0))

    def pass_(self, seconds):
        self._own.now = self() + seconds


@pytest.fixture
def costs(monkeypatch):
    """The clock, and what a dense sum, a compressed one and encoding a bucket take on it."""
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


def decided(time, ranks=2, **keys):
    config = CompressionConfig(**keys)
    found = run_threads(ranks, lambda comm: decide(seat_of(comm), config, 1, halved=False, clock=time))
    assert all(own == found[0] for own in found), "the same on all ranks, figures included"
    return found[0]


def test_a_slow_wire_is_worth_compression(costs):
    time, taken = costs
    taken |= {"dense": 0.1, "compressed": 0.02, "codec": 0.001}
    found = decided(time)
    assert (found.name, found.source) == ("int8", "measured")
    dense, row = found.rows
    assert (dense.name, dense.seconds, dense.codec_s) == ("none", pytest.approx(0.1), 0.0)
    assert row.codec_s == pytest.approx(0.001) and row.seconds >= 0.02
    assert "int8 is" in found.described() and "faster" in found.described() and "dense 100.00 ms" in found.described()


@pytest.mark.parametrize(("dense", "compressed", "said"), [(0.001, 0.02, "slower"), (0.1, 0.094, "not worth")])
def test_what_does_not_pay_is_off_and_says_why(costs, dense, compressed, said):
    time, taken = costs
    taken |= {"dense": dense, "compressed": compressed, "codec": 0.002}
    found = decided(time)
    assert found.name == "none" and said in found.described() and "encoding and decoding" in found.described()
    assert found.numbers()["measured"][1]["name"] == "int8"


def test_the_fastest_candidate_wins(costs):
    time, taken = costs
    taken |= {"dense": 0.5, "compressed": 0.2}  # topk takes no time on this clock
    assert decided(time, candidates=("int8", "topk")).name == "topk"


def test_one_data_rank_measures_nothing(costs):
    found = decided(costs[0], ranks=1)
    assert (found.name, found.rows) == ("none", ()) and "nothing travels" in found.described()


def test_every_candidate_runs_on_several_nodes_and_by_halves():
    config = CompressionConfig(candidates=("int8", "topk", "randomk", "powersgd"), across_nodes=True, density=0.1)
    half = CompressionConfig(candidates=("int8", "topk"), density=0.1, error_feedback=False)

    def run(comm):
        context = seat_of(comm)
        kept = {"budget_s": 0.0}
        return [decide(context, config, 1, halved=False, **kept), decide(context, half, 1, halved=True, **kept)]

    for found in run_threads(4, run, ranks_per_node=2):
        assert [[row.name for row in each.rows] for each in found] == [
            ["none", *config.candidates],
            ["none", *half.candidates],
        ]
        assert all(row.seconds > 0 for each in found for row in each.rows)
        assert all(row.codec_s > 0 for each in found for row in each.rows[1:])


def test_one_node_measures_nothing_of_what_leaves_nodes():
    config = CompressionConfig(across_nodes=True)
    for found in run_threads(2, lambda comm: decide(seat_of(comm), config, 1, halved=False)):
        assert (found.name, found.rows) == ("none", ()) and "nothing leaves" in found.described()


def test_stages_with_other_buckets_decide_alike(costs):
    """Factors are of whole layers, whose part in a bucket differs from stage to stage."""
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

    found = run_threads(4, run)
    assert len({share for _, share in found}) == 2
    assert all(one == found[0][0] for one, _ in found)


def test_many_rounds_encode_what_is_finite(monkeypatch):
    """Sums of sums on many ranks soon are beyond float32, and nobody would encode them."""
    monkeypatch.setattr(autoselect, "MOST", 140)

    def poison(*args):
        raise AssertionError("nothing was to be measured of values that are not finite")

    monkeypatch.setattr(Compressor, "poison", poison)
    config = CompressionConfig(error_feedback=False)
    found = run_threads(2, lambda comm: decide(seat_of(comm), config, 1, halved=False, budget_s=1e9))
    assert [row.name for row in found[0].rows] == ["none", "int8"]


def test_a_choice_of_the_recipe_is_not_explained():
    assert CompressionDecision("int8", "recipe").described() == ""
    kept = CompressionDecision("int8", "checkpoint").described()
    assert "kept from the checkpoint" in kept and "int8" in kept
    assert str(CandidateTiming("int8", 0.002, 0.0005)) == "int8 2.00 ms (0.50 of it encoding and decoding)"
    assert autoselect.CLEARLY < 1
