#!/usr/bin/env bash
# Install hpcdist from the folder this script lies in, on a machine without a network.
#
#   ./install.sh VENV                  a virtual environment VENV with hpcdist in it
#   PYTHON=python3.12 ./install.sh VENV        made by this Python
#   MPICC=mpicc ./install.sh VENV              mpi4py built here, against this MPI (on a Cray MPICC=cc)
#
# Without MPICC, mpi4py is its wheel: it opens the MPI it finds at run time, libmpi.so.12 (MPICH and its ABI: Intel,
# Cray, ParaStation, MVAPICH) or libmpi.so.40 (Open MPI), from LD_LIBRARY_PATH. A site that can build its own should.
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

# Every byte first: a copy over a slow line may be cut short.
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
# Neither an index nor a configuration of the user counts: what is installed is what lies here.
PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --quiet "${options[@]}"
"$venv/bin/hpcdist" --version
printf '%s\n' "next: $venv/bin/hpcdist doctor, and the same as the ranks of a job"
