"""The flight recorder: events are read back even if the process was killed."""

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hpcdist
from harness.jobs import LIMIT_S
from hpcdist.comm import transport
from hpcdist.comm.launch import environment
from hpcdist.comm.mpi.shared_memory import Members
from hpcdist.comm.record import flight_recorder
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import CommunicationError, StorageError


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(tmp_path / "rank-00003.rec", 3, 8, capacity=16)
    yield made
    made.close()


def begin(recorder, op="allreduce", count=7, comm="world", peer=-1):
    return recorder.begin(comm, op, "float32", count, 28, peer, 5)


def test_events_round_trip(recorder):
    recorder.end(begin(recorder))
    begin(recorder, "recv", peer=2)
    record = flight_recorder.read(recorder.path)
    assert (record.rank, record.world, record.pid, record.capacity) == (3, 8, os.getpid(), 16)
    first, second = record.events
    assert (first.comm, first.op, first.dtype, first.count) == ("world", "allreduce", "float32", 7)
    assert (first.sent_bytes, first.peer, first.tag, first.sequence) == (28, -1, 5, 1)
    assert first.ended_ns is not None and first.started_ns <= first.ended_ns <= second.started_ns
    assert second.ended_ns is None and record.open_events == (second,)
    # The recorder sees the first frame outside comm/: here the helper that called it.
    assert first.site.split(" ")[0].split(":")[0] == __file__ and first.site.endswith("(begin)")
    assert "allreduce #1 on world, 7 x float32, at " in str(first)
    assert "recv #1 on world, 7 x float32, peer 2, at " in str(second)


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        ([0], "0"),
        ([2, 3], "2-3"),
        ([0, 1, 2, 3, 8, 10, 12, 7], "0-3,8-12:2,7"),
        ([5, 3, 1], "5,3,1"),
        ([0, 4], "0,4"),
        (list(range(3, 1024, 4)), "3-1023:4"),
    ],
)
def test_rank_runs_round_trip(ranks, runs):
    assert transport.rank_runs(ranks) == runs and list(transport.parse_runs(runs, 1024)) == ranks


@pytest.mark.parametrize("runs", ["", "a", "0-1024", "0-5:0", "0-1023,0-1023"])
def test_invalid_rank_runs_are_rejected(runs):
    with pytest.raises(ValueError):
        transport.parse_runs(runs, 1024)


def test_ranks_of_random_groups_are_recorded(recorder, rng):
    groups = {f"group {size}": rng.permutation(500)[:size].tolist() for size in (1, 2, 17, 100, 400)}
    for name, ranks in groups.items():
        transport.note_members(name, transport.rank_runs(ranks))
        begin(recorder, comm=name)
        transport.note_members(name, "")
    begin(recorder, comm="other")
    read = flight_recorder.read(recorder.path).groups
    # 400 unordered ranks are longer than a text of the recorder.
    assert read == {name: tuple(ranks) for name, ranks in groups.items() if len(ranks) < 400}


def test_file_of_version_1_is_read(recorder):
    begin(recorder)
    data = bytearray(recorder.path.read_bytes())
    data[8:12] = (1).to_bytes(4, "little")
    record = flight_recorder.parse(bytes(data), recorder.path)
    assert record.groups == {} and len(record.events) == 1


def test_call_sites_are_outside_comm(recorder):
    comm = solo()
    comm.events = recorder
    line = sys._getframe().f_lineno + 1
    comm.barrier()
    comm.allreduce(np.ones(4))
    for _ in range(3):
        comm.barrier()
    sites = [event.site for event in flight_recorder.read(recorder.path).events]
    here = "(test_call_sites_are_outside_comm)"
    assert sites == [f"{__file__}:{line + step} {here}" for step in (0, 1, 3, 3, 3)]


