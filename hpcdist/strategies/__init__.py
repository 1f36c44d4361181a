"""Strategies of distributed training: they turn gradients into the next parameters.

Floor 4: imports nothing of checkpoint, planner, training or cli. A strategy is an exchange (`core.exchange.Exchange`);
a step is a list of operations (`core.operations`) that `schedule.executor` runs and `schedule.verify` proves. Begin
with `data.catalogue` and `build.build_executor`.
"""
