"""Starts a program that can send to no internet address before the process that started it has looked at that
address: `python guarded_start.py SOCKET PROGRAM ARGUMENT...`. Linux on x86-64.

A seccomp filter stops the calls that send somewhere (CALLS) and has them wait for who reads the filter's listener
(seccomp_unotify(2)). Its descriptor's number goes to the Unix socket; from there it is fetched by pidfd_getfd(2),
as nothing can be sent from here any more. Then this process becomes the program. Where the system has no such
filter, a number below 0 goes there, and the program runs without. Imports the standard library alone: it starts in
20 ms.
"""

import ctypes
import os
import platform
import socket
import struct
import sys

CONNECT, SENDTO, SENDMSG, SENDMMSG = CALLS = (42, 44, 46, 307)  # of x86-64
ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS
SECCOMP, SET_FILTER, NEW_LISTENER = 317, 1, 8  # seccomp(2), SECCOMP_SET_MODE_FILTER, its flag
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of BPF: ld [k], jeq k, ret k
ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def _filter() -> bytes:
    """The program: the calls of this architecture's are looked at, all others pass."""
    tests = [(EQUAL, len(CALLS) - i, 0, number) for i, number in enumerate(CALLS)]
    code = [
        (LOAD, 0, 0, 4),  # seccomp_data.arch
        (EQUAL, 0, len(CALLS) + 1, ARCHITECTURE),
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        *tests,
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, NOTIFY),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in code)


def listen() -> int:
    """Have this process's calls wait from now on; returns the listener's descriptor, -1: that cannot be had."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return -1
    libc, code = ctypes.CDLL(None, use_errno=True), _filter()
    program = _Program(len(code) // 8, code)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return -1
    return int(libc.syscall(SECCOMP, SET_FILTER, NEW_LISTENER, ctypes.byref(program)))


def main(path: str, *command: str) -> None:
    """Guard this process by who listens at the Unix socket, and become the command."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as who:
        who.connect(path)
        found = listen()
        os.write(who.fileno(), struct.pack("i", found))
        os.read(who.fileno(), 1)  # it has it, or is gone
    if found >= 0:
        os.close(found)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
