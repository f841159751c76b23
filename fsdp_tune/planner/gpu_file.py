"""A GPU that the table does not have, in a user's YAML file: keys of `core/hardware.yaml` and `name`,
`network_gb_s`, `devices_per_machine`, `dollars_per_hour`."""

from __future__ import annotations

import difflib
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.core.gpus import Hardware, find_hardware, hardware_of
from fsdp_tune.core.values import is_list, is_mapping
from fsdp_tune.recipe.read.plain_yaml import read_plain_yaml

_LINKS = ("nvlink_gb_s", "pcie_gb_s", "network_gb_s")
_NUMBERS = (
    "memory_gb",
    "bandwidth_gb_s",
    "usable_gib",
    *_LINKS,
    "compute_capability",
    "matmul_tflops",
    "dollars_per_hour",
)
_PEAKS = ("bf16_tflops", "fp16_tflops", "fp8_tflops", "tf32_tflops", "fp32_tflops")
_KEYS = (*_NUMBERS, *_PEAKS, "devices_per_machine", "device_names", "source", "name")
_MAY_BE_ZERO = ("nvlink_gb_s",)


def find_or_read_hardware(name: str) -> Hardware:
    """Return a GPU by name (`find_hardware`), or from a user's YAML file.

    Raises: usage error `unknown-gpu` with the known names, or `wrong-gpu-file` with the problems of the file.
    """
    return read_hardware(Path(name)) if name.endswith((".yaml", ".yml")) else find_hardware(name)


def read_hardware(path: Path) -> Hardware:
    """Return the GPU of a YAML file. Raises: usage error `wrong-gpu-file` with all problems of the file."""
    try:
        content = read_plain_yaml(path)
    except FsdpTuneError as error:
        raise FsdpTuneError(
            *(Problem("wrong-gpu-file", each.message, each.where, each.hint) for each in error.problems)
        ) from error
    if not is_mapping(content):
        raise usage_error(
            "wrong-gpu-file", f"{path} is not a mapping of keys to values", where=Where(str(path))
        )
    # a key of YAML may be a number
    fields: dict[str, object] = {str(key): value for key, value in content.items()}
    wrong = [*_wrong_keys(fields), *_wrong_values(fields)]
    if wrong:
        raise FsdpTuneError(
            *(Problem("wrong-gpu-file", message, Where(str(path), key=key)) for key, message in wrong)
        )
    return hardware_of(str(fields.pop("name", None) or path.stem), fields)


def _wrong_keys(fields: dict[str, object]) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    for key in [key for key in fields if key not in _KEYS]:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        wrong.append(
            (
                key,
                f"unknown key `{key}`"
                + (f": did you mean `{close[0]}`?" if close else f"; known: {', '.join(_KEYS)}"),
            )
        )
    return wrong + [
        (key, f"`{key}` is missing") for key in ("memory_gb", "bandwidth_gb_s") if fields.get(key) is None
    ]


def _wrong_values(fields: dict[str, object]) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    for key in (*_NUMBERS, *_PEAKS, "devices_per_machine"):
        value = fields.get(key)
        is_number = (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        )
        if value is not None and not (is_number and (value != 0 or key in _MAY_BE_ZERO)):
            least = "of at least zero" if key in _MAY_BE_ZERO else "above zero"
            wrong.append((key, f"`{key}` must be a number {least}, not {value!r}"))
    if not isinstance(fields.get("devices_per_machine", 1), int | None):
        wrong.append(("devices_per_machine", "`devices_per_machine` must be a whole number"))
    names = fields.get("device_names")
    if names is not None and not (is_list(names) and all(isinstance(each, str) for each in names)):
        wrong.append(("device_names", f"`device_names` must be a list of texts, not {names!r}"))
    return wrong
