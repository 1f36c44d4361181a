"""Results that cannot be kept are refused before they are measured, on all ranks alike."""

import pytest

from hpcdist.bench import output_file
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
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


class Leaving(Session):
    def leave(self, code):
        raise SystemExit(code)


def test_a_program_leaves_with_the_code_of_storage(tmp_path, capsys):
    (tmp_path / "there.h5").write_bytes(b"mine")

    def body(comm):
        session = Leaving(comm, locate(comm, None), "threads", lambda code: None)
        output_file.exit_unless_writable(session, None)
        output_file.exit_unless_writable(session, tmp_path / "free.h5")
        codes = []
        for name in ("there.h5", "missing/new.h5"):
            with pytest.raises(SystemExit) as caught:
                output_file.exit_unless_writable(session, tmp_path / name)
            codes.append(caught.value.code)
        return codes

    assert run_threads(2, body) == [[74, 74]] * 2
    assert capsys.readouterr().err.count("exists already") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.h5"]
