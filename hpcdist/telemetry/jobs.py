"""Which job a run is, and whose, as its scheduler tells the processes of the job."""

import os
import pwd
from collections.abc import Mapping
from typing import Final

JOB: Final = ("SLURM_JOB_ID", "PBS_JOBID")
# Labels, and the variables of Slurm and of PBS that they are from.
OWNER: Final = {
    "user": ("SLURM_JOB_USER", "PBS_O_LOGNAME"),
    "account": ("SLURM_JOB_ACCOUNT", "PBS_ACCOUNT"),
    "partition": ("SLURM_JOB_PARTITION", "PBS_QUEUE"),
    "qos": ("SLURM_JOB_QOS",),
}


def number(environment: Mapping[str, str] = os.environ) -> str:
    """Return the number of the job; "" outside of one (local)."""
    return _first(JOB, environment)


def owner(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return user, account, partition and QOS of the job, "" for what is not known (local).

    Outside of a job the user is the one who runs this process, by the database of users.
    """
    found = {label: _first(names, environment) for label, names in OWNER.items()}
    if not found["user"]:
        try:
            found["user"] = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # in containers: a number alone
            found["user"] = str(os.getuid())
    return found


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")
