"""The study of large batches: the search for learning rates, resume, image files, and the report."""

import gzip
import math
import struct
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.large_batch import data, report, results, study, tasks
from benchmarks.large_batch import search as search_for
from harness.marks import cases
from hpcdist.errors import DataError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.training.recipe.config import DataConfig


def ended_training(samples, status="reached", loss=1.0):
    return search_for.Ended(status, samples, loss, 0.1, np.array([[0.0, 2.0, np.nan], [100.0, loss, np.nan]]))


def line(**changes):
    reference = search_for.Line("task", "sgd", (8, 32, 128), "linear", 0.1, 10_000, 5, (0,), (1, 2))
    return replace(reference, **changes)


def train_with_best_rate(best):
    """Return a train function whose samples rise with the distance of the rate from ``best(batch)``, in octaves."""

    def train(expected):
        samples = 1000.0 * (1 + abs(math.log2(expected.learning_rate / best(expected.batch))))
        if samples > expected.limit_samples:
            return ended_training(math.nan, "missed")
        return ended_training(samples)

    return train


def test_target_crossing_is_interpolated_between_evaluations():
    crossing = search_for.crossing
    assert crossing([0, 100, 200, 300], [5.0, 4.0, 2.0, 1.0], 3.0) == 150.0
    assert crossing([0, 100, 200], [5.0, 3.0, 4.0], 3.0) == 100.0  # the first crossing counts
    assert crossing([0, 100], [2.0, 1.0], 3.0) == 0.0
    assert math.isnan(crossing([0, 100], [5.0, math.nan], 3.0))


@pytest.mark.parametrize("best", [1 / 16, 1 / 2, 1, 8])
def test_search_extends_its_border_and_then_halves_gaps(best):
    search, tried = search_for.Search(1.0, 8), []
    train = train_with_best_rate(lambda batch: best)
    while (exponent := search.next()) is not None:
        tried.append(search.rate(exponent))
        search.tell(exponent, [train(search_for.Wanted("t", "sgd", 1, 0, "search", tried[-1], 10**9))])
    assert len(tried) == len(set(tried)) == 8
    assert tried[:3] == [1.0, 0.5, 2.0]
    assert search.rate(search.best) == best and not search.at_border
    assert any(0.5 < rate / best < 2.0 and rate != best for rate in tried)  # the remaining trials went to the gaps


def test_diverging_rate_is_worse_than_a_slow_rate():
    search = search_for.Search(1.0, 6)
    assert math.isnan(search.samples)
    for exponent in (0.0, 1.0):
        search.tell(exponent, [ended_training(math.nan, "diverged", loss=0.5)])
    assert search.best == 0.0  # the lowest of the rates that diverge
    search.tell(-1.0, [ended_training(math.nan, "missed", loss=3.0)])
    assert search.best == -1.0 and search.at_border and search.next() == -2.0
    search.tell(-2.0, [ended_training(math.nan, "missed", loss=2.5)])
    assert search.best == -2.0 and math.isnan(search.samples)
    search.tell(-3.0, [ended_training(900.0, loss=2.9)])
    assert search.best == -3.0 and search.samples == 900.0
    assert search.next() == -4.0
    search.tell(-4.0, [ended_training(math.nan, "missed", loss=2.8)])
    assert search.next() is None and not search.at_border


def test_search_uses_the_median_of_several_seeds():
    search = search_for.Search(1.0, 6)
    search.tell(0.0, [ended_training(500.0), ended_training(math.nan, "missed"), ended_training(math.nan, "missed")])
    assert math.isnan(search.samples)
    search.tell(-1.0, [ended_training(700.0), ended_training(900.0), ended_training(math.nan, "diverged")])
    assert search.best == -1.0 and search.samples == 900.0

    def train(expected):  # seeds 0 and 2 fail for every rate above 0.1
        failed = expected.learning_rate > 0.1 and expected.seed != 1
        return ended_training(math.nan, "missed") if failed else ended_training(1000.0 + 100 * expected.seed)

    cells, made = run([line(batches=(8,), search_seeds=(0, 1, 2), seeds=(3,))], train, {})
    assert cells[0].learning_rate <= 0.1 and cells[0].searched.samples == 1100.0
    seeds = {}
    for expected in made:
        if expected.role == "search":
            seeds.setdefault(expected.learning_rate, []).append(expected.seed)
    assert seeds[0.1] == [0, 1, 2] == seeds[0.2]  # the third seed decides


