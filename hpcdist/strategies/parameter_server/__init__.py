"""Parameter servers: some ranks own the parameters; the others push gradients to them and pull the new values.

Floor 4. Begin with `lockstep.LockStepExchange` (bsp) and `transport.Transport`. Without lock-step (asp, ssp, backup
workers), only a rendezvous is collective, for a checkpoint or to stop. Begin with
`asynchronous.AsynchronousServerExchange` and `bounded_staleness.AsynchronousExchange`.
"""
