#!/usr/bin/env bash
# Install hpcdist from the folder of this script, on a machine without a network.
#
#   ./install.sh VENV                          create the virtual environment VENV with hpcdist
#   PYTHON=python3.12 ./install.sh VENV        use this Python
#   MPICC=mpicc ./install.sh VENV              build mpi4py here, against this MPI (on a Cray MPICC=cc)
#
# Without MPICC, the mpi4py wheel is installed. At run time it opens the MPI that it finds in LD_LIBRARY_PATH:
# libmpi.so.12 (MPICH and compatible MPIs: Intel, Cray, ParaStation, MVAPICH) or libmpi.so.40 (Open MPI). A site should
# build mpi4py if it can.
set -euo pipefail

die() {
  printf '%s\n' "install.sh: $1" >&2
  exit "$2"
}

[[ $# == 1 && $1 != -* ]] || die "usage: [PYTHON=python3.12] [MPICC=mpicc] $0 VENV" 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1
python=${PYTHON:-python3}
[[ ! -e $venv ]] || die "$venv exists: give a new folder, or remove it" 2

# Verify every byte first: a copy over a slow connection may be truncated.
(cd "$here" && sha256sum --check --quiet --strict SHA256SUMS) || die "files are missing or damaged: copy them again" 74

wanted=$(sed -n 's/^# python //p' "$here/requirements.txt")
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "$python does not run" 69
[[ $found == "$wanted" ]] ||
  die "these wheels are for Python $wanted, and $python is $found: PYTHON=python$wanted $0 $venv, or collect again" 69

options=(--no-index --find-links "$here" --require-hashes --requirement "$here/requirements.txt")
if [[ -n ${MPICC:-} ]]; then
  compgen -G "$here/mpi4py-*.tar.gz" >/dev/null ||
    die "no source of mpi4py here: collect again with --with-mpi4py-source" 69
  options+=(--no-binary mpi4py)
  export MPICC
fi

"$python" -m venv "$venv" || die "no virtual environment: on Debian, apt install python3-venv" 69
# Ignore package indexes and the user's pip configuration: install only the files of this folder.
PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --quiet "${options[@]}"
"$venv/bin/hpcdist" --version
printf '%s\n' "next: $venv/bin/hpcdist doctor, and the same as the ranks of a job"
