"""Where the sides of a comparison are computed: in a process with this interpreter (`comparison/observe.py`),
or with another one.

Environments with other versions of packages (`compare --with`) are made once for each list of requirements,
never in this environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fsdp_tune.comparison.stages import Observation, stages_until
from fsdp_tune.comparison.tool_trainers import PACKAGES
from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.errors import FsdpTuneError, failed_error, usage_error
from fsdp_tune.core.processes import QUIET_LIBRARIES, JsonChild
from fsdp_tune.core.version import PACKAGE
from fsdp_tune.data.cache import alone
from fsdp_tune.recipe.schema.recipe import Recipe

ENVIRONMENTS = "environments"
"""Folder of the cache."""
COMPLETE = "complete.json"
"""Written last: an environment without it is made again."""
FALLBACK = "packages_of_fsdp_tune.pth"
SHOWN_LINES = 4


def python_with(requirements: Sequence[str], cache: Path) -> Path:
    """Return an interpreter of this version of Python whose environment has `requirements`, and for the rest
    the packages of this one.

    It is kept in the `cache` for the next time. Commands that want the same one take turns.
    Raises: usage error for what is no requirement, failed error with what was tried and said if it cannot be
    installed.
    """
    wanted = sorted({_requirement(each) for each in requirements})
    home = sysconfig.get_path("purelib")
    key = hashlib.blake2b(json.dumps([wanted, sys.version, home]).encode(), digest_size=10).hexdigest()
    folder = cache / ENVIRONMENTS / key
    python = folder / "bin" / "python"
    DISK.mkdir(folder.parent)
    with alone(folder):
        if (folder / COMPLETE).is_file() and os.access(python, os.X_OK):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _make(folder, python, wanted, home)
            write_json(folder / COMPLETE, {"requirements": wanted})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python


def _requirement(text: str) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement as error:
        message = f"`--with {text}` is not a requirement: {str(error).splitlines()[0]}"
        raise usage_error("compare-with", message, hint='--with "transformers==4.57.6"') from error


def _make(folder: Path, python: Path, wanted: Sequence[str], home: str) -> None:
    uv = shutil.which("uv")
    if uv is not None:
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
    else:
        _run([sys.executable, "-m", "venv", str(folder)])
    # Behind what is installed, so that torch and all that the requirements do not name is that of this
    # environment. pip counts what it finds there as installed; uv does not, so it installs what the
    # requirements need.
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / FALLBACK).write_text(f"{home}\n", encoding="utf-8")
    install = (
        [uv, "pip", "install", "--quiet", "--python", str(python)]
        if uv is not None
        else [str(python), *PIP, "--upgrade"]
    )
    if others := [each for each in wanted if Requirement(each).name.lower() not in PARTLY]:
        _run([*install, *others])
    for each in wanted:
        if (name := Requirement(each).name.lower()) in PARTLY:
            _run([*install, "--no-deps", each])
            _add_needed(install, python, name, {Requirement(other).name.lower() for other in wanted})


PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
PARTLY = {
    "axolotl": (
        "axolotl.cli.train",
        "axolotl.cli.config",
        "axolotl.common.datasets",
        "axolotl.train",
        "axolotl.core.builders",
    )
}
"""Packages most of whose requirements serve GPUs, clouds and servers → the modules that are used. Of the
requirements those are installed that these modules import and this environment lacks, and those that compute,
if this environment has a version that does not meet them."""
TRIES = 40
_METADATA = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires({!r}) or []))"
_IMPORT = """
import importlib, sys
for name in {!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        sys.exit("{}" + str(error.name))
"""
_MISSING = "no module: "


def _add_needed(install: Sequence[str], python: Path, name: str, given: Collection[str]) -> None:
    """Install what a package needs, its requirements' versions included, and nothing in place of this
    environment's torch.

    `given`: names that the user chose versions of. Raises: failed error as `_run`, or for a module that no
    requirement is named after.
    """
    code, text = _output([str(python), "-c", _METADATA.format(name)])
    requirements = [Requirement(each) for each in (json.loads(text.splitlines()[-1]) if code == 0 else [])]
    requirements = [
        each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    requirements = [each for each in requirements if canonicalize_name(each.name) not in {"torch", *given}]
    held = python.parent.parent / "held.txt"
    held.write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
    install = [*install, "--constraint", str(held)]
    computing = [each for each in requirements if canonicalize_name(each.name) in PACKAGES]
    if stale := [f"{each.name}{each.specifier}" for each in computing if _is_other_version(each)]:
        _run([*install, *stale])
    tried: set[str] = set()
    for _ in range(TRIES):
        code, text = _output([str(python), "-c", _IMPORT.format(PARTLY[name], _MISSING)])
        if code == 0:
            return
        module = text.rpartition(_MISSING)[2].strip() if _MISSING in text else ""
        found = [each for each in requirements if _provides(each, module)]
        if not module or not found or module in tried:
            break
        tried.add(module)
        _run([*install, *(f"{each.name}{each.specifier}" for each in found)])
    shown = " / ".join([line.strip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:])
    others = f"`--with {name}==VERSION` tries another version, `--with PACKAGE` adds a package"
    hint = f"`compare --tools import` compares the imported recipe; {others}"
    raise failed_error(
        "compare-environment", f"{name} was installed and cannot be imported: {shown}", hint=hint
    )


def _is_other_version(requirement: Requirement) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return not requirement.specifier.contains(
            importlib.metadata.version(requirement.name), prereleases=True
        )
    return False


def _provides(requirement: Requirement, module: str) -> bool:
    """Return whether a requirement is named after a module: `axolotl.contribs` is in `axolotl-contribs-mit`
    and `axolotl-contribs-lgpl`."""
    name, parts = canonicalize_name(requirement.name), canonicalize_name(module)
    top = canonicalize_name(module.partition(".")[0])
    return name in (parts, top, f"python-{top}") or name.startswith(f"{parts}-")


def _output(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command in a tool's environment."""
    with tempfile.TemporaryFile("w+") as output:
        child = children.start(
            command, _variables(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = child.wait()
        finally:
            children.end(child)
        output.seek(0)
        return code, output.read()


def _variables() -> dict[str, str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return variables | {"AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}


def _run(command: Sequence[str]) -> None:
    code, text = _output(command)
    if code:
        said = [line.strip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        message = (
            f"no environment could be made: `{shlex.join(command)}` ended with exit code {code}: "
            f"{' / '.join(said)}"
        )
        hint = (
            "check the name, the version and the package index; or make one yourself and give `--python "
            "ENVIRONMENT/bin/python`"
        )
        raise failed_error("compare-environment", message, hint=hint)


OBSERVE = ("-P", "-m", "fsdp_tune.comparison.observe")
TOOL_SIDE = ("-P", "-m", "fsdp_tune.comparison.tool_side")
LENT = (
    *(
        "accelerate",
        "annotated-types",
        "isal",
        "jinja2",
        "markupsafe",
        "ml_dtypes",
        "packaging",
        "peft",
        "psutil",
        "pydantic",
    ),
    *("pydantic_core", "pyyaml", "typing-inspection", "typing_extensions", "xxhash"),
)
"""Packages that another interpreter of the same version of Python gets from this one if it lacks them. It
needs its own torch, transformers and what these need."""


def find_interpreter(python: Path) -> str:
    """Return the interpreter's path. Raises: usage error if it cannot be run."""
    found = shutil.which(str(python))
    if found is None:
        raise usage_error(
            "compare-python",
            f"`--python {python}` is not an interpreter",
            hint="give the path of `bin/python` of a venv",
        )
    return str(Path(found).absolute())


def _link(paths: Sequence[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path)


def _files_of(name: str) -> list[Path]:
    """Return the files and folders of an installed package at the top of its environment, metadata
    included."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    return [Path(str(found.locate_file(top))) for top in sorted(tops)]


class _ComputedStages:
    """What a process has computed, by key: up to which stage. B with A's values is often A."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, Observation]] = {}

    def get(self, key: str, until: str, compute: Callable[[], Observation]) -> Observation:
        """Return the observation of a key up to a stage or beyond, computed if it is not known that far."""
        known = self._found.get(key)
        if known is None or until not in stages_until(known[0]):
            known = self._found[key] = until, compute()
        return known[1]


class ObservingChild:
    """The process that computes sides with one interpreter. It starts with the first request."""

    def __init__(
        self,
        python: str,
        folder: Path,
        *,
        rows: int,
        model: str,
        shows_defaults: bool = False,
        is_beside_tool: bool = False,
    ) -> None:
        """`rows`: of each source. `model`: small or full. `shows_defaults`: the stage `defaults` is computed
        too. `is_beside_tool`: a tool computes the other side."""
        self._python, self._folder = python, folder
        self.settings = {
            "rows": rows,
            "model": model,
            "folder": str(folder),
            "defaults": shows_defaults,
            "beside_tool": is_beside_tool,
        }
        self._child: JsonChild | None = None
        self._known = _ComputedStages()

    def __enter__(self) -> ObservingChild:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def observe(self, recipe: Recipe, until: str) -> Observation:
        """Compute a resolved recipe up to a stage or beyond. Raises: usage error if the interpreter lacks a
        package, failed error if it crashed."""
        key = recipe.model_copy(update={"name": None, "output_dir": "RUN"}).model_dump_json()
        return self._known.get(key, until, lambda: self.computed(recipe, until))

    def computed(self, recipe: Recipe, until: str, inputs: Path | None = None) -> Observation:
        """Compute a recipe, whether or not it is known, and write to the file `inputs` what a tool needs for
        it. Raises: as `observe`."""
        request = {"recipe": recipe.model_dump(mode="json", by_alias=True), "until": until, **self.settings}
        request |= {"inputs": str(inputs)} if inputs is not None else {}
        child = self._started()
        child.send(json.dumps(request))
        found = child.receive()
        if found is None:
            raise self._crashed(child.failure())
        return Observation.from_json(found)

    def _started(self) -> JsonChild:
        if self._child is None:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            lent: list[str] = []
            if self._python != sys.executable:
                # A folder with this package alone: other packages of this environment must not hide those of
                # the other one.
                alone, folder = (
                    self._folder / "package",
                    self._folder / f"lent-{sys.version_info.major}.{sys.version_info.minor}",
                )
                _link([PACKAGE], alone)
                _link([path for name in LENT for path in _files_of(name)], folder)
                environment["PYTHONPATH"], lent = str(alone), [str(folder)]
            self._child = JsonChild((self._python, *OBSERVE, *lent), environment | QUIET_LIBRARIES)
        return self._child

    def _crashed(self, how: str) -> FsdpTuneError:
        if "ImportError" in how or "ModuleNotFoundError" in how:
            own = f"{sys.version_info.major}.{sys.version_info.minor}"
            hint = (
                f"it needs torch and transformers; packages such as pydantic are lent to a Python {own}, "
                "and another one needs its own"
            )
            return usage_error(
                "compare-python", f"`{self._python}` cannot run the comparison: {how}", hint=hint
            )
        return failed_error(
            "compare-failed",
            f"the comparison ended with {self._python}: {how}",
            hint="`fsdp-tune env` shows the installation",
        )


TOOLS = {"TRL": "trl", "axolotl": "axolotl"}
"""Tools that compute their own side → their package. `comparison/tool_trainers.py` has how."""
_NOT_SENT_TO_TRL = (
    *("env", "config", "trust_remote_code", "code_revision"),
    *(
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "accelerator_config",
        "parallelism_config",
        "tf32",
        "local_rank",
        "ddp_backend",
    ),
    *(
        "dataset_num_proc",
        "eval_steps",
        "save_steps",
        "logging_steps",
        "resume_from_checkpoint",
        "output_dir",
        "run_name",
    ),
    *(
        "gradient_checkpointing_kwargs",
        "liger_kernel_config",
        "torch_compile_backend",
        "torch_compile_mode",
        "dataloader_prefetch_factor",
    ),
    *(
        "dataloader_persistent_workers",
        "hub_model_id",
        "hub_token",
        "hub_strategy",
        "metric_for_best_model",
        "greater_is_better",
    ),
)
_NOT_SENT_TO_AXOLOTL = (
    *(
        "env",
        "trust_remote_code",
        "plugins",
        "deepspeed",
        "test_datasets",
        "gradient_checkpointing_kwargs",
        "auto_find_batch_size",
    ),
    *(
        "hub_model_id",
        "hub_strategy",
        "push_dataset_to_hub",
        "wandb_project",
        "wandb_entity",
        "wandb_name",
        "wandb_run_id",
        "wandb_watch",
    ),
    *(
        "mlflow_tracking_uri",
        "comet_api_key",
        "save_steps",
        "saves_per_epoch",
        "save_strategy",
        "eval_steps",
        "evals_per_epoch",
    ),
    *(
        "eval_strategy",
        "logging_steps",
        "output_dir",
        "dataset_prepared_path",
        "resume_from_checkpoint",
        "torch_compile_backend",
    ),
    *(
        "dataset_processes",
        "dataloader_prefetch_factor",
        "ddp",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "lora_model_dir",
    ),
    *(
        "early_stopping_patience",
        "tensor_parallel_size",
        "context_parallel_size",
        "sequence_parallel_degree",
        "dp_shard_size",
    ),
    *(
        "dp_replicate_size",
        "load_best_model_at_end",
        "metric_for_best_model",
        "profiler_steps",
        "loss_watchdog_threshold",
    ),
    *("use_tensorboard", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
)
NOT_SENT = {"TRL": _NOT_SENT_TO_TRL, "axolotl": _NOT_SENT_TO_AXOLOTL}
"""Options that a tool never gets: variables of its process, trust (which the request has), machines, and what
is logged or saved."""


_OFF_IN_TRL = (
    *(
        "do_eval",
        "push_to_hub",
        "use_liger_kernel",
        "use_liger",
        "gradient_checkpointing",
        "activation_offloading",
        "torch_compile",
    ),
    *("load_best_model_at_end", "dataloader_drop_last", "shuffle_dataset", "dataset_streaming"),
)
_SETTINGS_OF_TRL: dict[str, object] = {
    **dict.fromkeys(_OFF_IN_TRL, False),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"), "no"),
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
}
_SETTINGS_OF_AXOLOTL: dict[str, object] = {
    **dict.fromkeys(
        ("use_wandb", "use_mlflow", "use_comet", "gradient_checkpointing", "torch_compile", "tf32"), False
    ),
    **dict.fromkeys(
        (
            "activation_offloading",
            "shuffle_merged_datasets",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
        ),
        False,
    ),
    **dict.fromkeys(("dataset_num_proc", "val_set_size", "dataloader_num_workers"), 0),
    "curriculum_sampling": True,
}
SETTINGS = {"TRL": _SETTINGS_OF_TRL, "axolotl": _SETTINGS_OF_AXOLOTL}
"""Options that change no number on the CPU, or that end a run there. The order of the rows is observed
apart."""


class ToolChild:
    """The process that computes one side with the tool of its configuration. It starts with the first
    request."""

    def __init__(self, python: str, tool: str, inputs: Mapping[str, object]) -> None:
        """`inputs`: rows, model and sizes, the same for all requests."""
        self._python, self._tool, self._inputs = python, tool, {**inputs, "settings": SETTINGS[tool]}
        self._child: JsonChild | None = None
        self._known = _ComputedStages()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def observe(self, values: Mapping[str, object], until: str) -> Observation:
        """Compute the options of a configuration up to a stage or beyond. Raises: failed error if the process
        ended."""
        values = {name: value for name, value in values.items() if name not in NOT_SENT[self._tool]}
        key = json.dumps(values, sort_keys=True, default=str)
        return self._known.get(key, until, lambda: self._computed(values, until))

    def started(self) -> JsonChild:
        if self._child is None:
            # A folder with this package alone: others of this environment must not hide those of the tool's.
            alone = Path(str(self._inputs["rows"])).parent / "package"
            _link([PACKAGE], alone)
            variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(alone), **QUIET_LIBRARIES}
            self._child = JsonChild((self._python, *TOOL_SIDE), _variables() | variables)
        return self._child

    def _computed(self, values: Mapping[str, object], until: str) -> Observation:
        child = self.started()
        request = {"tool": self._tool, "values": values, "until": list(stages_until(until)), **self._inputs}
        child.send(json.dumps(request, default=str))
        found = child.receive()
        if found is None:
            message = f"{self._tool} did not compute its side with {self._python}: {child.failure()}"
            other = f"`--with {TOOLS[self._tool]}==VERSION` tries another version"
            hint = f"`compare --tools import` compares the recipe that `import` makes; {other}"
            raise failed_error("compare-failed", message, hint=hint)
        return Observation.from_json(found)


def needed_requirements(tools: Collection[str], given: Sequence[str]) -> list[str]:
    """Return the requirements of the environment of these tools: `given`, and the newest version of the tool
    if they do not name it.

    Raises: usage error for two tools, or for text that is not a requirement.
    """
    packages = {TOOLS[tool] for tool in tools}
    if len(packages) > 1:
        hint = (
            "`compare --tools import` compares the recipes that `import` makes of them; or compare each "
            "with a recipe"
        )
        raise usage_error(
            "compare-with", "A and B are of two tools, whose environments exclude each other", hint=hint
        )
    named = {Requirement(_requirement(each)).name.lower() for each in given}
    return [*given, *sorted(packages - named)]
