"""Parameter servers: some ranks own the parameters; the others push gradients to them and pull the new values.

Floor 4; imports core, schedule and compressed. `lockstep` (bsp) sums all workers in every step, over one of three
transports (`messages`, `shared_memory`, `rma`); `asynchronous` has asp, ssp and backup workers; `partition` assigns
roles to ranks and tensors to servers. Begin with `lockstep.LockStepExchange` and `transport.Transport`.
"""
