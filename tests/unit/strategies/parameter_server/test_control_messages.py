"""Notes and meetings of ranks without lock-step."""

from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.parameter_server.control_messages import (
    ControlChannel,
    ControlFields,
    ControlKind,
    Rendezvous,
)
from hpcdist.strategies.parameter_server.partition import Roles

ROLES = Roles(range(1, 3), range(1))  # rank 0 serves


def test_call_after_a_meeting_is_not_mistaken_for_a_late_call():
    """The call of worker 2 is still in flight when worker 1 leaves the meeting, pushes and calls the next meeting."""

    def body(comm):
        messages = []
        notes = ControlChannel(comm.dup("notes"))
        notes.answers[ControlKind.PUSH] = lambda worker, what: messages.append(f"push {what.clock} of {worker}")
        meetings = Rendezvous(comm.rank, ROLES, notes)
        meetings.meet()
        if comm.rank == 1:
            notes.tell(0, ControlKind.PUSH, ControlFields(clock=7))
            notes.tell(0, ControlKind.CALL, ControlFields(clock=1))  # for the second meeting
            notes.tell(0, ControlKind.PUSH, ControlFields(clock=8))
        comm.barrier()
        if comm.rank == 2:
            notes.tell(0, ControlKind.CALL, ControlFields(clock=0))
        if comm.rank == 0:
            meetings.settle(calls=1)
            assert messages == [] and meetings.due, "only the second meeting is due"
            notes.serve()
        comm.barrier()
        notes.settle()
        return messages

    assert run_threads(3, body)[0] == ["push 7 of 1", "push 8 of 1"]


def test_delayed_notes_come_before_others():
    def body(comm):
        messages = []
        notes = ControlChannel(comm.dup("notes"))
        notes.answers[ControlKind.PUSH] = lambda worker, what: messages.append(what.clock)
        notes.answers[ControlKind.CALL] = lambda worker, what: messages.append(-what.clock)
        if comm.rank == 1:
            for kind, clock in (
                (ControlKind.PUSH, 1),
                (ControlKind.CALL, 9),
                (ControlKind.PUSH, 2),
                (ControlKind.PUSH, 3),
            ):
                notes.tell(0, kind, ControlFields(clock=clock))
        else:
            notes.take(ControlKind.CALL)
            for alone in (True, False, True):
                notes.wait(alone=alone)
        notes.settle()
        return messages

    assert run_threads(2, body)[0] == [-9, 1, 2, 3]
