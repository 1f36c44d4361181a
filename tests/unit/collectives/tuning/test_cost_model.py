"""The formulas against what the algorithms send, counted on threads, and the model on machines that are made up."""

from collections import Counter

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.collectives.tuning.cost_model import CROWDED, FORMULAS, NODE, WIRE, LinkParameters, MachineCosts, Topology
from hpcdist.comm.events import NULL_SINK
from hpcdist.comm.threads.communicator import run_threads

ITEMS = 840  # divides into chunks for 1..8 ranks, and fits into one segment of every algorithm
ROUGHLY = 64 * 8  # bytes by which chunks that begin on 64 bytes may differ from n/p, over all steps


class Counted:
    """Messages and bytes of one rank: what is sent, and what is received while nothing is sent.

    A receive that is begun and waited for later is part of an exchange with what is sent meanwhile.
    """

    def __init__(self, ranks):
        self.ranks, self.messages, self.nbytes = ranks, Counter(), 0

    def begin(self, comm, op, dtype, count, sent_bytes, peer, tag):
        if op in ("send", "sendrecv", "isend", "recv"):
            self.messages[op] += 1
            self.nbytes += count * np.dtype(dtype).itemsize
        elif op == "all_to_all":
            self.messages[op] += self.ranks - 1
            self.nbytes += sent_bytes
        return 0

    def end(self, token):
        return


def counted(ranks, name):
    """Return messages and bytes of the rank that has most of both."""

    def body(comm):
        buffer = np.ones(ITEMS, np.float64)
        collectives.allreduce(comm, buffer, name)
        buffer[:] = 1.0
        comm.events = sink = Counted(ranks)
        collectives.allreduce(comm, buffer, name)
        comm.events = NULL_SINK
        assert (buffer == ranks).all()
        return sink.messages.total(), sink.nbytes

    return max(run_threads(ranks, body))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_formulas_are_what_is_sent(name, ranks):
    work = FORMULAS[name](Topology((ranks,)), ITEMS * 8)
    messages, nbytes = counted(ranks, name)
    if name == "circulant":  # where a step wraps round the end of the buffer, it takes a second message
        assert work.messages <= messages <= 2 * work.messages
    else:
        assert messages == work.messages
    assert abs(nbytes - work.nbytes) <= ROUGHLY


@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize("per_node", [(4, 4), (2, 2, 2), (1, 1, 1), (3, 2)])
def test_nodes_change_the_links_and_not_the_work(name, per_node):
    flat = FORMULAS[name](Topology((sum(per_node),)), 1e6)
    cut = FORMULAS[name](Topology(per_node), 1e6)
    assert {part.link for part in flat.parts if part.messages} == {NODE}
    assert (cut.messages, cut.reduced_bytes) == (flat.messages, flat.reduced_bytes)
    assert cut.nbytes == pytest.approx(flat.nbytes)
    assert {part.link for part in cut.parts if part.messages} & {WIRE, CROWDED}


def test_which_partner_is_on_the_own_node():
    topology = Topology((4, 4))
    assert [topology.across(distance) for distance in (1, 2, 4)] == [NODE, NODE, CROWDED]
    assert Topology((3, 3)).across(1) == CROWDED  # ranks 2 and 3


def seconds(name, topology, machine, nbytes):
    return FORMULAS[name](topology, nbytes).seconds(machine)


def test_the_model_ranks_known_cases():
    machine = MachineCosts({NODE: LinkParameters(1e-6, 1e-10)}, 1e-11)
    many = Topology((64,))
    short = {name: seconds(name, many, machine, 8) for name in FORMULAS}
    assert min(short, key=short.__getitem__) == "recursive_doubling", "fewest steps"
    assert short["ring"] > 10 * short["recursive_doubling"]
    long = {name: seconds(name, many, machine, 1 << 28) for name in FORMULAS}
    assert long["recursive_doubling"] > 2 * long["ring"], "six times the buffer against twice"
    assert long["ring"] == pytest.approx(long["rabenseifner"], rel=0.01)


def test_a_ring_suits_a_wire_that_all_ranks_of_a_node_would_crowd():
    topology = Topology((8, 8))
    machine = MachineCosts(
        {NODE: LinkParameters(1e-6, 1e-10), WIRE: LinkParameters(1e-5, 1e-9), CROWDED: LinkParameters(1e-5, 8e-9)}, 0.0
    )
    assert seconds("ring", topology, machine, 1 << 26) < seconds("rabenseifner", topology, machine, 1 << 26)
