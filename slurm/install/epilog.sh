#!/usr/bin/env bash
# Epilog of Slurm: removes what a job of hpcdist that was killed has left on this node. README.md beside it says how to
# use it. It ends with 0 within seconds whatever happens, since another status drains the node.
#
# Removed is only what belongs to the user of the job, and is of this job: folders that have its number in them, and
# shared memory of MPI that no process uses any more. Caches of a user (hpcdist-numba-UID, hpcdist-data-UID) stay.
#
# For a site to change: what nodes have for themselves (storage.node_local of profiles, TMPDIR of jobs), and where the
# node_exporter looks (telemetry.textfile_directory).
folders=${HPCDIST_EPILOG_FOLDERS:-/tmp:/var/tmp} # $USER in them is the user of the job
shared_memory=${HPCDIST_EPILOG_SHARED_MEMORY:-/dev/shm}
text_files=${HPCDIST_EPILOG_TEXT_FILES:-/var/lib/node_exporter/hpcdist}

set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C # slurmd gives none
readonly segments='(sm_segment|vader_segment|osc_sm|open_mpi)\.[^/ ]+|mpich_shm_[^/ ]+' # Open MPI, MPICH
job=${SLURM_JOB_ID:-} uid=${SLURM_JOB_UID:-} gid=${SLURM_JOB_GID:-65534}
[[ $job =~ ^[0-9]+$ && $uid =~ ^[0-9]+$ && $gid =~ ^[0-9]+$ ]] || exit 0

# Names of shared memory of MPI that any process, of any job, has open or mapped: in this order, since a process closes
# what it has mapped. Fails where a process of the user cannot be looked at: what is used is not known then.
used() {
  local process
  find / -maxdepth 0 -printf '' || return 1
  for process in /proc/[0-9]*; do
    [[ $process != /proc/1 && $(stat -c %u "$process") == "$uid" ]] || continue
    { : <"$process/maps"; } || [[ ! -e $process ]] || return 1
  done
  { find /proc/[0-9]*/fd -maxdepth 1 -type l -printf '%l\n'; cat /proc/[0-9]*/maps; } | grep -aoE "/($segments)"
  return 0
}

# What is there is the user's to shape: the rest runs as the user, who can make it do no more than a job could.
# remove JOB FOLDERS [FILE]...
# shellcheck disable=SC2317,SC2329
remove() {
  local job=$1 folder path gone
  local -a places
  IFS=: read -ra places <<<"$2"
  shift 2

  own() { [[ -O $1 && ! -L $1 ]]; }
  # Renamed first, which is quick: to remove a copy may take longer than slurmd waits.
  discard() {
    local _
    for _ in 1 2 3; do # the epilog of another job of the user removes an empty one
      gone=$(mktemp -d "${1%/*}/.hpcdist-gone-XXXXXX") && mv -T -- "$1" "$gone/${1##*/}" && break
    done
  }

  for folder in "${places[@]}"; do
    for path in "$folder"/hpcdist-run-*; do
      own "$path" && [[ -f $path/owner.json ]] && grep -qE "\"job\": \"$job\"[,}]" "$path/owner.json" && discard "$path"
    done
    for path in "$folder/hpcdist-$UID-"*; do # copies that a job script has made, which writes its number there
      own "$path" && [[ -f $path/job ]] && grep -qxF "$job" "$path/job" && discard "$path"
    done
    for path in "$folder"/.hpcdist-gone-*; do # what was not finished before, too
      own "$path" && { setsid rm -rf -- "$path" </dev/null &>/dev/null & }
    done
  done
  for path in "$@"; do
    own "$path" && rm -f -- "$path"
  done
}

clean() {
  local used path number as_user=(env) unused=()
  if [[ $EUID == 0 && $uid != 0 ]]; then
    as_user=(setpriv "--reuid=$uid" "--regid=$gid" --clear-groups --)
  elif [[ $EUID != "$uid" ]]; then
    return
  fi
  # In a folder of the site, which may be closed to the user but for a group.
  find -H "$text_files" -maxdepth 1 -name "hpcdist_$job.prom" -type f -uid "$uid" -delete
  # First what there is, then what is used: what somebody makes now is not looked at.
  for path in "$shared_memory"/*; do
    [[ ${path##*/} =~ ^($segments)$ ]] && unused+=("$path")
  done
  if [[ -n ${unused[*]:-} ]]; then
    used=$(used) || unused=()
    for number in "${!unused[@]}"; do
      grep -qxF -- "/${unused[number]##*/}" <<<"$used" && unset "unused[number]"
    done
  fi
  cd / && "${as_user[@]}" bash -c "$(declare -f remove); remove \"\$@\"" remove \
    "$job" "${folders//\$USER/${SLURM_JOB_USER:-}}" "${unused[@]:-}"
}

# Ten seconds at the most, also where a file system does not answer.
clean </dev/null &>/dev/null &
for ((tenths = 0; tenths < 100; tenths++)); do
  kill -0 "$!" 2>/dev/null || break
  sleep 0.1
done
exit 0
