"""Parameter servers without lock-step: asynchronous (asp), stale synchronous (ssp), and backup workers.

Floor 4; imports core, schedule, and the partition of the parameter server. Workers and servers exchange
`control_messages`; only a rendezvous, for a checkpoint or to stop, is collective. Begin with
`base.AsynchronousServerExchange` and `bounded_staleness.AsynchronousExchange`.
"""
