"""The `hpcdist plan` commands and `hpcdist schedule`: predict a training before anything is started.

Start reading with `group` (plan one layout) and `options`. The formulas are in `hpcdist.planner`.
"""
