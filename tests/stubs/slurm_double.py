"""Slurm replaced by small scripts, which print recorded output of version 22.05."""

from pathlib import Path

# JobArrayID, State, RestartCnt, TimeUsed, TimeLeft, NumNodes, exit_code, StartTime, EndTime, Reason
QUEUE = """\
46|CANCELLED|0|0:00|5:00|1|0|1795321506|1795321506|Priority|
9_4|CANCELLED|0|2:07|2:53|1|15|1795321371|1795321498|None|
27|COMPLETED|0|0:01|UNLIMITED|1|0|1795321499|1795321500|None|
32_1|FAILED|0|0:00|5:00|1|256|1795321500|1795321500|NonZeroExitCode|
32_0|COMPLETED|0|0:00|5:00|1|0|1795321500|1795321500|None|
28|FAILED|0|0:00|UNLIMITED|1|19200|1795321499|1795321499|NonZeroExitCode|
29|FAILED|0|0:00|UNLIMITED|1|9|1795321499|1795321499|JobLaunchFailure|
5|TIMEOUT|0|1:03|INVALID|1|15|1795320169|1795320232|TimeLimit|
35_[1-9%1]|PENDING|0|0:00|5:00|1|0|N/A|N/A|JobArrayTaskLimit|
41|PENDING|0|0:00|UNLIMITED|3|0|1795498019|NONE|Resources|
42|PENDING|0|0:00|UNLIMITED|1|0|N/A|N/A|JobHeldUser|
16|PENDING|1|0:00|5:00|1|0|1795320293|1795320593|BeginTime|
30|RUNNING|0|1:10|2-01:00:50|2|0|1795321499|1795498019|None|
31|RUNNING|0|1:10|INVALID|1|0|1795321499|1795321559|None|
35_0|RUNNING|0|1:08|3:52|1|0|1795321501|1795321801|None|
39+0|RUNNING|0|0:47|4:13|1|0|1795321522|1795321822|None|
39+1|RUNNING|0|0:47|4:13|2|0|1795321522|1795321822|None|
"""
NAMES = """\
27|hpcdist-ok|
28|bad|
35_[1-9%1]|hpcdist-sweep|
30|e|v;il\x1b[31m
41|COMPLETED|
39+0|het|
39+1|het|
41|pend|
"""
# What sacct -D prints without -X: a line for each start, and then one for each of its steps.
COLUMNS = (
    "JobID,State,ElapsedRaw,NNodes,ExitCode,Start,End,ConsumedEnergyRaw,NodeList,TRESUsageInMin,TRESUsageInMinNode,"
    "TRESUsageInMax,TRESUsageInMaxNode,Reason"
)
ACCOUNTS = """\
1|COMPLETED|1|1|0:0|1795320456|1795320457|5400|n1|||||None
2|FAILED|0|1|75:0|1795320456|1795320456||n1|||||None
3|FAILED|0|1|0:9|1795320456|1795320456||n1|||||None
4|CANCELLED by 0|21|2|0:0|1795320456|1795320477||n[1-2]|||||None
7+0|CANCELLED by 0|23|1|0:0|1795320483|1795320506||n1|||||None
7+1|CANCELLED by 0|23|1|0:0|1795320483|1795320506||n2|||||None
14_0|CANCELLED by 0|23|1|0:0|1795320483|1795320506||n1|||||None
14_[1-5%1]|CANCELLED by 0|0|1|0:0|1795320506|1795320506|0|None assigned|||||JobArrayTaskLimit
116|REQUEUED|4|1|0:0|1795320506|1795320510||n1|||||None
116|CANCELLED by 0|2|1|0:0|1795320517|1795320519||n1|||||BeginTime
6_0|COMPLETED|0|1|0:0|1795320456|1795320456|18446744073709551614|n1|||||None
30|RUNNING|28|2|0:0|1795321499|Unknown||n[1-2]|||||None
"""
OFF = "Slurm accounting storage is disabled"

_LISTED = r"""#!/bin/bash
echo "${0##*/} $*" >>"$SLURM_DOUBLE/calls"
[[ -e $SLURM_DOUBLE/down ]] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
[[ ${SQUEUE_FORMAT:-}${SACCT_FORMAT:-} == "" && $SLURM_TIME_FORMAT == %s ]] || exit 3
for word; do [[ $word == --jobs=* ]] && ids=${word#--jobs=}; done
"""
_SQUEUE = (
    _LISTED
    + r"""
case "$*" in
  *Name:*) cat "$SLURM_DOUBLE/names"; exit ;;
  *STDOUT:*) file=stdout ;;
  *) file=queue ;;
esac
found=$(awk -F'|' -v ids=",$ids," '{split($1, base, /[_+]/)} ids ~ ","base[1]"[_+,]" {print}' \
  "$SLURM_DOUBLE/$file")
if [[ -z $found && $ids != *,* ]]; then echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi
[[ $file == stdout ]] && found=${found#*|}
[[ -z $found ]] || printf '%s\n' "$found"
"""
)
_SACCT = (
    _LISTED
    + r"""
if [[ ! -e $SLURM_DOUBLE/accounts ]]; then echo "Slurm accounting storage is disabled" >&2; exit 1; fi
for word; do [[ $word == --format=* ]] && format=${word#--format=}; done
[[ " $* " == *" --allocations "* ]] && whole=1
awk -F'|' -v ids=",$ids," -v whole="${whole:-}" -v columns="COLUMNS" -v format="$format" '
BEGIN { n = split(columns, names, ","); for (i = 1; i <= n; i++) place[names[i]] = i; m = split(format, wanted, ",") }
{ split($1, base, /[_+.]/) }
ids ~ ","base[1]"[_+,]" && !(whole && $1 ~ /\./) {
  line = $place[wanted[1]]
  for (i = 2; i <= m; i++) line = line "|" $place[wanted[i]]
  print line
}' "$SLURM_DOUBLE/accounts"
""".replace('"COLUMNS"', f'"{COLUMNS}"')
)
_DOES = """#!/bin/bash
echo "${0##*/} $*" >>"$SLURM_DOUBLE/calls"
if [[ -n ${REFUSE:-} ]]; then echo "$REFUSE" >&2; exit 1; fi
"""


def install(folder: Path) -> dict[str, str]:
    """Write the commands into ``folder``/bin and their data into ``folder``. Return the variables that they need."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    texts = {"squeue": _SQUEUE, "sacct": _SACCT, "scancel": _DOES, "scontrol": _DOES}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name, text in (("queue", QUEUE), ("names", NAMES), ("accounts", ACCOUNTS), ("stdout", ""), ("calls", "")):
        (folder / name).write_text(text)
    return {"SLURM_DOUBLE": str(folder), "PATH": f"{programs}:/usr/bin:/bin"}
