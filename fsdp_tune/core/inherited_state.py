"""What the caller of a command may have closed, changed or ignored, and every command relies on: standard
streams, the encoding of paths, signals and the umask."""

from __future__ import annotations

import os
import signal
import sys


def open_standard_streams() -> None:
    """Open each of descriptors 0 to 2 that the caller closed on /dev/null, for this process and its children.

    Shells (`>&- 2>&-`) and some service managers start commands like that. Otherwise the next file or socket
    that is opened gets the number, and lines for the screen are written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # gets the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:  # Python makes no stream of a closed descriptor
            stream = os.fdopen(
                number,
                "r" if number == 0 else "w",
                encoding="utf-8",
                errors="backslashreplace",
                closefd=False,
            )
            setattr(sys, name, stream)


def continue_in_utf8() -> None:
    """Replace this process by itself in Python's UTF-8 mode if it encodes paths otherwise, as under
    `LC_ALL=C PYTHONUTF8=0`.

    Recipes, manifests and messages are UTF-8, so a path that is not ASCII could be neither read from a recipe
    nor printed.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for children too
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def reset_inherited() -> None:
    """Undo what a caller may have changed and every command relies on.

    Under an ignored SIGCHLD the kernel forgets how children ended; a stop signal that is blocked never
    arrives. Python of `PYTHONINSPECT` waits for someone to type when a program has ended, and that of
    `PYTHONOPTIMIZE=2` has no docstrings, from which transformers makes those of its models. The program is
    executed again without them. Children exchange UTF-8 with this process, whatever PYTHONIOENCODING is for
    its own streams. A umask that takes rights from the owner of a file makes directories in which nothing can
    be written.
    """
    if os.environ.pop("PYTHONINSPECT", None) or os.environ.pop("PYTHONOPTIMIZE", None):
        os.execv(sys.executable, sys.orig_argv)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.pop("PYTHONIOENCODING", None)
    os.umask(os.umask(0o077) & 0o077)