def run(lines, train, reference):
    made = []

    def record(expected, result):
        made.append(expected)
        reference[expected] = result

    return study.run(lines, study.Here(), 1, lambda expected: (train, expected), reference, record), made


def test_every_batch_has_the_same_budget_around_the_scaled_rate():
    one = line()
    cells, made = run([one], train_with_best_rate(lambda batch: 0.1 * (batch / 8) ** 0.5), {})
    assert [cell.batch for cell in cells] == list(one.batches)
    for batch, before in zip(one.batches, [None, *cells], strict=False):
        rates = [expected.learning_rate for expected in made if (expected.batch, expected.role) == (batch, "search")]
        assert len(rates) == len(set(rates)) == one.trials
        assert rates[0] == pytest.approx(0.1 if before is None else 4 * before.learning_rate)
    for cell in cells:
        assert cell.learning_rate == pytest.approx(0.1 * (cell.batch / 8) ** 0.5) and len(cell.checks) == 2
    assert [cell.noise is not None for cell in cells] == [False, True, False]
    assert {expected.seed for expected in made if expected.role == "search"} == {0}
    assert [expected.seed for expected in made if expected.role == "check"] == [1, 2] * 3
    # A search stops trainings that need more than the best so far, or more updates than a smaller batch.
    assert {(expected.batch, expected.limit_samples) for expected in made if expected.role != "search"} == {
        (8, 10_000),
        (32, 5000),
        (128, 5000),
    }
    assert min(expected.limit_samples for expected in made) == 1000


def test_batch_that_misses_the_target_is_not_checked():
    def train(expected):
        if expected.batch < 128:
            return ended_training(1000.0 + expected.learning_rate)
        return ended_training(math.nan, "missed", loss=abs(expected.learning_rate - 0.2))

    cells, _ = run([line()], train, {})
    assert cells[-1].checks == () and cells[-1].searched.status == "missed"
    output = report.text(cells)
    assert "missed at" in output and "| 8 |" in output


def test_stopped_study_is_resumed(tmp_path):
    small = line(batches=(8, 32), trials=4, seeds=(1,))
    lines = [small, replace(small, optimizer="lamb", rule="sqrt", first_rate=0.013)]
    train = train_with_best_rate(lambda batch: 0.07 * batch)
    path = tmp_path / "study.h5"
    records = results.Records(path, {"git_commit": "abc"})
    records.begin("task", {"target": 1.5})
    calls = 0

    def train_until_killed(requested):
        nonlocal calls
        calls += 1
        if calls > 9:
            raise KeyboardInterrupt
        return train(requested)

    def resume_study(records, train):
        return study.run(lines, study.Here(), 1, lambda requested: (train, requested), records.known, records.add)

    with pytest.raises(KeyboardInterrupt):
        resume_study(records, train_until_killed)
    before = path.read_bytes()
    again = results.Records(path, {})
    again.begin("task", {"target": 1.5})
    assert path.read_bytes() == before
    assert len(again.known) == 9
    none = study.run(
        lines, study.Here(), 0, lambda requested: pytest.fail("nothing is to be trained"), again.known, None
    )
    assert none == []
    cells = resume_study(again, train)
    expected, made = run(lines, train, {})
    assert len(again.known) == len(made)
    for result, requested in zip(cells, expected, strict=True):
        assert (result.learning_rate, result.searched.samples) == (requested.learning_rate, requested.searched.samples)
        assert [one.samples for one in result.checks] == [one.samples for one in requested.checks]
    assert report.text(cells) == report.text(expected)
    half = {
        requested: result
        for requested, result in again.known.items()
        if requested.batch == 8 or requested.optimizer == "sgd"
    }
    complete = study.run(lines, study.Here(), 0, lambda requested: pytest.fail("nothing is to be trained"), half, None)
    assert [(cell.optimizer, cell.batch) for cell in complete] == [("sgd", 8), ("sgd", 32), ("lamb", 8)]
    with pytest.raises(UsageError, match=r"target = 1\.5, these would have 1\.6"):
        results.Records(path, {}).begin("task", {"target": 1.6})


