"""Find the tensors of a merged model that stay in fp32, which `--dtype` does not round to 16 bits.

A run records them in RUN/model/base_layout.json: those of the class, and those that the base stores so. Of a
checkpoint without a run they are the class's own, from the configuration, in a child process, since this one
has no transformers.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from fsdp_tune.core.errors import Notice, Where
from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.merge.config_and_tokenizer import Companions
from fsdp_tune.merge.load_check import Child
from fsdp_tune.merge.source import Selection
from fsdp_tune.run.base_model import BaseLayout

HALVES = ("bf16", "fp16")
_MAY_KEEP = re.compile(
    r"_keep_in_fp32_modules|FloatTensor\(|(?:Parameter|Linear|Norm|Buffer|\.to)\([^\n]*float32"
)
_OTHER_FAMILY = re.compile(r"^from \.\.(\w+)\.", re.MULTILINE)


def find_kept(
    selection: Selection, companions: Companions, names: BaseLayout, dtype: str
) -> tuple[Callable[[str], bool], list[Notice]]:
    """Return the test of whether a tensor of the output, by its name, is kept in fp32, and a notice if that
    cannot be known.

    `names`: how the output names the parameters. `dtype`: that of the output, as the option.
    """
    if dtype not in HALVES:
        return _none, []
    recorded = BaseLayout.read(selection.run.base_layout_json) if selection.run is not None else None
    if recorded is not None and recorded.kept_in_fp32 is not None:
        return _without_prefix(recorded.keeps_fp32(dtype)), []
    if companions.folder is None or not _may_keep(companions.config or {}):
        return _none, []
    with Child("kept", companions.folder) as child:
        answer = child.answer()
    if isinstance(answer, str):
        message = (
            "which tensors this model's class keeps in fp32 is not known, so all are converted to "
            f"{dtype}: {answer}"
        )
        return _none, [
            Notice(
                "merge-precision-unknown",
                message,
                Where(str(companions.folder)),
                hint="`fsdp-tune merge-checkpoint --dtype keep` converts none",
            )
        ]
    kept = BaseLayout(
        names.renamed, names.tensors, kept_in_fp32={key: tuple(value) for key, value in answer.items()}
    )
    return _without_prefix(kept.keeps_fp32(dtype)), []


def _none(_name: str) -> bool:
    return False


def _without_prefix(is_kept: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return the test for names in a PEFT file too."""
    return lambda name: is_kept(name.removeprefix(PREFIX))


def _may_keep(config: Mapping[str, object]) -> bool:
    """Return whether a class of the configuration may keep tensors in fp32, by the text of transformers'
    source, which takes seconds to import."""
    kinds = {value for each in _nested(config) if isinstance(value := each.get("model_type"), str)}
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    models = Path(spec.origin).parent / "models"
    folders, seen = [kind.replace("-", "_") for kind in sorted(kinds)], set[str]()
    while folders:
        name = folders.pop()
        files = list((models / name).glob("modeling_*.py"))
        if name in seen:
            continue
        seen.add(name)
        if not files:
            return True  # a model type whose code has another name
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        if _MAY_KEEP.search(text):
            return True
        folders += _OTHER_FAMILY.findall(text)
    return False


def _nested(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    inner = [value for value in config.values() if isinstance(value, dict)]
    return [config, *(each for value in inner for each in _nested(value))]
