#!/usr/bin/env bash
# Slurm epilog: removes the files that a killed hpcdist job left on this node. README.md in this folder describes its
# use. It always ends with 0 within seconds, because another status drains the node.
#
# It removes only files of the job's user that belong to this job: folders that contain the job id, and MPI shared memory
# that no process uses any more. A user's caches (hpcdist-numba-UID, hpcdist-data-UID) stay.
#
# A site must adapt the node-local folders (storage.node_local of profiles, TMPDIR of jobs) and the folder that the
# node_exporter reads (telemetry.textfile_directory).
folders=${HPCDIST_EPILOG_FOLDERS:-/tmp:/var/tmp} # $USER in a folder name is the user of the job
shared_memory=${HPCDIST_EPILOG_SHARED_MEMORY:-/dev/shm}
text_files=${HPCDIST_EPILOG_TEXT_FILES:-/var/lib/node_exporter/hpcdist}

set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C # slurmd sets no PATH
readonly segments='(sm_segment|vader_segment|osc_sm|open_mpi)\.[^/ ]+|mpich_shm_[^/ ]+' # Open MPI, MPICH
job=${SLURM_JOB_ID:-} uid=${SLURM_JOB_UID:-} gid=${SLURM_JOB_GID:-65534}
[[ $job =~ ^[0-9]+$ && $uid =~ ^[0-9]+$ && $gid =~ ^[0-9]+$ ]] || exit 0

# Print the names of MPI shared memory that any process of any job has open or mapped. Open files are read first, because
# a process closes a file after it maps it. Fails if a process of the user cannot be inspected: its use is then unknown.
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

# The user controls the content of these folders. So this function runs as the user, and can do no more than a job could.
# Usage: remove JOB FOLDERS [FILE]...
# shellcheck disable=SC2317,SC2329
remove() {
  local job=$1 folder path gone
  local -a places
  IFS=: read -ra places <<<"$2"
  shift 2

  own() { [[ -O $1 && ! -L $1 ]]; }
  # Rename first, which is quick. The removal may take longer than slurmd waits.
  discard() {
    local _
    for _ in 1 2 3; do # an epilog of another job of the user may remove an empty folder
      gone=$(mktemp -d "${1%/*}/.hpcdist-gone-XXXXXX") && mv -T -- "$1" "$gone/${1##*/}" && break
    done
  }

  for folder in "${places[@]}"; do
    for path in "$folder"/hpcdist-run-*; do
      own "$path" && [[ -f $path/owner.json ]] && grep -qE "\"job\": \"$job\"[,}]" "$path/owner.json" && discard "$path"
    done
    for path in "$folder/hpcdist-$UID-"*; do # copies made by a job script, which writes its job id there
      own "$path" && [[ -f $path/job ]] && grep -qxF "$job" "$path/job" && discard "$path"
    done
    for path in "$folder"/.hpcdist-gone-*; do # also unfinished removals of earlier epilogs
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
  # This folder of the site may be accessible to a group only, not to the user.
  find -H "$text_files" -maxdepth 1 \( -name "hpcdist_$job.prom" -o -name "hpcdist_$job-*.prom" \) -type f -uid "$uid" \
    -delete
  # List the existing segments first, then the used ones, so that segments created meanwhile are not removed.
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

# Wait at most ten seconds, also if a file system does not answer.
clean </dev/null &>/dev/null &
for ((tenths = 0; tenths < 100; tenths++)); do
  kill -0 "$!" 2>/dev/null || break
  sleep 0.1
done
exit 0
