"""Studies of hpcdist. `python -m benchmarks` lists them; README.md has their results."""
