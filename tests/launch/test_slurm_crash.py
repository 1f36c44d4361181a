"""Nodes that crash under a job of a real Slurm: everything on them dies at once, and Slurm has to find out.

Needs Debian's slurm-wlm and munge, root, and namespaces (`unshare`).
"""

from pathlib import Path

import pytest
from slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(600)


def test_a_crashed_node_is_noticed_by_slurm_alone_and_comes_back(fragile: Cluster, tmp_path: Path) -> None:
    show = 'echo "$(hostname) $SLURMD_NODENAME $(cut -d " " -f 1 /proc/1/stat)"'
    done = fragile.run("srun", "--nodes=3", "bash", "-c", show)
    assert sorted(done.stdout.splitlines()) == ["n1 n1 1", "n2 n2 1", "n3 n3 1"], done.stderr
    fragile.crash("n2")
    state = ("sinfo", "-h", "-n", "n2", "-o", "%t")
    assert "down" not in fragile.run(*state).stdout
    fragile.wait(lambda: fragile.run(*state).stdout.strip() == "down*", "verdict of Slurm")
    fragile.revive("n2")
    assert fragile.run("srun", "--nodes=3", "hostname").returncode == 0
