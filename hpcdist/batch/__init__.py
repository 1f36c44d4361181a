"""Batch jobs: the sbatch script of a training, and its way to Slurm. No MPI is started here."""
