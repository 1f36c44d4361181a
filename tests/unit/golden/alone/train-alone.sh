#!/bin/bash
# A training of hpcdist, written by `hpcdist submit` for the site workstation. Every start trains the recipe as it was
# then: see `input` below. It may be started again by hand, with bash and from the same directory: a run that holds a
# checkpoint is gone on with.
#

set -euo pipefail

# By hand it has no id but what `hpcdist submit` would have given it: its process, and when that started.
job_id=${HPCDIST_JOB_ID:-local-$$-$(cut -d' ' -f22 /proc/$$/stat)} restart=${HPCDIST_JOB_RESTART:-0}
say() { printf 'hpcdist job %s: %s\n' "$job_id" "$*" >&2; }

# Each rank computes with the cores of its task. All three are set, since `hpcdist run` chooses one thread otherwise.
export OMP_NUM_THREADS=8
export OPENBLAS_NUM_THREADS=$OMP_NUM_THREADS
export MKL_NUM_THREADS=$OMP_NUM_THREADS

# As it was submitted, whatever becomes of the file that it was made of. A script of --dry-run has it at its end as well.
input=/scratch/me/runs/hpcdist-1a2b3c4d/job-d29b355f.toml
if [[ ! -e $input ]]; then
  mkdir -p /scratch/me/runs/hpcdist-1a2b3c4d
  sed -n 's/^#: \{0,1\}//p' "$0" >"$input.$job_id"
  if [[ ! -s $input.$job_id ]]; then
    rm "$input.$job_id"
    say "$input is missing, and this script does not have it; submit again"
    exit 74
  fi
  mv "$input.$job_id" "$input"
fi
recipe=$input
# No variable may change a key of it.
unset "${!HPCDIST_SET__@}"
hpcdist=(/opt/env/bin/python -P -m hpcdist)
run_dir=/scratch/me/runs/hpcdist-1a2b3c4d # the same for every start of this run, in whichever job

# By hand, this job can be told:
#   hpcdist jobs cancel JOB   to save, and end
#   touch RUN_DIR/stop        to save, and go on in a new start; so does SIGUSR1 to this shell
#   kill PID                  of this shell: to save, and end
# The launcher signals the ranks, which agree to save and stop after the same step.

# Runs a command in the background, waits for it, and passes signals on to it: bash puts a trap off while a child in the
# foreground runs, and a trap ends `wait`, not the child.
attend() {
  local code
  [[ -z $pending ]] || return 75 # told to stop before there was anything to tell
  "$@" &
  child=$!
  [[ -z $pending ]] || kill -"$pending" "$child" || true
  while true; do
    signalled='' code=0
    wait "$child" || code=$?
    [[ -n $signalled ]] || break
  done
  child=''
  return "$code"
}
# shellcheck disable=SC2329 # the traps call it
pass() {
  signalled=yes pending=$1
  [[ -z $child ]] || kill -"$1" "$child" || true
}
child='' pending='' signalled='' terminated=''
trap 'say "SIGUSR1: the walltime ends soon"; pass USR1' USR1
trap 'say "SIGTERM"; terminated=yes; pass TERM' TERM

# Says what this start goes on from, and writes it down. A run that is complete, or that three starts in a row did not
# advance, is left alone, before anything is done on the other nodes.
verdict=$("${hpcdist[@]}" jobs begin "$run_dir" --job "$job_id" --restart "$restart" \
  --recipe "$recipe" --most-fruitless 3) || exit
if [[ $verdict != go ]]; then
  exit 0
fi

# How ranks are started here, and the whole world of them.
how=(--launcher mpirun --ranks-per-node 4 --cpus-per-task 8)
run=("${hpcdist[@]}" run -n 8 "${how[@]}")

# Seconds, before hours are spent on nodes that are not right. Where the nodes still end the steps of the start before,
# none begins: then it is tried again.
examine() { attend "${run[@]}" doctor --job --out "$run_dir" --device cpu --recipe "$recipe"; }
if ! { examine || { ((restart > 0)) && [[ -z $pending ]] && sleep 5 && examine; }; } &&
  [[ -z $pending ]]; then # told to stop, `attend` starts nothing more
  say "not started: see what the doctor says above; submit with --no-check to start all the same"
  code=1
  "${hpcdist[@]}" jobs end "$run_dir" --job "$job_id" --restart "$restart" --code "$code" >/dev/null || true
  exit "$code"
fi

code=0
attend "${run[@]}" \
  train "$recipe" --out "$run_dir" --resume auto || code=$?

# 75 means: saved, start me again. Any other code is the end of the job, and its exit code.
verdict=$("${hpcdist[@]}" jobs end "$run_dir" --job "$job_id" --restart "$restart" --code "$code") || verdict=stop
if [[ $verdict == again && -n $terminated ]]; then
  say "not started again after SIGTERM"
  verdict=stop
fi
if [[ $verdict != again ]]; then
  "${hpcdist[@]}" jobs report "$run_dir" || true # with the energy, where the scheduler measures it
fi
if [[ $verdict == again ]]; then
  say "again"
  export HPCDIST_JOB_ID=$job_id HPCDIST_JOB_RESTART=$((restart + 1))
  exec bash "$0"
fi
if [[ $verdict == cancelled ]]; then
  code=0 # saved, as `hpcdist jobs cancel` has asked
fi
exit "$code"
