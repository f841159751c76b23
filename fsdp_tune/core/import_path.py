"""Where the processes of this package import from: the installation and what PYTHONPATH names, never the working directory.

`python -m` and an empty entry of PYTHONPATH (`PYTHONPATH=$PYTHONPATH:/libs`, if it was unset) put the working directory on the import path,
and a `yaml.py` or `token.py` of the user's would be imported in the place of the library's. This module is imported before all others, so
it imports only what Python has loaded when it starts.
"""

from __future__ import annotations

import os
import sys

PACKAGE = "fsdp_tune"
PROGRAM = "fsdp-tune"


def named_directories(python_path: str) -> str:
    """Return a value of PYTHONPATH without its empty entries, which stand for the working directory."""
    return os.pathsep.join(filter(None, python_path.split(os.pathsep)))


def runs_this_package() -> bool:
    """Return whether this process is a program of the package, started as `fsdp-tune` or `python -m fsdp_tune…`. Others import it."""
    words = sys.orig_argv
    is_module = any(
        word.startswith(f"-m{PACKAGE}") or (before[:1] == "-" and before[-1:] == "m" and word.partition(".")[0] == PACKAGE)
        for before, word in zip(words, words[1:], strict=False)  # noqa: RUF007  no itertools yet
    )
    return is_module or (bool(sys.argv) and os.path.basename(sys.argv[0]) == PROGRAM)  # noqa: PTH119  no pathlib yet


def leave_out_working_directory() -> None:
    """Take the working directory from the import path of this process and of its children, and put the standard library first.

    Directories that PYTHONPATH names stay before the installed packages, which they may replace on purpose. No directory replaces the
    standard library on purpose.
    """
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    named = named_directories(given)
    try:
        here = os.getcwd()  # noqa: PTH109  no pathlib yet
    except OSError:  # it has been removed, so nothing is imported from it
        here = ""
    if here and sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[:1] == [here]:
        del sys.path[0]
    if here and named != given and here in sys.path and here not in map(os.path.abspath, filter(None, named.split(os.pathsep))):
        sys.path.remove(here)
    library = os.path.dirname(os.__file__)  # noqa: PTH120  no pathlib yet
    own = [entry for entry in sys.path if entry in (library, f"{library}/lib-dynload")]
    sys.path[:] = [*own, *(entry for entry in sys.path if entry not in own)]
    if named != given:
        os.environ["PYTHONPATH"] = named
    os.environ["PYTHONSAFEPATH"] = "1"  # multiprocessing starts children with `python -c`
