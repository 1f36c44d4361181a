"""The figures that a run ends with, from what its ranks measured."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from harness import trainings
from harness.trainings import assembled
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.reporting.units import format_bytes
from hpcdist.training.run.loop import SAMPLED_STEPS, RunOutcome, StepStatistics
from hpcdist.training.run.summary import (
    NO_STEP_MADE,
    NOT_VISIBLE,
    async_throughput,
    describe,
    lock_step_throughput,
    summarise,
)

SERVED = {"parallel.strategy": "parameter_server"}
TARGETS = 7 * 8  # of a whole step in these recipes


def summaries(settings, outcomes):
    """The summary of ranks that measured this; the same on all of them, and JSON."""

    def body(comm):
        return summarise(comm, assembled(comm, settings), outcomes[comm.rank], Path("run"), math.nan, {})

    found = run_threads(len(outcomes), body)
    assert all(one == found[0] for one in found)
    json.dumps(found[0], allow_nan=False)
    return found[0]


def outcome(step_s, comm_s, sent, targets=None, loss=2.0):
    found = RunOutcome(0, 5, None, loss)
    for step, seconds in enumerate(step_s):
        figures = {"communication_s": comm_s[step], "messages": sent[step], "targets": (targets or step_s)[step]}
        found.steps.add(seconds, sent[step], shared=0.0, unknown=0.0, staleness=0, **figures)
    if not step_s and sent:
        found.served_bytes = sent[0]
    return found


def test_a_step_takes_as_long_as_its_slowest_rank(words):
    ranks = [
        outcome([9.0, 1.0, 2.0, 4.0], [8.0, 0.5, 0.5, 0.75], [5, 10, 10, 12]),
        outcome([9.5, 2.0, 1.0, 3.0], [8.0, 1.0, 0.5, 1.5], [5, 11, 10, 10]),
    ]
    found = summaries(words, ranks)
    assert found["step_s_median"] == 2.0 and found["training_s"] == 9.5 + 2 + 2 + 4
    assert found["tokens_per_s"] == 3 * TARGETS / 8
    assert found["comm_fraction"] == pytest.approx((1.75 / 7 + 3 / 6) / 2)
    assert found["comm_fraction_median"] == (0.25 + 0.5) / 2 and found["step_s_mean"] == 8 / 3
    assert found["bytes_sent_per_step"] == 11
    assert not [name for name in found if name.endswith("_reason")]


def test_a_dedicated_server_only_waits_and_sends(words):
    """Of its time nothing is told; of bytes, what it sent when that is the most."""
    workers = [outcome([9.0, 1.0, 2.0], [8.0, 0.5, 1.0], [5, 10, 10]) for _ in range(2)]
    server = outcome([9.0, 7.0, 7.0], [9.0, 6.9, 6.9], [5, 20, 20])
    found = summaries({**words, **SERVED}, [*workers, server])
    assert found["comm_fraction"] == 0.5 and found["step_s_median"] == 1.5 and found["training_s"] == 12.0
    assert found["tokens_per_s"] == 2 * TARGETS / 3
    assert found["bytes_sent_per_step"] == 20


def test_what_is_loaded_from_memory_of_the_node_is_no_part_of_what_is_sent(words):
    shared = {**words, **SERVED, "parameter_server.placement": "colocated", "parameter_server.transport": "shared"}

    def body(comm):
        trainer = assembled(comm, shared)
        trainings.results(trainer, 4)
        found = summarise(comm, trainer, outcome([1.0] * 4, [0.5] * 4, [8.0] * 4), Path("run"), math.nan, {})
        trainer.close()
        return found, trainer.model.layout.size * 4

    for found, psi in run_threads(2, body):
        assert found["bytes_sent_per_step"] == 8
        assert found["bytes_loaded_per_step"] == pytest.approx(psi, rel=0.01), "half the gradients, half the parameters"
        said = describe(found | {"energy_j": None, "energy_reason": "none"})
        shared_bytes = format_bytes(round(psi))
        moved = f"8 bytes in messages, {shared_bytes} through shared memory a step"
        assert f"communication 50.0% (median step 50.0%): {moved}" in said
    none = summaries({**words, **SERVED, "parameter_server.placement": "colocated"}, [outcome([1.0], [0.5], [8.0])] * 2)
    assert none["bytes_loaded_per_step"] is None


def test_without_lock_step_every_worker_counts_its_own_steps(words):
    """Worker 0 is quick and done after 8 s of the 23 that the other takes; both took 3 or 2 s for the first step."""
    quick = outcome([3.0, 1.0, 1.0, 1.0, 2.0], [2.0, 0.5, 0.5, 0.5, 1.0], [9, 10, 10, 10, 11], [30] * 5)
    slow = outcome([2.0, 10.0, 11.0], [1.0, 1.0, 1.1], [9, 10, 10], [26] * 3)
    server = outcome([], [], [20.0])
    found = summaries({**words, **SERVED, "parameter_server.consistency": "asp"}, [quick, slow, server])
    assert found["training_s"] == 23.0
    assert found["tokens_per_s"] == (4 * 30 + 2 * 26) / (23 - 2)
    assert found["step_s_median"] == (1.0 + 10.5) / 2 and found["step_s_mean"] == (5 + 21) / 6
    assert found["comm_fraction"] == pytest.approx((2.5 / 5 + 2.1 / 21) / 2)
    assert found["bytes_sent_per_step"] == 20


def test_one_step_is_better_than_none():
    one, none = StepStatistics(), StepStatistics()
    one.add(4.0, 7.0, targets=28)
    one, none = ({**steps.measured(), "served": math.nan} for steps in (one, none))
    pace = async_throughput([one, none], [one, none])
    assert (pace.tokens_per_s, pace.step_s, pace.training_s, pace.sent_bytes) == (7.0, 4.0, 4.0, 7.0)
    pace = lock_step_throughput([one, one], [one, one], 56)
    assert (pace.tokens_per_s, pace.step_s, pace.training_s, pace.sent_bytes) == (14.0, 4.0, 4.0, 7.0)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_start_without_a_step_says_so(consistency, words):
    empty = [outcome([], [], [], loss=math.nan) for _ in range(3)]
    found = summaries({**words, **SERVED, "parameter_server.consistency": consistency}, empty)
    for figure, reason in {
        "train_loss": "train",
        "tokens_per_s": "tokens",
        "step_s_median": "step",
        "comm_fraction": "comm",
        "bytes_sent_per_step": "bytes_sent",
    }.items():
        assert found[figure] is None and found[f"{reason}_reason"] == NO_STEP_MADE
    assert found["training_s"] == 0
    assert NO_STEP_MADE in describe(found | {"energy_j": None, "energy_reason": "none"})


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.25, "25% of the time of reductions was not waited for"), (0.0, "hid nothing"), (-0.16, "hid nothing")],
)
def test_what_overlap_hid_is_said_without_negative_shares(words, share, said):
    found = summaries(words, [outcome([1.0, 1.0], [0.5, 0.5], [8.0, 8.0])] * 2)
    lines = describe(found | {"energy_j": None, "energy_reason": "none", "communication_hidden_share": share})
    assert said in lines and "-16%" not in lines
    assert ("was not waited for" in lines) == (share > 0)


def test_what_the_library_sends_is_not_visible(words):
    unknown = [outcome([1.0, 1.0], [0.5, 0.5], [8.0, count]) for count in (8.0, math.nan)]
    found = summaries(words, unknown)
    assert found["bytes_sent_per_step"] is None and found["bytes_sent_reason"] == NOT_VISIBLE
    assert "tokens_reason" not in found and found["tokens_per_s"] == TARGETS
    native = summaries({**words, "communication.algorithm": "native"}, unknown)
    assert native["bytes_sent_reason"].startswith(NOT_VISIBLE) and "set communication.algorithm" in str(native)
    checked = summaries({**words, "communication.checked": "true"}, unknown)
    assert "set communication.checked to false" in checked["bytes_sent_reason"]


def test_it_tells_how_samples_were_shared(words):
    done = [outcome([1.0, 1.0], [0.5, 0.5], [8.0, 8.0])] * 2
    assert summaries(words, done)["samples_by_replica"] is None
    found = summaries({**words, "data.shares": "measured"}, done)
    shares = found["samples_by_replica"]
    assert len(shares) == 2 and max(shares) - min(shares) <= 1
    said = f"replicas took {min(shares)} to {max(shares)} of {sum(shares)} samples in the last step"
    assert said in describe(found | {"energy_j": None, "energy_reason": "none"})


def test_the_figures_of_many_steps_are_those_of_a_sample_and_of_all_sums(words):
    """All ranks hold the same steps of their samples, and what is added up is of every step."""
    count = 3 * SAMPLED_STEPS
    step_s = np.random.default_rng(7).exponential(1.0, (count, 2)) + 1.0
    ranks = [outcome(step_s[:, rank].tolist(), [0.5] * count, [8.0] * count) for rank in range(2)]
    found = summaries(words, ranks)
    slowest = step_s[1:].max(axis=1)
    assert [len(rank.steps.sample) for rank in ranks] == [SAMPLED_STEPS] * 2
    pairs = {(own, other) for own, other in step_s.tolist()}
    samples = zip(*([seconds for seconds, *_ in rank.steps.sample] for rank in ranks), strict=True)
    assert len(set(samples) & pairs) == SAMPLED_STEPS, "of each step, the seconds of both"
    assert found["step_s_median"] == pytest.approx(np.median(slowest), rel=0.05)
    assert found["tokens_per_s"] == pytest.approx(TARGETS / slowest.mean(), rel=0.02)
    assert found["training_s"] == pytest.approx(slowest.sum(), rel=0.02)
    assert found["comm_fraction"] == pytest.approx(np.mean(0.5 / step_s[1:].mean(axis=0)))
    late = sum(seconds in set(step_s[count // 2 :, 0].tolist()) for seconds, *_ in ranks[0].steps.sample)
    assert late == pytest.approx(SAMPLED_STEPS / 2, rel=0.1), "no part of the run counts more than another"


def test_what_was_moved_is_said_by_its_kind(words):
    """Where something is not known, of what the messages of the algorithms sent there is a mean."""
    ranks = [outcome([1.0], [0.5], [math.nan]) for _ in range(2)]
    for rank, messages in zip(ranks, (1000.0, 3000.0), strict=True):
        rank.steps.first |= {"messages": messages, "unknown": 2048.0}
    found = summaries(words, ranks)
    assert found["bytes_moved_per_step"] == {"messages": 3000, "shared": 0, "unknown": 2048}
    for moved, said in (
        ((3 << 20, 0, 0), "3.0 MiB in messages"),
        ((0, 3 << 20, 0), "3.0 MiB through shared memory"),
        ((0, 0, 3 << 20), "3.0 MiB by the MPI library"),
        ((3 << 20, 512, 2048), "3.0 MiB in messages, 512 bytes through shared memory, 2.0 KiB by the MPI library"),
        ((0, 0, 0), "nothing"),
    ):
        ways = dict(zip(("messages", "shared", "unknown"), moved, strict=True))
        shown = found | {"energy_j": None, "energy_reason": "none", "bytes_moved_per_step": ways}
        assert f"communication 50.0% (median step 50.0%): {said} a step and rank" in describe(shown).splitlines()


def test_the_lines_of_a_summary_are_short_and_say_what_they_count(words):
    """No table of algorithms, no list of sensors, no unit behind what was not measured."""
    found = summaries(words, [outcome([1.0, 1.0], [0.5, 0.5], [8.0, 8.0])] * 2)
    table = "recursive_doubling<=16384,ring<=65536,node_shared"
    lacking = "no source can be read: gpu (node 0): the job computes on the CPU; cpu (node 0): no powercap"
    shown = found | {"algorithm": table, "energy_j": None, "energy_reason": lacking}
    shown |= {"val_loss": 2.5, "entropy": {"unigram": 3.25, "bigram": 2.4, "trigram": None}, "speed_unit": "samples"}
    lines = describe(shown).splitlines()
    assert "train_loss 2.0000  val_loss 2.5000 nats (below unigram 3.250; above bigram 2.400: entropies of the" in str(
        lines
    )
    assert f"{TARGETS} samples/s  step 1.0000 s (mean 1.0000 s)" in lines
    assert "energy not measured: no source can be read; see `hpcdist energy sources`" in lines
    assert max(map(len, lines)) <= 120 and "<=" not in str(lines)
    assert "train_loss 2.0000 nats" in describe(shown | {"val_loss": None}).splitlines()
    assert "train_loss 2.0000" in describe(shown | {"val_loss": None, "loss_unit": ""}).splitlines()


@pytest.mark.parametrize(("kind", "unit"), [("gpt", "tokens"), ("encoder", "tokens"), ("mlp", "samples")])
def test_a_speed_counts_what_the_model_predicts(kind, unit, words):
    vocabulary = {"model.mask_token": 10, "model.vocabulary": 11} if kind == "encoder" else {}
    settings = {**words, "model.kind": kind, "model.tied": "false", **vocabulary}
    if kind != "gpt":
        settings = {**settings, "data.path": words["data.path"]}
    assert run_threads(1, lambda comm: assembled(comm, settings).speed_unit) == [unit]
