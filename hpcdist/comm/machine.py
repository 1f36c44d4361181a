"""Which machine this is, for files that several of them see. Imports nothing but the standard library."""

import os
from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what all processes under this kernel, in containers too, and no others have in common (local).

    It is another one after a reboot; where the kernel does not say, it is the name of the machine.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename
