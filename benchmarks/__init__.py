"""Studies of hpcdist: `python -m benchmarks` lists them, README.md tells what each has proven."""
