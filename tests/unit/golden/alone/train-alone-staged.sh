#!/bin/bash
# A training of hpcdist, written by `hpcdist submit` for the site workstation. Every start trains the recipe as it was
# submitted: see `input` below. It may be started again by hand, with bash and from the same directory: a run with a
# checkpoint continues.
#

set -euo pipefail

# A job started by hand has no id, so it builds the id that `hpcdist submit` would use: process id and start time.
job_id=${HPCDIST_JOB_ID:-local-$$-$(cut -d' ' -f22 /proc/$$/stat)} restart=${HPCDIST_JOB_RESTART:-0}
walltime_s=5400

on_each_node() { "$@"; }
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
# No scheduler signals this shell before the walltime ends, so it signals itself.
if ((walltime_s > 0)); then
  (
    while left_s=$((walltime_s - 120 - SECONDS)) && ((left_s > 0)); do
      sleep $((left_s < 10 ? left_s : 10))
      kill -0 $$ || exit # the job has ended before
    done
    kill -USR1 $$
  ) </dev/null &>/dev/null &
fi

# Print and record the checkpoint from which this start resumes. If the run is complete, or several starts in a row made
# no progress, the job ends here, before it uses the other nodes.
verdict=$("${hpcdist[@]}" jobs begin "$run_dir" --job "$job_id" --restart "$restart" \
  --recipe "$recipe" --most-fruitless 3) || exit
if [[ $verdict != go ]]; then
  exit 0
fi

# Each node gets its own copies: thousands of processes that import from one shared folder take minutes.
local_dir=/tmp/hpcdist-1000-1a2b3c4d
# The parent may be writable by others, so a folder of another user is rejected. The file `job` has the job id, by which
# the site's epilog finds the job's folders.
if ! on_each_node bash -c 'mkdir -p -m 700 "$1" && [[ -O $1 && ! -L $1 ]] && env | sed -n "s/^SLURM_JOB_ID[^=]*=//p" >"$1/job"' bash "$local_dir"; then
  say "$local_dir cannot be made, or is somebody else's, on one of the nodes"
  exit 1
fi
# shellcheck disable=SC2329 # called by the trap
leave() { on_each_node rm -rf "$local_dir" || say "$local_dir could not be removed on all nodes"; }
trap leave EXIT
archive=/scratch/me/env.tar
on_each_node bash -c 'rm -rf "$2/environment" && mkdir "$2/environment" && tar -xf "$1" -C "$2/environment"' bash "$archive" "$local_dir"
hpcdist=("$local_dir/environment/bin/python" -P -m hpcdist)
# The recipe names the copy as data.staged.
data=/scratch/text
on_each_node bash -c 'rm -rf "$2/data" && mkdir "$2/data" && cp -r "$1" "$2/data/"' bash "$data" "$local_dir"
# Compile the kernels once on each node, for its processor. This runs without `attend`, which can signal only a process,
# not a function. Bash delays a signal until the compilation ends; then nothing more is started.
export NUMBA_CACHE_DIR=${local_dir:?}/kernels
on_each_node "${hpcdist[@]}" warmup --cache "$NUMBA_CACHE_DIR"

# Options of the launcher, and the command that starts all ranks.
how=(--launcher mpirun --ranks-per-node 4 --cpus-per-task 8 --python /tmp/hpcdist-1000-1a2b3c4d/environment/bin/python)
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

# The training measures how long a save takes. It stops in time even if a save takes longer than the signal allows.
limit='' left_s=$((walltime_s > SECONDS + 60 ? walltime_s - SECONDS : 60))
if ((walltime_s > 0)); then
  limit=$(printf '%d:%02d:%02d' $((left_s / 3600)) $((left_s / 60 % 60)) $((left_s % 60)))
fi

code=0
attend "${run[@]}" \
  train "$recipe" --out "$run_dir" --resume auto ${limit:+"--time-limit=$limit"} || code=$?

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
  say "its time is over; submit again to go on"
fi
if [[ $verdict == cancelled ]]; then
  code=0 # saved, as requested by `hpcdist jobs cancel`
fi
exit "$code"
