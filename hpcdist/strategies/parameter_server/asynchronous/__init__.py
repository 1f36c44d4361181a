"""Parameter servers without lock-step: asynchronous (asp), stale synchronous (ssp), and backup workers.

Floor 4; imports core and schedule of the strategies, and the partition of the parameter server. Workers and servers
speak by `control_messages`; nobody waits in a collective but in a rendezvous, for a checkpoint or to stop. Begin with
`base.AsynchronousServerExchange` and `bounded_staleness.AsynchronousExchange`.
"""
