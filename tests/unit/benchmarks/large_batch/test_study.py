"""The study of large batches: how it searches for rates, goes on, reads images and answers."""

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


def ended(samples, status="reached", loss=1.0):
    return search_for.Ended(status, samples, loss, 0.1, np.array([[0.0, 2.0, np.nan], [100.0, loss, np.nan]]))


def line(**changes):
    known = search_for.Line("task", "sgd", (8, 32, 128), "linear", 0.1, 10_000, 5, (0,), (1, 2))
    return replace(known, **changes)


def answers(best):
    """Return trainings whose samples rise with the distance, in octaves, of their rate from ``best`` of the batch."""

    def train(wanted):
        samples = 1000.0 * (1 + abs(math.log2(wanted.learning_rate / best(wanted.batch))))
        if samples > wanted.limit_samples:
            return ended(math.nan, "missed")
        return ended(samples)

    return train


def test_the_target_is_crossed_on_the_line_between_two_evaluations():
    crossing = search_for.crossing
    assert crossing([0, 100, 200, 300], [5.0, 4.0, 2.0, 1.0], 3.0) == 150.0
    assert crossing([0, 100, 200], [5.0, 3.0, 4.0], 3.0) == 100.0  # the first time counts
    assert crossing([0, 100], [2.0, 1.0], 3.0) == 0.0
    assert math.isnan(crossing([0, 100], [5.0, math.nan], 3.0))


@pytest.mark.parametrize("best", [1 / 16, 1 / 2, 1, 8])
def test_a_search_follows_its_border_and_then_halves_gaps(best):
    search, tried = search_for.Search(1.0, 8), []
    train = answers(lambda batch: best)
    while (exponent := search.next()) is not None:
        tried.append(search.rate(exponent))
        search.tell(exponent, [train(search_for.Wanted("t", "sgd", 1, 0, "search", tried[-1], 10**9))])
    assert len(tried) == len(set(tried)) == 8
    assert tried[:3] == [1.0, 0.5, 2.0]
    assert search.rate(search.best) == best and not search.at_border
    assert any(0.5 < rate / best < 2.0 and rate != best for rate in tried)  # what was left went to the gaps


def test_a_rate_that_diverges_is_worse_than_one_that_is_slow():
    search = search_for.Search(1.0, 6)
    assert math.isnan(search.samples)
    for exponent in (0.0, 1.0):
        search.tell(exponent, [ended(math.nan, "diverged", loss=0.5)])
    assert search.best == 0.0  # of those that diverge the lowest
    search.tell(-1.0, [ended(math.nan, "missed", loss=3.0)])
    assert search.best == -1.0 and search.at_border and search.next() == -2.0
    search.tell(-2.0, [ended(math.nan, "missed", loss=2.5)])
    assert search.best == -2.0 and math.isnan(search.samples)
    search.tell(-3.0, [ended(900.0, loss=2.9)])
    assert search.best == -3.0 and search.samples == 900.0
    assert search.next() == -4.0
    search.tell(-4.0, [ended(math.nan, "missed", loss=2.8)])
    assert search.next() is None and not search.at_border


def test_of_several_seeds_the_median_counts():
    search = search_for.Search(1.0, 6)
    search.tell(0.0, [ended(500.0), ended(math.nan, "missed"), ended(math.nan, "missed")])
    assert math.isnan(search.samples)
    search.tell(-1.0, [ended(700.0), ended(900.0), ended(math.nan, "diverged")])
    assert search.best == -1.0 and search.samples == 900.0

    def train(wanted):  # seeds 0 and 2 of every rate above 0.1 fail
        failed = wanted.learning_rate > 0.1 and wanted.seed != 1
        return ended(math.nan, "missed") if failed else ended(1000.0 + 100 * wanted.seed)

    cells, made = run([line(batches=(8,), search_seeds=(0, 1, 2), seeds=(3,))], train, {})
    assert cells[0].learning_rate <= 0.1 and cells[0].searched.samples == 1100.0
    seeds = {}
    for wanted in made:
        if wanted.role == "search":
            seeds.setdefault(wanted.learning_rate, []).append(wanted.seed)
    assert seeds[0.1] == [0, 1, 2] == seeds[0.2]  # decided by the third


def run(lines, train, known):
    made = []

    def note(wanted, found):
        made.append(wanted)
        known[wanted] = found

    return study.run(lines, study.Here(), 1, lambda wanted: (train, wanted), known, note), made


