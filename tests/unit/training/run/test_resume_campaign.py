"""2k steps are k steps, a kill, a resume and k steps: bit for bit, by every reproducible exchange and schedule.

Every combination of the tables in `resume_runs` that a recipe may have; a sample of them, unless
HPCDIST_TEST_RESUMES=all. A kill is that nothing is left of the trainer that saved: a fresh one goes on from the files.
"""

import os
import time
from itertools import islice

import pytest

from harness.combinations import COMBINATIONS, HALF, legal, ranks_of
from harness.trainings import bits, outcomes, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.training.run.saving import CheckpointSaver

EVERYTHING = os.environ.get("HPCDIST_TEST_RESUMES") == "all"
SAMPLE = 4  # combinations, where not all of them are taken


def whole(comm, keys, *, meets):
    """The run that nobody stops; one whose replicas differ makes one model of them where the other is saved."""
    trainer = trainer_of(comm, keys)
    outcomes(trainer, HALF, 0)
    if meets:
        trainer.flush()
    found = outcomes(trainer, 2 * HALF, HALF)
    trainer.flush()
    kept = found, bits(trainer)
    trainer.close()
    return kept


def killed(comm, keys, directory):
    trainer = trainer_of(comm, keys)
    outcomes(trainer, HALF, 0)
    path = CheckpointSaver(trainer, directory).save(HALF)
    trainer.close()
    return path


def resumed(comm, keys, path):
    trainer = trainer_of(comm, keys, path)
    assert trainer.first_step == HALF
    found = outcomes(trainer, 2 * HALF, HALF)
    trainer.flush()
    kept = found, bits(trainer)
    trainer.close()
    return kept


def compare(ranks, keys, directory, *, meets):
    """How the resumed run differs from the whole one; "" where it does not."""
    right = run_threads(ranks, lambda comm: whole(comm, keys, meets=meets))
    path = run_threads(ranks, lambda comm: killed(comm, keys, directory))[0]
    again = run_threads(ranks, lambda comm: resumed(comm, keys, path))
    same = repr(again) == repr(right)  # where a step overflows, its norm is NaN, which equals nothing
    return "" if same else f"{[one[0] for one in again]}, the whole run {[one[0] for one in right]}"


@pytest.mark.timeout(7200)
@pytest.mark.full
def test_a_resumed_run_has_the_bits_of_the_whole_one(text, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing crashes here
    chosen = legal() if EVERYTHING else islice(legal(rng.permutation(len(COMBINATIONS))), SAMPLE)
    began, done, failed = time.monotonic(), 0, []
    for name, settings in chosen:
        keys = {**settings, "data.path": text}
        meets = settings.get("parallel.strategy") in ("gossip", "local_sgd")
        try:
            difference = compare(ranks_of(settings), keys, tmp_path / name, meets=meets)
        except ConfigurationError as error:  # what only ranks can tell
            print(f"refused: {name}: {error}")
            continue
        except Exception as error:  # noqa: BLE001 - the names of all that fail are wanted
            difference = repr(error)
        done += 1
        failed += [f"{name}: {difference}"] if difference else []
    print(f"{done} combinations resumed to the same bits in {time.monotonic() - began:.0f} s")
    assert not failed and done >= SAMPLE // 2, "\n".join(failed)
