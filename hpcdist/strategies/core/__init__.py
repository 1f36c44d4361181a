"""Shared parts of all strategies: the exchange protocol, the rank context, and the sharded update.

Floor 4, its lowest part: every strategy and the schedule import it. Begin with `exchange.Exchange` and
`rank_context.RankContext`.
"""