def test_every_batch_has_the_same_budget_around_the_scaled_rate():
    one = line()
    cells, made = run([one], answers(lambda batch: 0.1 * (batch / 8) ** 0.5), {})
    assert [cell.batch for cell in cells] == list(one.batches)
    for batch, before in zip(one.batches, [None, *cells], strict=False):
        rates = [wanted.learning_rate for wanted in made if (wanted.batch, wanted.role) == (batch, "search")]
        assert len(rates) == len(set(rates)) == one.trials
        assert rates[0] == pytest.approx(0.1 if before is None else 4 * before.learning_rate)
    for cell in cells:
        assert cell.learning_rate == pytest.approx(0.1 * (cell.batch / 8) ** 0.5) and len(cell.checks) == 2
    assert [cell.noise is not None for cell in cells] == [False, True, False]
    assert {wanted.seed for wanted in made if wanted.role == "search"} == {0}
    assert [wanted.seed for wanted in made if wanted.role == "check"] == [1, 2] * 3
    # A search gives up what needs more than the best so far; all give up what takes more updates than a smaller batch.
    assert {(wanted.batch, wanted.limit_samples) for wanted in made if wanted.role != "search"} == {
        (8, 10_000),
        (32, 5000),
        (128, 5000),
    }
    assert min(wanted.limit_samples for wanted in made) == 1000


def test_a_batch_that_never_reaches_the_target_is_not_checked():
    def train(wanted):
        if wanted.batch < 128:
            return ended(1000.0 + wanted.learning_rate)
        return ended(math.nan, "missed", loss=abs(wanted.learning_rate - 0.2))

    cells, _ = run([line()], train, {})
    assert cells[-1].checks == () and cells[-1].searched.status == "missed"
    said = report.text(cells)
    assert "missed at" in said and "| 8 |" in said


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path):
    small = line(batches=(8, 32), trials=4, seeds=(1,))
    lines = [small, replace(small, optimizer="lamb", rule="sqrt", first_rate=0.013)]
    train = answers(lambda batch: 0.07 * batch)
    path = tmp_path / "study.h5"
    records = results.Records(path, {"git_commit": "abc"})
    records.begin("task", {"target": 1.5})
    calls = 0

    def until_killed(wanted):
        nonlocal calls
        calls += 1
        if calls > 9:
            raise KeyboardInterrupt
        return train(wanted)

    def resumed(records, train):
        return study.run(lines, study.Here(), 1, lambda wanted: (train, wanted), records.known, records.add)

    with pytest.raises(KeyboardInterrupt):
        resumed(records, until_killed)
    before = path.read_bytes()
    again = results.Records(path, {})
    again.begin("task", {"target": 1.5})
    assert path.read_bytes() == before
    assert len(again.known) == 9
    none = study.run(lines, study.Here(), 0, lambda wanted: pytest.fail("nothing is to be trained"), again.known, None)
    assert none == []
    cells = resumed(again, train)
    expected, made = run(lines, train, {})
    assert len(again.known) == len(made)
    for found, wanted in zip(cells, expected, strict=True):
        assert (found.learning_rate, found.searched.samples) == (wanted.learning_rate, wanted.searched.samples)
        assert [one.samples for one in found.checks] == [one.samples for one in wanted.checks]
    assert report.text(cells) == report.text(expected)
    half = {wanted: found for wanted, found in again.known.items() if wanted.batch == 8 or wanted.optimizer == "sgd"}
    complete = study.run(lines, study.Here(), 0, lambda wanted: pytest.fail("nothing is to be trained"), half, None)
    assert [(cell.optimizer, cell.batch) for cell in complete] == [("sgd", 8), ("sgd", 32), ("lamb", 8)]
    with pytest.raises(UsageError, match=r"target = 1\.5, these would have 1\.6"):
        results.Records(path, {}).begin("task", {"target": 1.6})


@pytest.mark.full
def test_it_trains_with_our_optimizers_and_measures_the_noise(tmp_path):
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
        wanted = search_for.Wanted("digits", name, 16, 1, "check", rate, 1000)
        found = tasks.train(task, wanted)
        assert found.status == "reached" and 0 < found.samples < 1000, name
        assert found.curve[-1, 1] <= 0.3 < found.curve[-2, 1] and np.isnan(found.curve[:, 2]).all()
    noise = tasks.train(task, replace(wanted, role="noise"))
    assert noise.samples == pytest.approx(found.samples, rel=1e-3)  # it only looks on
    assert np.isfinite(noise.curve[1:, 2]).any()
    wanted = search_for.Wanted("digits", "sgd", 16, 1, "search", 1e6, 1000)
    assert tasks.train(task, wanted).status == "diverged"
    assert tasks.train(task, replace(replace(wanted, learning_rate=1e-6), limit_samples=64)).status == "missed"


