"""Confining this process before it opens a file that nobody vouches for (Linux; local).

Limits of address space and processor seconds; no byte written to any file; and, by a seccomp filter on all threads, no
socket, no program started, no file removed, renamed or changed. What is open already stays usable. There is no way
back: this is for a process that does nothing else.
"""

import ctypes
import errno
import os
import platform
import resource
import sys
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

# audit number of the architecture, and of its system calls those that are refused (unistd.h of the kernel):
# socket connect sendto socketpair execve execveat kill truncate ftruncate rename* mkdir* rmdir creat link* unlink*
# symlink* mknod* chmod* chown* ptrace process_vm_writev io_uring_setup
_REFUSED: Final = {
    "x86_64": (
        0xC000003E,
        317,
        (
            *(41, 42, 44, 53, 59, 322, 62, 76, 77, 82, 264, 316, 83, 258, 84, 85, 86, 265, 87, 263, 88, 266),
            *(133, 259, 90, 91, 268, 92, 93, 94, 260, 101, 311, 425),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        277,
        (198, 203, 206, 199, 221, 281, 129, 45, 46, 38, 276, 34, 37, 35, 36, 33, 52, 53, 54, 55, 117, 271, 425),
    ),
}
_X32: Final = 0x40000000  # numbers of another interface to the same kernel
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NO_NEW_PRIVILEGES, _SET_MODE_FILTER, _ALL_THREADS = 38, 1, 1


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def confine(memory_bytes: int, cpu_s: int) -> str:
    """Confine this process; it may take ``memory_bytes`` of address space beyond what it has.

    Returns why the network and other files are not closed to it, "" where they are. Raises OSError when a limit cannot
    be set.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * _PAGE
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
    for kind, most in (
        (resource.RLIMIT_AS, held + memory_bytes),
        (resource.RLIMIT_CPU, used + cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    return _refuse_calls()


def _refuse_calls() -> str:
    """Set the filter on all threads; return why there is none."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _REFUSED:
        return f"the system calls of {sys.platform} on {machine} are not known here"
    audit, seccomp, refused = _REFUSED[machine]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    program = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero):
        return f"prctl: {os.strerror(ctypes.get_errno())}"
    given = ctypes.byref(_Program(len(lines), program))
    if libc.syscall(ctypes.c_long(seccomp), ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_ALL_THREADS), given):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""
