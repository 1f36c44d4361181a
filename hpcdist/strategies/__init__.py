"""Strategies of distributed training: they turn gradients into the next parameters.

Floor 4: imports nothing of checkpoint, planner, training or cli. A strategy is an exchange (`core.exchange.Exchange`);
a step is a list of operations (`core.operations`) that `schedule.executor` runs and `schedule.verify` proves. Begin
with `build.build_exchange`, then `data.catalogue`, which lists the files on the path of a gradient.
"""
