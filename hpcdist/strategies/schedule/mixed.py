"""Are parameters left alone while they are on their way to neighbours, and mixed once? Asks one rank, and no other."""

from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.share import Share

CHANGES = (Kind.APPLY, Kind.MIX, Kind.AVERAGE)  # the parameters


def check(share: Share) -> None:
    """Raise ScheduleError where a MIX_START has no MIX_WAIT, a MIX has none either, or what is sent changes."""
    under_way: list[Operation] = []
    arrived: list[Range | None] = []
    for _, op in share.where(Kind.MIX_START, Kind.MIX_WAIT, *CHANGES):
        if op.kind is Kind.MIX_START:
            under_way.append(op)
        elif op.kind is Kind.MIX_WAIT:
            begun = next((other for other in under_way if other.range == op.range), None)
            if begun is None:
                raise share.refuse(f"{op} waits for what was not started, or was waited for before")
            under_way.remove(begun)
            arrived.append(op.range)
        else:
            sent = next((other for other in under_way if _meet(op.range, other.range)), None)
            if sent is not None:
                raise share.refuse(f"{op} changes what {sent}, still under way, sends")
            if op.kind is Kind.MIX:
                if op.range not in arrived:
                    raise share.refuse(f"{op} has nothing of its neighbours to mix with: no MIX_WAIT of its range")
                arrived.remove(op.range)
    if under_way:
        raise share.refuse(f"{under_way[0]} is never waited for")
    if arrived:
        raise share.refuse(f"{Operation(Kind.MIX_WAIT, range=arrived[0])} brings what is never mixed")


def _meet(one: Range | None, other: Range | None) -> bool:
    return one is not None and other is not None and bool(one.intersect(other))