def cell(optimizer, batch, *samples):
    checks = tuple(ended(each, "missed" if math.isnan(each) else "reached") for each in samples)
    return search_for.Cell("task", optimizer, batch, 0.1, checks[0], False, checks)


def test_the_answer_follows_from_the_samples():
    def verdict(lamb, adamw):
        cells = [cell("adamw", 8, 100.0), cell("lamb", 8, 100.0)]
        cells += [cell("adamw", 64, *adamw), cell("lamb", 64, *lamb)]
        return report.text(cells).splitlines()[-1]

    assert "do not reach further: 2.00 times" in verdict((200.0, 210.0, 190.0), (100.0, 105.0, 95.0))
    assert "rates reach further: 0.50 times" in verdict((100.0, 105.0, 95.0), (200.0, 210.0, 190.0))
    assert "No difference beyond the spread" in verdict((100.0, 150.0, 95.0), (110.0, 140.0, 105.0))
    # Where nobody reaches the target at the largest batch, the one before decides.
    assert "task, 8 samples" in verdict((math.nan,), (math.nan,))
    assert "do not reach further: inf times" in verdict((math.nan,), (100.0,))


def test_the_bend_is_where_samples_have_doubled():
    points = [report.Point(cell("sgd", batch, 1000 + 20.0 * batch)) for batch in (8, 32, 128, 512)]
    assert report.bend(points) == pytest.approx(50.0)
    assert report.reach(points) == 32  # 1,640 samples, of at least 1,160; at 128 it is 3,560
    assert math.isnan(report.bend(points[:2]))
    falling = [report.Point(cell("sgd", batch, 1000.0 / batch)) for batch in (8, 32, 128)]
    assert math.isinf(report.bend(falling))


def idx(values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def mnist(folder, *, train=6, test=2):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (train + test, 4, 5)), rng.integers(0, 10, train + test)
    for name, part in (("train", slice(train)), ("t10k", slice(train, None))):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(x[part]))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y[part])))
    return x, y


def test_mnist_is_read_plain_and_compressed(tmp_path):
    x, y = mnist(tmp_path)
    table = data.images(tmp_path)
    assert (table.name, table.validation, table.x.dtype) == ("mnist", 2, np.uint8)
    np.testing.assert_array_equal(table.x, x)
    np.testing.assert_array_equal(table.y, y)


@cases(
    "name, content, said",
    ("train-images-idx3-ubyte", b"", "starts with nothing, not 00000803"),
    ("train-images-idx3-ubyte", idx(np.zeros(6)), "starts with 00000801, not 00000803"),
    ("train-images-idx3-ubyte", bytes([0, 0, 8, 3, 0, 0]), "ends within its header"),
    ("train-images-idx3-ubyte", idx(np.zeros((6, 4, 5)))[:-1], r"119 bytes behind its header of \(6, 4, 5\)"),
    ("train-images-idx3-ubyte", idx(np.zeros((5, 4, 5))), "5 train images and 6 labels"),
    ("train-images-idx3-ubyte", idx(np.zeros((6, 4, 4))), "images of the shapes"),
    ("train-labels-idx1-ubyte.gz", b"no gzip", "cannot be read: Not a gzipped file"),
    ("t10k-images-idx3-ubyte", None, "No such file or directory; expected a directory with"),
)
def test_damaged_files_of_mnist_are_refused(tmp_path, name, content, said):
    mnist(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        data.images(tmp_path)


def test_cifar_is_read_with_one_label_and_with_two(tmp_path):
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


def test_other_directories_are_told_what_is_expected(tmp_path):
    with pytest.raises(DataError, match="holds nothing; expected a directory with train-images-idx3-ubyte"):
        data.images(tmp_path)
    with pytest.raises(DataError, match="No such file or directory; expected a directory"):
        data.images(tmp_path / "none")
    options = Namespace(tasks=["mnist"], data=None, text="")
    with pytest.raises(UsageError, match="--tasks mnist: choose among gpt, digits; --data"):
        study.tasks_of(options, tmp_path)
