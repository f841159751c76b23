"""Entry point of a rank, with the steps that must precede the import of torch.

After `--early DIRECTORY` the rank has been started while the command still checks its inputs: it imports the
libraries, inspects the model (rank 0), and waits for the run directory. Until then it touches no device and
draws no random number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.inherited_state import open_standard_streams, reset_inherited
from fsdp_tune.core.parent_death import die_with_launcher, die_with_parent
from fsdp_tune.launch.command.accelerate import EARLY
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.early_start import EarlyStart
from fsdp_tune.worker import rank as ranks

POLL_SECONDS = 0.02


def main(arguments: list[str]) -> int:
    started = time.time()
    die_with_launcher()
    reset_inherited()
    open_standard_streams()
    *early, folder = arguments or [""]
    if not folder or (early and (len(early) != 2 or early[0] != EARLY)):
        sys.stderr.write("usage: python -m fsdp_tune.worker RUN_DIR (started by a launcher)\n")
        return 2
    from fsdp_tune.worker.main import read_recipe, run_directory, run_rank

    run = run_directory(folder)
    waited: dict[str, float] = {}
    if early:
        waited = wait_for_run(EarlyStart(Path(early[1])))
        started = time.time()
        with contextlib.suppress(OSError):  # without a directory of logs, `read_recipe` fails and says so
            ranks.append_output(run.launcher_log)
    try:
        recipe = read_recipe(run)
        rank = ranks.read_rank(recipe, run)
    except FsdpTuneError as error:
        for problem in error.problems:
            sys.stderr.write(
                "\n".join([f"error: {problem.message}", *(f"hint: {way}" for way in problem.ways_out)]) + "\n"
            )
        return int(error.exit_code)
    ranks.set_environment(recipe, run)
    screen = ranks.redirect_output(run, rank.index)
    # The supervisor requests stacks with this signal; faulthandler answers from C, even while the GIL is
    # held.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)

    def say(line: str) -> None:
        if rank.is_first:
            screen.write(line + "\n")

    outcome = run_rank(run, recipe, rank, say, started, waited)
    if outcome.problem is not None and not run.rank_outcome(rank.index).is_file():
        # The disk refused the outcome. The launcher's log is open already and may still accept the message.
        screen.write(f"error: rank {rank.index}: {outcome.problem.message}\n")
    return int(outcome.exit_code)


def wait_for_run(files: EarlyStart) -> dict[str, float]:
    """Return when the run directory is complete, with the seconds of each phase until then."""
    recipe = Recipe.model_validate_json(files.recipe_json.read_bytes())
    ranks.set_library_environment(recipe)
    began = time.monotonic()
    with contextlib.suppress(Exception):  # raised again where its outcome is reported
        # It imports everything that a rank needs to load and train a model.
        import fsdp_tune.worker.setup  # noqa: F401 # pyright: ignore[reportUnusedImport]
    imported = time.monotonic()
    inspector = _Inspector(files, recipe) if os.environ.get("RANK") == "0" else None
    while not files.opened.exists():
        if inspector is not None:
            inspector.poll()
        time.sleep(POLL_SECONDS)
    return {"importing": imported - began, "waiting for the inputs": time.monotonic() - imported}


class _Inspector:
    """Inspects the model in a forked process, which shares the imports and leaves this one as it is."""

    def __init__(self, files: EarlyStart, recipe: Recipe) -> None:
        self._files = files
        self._is_running = True
        sys.stderr.flush()
        rank = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            try:
                die_with_parent(rank)
                _inspect(files, recipe)
            except BaseException:  # noqa: BLE001  the command then inspects in a process of its own and reports the reason
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)

    def poll(self) -> None:
        """Answer for a process that has ended without an answer."""
        if self._is_running and os.waitpid(self._child, os.WNOHANG)[0] == self._child:
            self._is_running = False
            if not self._files.inspection_json.exists():
                write_file(self._files.inspection_json, "")


def _inspect(files: EarlyStart, recipe: Recipe) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from fsdp_tune.model.loading.inspect import find_facts

    with contextlib.redirect_stdout(sys.stderr):
        document = find_facts(recipe).to_json()
    write_file(files.inspection_json, document, private=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
