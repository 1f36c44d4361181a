"""The cost formulas compared with the counted traffic of threads, and the model on made-up machines."""

from collections import Counter

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.collectives.cost_model import CROWDED, FORMULAS, NODE, WIRE, LinkParameters, MachineCosts, Topology
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.comm.transport import NULL_SINK

ITEMS = 840  # divides into chunks for 1..8 ranks, and fits into one segment of every algorithm
ROUGHLY = 64 * 8  # bytes by which 64-byte aligned chunks may differ from n/p, over all steps


class Counted:
    """Counts the messages and bytes of one rank: sends, and receives that overlap no send.

    A nonblocking receive belongs to the exchange with the message that is sent before its wait.
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


def count_on_busiest_rank(ranks, name):
    """Return the largest number of messages and of bytes of any rank."""

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
def test_formulas_match_counted_traffic(name, ranks):
    work = FORMULAS[name](Topology((ranks,)), ITEMS * 8)
    messages, nbytes = count_on_busiest_rank(ranks, name)
    if name == "circulant":  # a step that wraps around the end of the buffer needs a second message
        assert work.messages <= messages <= 2 * work.messages
    else:
        assert messages == work.messages
    assert abs(nbytes - work.nbytes) <= ROUGHLY


@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize("per_node", [(4, 4), (2, 2, 2), (1, 1, 1), (3, 2)])
def test_nodes_change_links_but_not_work(name, per_node):
    flat = FORMULAS[name](Topology((sum(per_node),)), 1e6)
    cut = FORMULAS[name](Topology(per_node), 1e6)
    assert {part.link for part in flat.parts if part.messages} == {NODE}
    assert (cut.messages, cut.reduced_bytes) == (flat.messages, flat.reduced_bytes)
    assert cut.nbytes == pytest.approx(flat.nbytes)
    assert {part.link for part in cut.parts if part.messages} & {WIRE, CROWDED}


def test_link_of_a_partner_at_each_distance():
    topology = Topology((4, 4))
    assert [topology.across(distance) for distance in (1, 2, 4)] == [NODE, NODE, CROWDED]
    assert Topology((3, 3)).across(1) == CROWDED  # ranks 2 and 3


def predicted_seconds(name, topology, machine, nbytes):
    return FORMULAS[name](topology, nbytes).seconds(machine)


def test_cost_model_ranks_known_cases():
    machine = MachineCosts({NODE: LinkParameters(1e-6, 1e-10)}, 1e-11)
    many = Topology((64,))
    short = {name: predicted_seconds(name, many, machine, 8) for name in FORMULAS}
    assert min(short, key=short.__getitem__) == "recursive_doubling", "expected the algorithm with the fewest steps"
    assert short["ring"] > 10 * short["recursive_doubling"]
    long = {name: predicted_seconds(name, many, machine, 1 << 28) for name in FORMULAS}
    assert long["recursive_doubling"] > 2 * long["ring"], "it sends the buffer six times, the ring twice"
    assert long["ring"] == pytest.approx(long["rabenseifner"], rel=0.01)


def test_ring_is_predicted_best_on_a_crowded_wire():
    topology = Topology((8, 8))
    machine = MachineCosts(
        {NODE: LinkParameters(1e-6, 1e-10), WIRE: LinkParameters(1e-5, 1e-9), CROWDED: LinkParameters(1e-5, 8e-9)}, 0.0
    )
    assert predicted_seconds("ring", topology, machine, 1 << 26) < predicted_seconds(
        "rabenseifner", topology, machine, 1 << 26
    )
