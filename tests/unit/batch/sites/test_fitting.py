"""Options that the scheduler of a site does not support are rejected, not silently left out of the script."""

import dataclasses

import pytest

from harness.job_scripts import PLAIN
from harness.marks import cases
from hpcdist.batch import site_search
from hpcdist.errors import ConfigurationError

ALONE = dataclasses.replace(PLAIN, account=None, nodes=1)


@cases(
    "site, change, words",
    ("pbs", {"sbatch_args": ("--qos=debug",)}, "--sbatch-arg --qos=debug: the site pbs has no sbatch"),
    ("workstation", {"sbatch_args": ("--qos=debug",)}, "scheduler.options"),
    ("workstation", {"partition": "gpu"}, "--partition gpu: the site workstation has no scheduler"),
    ("workstation", {"account": "me"}, "--account me"),
    ("workstation", {"links": 3}, "--chain 3"),
    ("workstation", {"nodes": 2}, "--nodes 2"),
)
def test_options_unsupported_by_the_scheduler_are_rejected(site, change, words):
    plain = dataclasses.replace(ALONE, account="me") if site == "pbs" else ALONE
    site_search.check(plain, site_search.load(site))
    with pytest.raises(ConfigurationError, match=words):
        site_search.check(dataclasses.replace(plain, **change), site_search.load(site))


@cases(
    "site, change, words",
    ("pbs", {"qos": "debug"}, "--qos debug: the site pbs has PBS"),
    ("pbs", {"constraint": "gpu"}, "--constraint gpu: the site pbs has PBS"),
    ("pbs", {"mem": "0"}, "--mem 0"),
    ("workstation", {"mem": "4G"}, "--mem 4G: the site workstation has no scheduler"),
    ("perlmutter", {"walltime": "2-00:00:01"}, "--time 2-00:00:01 is over the limit of QOS regular of perlmutter"),
    ("perlmutter", {"qos": "debug", "walltime": "01:00:00"}, "limit of QOS debug of perlmutter, 00:30:00"),
    ("perlmutter", {"sbatch_args": ("--qos=debug",), "walltime": "20", "nodes": 9}, "QOS debug .* allows at most 8"),
    ("perlmutter", {"mem": "256G"}, "--mem 256G is more than 246G, the memory of a node of QOS regular of perlmutter"),
    ("perlmutter-cpu", {"gpus_per_node": 4}, "at the site perlmutter-cpu cannot be used: its nodes have none"),
    ("frontier", {"gpus_per_node": 8, "walltime": "60"}, "its GPUs are of AMD.*run.device = 'cpu'"),
    ("lumi", {"partition": "standard-g", "cpus_per_task": 15}, "60 cores, .* partition standard-g of lumi has 56"),
    ("lumi", {"partition": "gpu"}, "no such partition"),
    ("leonardo", {"qos": "boost_qos_lprod", "walltime": "5-00:00:00"}, "QOS boost_qos_lprod of leonardo, 4-00:00:00"),
    ("leonardo", {"mem": "500G"}, "494000M"),
    (
        "polaris",
        {"partition": "debug", "walltime": "01:00:00", "nodes": 3},
        "partition debug of polaris allows at most 2",
    ),
)
def test_jobs_beyond_machine_limits_are_rejected(site, change, words):
    plain = dataclasses.replace(ALONE, account=None if site == "workstation" else "me", cpus_per_task=1, walltime=None)
    site_search.check(plain, site_search.load(site))
    with pytest.raises(ConfigurationError, match=words):
        site_search.check(dataclasses.replace(plain, **change), site_search.load(site))


def test_qos_overrides_partition_limits():
    job = dataclasses.replace(ALONE, account="me", walltime="4-00:00:00", qos="boost_qos_lprod")
    site_search.check(job, site_search.load("leonardo"))
    with pytest.raises(ConfigurationError, match="partition boost_usr_prod of leonardo, 1-00:00:00"):
        site_search.check(dataclasses.replace(job, qos=None), site_search.load("leonardo"))


def test_job_options_override_site_options():
    site = site_search.load("perlmutter")
    job = site.complete(ALONE)
    assert (job.account, job.qos, job.constraint, job.mem) == (None, "regular", "gpu", None)
    job = site.complete(dataclasses.replace(ALONE, account="m1_g", qos="debug", constraint="gpu&hbm80g", mem="100G"))
    assert (job.account, job.qos, job.constraint, job.mem) == ("m1_g", "debug", "gpu&hbm80g", "100G")
    assert site.complete(dataclasses.replace(ALONE, account="m1")).account == "m1_g"
    job = site.complete(dataclasses.replace(ALONE, sbatch_args=("--qos=debug", "--constr=gpu&hbm80g")))
    assert (job.qos, job.constraint) == (None, None)
    whole = dataclasses.replace(site, scheduler=dataclasses.replace(site.scheduler, mem="0"))
    assert whole.complete(ALONE).mem == "0"
    assert whole.complete(dataclasses.replace(ALONE, sbatch_args=("--mem-per-cpu=2G",))).mem is None


def test_slurm_supports_all_options():
    job = dataclasses.replace(PLAIN, sbatch_args=("--qos=debug",), partition="gpu", links=3)
    site_search.check(job, site_search.load("slurm-openmpi"))