@pytest.mark.full
def test_task_trains_with_every_optimizer_and_measures_noise(tmp_path):
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, 120)
    x = (np.eye(3)[y] + 0.1 * rng.standard_normal((120, 3))).astype(np.float32)
    data.Table("digits", x, y, 24).write(tmp_path / "x.h5")
    task = replace(
        tasks.classifier("digits", tmp_path / "x.h5", 0.2, 120),
        model=ModelConfig(kind="mlp", layers=1, hidden=8),
        data=DataConfig(path=str(tmp_path / "x.h5"), validation_fraction=0.2),
        warmup_samples=32,
        limit_samples=1000,
        target=0.3,
    )
    for name, rate in {"sgd": 0.1, "adamw": 0.01, "lars": 1.0, "lamb": 0.03}.items():
        expected = search_for.Wanted("digits", name, 16, 1, "check", rate, 1000)
        result = tasks.train(task, expected)
        assert result.status == "reached" and 0 < result.samples < 1000, name
        assert result.curve[-1, 1] <= 0.3 < result.curve[-2, 1] and np.isnan(result.curve[:, 2]).all()
    noise = tasks.train(task, replace(expected, role="noise"))
    assert noise.samples == pytest.approx(result.samples, rel=1e-3)  # measuring the noise changes nothing
    assert np.isfinite(noise.curve[1:, 2]).any()
    expected = search_for.Wanted("digits", "sgd", 16, 1, "search", 1e6, 1000)
    assert tasks.train(task, expected).status == "diverged"
    assert tasks.train(task, replace(replace(expected, learning_rate=1e-6), limit_samples=64)).status == "missed"


def cell(optimizer, batch, *samples):
    checks = tuple(ended_training(each, "missed" if math.isnan(each) else "reached") for each in samples)
    return search_for.Cell("task", optimizer, batch, 0.1, checks[0], False, checks)


def test_report_verdict_follows_from_samples():
    def verdict(lamb, adamw):
        cells = [cell("adamw", 8, 100.0), cell("lamb", 8, 100.0)]
        cells += [cell("adamw", 64, *adamw), cell("lamb", 64, *lamb)]
        return report.text(cells).splitlines()[-1]

    assert "do not reach further: 2.00 times" in verdict((200.0, 210.0, 190.0), (100.0, 105.0, 95.0))
    assert "rates reach further: 0.50 times" in verdict((100.0, 105.0, 95.0), (200.0, 210.0, 190.0))
    assert "No difference beyond the spread" in verdict((100.0, 150.0, 95.0), (110.0, 140.0, 105.0))
    # If no optimizer reaches the target at the largest batch, the previous batch decides.
    assert "task, 8 samples" in verdict((math.nan,), (math.nan,))
    assert "do not reach further: inf times" in verdict((math.nan,), (100.0,))


