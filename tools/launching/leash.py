"""Runs a program on a leash: `leash.py PARENT_PID COMMAND...` becomes COMMAND, and dies when its parent does.

Linux only: PR_SET_PDEATHSIG survives exec, so nothing outlives a `kill -9` of the launcher. A program of its own and
not Popen's preexec_fn, because running Python between fork and exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the leash was on
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
