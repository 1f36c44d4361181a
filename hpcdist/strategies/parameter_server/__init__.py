"""Parameter servers: some ranks own the parameters, the others push gradients to them and pull the new values.

Floor 4; imports core, schedule and compressed of the strategies. `lockstep` (bsp) sums all workers in every step,
over one of three transports (`messages`, `shared_memory`, `rma`); `asynchronous` has asp, ssp and backup workers.
`partition` says which rank serves and which tensors it owns. `config` is light. Begin with
`lockstep.LockStepExchange` and `transport.Transport`.
"""
