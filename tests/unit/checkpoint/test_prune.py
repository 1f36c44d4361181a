"""The retention rule: the checkpoints it keeps, and their removal from the disk."""

import math
import os

import numpy as np
import pytest

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.directory import VAL_LOSS, Retention, loss_of
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import solo


def unknown_losses(*steps):
    return dict.fromkeys(steps, math.nan)


def test_retention_keeps_the_newest():
    assert Retention(2).kept(unknown_losses(10, 20, 30)) == {20, 30}
    assert Retention(5).kept(unknown_losses(10, 20)) == {10, 20}


def test_retention_keeps_the_first_of_each_interval():
    assert Retention(1, 100).kept(unknown_losses(50, 100, 150, 200, 250, 300, 320)) == {100, 200, 300, 320}
    assert Retention(1, 100).kept(unknown_losses(30, 130, 160, 290)) == {130, 290}, "no step is a multiple of 100"


@pytest.mark.parametrize("every", (1, 7, 30))
def test_retention_is_independent_of_pruning_frequency(every, rng):
    """Pruning after each save or once at the end keeps the same checkpoints."""
    rule, seen, kept = Retention(2, every, 2), {}, {}
    for step in np.cumsum(rng.integers(1, 12, 60)).tolist():
        loss = float(rng.integers(5)) if rng.random() < 0.7 else math.nan
        seen[step] = kept[step] = loss
        stay = rule.kept(kept)
        kept = {step: loss for step, loss in kept.items() if step in stay}
    lasting = set(kept) - set(sorted(seen)[-2:])
    assert lasting <= rule.kept(seen) and rule.kept(seen) == set(kept)


def test_retention_keeps_the_best_and_ignores_unknown_losses():
    losses = {10: 2.0, 20: 1.0, 30: math.nan, 40: 1.5, 50: 1.7}
    assert Retention(1, best=2).kept(losses) == {20, 40, 50}
    assert Retention(1, best=1).kept({10: 1.0, 20: 1.0, 30: 3.0}) == {20, 30}, "the later of equal losses must stay"
    assert Retention(1, best=3).kept(unknown_losses(10, 20)) == {20}


def test_save_prunes_by_the_retention_rule(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.5), (4, 2.0), (5, 2.1), (6, 2.2)):
        piece = Piece.whole("parameters", "0.w", np.full(3, step, "f4"))
        save(tmp_path, step, [piece], {VAL_LOSS: loss}, solo(), Retention(1, every_steps=4, best=1))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-2", "step-4", "step-6"]
    assert loss_of(tmp_path / "step-2") == 1.0 and math.isnan(loss_of(tmp_path / "step-3"))
