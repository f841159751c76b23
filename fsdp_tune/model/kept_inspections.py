"""Keep the inspection of a model in the user's cache, and reuse it while nothing that it depends on has
changed.

The name of an entry is a digest of what the inspecting process is given: its command, the recipe, the
environment and the directory. The entry lists every file that it read, with a digest of their states
(`core.reads`): configurations, headers of weights, the code of this package and of the libraries. Only an
inspection without problems is kept, and none that ran code of a model or used the network.
"""

from __future__ import annotations

import json
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.reads import Reads, digest_of
from fsdp_tune.core.user_cache import INSPECTIONS, default_cache_directory
from fsdp_tune.model.model_files import ModelInspection
from fsdp_tune.recipe.schema.data_section import Mixture
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.manifest import digest

_PACKAGE = Path(__file__).parents[1]
_MACHINE = ("/proc/sys/kernel/random/boot_id", "/proc/driver/nvidia/version")
_OF_SESSION = (
    *(
        "PWD",
        "OLDPWD",
        "SHLVL",
        "TERM",
        "COLUMNS",
        "LINES",
        "WINDOWID",
        "SSH_",
        "TMUX",
        "STY",
        "VTE_",
        "KONSOLE_",
        "VSCODE_",
    ),
    *(
        "XDG_SESSION_",
        "XDG_RUNTIME_DIR",
        "XDG_SEAT",
        "XDG_VTNR",
        "DBUS_",
        "KRB5CCNAME",
        "GPG_",
        "DISPLAY",
        "XAUTHORITY",
        "WAYLAND_DISPLAY",
    ),
    *("INVOCATION_ID", "JOURNAL_STREAM", "MAIL"),
    *(
        "SLURM",
        "SBATCH_",
        "SRUN_",
        "SALLOC_",
        "PMI",
        "PBS_",
        "LSB_",
        "LSF_",
        "JOB_ID",
        "SGE_",
        "FLUX_",
        "OMPI_",
        "PRTE_",
    ),
)
"""First letters of the variables of a terminal, a login or a job of a scheduler."""
_MOST_ENTRIES = 100
_MOST_BYTES = 2**28
"""Of an entry; more than the inspection of any model takes."""


def without_session(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without variables that differ in each terminal, login or job, and that an
    inspection does not need."""
    return {
        name: value for name, value in environment.items() if name != "_" and not name.startswith(_OF_SESSION)
    }


def inspected_part(recipe: Recipe) -> Recipe:
    """Return a recipe without the names and rows that an inspection does not use, so that it is the same for
    others of the model."""
    data = recipe.data.model_copy(update={"train": [], "eval": None, "mixture": Mixture()})
    return recipe.model_copy(update={"name": None, "output_dir": ".", "data": data})


def entry_path(command: Sequence[str], recipe: str, environment: Mapping[str, str]) -> Path | None:
    """Return where the inspection of a recipe, as a JSON text, is kept; None without a cache directory."""
    try:
        machine = [path.read_text() for name in _MACHINE if (path := Path(name)).exists()]
        python = [sys.version, sys.path, platform.node(), machine]
        given = json.dumps(
            [list(command), recipe, dict(environment), str(Path.cwd()), python], sort_keys=True
        )
        path = default_cache_directory() / INSPECTIONS / digest(given, size=16)
        # now, since libraries of the process look whether the cache is there
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FsdpTuneError, OSError):
        return None
    return path


def keep(path: Path, recipe: Recipe, found: ModelInspection, reads: Reads) -> None:
    """Keep an inspection, if it can be reused, and remove the oldest of many. A cache that cannot be written
    is not an error."""
    if found.facts is None or found.problems or recipe.model.trust_remote_code:
        return
    # modules of this package read them when they are imported, before anything is recorded
    for file in _PACKAGE.rglob("*.json"):
        reads.include(str(file))
    for text in (
        *_texts(recipe.model.model_dump()),
        *_texts(recipe.lora.model_dump() if recipe.lora is not None else None),
    ):
        reads.include(text)  # a path among them is read, or would be if it existed
    if not reads.is_reusable:
        return
    entry = {"paths": sorted(reads.states), "states": reads.digest(), "inspection": found.to_json()}
    with suppress(OSError):
        write_file(path, zlib.compress(json.dumps(entry).encode(), 1), private=True)
        by_age = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)
        for oldest in by_age[:-_MOST_ENTRIES]:
            oldest.unlink()


def kept(path: Path) -> ModelInspection | None:
    """Return the kept inspection; None if there is none, if it is damaged, or if anything that it depends on
    has changed."""
    try:
        reader = zlib.decompressobj()
        entry = json.loads(reader.decompress(path.read_bytes(), _MOST_BYTES))
        if digest_of(entry["paths"]) == entry["states"]:
            return ModelInspection.from_json(entry["inspection"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
        pass
    return None


def _texts(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for inner in value.values() for text in _texts(inner)]
        case list() | tuple():
            return [text for inner in value for text in _texts(inner)]
        case _:
            return []
