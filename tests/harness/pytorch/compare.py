"""Run a suite of PyTorch's own tests over hpcdist and over gloo, and print the tests that one of them fails.

    python tests/harness/pytorch/compare.py distributed OUT.json [RANKS...]

Each backend runs the suite on each number of ranks (default 2 and 4) with the `mpirun` of the PATH. If a test ends the
job, the suite goes on with the next test. OUT.json gets the outcome of each test: passed, failed, skipped or "ended".
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import harness

STARTS = 40  # of one suite: each test that ends the job costs one
LIMIT_S = 3600.0


def outcomes(backend: str, suite: str, ranks: int) -> dict[str, str]:
    """Return the outcome of each test of ``suite`` on ``ranks`` ranks: the worst of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for _ in range(STARTS):
            line = [str(Path(__file__).with_name("suite.py")), backend, suite, str(out)]
            if harness.launch(ranks, line, limit_s=LIMIT_S, capture=True).returncode == 0:
                break
        else:
            raise SystemExit(f"{backend} on {ranks} ranks: the suite did not end in {STARTS} starts")
        verdicts = {
            name: {each.partition(" ")[0].rstrip(":") for each in of}
            for name, of in json.loads(out.read_text()).items()
        }
    worst = ("ended", "failed", "passed", "skipped")
    return {name: next(word for word in worst if word in of) for name, of in verdicts.items()}


def main(suite: str, out: str, *counts: str) -> None:
    """Run the suite over both backends, print the numbers and the differences, and write ``out``."""
    results = {
        f"{backend} on {ranks} ranks": outcomes(backend, suite, ranks)
        for ranks in map(int, counts or ("2", "4"))
        for backend in ("hpcdist", "gloo")
    }
    names = sorted(set().union(*results.values()))
    skipped = [name for name in names if all(of.get(name) == "skipped" for of in results.values())]
    tests = {name: {run: of.get(name) for run, of in results.items()} for name in names if name not in skipped}
    Path(out).write_text(json.dumps({"suite": suite, "skipped_by_all": len(skipped), "tests": tests}, indent=1) + "\n")
    print(f"{len(names)} tests, {len(skipped)} skipped by all")
    for run, of in results.items():
        print(f"{run}: {sum(word == 'passed' for word in of.values())} passed")
    for ranks in map(int, counts or ("2", "4")):
        for one, other in (("hpcdist", "gloo"), ("gloo", "hpcdist")):
            passed, lost = results[f"{one} on {ranks} ranks"], results[f"{other} on {ranks} ranks"]
            alone = [name for name, word in passed.items() if word == "passed" and lost.get(name) != "passed"]
            print(f"only {one} passes on {ranks} ranks: {', '.join(alone) or 'none'}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
