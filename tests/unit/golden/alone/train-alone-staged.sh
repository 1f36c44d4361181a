#!/bin/bash
# A training of hpcdist, written by `hpcdist submit` for the site workstation. Every start trains the recipe as it was
# then: see `input` below. It may be started again by hand, with bash and from the same directory: a run that holds a
# checkpoint is gone on with.
#

set -euo pipefail

# By hand it has no id but what `hpcdist submit` would have given it: its process, and when that started.
job_id=${HPCDIST_JOB_ID:-local-$$-$(cut -d' ' -f22 /proc/$$/stat)} restart=${HPCDIST_JOB_RESTART:-0}
walltime_s=5400

on_each_node() { "$@"; }
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
# Nobody signals this shell before its time is over: it does so itself.
if ((walltime_s > 0)); then
  (
    while left_s=$((walltime_s - 120 - SECONDS)) && ((left_s > 0)); do
      sleep $((left_s < 10 ? left_s : 10))
      kill -0 $$ || exit # the job has ended before
    done
    kill -USR1 $$
  ) </dev/null &>/dev/null &
fi

# Says what this start goes on from, and writes it down. A run that is complete, or that three starts in a row did not
# advance, is left alone, before anything is done on the other nodes.
verdict=$("${hpcdist[@]}" jobs begin "$run_dir" --job "$job_id" --restart "$restart" \
  --recipe "$recipe" --most-fruitless 3) || exit
if [[ $verdict != go ]]; then
  exit 0
fi

# Each node has copies of its own: thousands of processes that import from one shared folder take minutes.
local_dir=/tmp/hpcdist-1000-1a2b3c4d
# Others may write where it lies: one that somebody else has made is not used. The number of the job tells an epilog of
# the site whose it is.
if ! on_each_node bash -c 'mkdir -p -m 700 "$1" && [[ -O $1 && ! -L $1 ]] && env | sed -n "s/^SLURM_JOB_ID[^=]*=//p" >"$1/job"' bash "$local_dir"; then
  say "$local_dir cannot be made, or is somebody else's, on one of the nodes"
  exit 1
fi
# shellcheck disable=SC2329 # the trap calls it
leave() { on_each_node rm -rf "$local_dir" || say "$local_dir could not be removed on all nodes"; }
trap leave EXIT
archive=/scratch/me/env.tar
on_each_node bash -c 'rm -rf "$2/environment" && mkdir "$2/environment" && tar -xf "$1" -C "$2/environment"' bash "$archive" "$local_dir"
hpcdist=("$local_dir/environment/bin/python" -P -m hpcdist)
# The recipe names the copy as data.staged.
data=/scratch/text
on_each_node bash -c 'rm -rf "$2/data" && mkdir "$2/data" && cp -r "$1" "$2/data/"' bash "$data" "$local_dir"
# The kernels, compiled once on each node, for its own processor. Not attended: `attend` signals a process, which the
# function is not. A signal is put off until it is done, and nothing more is started then.
export NUMBA_CACHE_DIR=${local_dir:?}/kernels
on_each_node "${hpcdist[@]}" warmup --cache "$NUMBA_CACHE_DIR"

# How ranks are started here, and the whole world of them.
how=(--launcher mpirun --ranks-per-node 4 --cpus-per-task 8 --python /tmp/hpcdist-1000-1a2b3c4d/environment/bin/python)
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

# The training knows how long its saves take, and stops in time even where that is longer than the signal allows for.
limit='' left_s=$((walltime_s > SECONDS + 60 ? walltime_s - SECONDS : 60))
if ((walltime_s > 0)); then
  limit=$(printf '%d:%02d:%02d' $((left_s / 3600)) $((left_s / 60 % 60)) $((left_s % 60)))
fi

code=0
attend "${run[@]}" \
  train "$recipe" --out "$run_dir" --resume auto ${limit:+"--time-limit=$limit"} || code=$?

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
  say "its time is over; submit again to go on"
fi
if [[ $verdict == cancelled ]]; then
  code=0 # saved, as `hpcdist jobs cancel` has asked
fi
exit "$code"
