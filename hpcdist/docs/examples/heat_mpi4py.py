"""An mpi4py program that uses hpcdist for checkpoints, stop requests and energy, and sends its messages itself.

mpirun -n 4 python heat_mpi4py.py [STEPS]. A second start resumes from the checkpoint, on any number of ranks.
"""

import sys

import numpy as np
from mpi4py import MPI

import hpcdist

hpcdist.init()  # from now on an exception on any rank ends the job
comm = MPI.COMM_WORLD
steps = int(sys.argv[1]) if sys.argv[1:] else 1000
rows = np.array_split(np.arange(256), comm.size)[comm.rank]
field = np.zeros((len(rows) + 2, 256))  # with one halo row of each neighbour
field[1:-1][rows == 0] = 100.0
up, down = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

part = hpcdist.checkpoint.Sharded(field[1:-1])
saved = hpcdist.checkpoint.load("heat", {"field": part}, comm=comm) or {"steps": 0}
for step in range(saved["steps"], steps):
    with hpcdist.energy.window("halo"):
        comm.Sendrecv(field[1], up, recvbuf=field[-1], source=down)
        comm.Sendrecv(field[-2], down, recvbuf=field[0], source=up)
    with hpcdist.energy.window("diffusion"):
        field[1:-1] += 0.2 * (field[:-2] - 2 * field[1:-1] + field[2:])
    if code := hpcdist.should_stop(comm=comm):
        hpcdist.checkpoint.save("heat", {"field": part, "steps": step + 1}, comm=comm)
        hpcdist.init().exit(code)

hpcdist.checkpoint.save("heat", {"field": part, "steps": steps}, comm=comm)
heat = hpcdist.allreduce(field[1:-1].sum(), comm=comm)
phases = hpcdist.energy.usage()["phases"]
if comm.rank == 0:
    print(f"heat {heat:.1f} after {steps} steps, {saved['steps']} of them in earlier runs")
    for name, phase in phases.items():
        print(f"{name}: {phase['seconds']:.2f} s, {phase['joules']:.1f} J")  # nan: no sensor