def test_sites_inside_collectives_name_the_caller_and_the_algorithm(recorder, tmp_path):
    path = str(Path(hpcdist.__file__).parent / "collectives" / "made_up.py")
    recorder._algorithms = frozenset({path})
    module = {"begin": begin}
    exec(
        compile("def algorithm(recorder):\n    return recorder.begin('world','send','f',1,4,0,0)", path, "exec"), module
    )
    algorithm = module["algorithm"]
    assert callable(algorithm)
    for _ in range(2):
        recorder.end(algorithm(recorder))
    recorder.end(algorithm(recorder))
    sites = [event.site for event in flight_recorder.read(recorder.path).events]
    assert all(site.endswith("via hpcdist/collectives/made_up.py:2 (algorithm)") for site in sites)
    assert all(site.startswith(f"{__file__}:") for site in sites)
    assert sites[0] == sites[1] != sites[2]


def test_collectives_and_messages_are_numbered_per_communicator(recorder):
    for op, comm in [
        ("allreduce", "world"),
        ("send", "world"),
        ("barrier", "world"),
        ("barrier", "a"),
        ("send", "world"),
    ]:
        recorder.end(begin(recorder, op, comm=comm))
    events = flight_recorder.read(recorder.path).events
    assert [(event.op, event.comm, event.sequence) for event in events] == [
        ("allreduce", "world", 1),
        ("send", "world", 1),
        ("barrier", "world", 2),
        ("barrier", "a", 1),
        ("send", "world", 2),
    ]
    assert [event.collective for event in events] == [True, False, True, True, False]


def test_ring_keeps_last_events_and_open_events(recorder):
    slow = begin(recorder, "irecv", peer=1)
    for _ in range(100):
        recorder.end(begin(recorder))
    record = flight_recorder.read(recorder.path)
    assert len(record.events) == 16
    assert record.events[0].op == "irecv" and record.events[0].ended_ns is None
    assert [event.sequence for event in record.events[1:]] == list(range(86, 101))
    recorder.end(slow)
    assert flight_recorder.read(recorder.path).open_events == ()


def test_unfinished_requests_do_not_block_the_recorder(recorder):
    for _ in range(40):
        begin(recorder, "isend", peer=1)
    assert len(flight_recorder.read(recorder.path).events) == 16
    assert len(recorder.running()) <= 16


