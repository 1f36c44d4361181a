"""What a training will need before it is started: memory, time, energy, failures. Pure: no MPI, no device, no file."""
