"""The figures at the end of a run, computed from the measurements of its ranks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from harness import trainings
from harness.trainings import assemble_trainer
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.run.loop import SAMPLED_STEPS, RunOutcome, StepStatistics
from hpcdist.training.run.summary import (
    NO_STEP_MADE,
    NOT_VISIBLE,
    async_throughput,
    catalogue_lines,
    describe,
    lock_step_throughput,
    summarise,
)

SERVED = {"parallel.strategy": "parameter_server"}
TARGETS = 7 * 8  # of a whole step in these recipes


def summaries(settings, outcomes):
    """Return the summary of ranks with these measurements. Checks that it is the same on all ranks and valid JSON."""

    def body(comm):
        return summarise(comm, assemble_trainer(comm, settings), outcomes[comm.rank], Path("run"), math.nan, {})

    results = run_threads(len(outcomes), body)
    assert all(one == results[0] for one in results)
    json.dumps(results[0], allow_nan=False)
    return results[0]


def outcome(step_s, comm_s, sent, targets=None, loss=2.0):
    result = RunOutcome(0, 5, None, loss)
    for step, seconds in enumerate(step_s):
        figures = {"communication_s": comm_s[step], "messages": sent[step], "targets": (targets or step_s)[step]}
        result.steps.add(seconds, sent[step], shared=0.0, unknown=0.0, staleness=0, **figures)
    if not step_s and sent:
        result.served_bytes = sent[0]
    return result


def test_step_time_is_the_time_of_the_slowest_rank(words):
    ranks = [
        outcome([9.0, 1.0, 2.0, 4.0], [8.0, 0.5, 0.5, 0.75], [5, 10, 10, 12]),
        outcome([9.5, 2.0, 1.0, 3.0], [8.0, 1.0, 0.5, 1.5], [5, 11, 10, 10]),
    ]
    results = summaries(words, ranks)
    assert results["step_s_median"] == 2.0 and results["training_s"] == 9.5 + 2 + 2 + 4
    assert results["tokens_per_s"] == 3 * TARGETS / 8
    assert results["comm_fraction"] == pytest.approx((1.75 / 7 + 3 / 6) / 2)
    assert results["comm_fraction_median"] == (0.25 + 0.5) / 2 and results["step_s_mean"] == 8 / 3
    assert results["bytes_sent_per_step"] == 11
    assert not [name for name in results if name.endswith("_reason")]


def test_dedicated_server_counts_only_for_sent_bytes(words):
    """Its time is not reported. Its sent bytes are reported if they are the maximum."""
    workers = [outcome([9.0, 1.0, 2.0], [8.0, 0.5, 1.0], [5, 10, 10]) for _ in range(2)]
    server = outcome([9.0, 7.0, 7.0], [9.0, 6.9, 6.9], [5, 20, 20])
    results = summaries({**words, **SERVED}, [*workers, server])
    assert results["comm_fraction"] == 0.5 and results["step_s_median"] == 1.5 and results["training_s"] == 12.0
    assert results["tokens_per_s"] == 2 * TARGETS / 3
    assert results["bytes_sent_per_step"] == 20


def test_shared_memory_loads_do_not_count_as_sent_bytes(words):
    shared = {**words, **SERVED, "parameter_server.placement": "colocated", "parameter_server.transport": "shared"}

    def body(comm):
        trainer = assemble_trainer(comm, shared)
        trainings.run_steps(trainer, 4)
        result = summarise(comm, trainer, outcome([1.0] * 4, [0.5] * 4, [8.0] * 4), Path("run"), math.nan, {})
        trainer.close()
        return result, trainer.model.layout.size * 4

    for result, psi in run_threads(2, body):
        assert result["bytes_sent_per_step"] == 8
        assert result["bytes_loaded_per_step"] == pytest.approx(psi, rel=0.01), (
            "half the gradients, half the parameters"
        )
        assert result["bytes_moved_per_step"]["shared"] == result["bytes_loaded_per_step"]
    none = summaries({**words, **SERVED, "parameter_server.placement": "colocated"}, [outcome([1.0], [0.5], [8.0])] * 2)
    assert none["bytes_loaded_per_step"] is None


def test_asynchronous_workers_count_their_steps_separately(words):
    """Worker 0 finishes after 8 s of the 23 s of the other worker. Their first steps took 3 and 2 s."""
    quick = outcome([3.0, 1.0, 1.0, 1.0, 2.0], [2.0, 0.5, 0.5, 0.5, 1.0], [9, 10, 10, 10, 11], [30] * 5)
    slow = outcome([2.0, 10.0, 11.0], [1.0, 1.0, 1.1], [9, 10, 10], [26] * 3)
    server = outcome([], [], [20.0])
    results = summaries({**words, **SERVED, "parameter_server.consistency": "asp"}, [quick, slow, server])
    assert results["training_s"] == 23.0
    assert results["tokens_per_s"] == (4 * 30 + 2 * 26) / (23 - 2)
    assert results["step_s_median"] == (1.0 + 10.5) / 2 and results["step_s_mean"] == (5 + 21) / 6
    assert results["comm_fraction"] == pytest.approx((2.5 / 5 + 2.1 / 21) / 2)
    assert results["bytes_sent_per_step"] == 20


def test_single_step_is_used_if_there_are_no_others():
    one, none = StepStatistics(), StepStatistics()
    one.add(4.0, 7.0, targets=28)
    one, none = ({**steps.measured(), "served": math.nan} for steps in (one, none))
    pace = async_throughput([one, none], [one, none])
    assert (pace.tokens_per_s, pace.step_s, pace.training_s, pace.sent_bytes) == (7.0, 4.0, 4.0, 7.0)
    pace = lock_step_throughput([one, one], [one, one], 56)
    assert (pace.tokens_per_s, pace.step_s, pace.training_s, pace.sent_bytes) == (14.0, 4.0, 4.0, 7.0)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_start_without_a_step_reports_it(consistency, words):
    empty = [outcome([], [], [], loss=math.nan) for _ in range(3)]
    results = summaries({**words, **SERVED, "parameter_server.consistency": consistency}, empty)
    for figure, reason in {
        "train_loss": "train",
        "tokens_per_s": "tokens",
        "step_s_median": "step",
        "comm_fraction": "comm",
        "bytes_sent_per_step": "bytes_sent",
    }.items():
        assert results[figure] is None and results[f"{reason}_reason"] == NO_STEP_MADE
    assert results["training_s"] == 0
    assert NO_STEP_MADE in describe(results, [])


@pytest.mark.parametrize(
    ("share", "output"),
    [
        (0.25, "25%  (of the time of reductions"),
        (0.0, "0%  (starting and waiting"),
        (-0.16, "0%  (starting and waiting"),
    ],
)
def test_summary_prints_the_catalogue_of_the_run(words, share, output, tmp_path):
    """The hidden share is never negative. A run without readable files has a reason instead of figures."""
    recipe = trainings.recipe_of(words)
    with MetricsWriter(tmp_path / "metrics.h5", 2) as writer:
        for step in (1, 2):
            figures = dict.fromkeys(PER_RANK, np.ones(2))
            writer.append(step=step, loss=2.0, learning_rate=0.1, tokens=8, **figures)
        writer.describe(communication_hidden_share=share)
    lines = catalogue_lines(tmp_path, recipe)
    assert lines[0].startswith("training loss") and "2.0000 nats  (mean of the last 2 steps" in lines[0]
    assert any(line.startswith("overlap") and output in line for line in lines)
    results = summaries(words, [outcome([1.0, 1.0], [0.5, 0.5], [8.0, 8.0])] * 2)
    assert describe(results, lines).splitlines()[1 : 1 + len(lines)] == lines
    assert catalogue_lines(tmp_path / "absent", recipe)[0].startswith("no figures: ")


def test_bytes_of_the_library_are_not_visible(words):
    unknown = [outcome([1.0, 1.0], [0.5, 0.5], [8.0, count]) for count in (8.0, math.nan)]
    results = summaries(words, unknown)
    assert results["bytes_sent_per_step"] is None and results["bytes_sent_reason"] == NOT_VISIBLE
    assert "tokens_reason" not in results and results["tokens_per_s"] == TARGETS
    native = summaries({**words, "communication.algorithm": "native"}, unknown)
    assert native["bytes_sent_reason"].startswith(NOT_VISIBLE) and "set communication.algorithm" in str(native)
    checked = summaries({**words, "communication.checked": "true"}, unknown)
    assert "set communication.checked to false" in checked["bytes_sent_reason"]


def test_summary_reports_the_sample_shares(words):
    done = [outcome([1.0, 1.0], [0.5, 0.5], [8.0, 8.0])] * 2
    assert summaries(words, done)["samples_by_replica"] is None
    results = summaries({**words, "data.shares": "measured"}, done)
    shares = results["samples_by_replica"]
    assert len(shares) == 2 and max(shares) - min(shares) <= 1
    output = f"replicas took {min(shares)} to {max(shares)} of {sum(shares)} samples in the last step"
    assert output in describe(results, [])


def test_figures_of_many_steps_use_a_sample_and_exact_sums(words):
    """All ranks sample the same steps. Sums cover every step."""
    count = 3 * SAMPLED_STEPS
    step_s = np.random.default_rng(7).exponential(1.0, (count, 2)) + 1.0
    ranks = [outcome(step_s[:, rank].tolist(), [0.5] * count, [8.0] * count) for rank in range(2)]
    results = summaries(words, ranks)
    slowest = step_s[1:].max(axis=1)
    assert [len(rank.steps.sample) for rank in ranks] == [SAMPLED_STEPS] * 2
    pairs = {(local_data, other) for local_data, other in step_s.tolist()}
    samples = zip(*([seconds for seconds, *_ in rank.steps.sample] for rank in ranks), strict=True)
    assert len(set(samples) & pairs) == SAMPLED_STEPS, "of each step, the seconds of both"
    assert results["step_s_median"] == pytest.approx(np.median(slowest), rel=0.05)
    assert results["tokens_per_s"] == pytest.approx(TARGETS / slowest.mean(), rel=0.02)
    assert results["training_s"] == pytest.approx(slowest.sum(), rel=0.02)
    assert results["comm_fraction"] == pytest.approx(np.mean(0.5 / step_s[1:].mean(axis=0)))
    late = sum(seconds in set(step_s[count // 2 :, 0].tolist()) for seconds, *_ in ranks[0].steps.sample)
    assert late == pytest.approx(SAMPLED_STEPS / 2, rel=0.1), "no part of the run counts more than another"


def test_moved_bytes_are_reported_by_kind(words):
    """If some traffic is unknown, the mean covers the messages of the algorithms."""
    ranks = [outcome([1.0], [0.5], [math.nan]) for _ in range(2)]
    for rank, messages in zip(ranks, (1000.0, 3000.0), strict=True):
        rank.steps.first |= {"messages": messages, "unknown": 2048.0}
    results = summaries(words, ranks)
    assert results["bytes_moved_per_step"] == {"messages": 3000, "shared": 0, "unknown": 2048}


@pytest.mark.parametrize(("kind", "unit"), [("gpt", "tokens"), ("encoder", "tokens"), ("mlp", "samples")])
def test_speed_unit_follows_the_model(kind, unit, words):
    vocabulary = {"model.mask_token": 10, "model.vocabulary": 256} if kind == "encoder" else {}
    settings = {**words, "model.kind": kind, "model.tied": "false", **vocabulary}
    if kind != "gpt":
        settings = {**settings, "data.path": words["data.path"]}
    assert run_threads(1, lambda comm: assemble_trainer(comm, settings).speed_unit) == [unit]
