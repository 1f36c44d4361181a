"""Messages: communicators over MPI, threads or nothing, and what looks on."""
