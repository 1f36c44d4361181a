"""Striping on Lustre and BeeGFS, with a fake mount table and fake tools in PATH."""

import json
import os

import pytest

from harness.jobs import call_command
from harness.marks import cases
from hpcdist.checkpoint import stripe
from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.training.run import saving

GIB = 1 << 30


def tool(folder, name, body):
    """Write an executable into ``folder`` that records its arguments in ``calls``."""
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls"\n{body}\n')
    (folder / name).chmod(0o755)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on Lustre and one on BeeGFS according to the mount table. `lfs` reports 12 servers."""
    for name in ("lustre", "bee gfs", "bin", "lustre/local"):
        (tmp_path / name).mkdir()
    mounts = tmp_path / "mounts"
    named = str(tmp_path / "bee gfs").replace(" ", r"\040")
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nmgs:/scratch {tmp_path}/lustre lustre rw 0 0\nb {named} beegfs rw 0 0\n"
        f"tmpfs {tmp_path}/lustre/local tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(stripe, "MOUNTS", mounts)
    monkeypatch.setattr(stripe.file_system, "__defaults__", (mounts,))
    monkeypatch.setattr(stripe.plan, "__defaults__", ("auto", mounts))
    osts = "\n".join(f"echo '{k}: scratch-OST{k:04x}_UUID ACTIVE'" for k in range(12))
    tool(tmp_path / "bin", "lfs", f'[ "$1" = osts ] || exit 0\necho OBDS:\n{osts}\necho "12: x INACTIVE"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def recorded_calls(site):
    result = site / "bin/calls"
    return result.read_text().splitlines() if result.exists() else []


def test_file_system_is_found_by_mount_table_or_number(site, monkeypatch):
    kind = lambda path: stripe.file_system(site / path).kind  # noqa: E731
    assert kind("lustre/run/not/there/yet") == "lustre" and kind("bee gfs") == "beegfs"
    assert kind("lustre/local") == "tmpfs" and kind("bin") == "ext4"
    assert stripe.file_system(site / "lustre").mount == f"{site}/lustre"
    monkeypatch.setattr(stripe, "_magic", lambda path: 0x0BD00BD0)
    assert kind("bin") == "lustre", "the number must win over the mount table"
    assert stripe.file_system(site, site / "no table").kind == "lustre"


def test_file_system_number_matches_stat(tmp_path):
    stat = os.popen(f"stat -f -c %t '{tmp_path}'").read().strip()
    assert stripe._magic(tmp_path) == int(stat, 16)


@cases(
    "nbytes, writers, servers, count",
    (100 << 20, 1, None, 1),  # small file: one stripe
    (16 * GIB, 16, 64, 1),  # many files spread over the servers
    (64 * GIB, 2, 64, 32),  # few large files need several stripes
    (64 * GIB, 2, 12, 6),
    (64 * GIB, 2, None, 8),  # the number of servers is unknown
    (10_000 * GIB, 8, 12, 12),  # at least one stripe per 100 GB, but not more than servers
    (10_000 * GIB, 8, None, 14),
    (0, 1, None, 1),
)
def test_stripe_count_follows_size_writers_and_servers(nbytes, writers, servers, count):
    assert stripe.stripes(nbytes, writers, servers) == count


def test_stripe_plans_for_each_file_system(site):
    lustre, bee = site / "lustre/run", site / "bee gfs/run"
    assert stripe.plan(lustre, GIB, 8).command == ("lfs", "setstripe", "-c", "1", "-S", "4M", str(lustre))
    text = stripe.plan(lustre, 64 * GIB, 2).text
    assert text == f"lfs setstripe -E 64M -c 1 -S 4M -E 1G -c 4 -S 4M -E -1 -c 6 -S 4M {lustre}"
    assert stripe.plan(lustre, GIB, 1, "-c 2 -p capacity").command[2:] == ("-c", "2", "-p", "capacity", str(lustre))
    assert stripe.plan(lustre, GIB, 1, "none").command == ()
    nothing = stripe.plan(site / "bin", GIB, 1)
    assert nothing.command == () and "ext4, which has no stripes" in nothing.why
    there = f"on Lustre it would be `lfs setstripe -c 1 -S 4M {site / 'bin'}` (1.0 GiB by 1 writer on an unknown number"
    assert there in nothing.why
    assert "`lfs setstripe -c 2 " in stripe.plan(site / "bin", GIB, 1, "-c 2").why
    assert stripe.plan(bee, 64 * GIB, 2).command == (
        *("beegfs-ctl", "--setpattern", "--chunksize=4m", "--numtargets=8"),
        str(bee),
    )
    tool(site / "bin", "beegfs", "")
    assert stripe.plan(bee, GIB, 2).text == f"beegfs entry set --chunk-size 4Mi --num-targets 1 '{bee}'"


def test_failed_stripe_command_is_reported(site):
    assert "beegfs-ctl is not installed" in stripe.apply(stripe.plan(site / "bee gfs", GIB, 1))
    tool(site / "bin", "lfs", "echo 'setstripe: Permission denied' >&2; exit 13")
    assert stripe.apply(stripe.plan(site / "lustre", GIB, 1)) == "lfs: setstripe: Permission denied"


def on_three_ranks(directory, **keys):
    messages = []

    def body(comm):
        config = CheckpointConfig(**keys)
        saving.stripe_checkpoints(
            comm, directory, config, 12 * GIB, messages.append if comm.rank == 0 else messages.remove
        )

    run_threads(3, body)
    return messages


def test_run_stripes_its_directory_once(site):
    directory = site / "lustre/run/checkpoints"
    output = on_three_ranks(directory)
    layout = f"lfs setstripe -E 64M -c 1 -S 4M -E 1G -c 4 -S 4M -E -1 -c 4 -S 4M {directory}"
    assert len(output) == 1 and layout in output[0] and "36.0 GiB by 3 writers on 12 servers" in output[0]
    assert recorded_calls(site)[-1] == layout and directory.is_dir()
    assert on_three_ranks(directory, writers="1")[0].count("-c 12") == 1
    assert len(recorded_calls(site)) == 4 and on_three_ranks(directory, stripe="none") == []
    assert on_three_ranks(site / "bin/run") == [] and len(recorded_calls(site)) == 4


def test_run_continues_if_the_stripe_tool_fails(site):
    tool(site / "bin", "lfs", "echo no >&2; exit 1")
    output = on_three_ranks(site / "lustre/run", stripe="-c 3")
    assert "lfs setstripe -c 3" in output[0] and output[1].startswith("warning: lfs: no;")


def test_stripe_command(site, capsys):
    def invoke(*arguments):
        return call_command(capsys, "checkpoint", "stripe", *arguments)

    folder = site / "lustre/run"
    code, out, err = invoke(folder, "--plan", "--bytes", "40G", "--writers", 4)
    assert code == 0 and out.startswith("lfs setstripe -E 64M") and "4 writers on 12 servers: 3 stripes" in err
    assert not folder.exists() and all("setstripe" not in line for line in recorded_calls(site))
    document = json.loads(invoke(folder, "--json")[1])
    assert document["file_system"] == "lustre" and document["done"] and folder.is_dir()
    assert recorded_calls(site)[-1] == f"lfs setstripe -c 1 -S 4M {folder}"
    code, out, err = invoke(site / "bin", "--plan", "--bytes", "40G", "--writers", 4)
    assert (code, out) == (0, "nothing to do\n") and "lies on ext4" in err and "lfs setstripe -E 64M" in err
    tool(site / "bin", "lfs", "exit 3")
    code, _, err = invoke(folder)
    assert code == 74 and "failed: lfs: exit code 3" in err
    assert invoke(folder, "--bytes", "lots")[0] == 2
    assert invoke(site / "bin", "--set", "-c '4")[0] == 78


@pytest.mark.parametrize("text", ("4", "lfs setstripe -c 4", "-c '4", ""))
def test_invalid_stripe_options_are_rejected(text):
    with pytest.raises(ConfigurationError, match=r"checkpoint\.stripe"):
        CheckpointConfig(stripe=text)
