"""Parameter servers: some ranks own the parameters; the others push gradients to them and pull the new values.

Floor 4. Begin with `lockstep.LockStepExchange` (bsp), `transport.Transport`, and `asynchronous` (asp, ssp, backup
workers).
"""
