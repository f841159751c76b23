"""Recipes as jobs use them: what one may run, its resolution for this machine, and the caches it names."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.devices import this_machine
from fsdp_tune.core.errors import NOWHERE, FsdpTuneError, Notice, Problem, Where, collected, usage_error
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.user_cache import COMPILED, default_cache_directory
from fsdp_tune.data.cache import STORES
from fsdp_tune.data.read.file_access import is_url
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.recipe.extensions import find_extensions, named_extensions
from fsdp_tune.recipe.fsdp_arguments import compiles
from fsdp_tune.recipe.read.loader import LoadedRecipe, WrongRecipeError, load_recipe
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.resolve import Resolution, UnresolvedError, resolve, split_absent
from fsdp_tune.recipe.rules.launch import variables_to_allow
from fsdp_tune.recipe.schema.keys import pinned
from fsdp_tune.recipe.schema.recipe import Recipe


def resolve_recipe(
    loaded: LoadedRecipe,
    allowed: Allowed,
    observer: Observer,
    *,
    starts_ranks: bool = False,
    starts_here: bool = False,
    strict: bool = False,
    resume: str | None = None,
    planned: Hardware | None = None,
    elsewhere: bool = False,
) -> Resolution:
    """Resolve a recipe for this machine. Reports the notices of loading; those of the resolution are the
    caller's to report.

    `starts_ranks`: the job starts ranks or checks whether it could, so variables and trackers matter.
    `starts_here`: on this machine and now, so the devices that the recipe names must be here; without it a
    GPU is assumed where this machine shows none.
    `strict`: the caller makes errors of notices about keys without effect. `resume`: of `TrainOptions`.
    `planned`: resolve for this GPU instead of this machine's. `elsewhere`: the run starts on another machine,
    so what
    is missing here is a notice: model, tokenizer, data, packages. Raises: UnresolvedError.
    """
    observer.notices([notice for notice in loaded.notices if not (strict and notice.strict)])
    refused = code_not_allowed(loaded.recipe, allowed, starts_ranks=starts_ranks)
    device = loaded.recipe.launch.device
    machine = this_machine(device if starts_here or device == "cpu" else "auto")
    if planned is not None:
        machine = replace(machine, device_name=planned.name, capability=planned.capability)
    wrong: list[Problem] = []
    with collected(wrong):
        find_extensions(loaded.recipe)
    absent: list[Notice] = []
    if elsewhere:
        wrong, absent = split_absent([*wrong, *missing_sources(loaded.recipe)])
    try:
        resolution = resolve(
            loaded.recipe,
            machine,
            cwd=Path.cwd(),
            assume=None if starts_here else "cuda",
            needs_trackers=starts_ranks,
            positions=loaded.positions,
            resume=resume,
            elsewhere=elsewhere,
        )
    except UnresolvedError as error:
        before = [*refused, *wrong]
        raise UnresolvedError(
            error.recipe, *before, *error.problems, suspects=[*_suspects(before), *error.suspects]
        ) from error
    if refused or wrong:
        missing = missing_sources(loaded.recipe) if refused and starts_ranks and not elsewhere else ()
        raise UnresolvedError(
            resolution.recipe, *refused, *wrong, *missing, suspects=_suspects([*refused, *wrong])
        )
    return replace(
        resolution, notices=(*resolution.notices, *(_pinned_notice(each, loaded) for each in absent))
    )


def _pinned_notice(notice: Notice, loaded: LoadedRecipe) -> Notice:
    return replace(
        notice, where=pinned(Problem(notice.code, notice.message, notice.where), loaded.positions).where
    )


def _suspects(problems: Sequence[Problem]) -> list[str]:
    """Return the keys on which a check may not depend: code from a repository that is not trusted must not
    run in one either."""
    is_untrusted = any(problem.code == "remote-code-not-trusted" for problem in problems)
    return [
        *(["model"] if is_untrusted else []),
        *(problem.where.key for problem in problems if problem.where.key is not None),
    ]


def load_checked(
    source: str,
    overrides: Sequence[str],
    allowed: Allowed,
    *,
    name: str | None = None,
    unneeded: frozenset[str] = frozenset(),
) -> LoadedRecipe:
    """Read a recipe that is to start ranks. Raises as `load_recipe`; mistakes come with what would be refused
    after they are corrected: code that is not allowed, and files that are not there."""
    try:
        return load_recipe(source, overrides, name=name, unneeded=unneeded)
    except WrongRecipeError as error:
        if error.recipe is None:
            raise
        more = [*code_not_allowed(error.recipe, allowed, starts_ranks=True), *missing_sources(error.recipe)]
        raise FsdpTuneError(
            *error.problems, *(pinned(problem, error.positions) for problem in more)
        ) from error


def missing_sources(recipe: Recipe) -> list[Problem]:
    """Return the problems of data sources that can only be files of this machine; a hub is not asked."""
    found: list[Problem] = []
    for key, entry in (*recipe.data.sources, *recipe.evaluation.sources):
        if entry.loader is None and can_only_be_a_path(entry.path) and not is_url(entry.path):
            try:
                find_source(entry, key)
            except FsdpTuneError as error:
                found.extend(error.problems)
    return found


def sized_recipe(
    source: str,
    overrides: Sequence[str],
    nodes: int | None,
    gpus_per_node: int | None,
    *,
    name: str | None = None,
) -> LoadedRecipe:
    """Read a recipe for this number of machines and of ranks on each; None: as the recipe says. Raises:
    FsdpTuneError."""
    loaded = load_recipe(source, overrides, name=name)
    launch = loaded.recipe.launch
    machines = nodes or launch.num_machines
    size = [f"launch.num_machines={machines}"] if machines != launch.num_machines else []
    if gpus_per_node is not None and launch.num_processes != machines * gpus_per_node:
        size.append(f"launch.num_processes={machines * gpus_per_node}")
    return load_recipe(source, [*overrides, *size], name=name) if size else loaded


def check_cache(recipe: Recipe, *, writes: bool = True) -> None:
    """Check the cache directories of a resolved recipe before the work that they are for. Raises: usage error
    (exit 2).

    A directory that cannot be written serves if it has prepared data. Without `writes` nothing is created,
    and only what permissions and the kinds of existing files exclude is found.
    """
    assert recipe.data.cache_dir is not None, "the recipe is resolved"
    folder, compiled = Path(recipe.data.cache_dir), default_cache_directory() / COMPILED
    for path, way_out in (
        (folder, "--set data.cache_dir=DIR"),
        *([(compiled, "export XDG_CACHE_HOME=DIR")] if compiles(recipe) else []),
    ):
        error = _reason_unusable(path, writes=writes)
        if error is None or (
            error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and (path / STORES).is_dir()
        ):
            continue
        what = "of compiled kernels" if path == compiled else "of prepared data and plans"
        at = f" (at `{error.filename}`)" if error.filename and Path(error.filename) != path else ""
        raise usage_error(
            "cache-unusable",
            f"the cache directory {what}, `{path}`, cannot be used: {error.strerror}{at}",
            hint=f"name a directory where you may write: `{way_out}`",
            where=Where(key="data.cache_dir") if path == folder else NOWHERE,
        )


def _reason_unusable(path: Path, *, writes: bool) -> OSError | None:
    try:
        if writes:
            DISK.mkdir(path)
            tempfile.TemporaryFile(dir=path).close()
        else:
            existing = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
            if not existing.is_dir():
                return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
            if not os.access(existing, os.W_OK | os.X_OK):
                return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
    except OSError as error:
        return error
    return None


def refuse_code(recipe: Recipe, allowed: Allowed, *, starts_ranks: bool) -> None:
    """Refuse a recipe that runs code which the caller has not allowed. Raises: FsdpTuneError with every
    option to add."""
    if found := code_not_allowed(recipe, allowed, starts_ranks=starts_ranks):
        raise FsdpTuneError(*found)


def code_not_allowed(recipe: Recipe, allowed: Allowed, *, starts_ranks: bool) -> list[Problem]:
    """Return a problem for each kind of code that a recipe runs and the caller has not allowed."""
    model, kernel = recipe.model, recipe.model.attn_implementation
    found: list[Problem] = []
    trust = "read that code; if you trust it, add `--trust-remote-code`"
    if model.trust_remote_code and not allowed.remote_code:
        message = (
            f"the recipe wants to run Python code from the repository of {model.name_or_path} "
            "(`model.trust_remote_code`)"
        )
        found.append(Problem("remote-code-not-trusted", message, Where(key="model.trust_remote_code"), trust))
    if "/" in kernel and not allowed.remote_code:
        message = (
            f"the recipe wants to run an attention kernel from the hub, `{kernel}` "
            "(`model.attn_implementation`)"
        )
        found.append(
            Problem("remote-code-not-trusted", message, Where(key="model.attn_implementation"), trust)
        )
    kernels = EXPERTS_KERNELS.get(recipe.kernels.experts)
    if kernels is not None and kernels.repository is not None and not allowed.remote_code:
        message = (
            f"`kernels.experts: {recipe.kernels.experts}` runs code from the hub, `{kernels.repository}`"
        )
        found.append(Problem("remote-code-not-trusted", message, Where(key="kernels.experts"), trust))
    for name in variables_to_allow(recipe.launch.env) if starts_ranks else ():
        if name not in allowed.variables:
            message = (
                f"`launch.env.{name}` is not known to be a plain setting, and a variable can make the "
                "ranks run code"
            )
            hint = f"read what it does; if you trust it, add `--allow-env {name}`"
            found.append(Problem("variable-not-allowed", message, Where(key=f"launch.env.{name}"), hint))
    for key, _, name in named_extensions(recipe) if not allowed.extensions else ():
        message = f"the recipe wants to run the installed extension `{name}`"
        hint = "read its code; if you trust it, add `--allow-extensions`"
        found.append(Problem("extension-not-allowed", message, Where(key=key), hint))
    return found