def test_threads_share_one_recorder(tmp_path):
    recorder = Recorder(tmp_path / "rank-00000.rec", 0, 1, capacity=4096)

    def work(name):
        for number in range(500):
            recorder.end(begin(recorder, "send", count=number, comm=name, peer=0))

    threads = [threading.Thread(target=work, args=(f"c{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = flight_recorder.read(recorder.path).events
    assert len(events) == 2000 and recorder.running() == []
    for name in ("c0", "c1", "c2", "c3"):
        mine = [event for event in events if event.comm == name]
        assert [event.count for event in mine] == list(range(500))
        assert [event.sequence for event in mine] == list(range(1, 501))
    recorder.close()


def test_notes_are_kept_and_truncated(recorder):
    recorder.note("stage", "step 1")
    recorder.note("stage", "step 2")
    recorder.note("raised", "ValueError: first ü" + "x" * 3000)
    recorder.note("raised", "second")
    notes = flight_recorder.read(recorder.path).notes
    assert notes["stage"].text == "step 2"
    assert notes["raised"].text.startswith("ValueError: first ü") and len(notes["raised"].text.encode()) <= 1024
    assert notes.keys() == {"stage", "raised"}
    with pytest.raises(ValueError, match="tuple"):
        recorder.note("unknown", "")


def test_full_text_table_stores_question_marks(recorder):
    for number in range(600):
        recorder.end(begin(recorder, comm=f"{number}" + "x" * 900))
    events = flight_recorder.read(recorder.path).events
    assert len(events) == 16 and {event.comm for event in events} == {"?"}


KILLED = """
import os, signal, sys
from pathlib import Path
from hpcdist.comm.record.flight_recorder import Recorder

recorder = Recorder(Path(sys.argv[1]), 1, 2)
for number in range(1000):
    recorder.end(recorder.begin("world", "allreduce", "float64", number, -1, -1, 0))
recorder.note("stage", "about to die")
recorder.begin("world", "barrier", "uint8", 0, 0, -1, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_record_survives_sigkill(tmp_path):
    path = tmp_path / "rank-00001.rec"
    environment = {**os.environ, "PYTHONPATH": str(Path(hpcdist.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, timeout=LIMIT_S, check=False)
    assert ended.returncode == -signal.SIGKILL
    record = flight_recorder.read(path)
    assert len(record.events) == 1001 and record.notes["stage"].text == "about to die"
    assert [event.op for event in record.open_events] == ["barrier"]
    assert [event.count for event in record.events[:1000]] == list(range(1000))
    assert record.process_state() == ""


def test_process_state_of_live_process(recorder):
    assert flight_recorder.read(recorder.path).process_state() in ("R", "S", "D")


class _Mpi:
    """The parts of mpi4py that `Members` needs."""

    ANY_SOURCE = ANY_TAG = -1
    Get_library_version = staticmethod(lambda: "a stand-in")


def test_lack_of_file_descriptors_does_not_declare_ranks_dead(recorder):
    record, began = flight_recorder.read(recorder.path), environment.start_ticks(os.getpid())
    announced = [(os.getpid(), began), (os.getpid(), began + 1)]  # a live member and an ended member
    everybody = SimpleNamespace(
        allgather=lambda value: [value] if isinstance(value, bool) else announced[:1],
        Iprobe=lambda source, tag: False,
        Get_name=lambda: "node",
    )
    members = Members(_Mpi, everybody)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        unknown = environment.start_ticks(os.getpid()), record.process_state()
        ended = [environment.has_ended(*process) for process in announced]
        members.check_alive(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (unknown, ended) == ((0, None), [False, False])
    assert [environment.has_ended(*process) for process in announced] == [False, True]
    members._processes = announced[1:]
    members.check_alive(0.0)  # data written before its end is read once more
    with pytest.raises(CommunicationError, match="rank 0 of node .* has died"):
        members.check_alive(0.0)


def test_new_recorder_keeps_the_old_mapping_valid(recorder):
    begin(recorder)
    again = Recorder(recorder.path, 3, 8, capacity=16)
    begin(recorder)  # would be a SIGBUS had the file been truncated
    assert flight_recorder.read(recorder.path).events == ()
    again.close()


@pytest.mark.parametrize("data", [b"", b"HPCDREC\0", b"x" * 1_000_000])
def test_foreign_files_are_rejected(tmp_path, data):
    path = tmp_path / "rank-00000.rec"
    path.write_bytes(data)
    with pytest.raises(StorageError, match="not a file of the flight recorder"):
        flight_recorder.read(path)
    with pytest.raises(StorageError, match="cannot be read"):
        flight_recorder.read(tmp_path / "absent.rec")


def test_missing_directory_error_names_required_bytes(tmp_path):
    with pytest.raises(StorageError, match=r"flight recorder cannot reserve \d+ bytes"):
        Recorder(tmp_path / "no such directory" / "rank-00000.rec", 0, 1)


def test_full_disk_is_rejected_at_creation(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left"):
        Recorder(tmp_path / "rank-00000.rec", 0, 1)


def test_half_written_records_are_skipped(recorder):
    recorder.end(begin(recorder))
    recorder.end(begin(recorder))
    data = bytearray(recorder.path.read_bytes())
    flight_recorder.RECORD.pack_into(data, flight_recorder.RING + 2 * 64, 77, 1, 0, 1, 1, 1, 9999, 1, 0, 0)
    assert [event.index for event in flight_recorder.parse(bytes(data), recorder.path).events] == [1]


def test_damaged_record_error_names_the_file(tmp_path, rng):
    recorder = Recorder(tmp_path / "rank-00000.rec", 0, 1, capacity=64)
    for number in range(100):
        recorder.end(recorder.begin("world", f"send{number % 7}", "float32", 1, 4, 0, 0))
    recorder.close()
    whole = recorder.path.read_bytes()
    refusals = []
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(flight_recorder.TEXTS + 2000, size=40):
            damaged[place] = rng.integers(256)
        try:
            assert len(flight_recorder.parse(bytes(damaged), recorder.path).events) <= 64
        except StorageError as error:
            refusals.append(str(error))
    # 40 bytes of 7 KiB: some hit the signature, a length or a text
    assert refusals and all(str(recorder.path) in text for text in refusals)
