#!/bin/bash
# A training of hpcdist, written by `hpcdist submit` for the site workstation. Every start trains the recipe as it was
# submitted: see `input` below. It may be started again by hand, with bash and from the same directory: a run with a
# checkpoint continues.
#

set -euo pipefail

# A job started by hand has no id, so it builds the id that `hpcdist submit` would use: process id and start time.
job_id=${HPCDIST_JOB_ID:-local-$$-$(cut -d' ' -f22 /proc/$$/stat)} restart=${HPCDIST_JOB_RESTART:-0}
say() { printf 'hpcdist job %s: %s\n' "$job_id" "$*" >&2; }

# Each rank uses all cores of its task. All three are set, because `hpcdist run` sets missing ones to 1.
export OMP_NUM_THREADS=8
export OPENBLAS_NUM_THREADS=$OMP_NUM_THREADS
export MKL_NUM_THREADS=$OMP_NUM_THREADS

# A copy made at submission, independent of the original file. A script of --dry-run also contains it, at its end.
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
# No variable may change a recipe key.
unset "${!HPCDIST_SET__@}"
hpcdist=(/opt/env/bin/python -P -m hpcdist)
run_dir=/scratch/me/runs/hpcdist-1a2b3c4d # the same for every start of this run, in every job

# Ways to stop this job:
#   hpcdist jobs cancel JOB   save, and end
#   touch RUN_DIR/stop        save, and continue in a new start; so does SIGUSR1 to this shell
#   kill PID                  (PID of this shell) save, and end
# The launcher signals the ranks. They agree on the step after which they save and stop.

# Run a command in the background, wait for it, and forward signals to it. Bash delays a trap while a foreground child
# runs. A trap interrupts `wait`, but does not end the child.
attend() {
  local code
  [[ -z $pending ]] || return 75 # the stop signal came before the command started
  "$@" &
  child=$!
  [[ -z $pending ]] || kill -"$pending" "$child" || true
  while true; do
    signalled='' code=0
    wait "$child" || code=$?
    [[ -n $signalled ]] || break
  done
  child=''
  ((code >= 0)) || return 75 # bash lost the code of a command that ended at the time of the signal
  return "$code"
}
# shellcheck disable=SC2329 # called by the traps
pass() {
  signalled=yes pending=$1
  [[ -z $child ]] || kill -"$1" "$child" || true
}
child='' pending='' signalled='' terminated=''
trap 'say "SIGUSR1: the walltime ends soon"; pass USR1' USR1
trap 'say "SIGTERM"; terminated=yes; pass TERM' TERM

# Print and record the checkpoint from which this start resumes. If the run is complete, or several starts in a row made
# no progress, the job ends here, before it uses the other nodes.
verdict=$("${hpcdist[@]}" jobs begin "$run_dir" --job "$job_id" --restart "$restart" \
  --recipe "$recipe" --most-fruitless 3) || exit
if [[ $verdict != go ]]; then
  exit 0
fi

# Options of the launcher, and the command that starts all ranks.
how=(--launcher mpirun --ranks-per-node 4 --cpus-per-task 8)
run=("${hpcdist[@]}" run -n 8 "${how[@]}")

# A check of some seconds, before a job of hours uses faulty nodes. It can fail to start while the nodes still end the
# steps of the previous start, so a restart tries it twice.
examine() { attend "${run[@]}" doctor --job --out "$run_dir" --device cpu --recipe "$recipe"; }
if ! { examine || { ((restart > 0)) && [[ -z $pending ]] && sleep 5 && examine; }; } &&
  [[ -z $pending ]]; then # after a stop signal `attend` starts nothing
  say "not started: see what the doctor says above; submit with --no-check to start all the same"
  code=1
  "${hpcdist[@]}" jobs end "$run_dir" --job "$job_id" --restart "$restart" --code "$code" >/dev/null || true
  exit "$code"
fi

code=0
attend "${run[@]}" \
  train "$recipe" --out "$run_dir" --resume auto || code=$?

# Code 75 means that the run was saved and must be started again. Any other code ends the job, as its exit code.
verdict=$("${hpcdist[@]}" jobs end "$run_dir" --job "$job_id" --restart "$restart" --code "$code") || verdict=stop
if [[ $verdict == again && -n $terminated ]]; then
  say "not started again after SIGTERM"
  verdict=stop
fi
if [[ $verdict != again ]]; then
  "${hpcdist[@]}" jobs report "$run_dir" || true # with the energy, if the scheduler measures it
fi
if [[ $verdict == again ]]; then
  say "again"
  export HPCDIST_JOB_ID=$job_id HPCDIST_JOB_RESTART=$((restart + 1))
  exec bash "$0"
fi
if [[ $verdict == cancelled ]]; then
  code=0 # saved, as requested by `hpcdist jobs cancel`
fi
exit "$code"