def test_bend_is_the_batch_that_doubles_the_samples():
    points = [report.Point(cell("sgd", batch, 1000 + 20.0 * batch)) for batch in (8, 32, 128, 512)]
    assert report.bend(points) == pytest.approx(50.0)
    assert report.reach(points) == 32  # 1,640 samples, of at least 1,160; at 128 it is 3,560
    assert math.isnan(report.bend(points[:2]))
    falling = [report.Point(cell("sgd", batch, 1000.0 / batch)) for batch in (8, 32, 128)]
    assert math.isinf(report.bend(falling))


def idx_bytes(values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder, *, train=6, test=2):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (train + test, 4, 5)), rng.integers(0, 10, train + test)
    for name, part in (("train", slice(train)), ("t10k", slice(train, None))):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx_bytes(x[part]))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(y[part])))
    return x, y


def test_mnist_is_read_from_plain_and_compressed_files(tmp_path):
    x, y = write_mnist(tmp_path)
    table = data.images(tmp_path)
    assert (table.name, table.validation, table.x.dtype) == ("mnist", 2, np.uint8)
    np.testing.assert_array_equal(table.x, x)
    np.testing.assert_array_equal(table.y, y)


@cases(
    "name, content, output",
    ("train-images-idx3-ubyte", b"", "starts with nothing, not 00000803"),
    ("train-images-idx3-ubyte", idx_bytes(np.zeros(6)), "starts with 00000801, not 00000803"),
    ("train-images-idx3-ubyte", bytes([0, 0, 8, 3, 0, 0]), "ends within its header"),
    ("train-images-idx3-ubyte", idx_bytes(np.zeros((6, 4, 5)))[:-1], r"119 bytes behind its header of \(6, 4, 5\)"),
    ("train-images-idx3-ubyte", idx_bytes(np.zeros((5, 4, 5))), "5 train images and 6 labels"),
    ("train-images-idx3-ubyte", idx_bytes(np.zeros((6, 4, 4))), "images of the shapes"),
    ("train-labels-idx1-ubyte.gz", b"no gzip", "cannot be read: Not a gzipped file"),
    ("t10k-images-idx3-ubyte", None, "No such file or directory; expected a directory with"),
)
def test_damaged_mnist_files_are_rejected(tmp_path, name, content, output):
    write_mnist(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=output):
        data.images(tmp_path)


def test_cifar_is_read_with_one_or_two_labels(tmp_path):
    rows = np.random.default_rng(1).integers(0, 10, (12, 3074)).astype(np.uint8)
    ten, hundred = tmp_path / "ten", tmp_path / "hundred"
    for folder in (ten, hundred):
        folder.mkdir()
    for number in range(5):
        (ten / f"data_batch_{number + 1}.bin").write_bytes(rows[2 * number : 2 * number + 2, 1:].tobytes())
    (ten / "test_batch.bin").write_bytes(rows[10:, 1:].tobytes())
    (hundred / "train.bin").write_bytes(rows[:9].tobytes())
    (hundred / "test.bin").write_bytes(rows[9:].tobytes())
    for folder, name, validation in ((ten, "cifar10", 2), (hundred, "cifar100", 3)):
        table = data.images(folder)
        assert (table.name, table.validation) == (name, validation)
        np.testing.assert_array_equal(table.x, rows[:, 2:])
        np.testing.assert_array_equal(table.y, rows[:, 1])
    (ten / "test_batch.bin").write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(DataError, match="a label of 10; expected classes from 0 to 9"):
        data.images(ten)
    (ten / "test_batch.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, match="3072 bytes; expected a multiple of 3073"):
        data.images(ten)


def test_wrong_data_directory_error_names_expected_files(tmp_path):
    with pytest.raises(DataError, match="holds nothing; expected a directory with train-images-idx3-ubyte"):
        data.images(tmp_path)
    with pytest.raises(DataError, match="No such file or directory; expected a directory"):
        data.images(tmp_path / "none")
    options = Namespace(tasks=["mnist"], data=None, text="")
    with pytest.raises(UsageError, match="--tasks mnist: choose among gpt, digits; --data"):
        study.tasks_of(options, tmp_path)
