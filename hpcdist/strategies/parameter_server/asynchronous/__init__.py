"""Parameter servers without lock-step: asynchronous (asp), stale synchronous (ssp), and backup workers.

Floor 4. Only a rendezvous, for a checkpoint or to stop, is collective. Begin with `base.AsynchronousServerExchange` and
`bounded_staleness.AsynchronousExchange`.
"""
