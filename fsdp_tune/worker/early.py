"""A rank that starts while the command still checks its inputs: import the libraries, inspect the model, wait for the run directory.

Nothing here touches a device, draws a random number or reads the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.parent_death import die_with_parent
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.early_start import EarlyStart
from fsdp_tune.worker.rank import set_library_environment

POLL_SECONDS = 0.02


def wait_for_run(files: EarlyStart) -> dict[str, float]:
    """Return when the run directory is complete, with the seconds of each phase until then."""
    recipe = Recipe.model_validate_json(files.recipe_json.read_bytes())
    set_library_environment(recipe)
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
    from fsdp_tune.model.loading.inspect import facts

    with contextlib.redirect_stdout(sys.stderr):
        document = json.dumps(facts(recipe))
    write_file(files.inspection_json, document, private=True)
