"""Run a command where torch finds emulated GPUs: `python -m tests.cuda [--gpus N] [--gpu NAME] COMMAND …`."""

from __future__ import annotations

import argparse
import os
import sys

from tests.cuda.build import why_not
from tests.cuda.environment import GPUS, with_gpus


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="what they say they are")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("a command is needed")
    if (reason := why_not()) is not None:
        sys.exit(f"no emulated GPU: {reason}")
    environment = with_gpus(options.gpus, options.gpu)
    environment.setdefault("PYTHON", sys.executable)  # which the scripts of this repository read
    os.execvpe(options.command[0], options.command, environment)


main()
