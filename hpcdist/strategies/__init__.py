"""Architectures of distributed training: the strategies that turn gradients into the next parameters.

Floor 4: may import collectives, models, optim, compression, adapters and what is below them; nothing of checkpoint,
planner, training or cli. A strategy is an exchange (`core.exchange.Exchange`); a step is a list of operations
(`schedule.operations`) that `schedule.executor` runs and `schedule.verify` proves. The folders are the shared parts
(core, schedule, pipeline) and the families (zero, parameter_server, decentralised, compressed, tensor). Begin with
`allreduce.AllreduceExchange`, the smallest strategy, and `build.build_executor`.
"""
