"""What a site's scheduler cannot be told is refused, and not left out of the script in silence."""

import dataclasses

import pytest
from job_scripts import PLAIN

from hpcdist.batch import fitting, sites
from hpcdist.errors import ConfigurationError

ALONE = dataclasses.replace(PLAIN, account=None, nodes=1)


@pytest.mark.parametrize(
    ("site", "change", "words"),
    [
        ("pbs", {"sbatch_args": ("--qos=debug",)}, "--sbatch-arg --qos=debug: the site pbs has no sbatch"),
        ("workstation", {"sbatch_args": ("--qos=debug",)}, "scheduler.options"),
        ("workstation", {"partition": "gpu"}, "--partition gpu: the site workstation has no scheduler"),
        ("workstation", {"account": "me"}, "--account me"),
        ("workstation", {"links": 3}, "--chain 3"),
        ("workstation", {"nodes": 2}, "--nodes 2"),
    ],
)
def test_what_a_scheduler_would_never_hear_of_is_refused(site, change, words):
    plain = dataclasses.replace(ALONE, account="me") if site == "pbs" else ALONE
    fitting.check(plain, sites.load(site))
    with pytest.raises(ConfigurationError, match=words):
        fitting.check(dataclasses.replace(plain, **change), sites.load(site))


def test_slurm_hears_of_all():
    job = dataclasses.replace(PLAIN, sbatch_args=("--qos=debug",), partition="gpu", links=3)
    fitting.check(job, sites.load("slurm-openmpi"))
