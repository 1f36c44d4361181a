"""Bubbles in closed form, for stages that are all alike and messages that take nothing.

With p stages, m micro-batches and v chunks on each rank, F, I and W the seconds of a stage for a micro-batch:

    gpipe, 1f1b    (p-1) / (m + p-1)                                          arXiv:1811.06965, arXiv:2104.04473
    interleaved    (p-1) / (v m + p-1), m a multiple of p                     arXiv:2104.04473
    zb-h1          (p-1)(F + I - W) / (m (F + I + W) + (p-1)(F + I - W))      arXiv:2401.10241, table 1
    zb-h2          (p-1)(F + I - 2W) / (m (F + I + W) + (p-1)(F + I - 2W))    the same
    zb-v           0                                                          the same, and arXiv:2405.15362

The paper gives those of zb-h1 and zb-h2 as seconds of bubble, which is the numerator; it calls I "B". They hold while
the weights' gradients fit into the bubbles: W <= I and m >= p for zb-h1, F = I = W and m >= 2p - 1 for the last two.
"""


def bubble(
    schedule: str,
    stages: int,
    microbatches: int,
    *,
    chunks: int = 1,
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
) -> float | None:
    """Return the bubble of the longest stage; None for schedules, or cases, without a closed form (local)."""
    behind, whole_s = stages - 1, forward_s + input_s + weight_s
    if schedule in ("gpipe", "1f1b"):
        return behind / (microbatches + behind)
    if schedule == "interleaved":
        return behind / (chunks * microbatches + behind) if microbatches % stages == 0 else None
    if schedule == "zb-h1" and weight_s <= input_s and microbatches >= stages:
        return _share(behind * (forward_s + input_s - weight_s), microbatches * whole_s)
    if schedule in ("zb-h2", "zb-v") and forward_s == input_s == weight_s and microbatches >= 2 * stages - 1:
        return (
            0.0 if schedule == "zb-v" else _share(behind * (forward_s + input_s - 2 * weight_s), microbatches * whole_s)
        )
    return None


def _share(idle_s: float, busy_s: float) -> float:
    return idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0
