"""Files as the whole of hpcdist reads and writes them (floor 0): nothing here knows of ranks, runs or formats.

Begin with `atomic.write`, which puts a file in the place of another, and `regular.read`, which reads a small one.
"""
