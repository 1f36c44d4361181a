"""2k steps equal k steps, a kill, a resume and k steps, bit for bit, for every reproducible exchange and schedule.


The cases are all valid combinations of the tables in `resume_runs`: a sample, or all with HPCDIST_TEST_RESUMES=all. A
kill means that nothing of the saving trainer is reused: a new trainer resumes from the files.
"""

import os
import time
from itertools import islice

import pytest

from harness.combinations import COMBINATIONS, HALF, legal_combinations, ranks_of
from harness.trainings import local_bits, outcomes, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.training.run.saving import CheckpointSaver

EVERYTHING = os.environ.get("HPCDIST_TEST_RESUMES") == "all"
SAMPLE = 4  # combinations, where not all of them are taken


def run_whole(comm, keys, *, meets):
    """Run without a stop. Differing replicas are merged into one model at the step where the other run is saved."""
    trainer = trainer_of(comm, keys)
    outcomes(trainer, HALF, 0)
    if meets:
        trainer.flush()
    result = outcomes(trainer, 2 * HALF, HALF)
    trainer.flush()
    kept = result, local_bits(trainer)
    trainer.close()
    return kept


def run_and_kill(comm, keys, directory):
    trainer = trainer_of(comm, keys)
    outcomes(trainer, HALF, 0)
    path = CheckpointSaver(trainer, directory).save(HALF)
    trainer.close()
    return path


def resume_run(comm, keys, path):
    trainer = trainer_of(comm, keys, path)
    assert trainer.first_step == HALF
    result = outcomes(trainer, 2 * HALF, HALF)
    trainer.flush()
    kept = result, local_bits(trainer)
    trainer.close()
    return kept


def compare(ranks, keys, directory, *, meets):
    """Return the difference between the resumed and the uninterrupted run, or "" if they are equal."""
    right = run_threads(ranks, lambda comm: run_whole(comm, keys, meets=meets))
    path = run_threads(ranks, lambda comm: run_and_kill(comm, keys, directory))[0]
    again = run_threads(ranks, lambda comm: resume_run(comm, keys, path))
    same = repr(again) == repr(right)  # where a step overflows, its norm is NaN, which equals nothing
    return "" if same else f"{[one[0] for one in again]}, the whole run {[one[0] for one in right]}"


@pytest.mark.timeout(7200)
@pytest.mark.full
def test_resumed_run_has_the_bits_of_the_uninterrupted_run(text, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing crashes here
    chosen = (
        legal_combinations() if EVERYTHING else islice(legal_combinations(rng.permutation(len(COMBINATIONS))), SAMPLE)
    )
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
