"""If results cannot be written, every rank raises the error before the measurement."""

import pytest

from hpcdist.bench import output_file
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError


def test_output_error_of_rank_0_is_raised_on_every_rank():
    made = []

    def raise_storage_error():
        made.append(1)
        raise StorageError("no room")

    def body(comm):
        with pytest.raises(StorageError, match="no room"):
            output_file.check_on_all_ranks(comm, raise_storage_error)
        output_file.check_on_all_ranks(comm, lambda: None)

    run_threads(3, body)
    assert made == [1]
