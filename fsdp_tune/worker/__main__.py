"""Entry point of a rank, with the steps that must precede the import of torch."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import time
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.run.early_start import EarlyStart


def main(arguments: list[str]) -> int:
    started = time.time()
    from fsdp_tune.launch.command.accelerate import EARLY

    *early, folder = arguments or [""]
    if not folder or (early and (len(early) != 2 or early[0] != EARLY)):
        sys.stderr.write("usage: python -m fsdp_tune.worker RUN_DIR (started by a launcher)\n")
        return 2
    from fsdp_tune.core.parent_death import die_with_parent
    from fsdp_tune.worker import rank as ranks
    from fsdp_tune.worker.early import wait_for_run
    from fsdp_tune.worker.main import read_recipe, run_directory, run_rank

    die_with_parent()
    run = run_directory(folder)
    waited: dict[str, float] = {}
    if early:
        waited = wait_for_run(EarlyStart(Path(early[1])))
        started = time.time()
    try:
        recipe = read_recipe(run)
        rank = ranks.read_rank(recipe, run)
    except FsdpTuneError as error:
        for problem in error.problems:
            sys.stderr.write("\n".join([f"error: {problem.message}", *(f"hint: {way}" for way in problem.ways_out)]) + "\n")
        return int(error.exit_code)
    ranks.set_environment(recipe, run)
    screen = ranks.redirect_output(run, rank.index)
    # The supervisor requests stacks with this signal; faulthandler answers from C, even while the GIL is held.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)

    def say(line: str) -> None:
        if rank.is_first:
            screen.write(line + "\n")

    outcome = run_rank(run, recipe, rank, say, started, waited)
    if outcome.problem is not None and not run.rank_outcome(rank.index).is_file():
        # The disk refused the outcome. The launcher's log is open already and may still accept the message.
        with contextlib.suppress(OSError):
            screen.write(f"error: rank {rank.index}: {outcome.problem.message}\n")
    return int(outcome.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
