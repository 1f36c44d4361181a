"""Results that cannot be kept are refused before they are measured, on all ranks alike."""

import pytest

from hpcdist.bench import output_file
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError


def test_what_rank_0_finds_is_raised_on_every_rank():
    made = []

    def check():
        made.append(1)
        raise StorageError("no room")

    def body(comm):
        with pytest.raises(StorageError, match="no room"):
            output_file.check_on_all_ranks(comm, check)
        output_file.check_on_all_ranks(comm, lambda: None)

    run_threads(3, body)
    assert made == [1]
