"""Shared parts of all strategies: the exchange protocol, the context of a rank, and the sharded update.

Floor 4, and the lowest part of it: imported by every strategy and by the schedule, imports of the strategies only
what `replica_check` and the views of parameters need. It also has mixed precision, logical shards (equal bits on any
number of ranks), the grid of ranks and the checks of replicas. Begin with `exchange.Exchange`, the protocol, and
`rank_context.RankContext`, the communicators and the model of a rank.
"""
