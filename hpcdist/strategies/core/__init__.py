"""Shared parts of all strategies: the exchange protocol, the rank context, and the sharded update.

Floor 4, its lowest part: every strategy and the schedule import it. It imports from other strategy packages only what
the replica checks and the parameter views need. It also contains mixed precision, logical shards (the same bits on
any number of ranks) and the process grid. Begin with `exchange.Exchange` and `rank_context.RankContext`.
"""
