"""`python -m tests.architectures.precision`: which tensors of each family stay in fp32 when it is loaded, trained and merged in bf16.

The reference is transformers alone: a model that is loaded in bf16 and saved. Every class for causal language modelling that keeps a
tensor in fp32 is tried, in tiny form on two CPU ranks; `--write` makes docs/evidence/precision.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.architectures.case import MICRO_BATCH, RANKS, TRAINING
from tests.architectures.tiny import config_of, make_model, names
from tests.evidence import Evidence, Results, installed, table
from tests.parity import runs
from tests.parity.store import make_store
from tests.ranks import Ranks, shared_ranks

STEPS = 2
WAYS: dict[str, dict[str, Any]] = {
    "full": {"fsdp": {"version": 2}},
    "lora": {"fsdp": {"version": 2}, "lora": {"r": 4, "target_modules": ["o_proj"]}, "merge": {"adapter": "merged"}},
}
Dtypes = dict[str, str]


@dataclass
class Precision:
    """`kept`: {kind of name: P trained, F frozen by the model's code, B buffer} of the tensors in fp32. `differences`: tensors whose
    dtype is not that of transformers, by what holds them: `live` model of a run or its `merged` files. `refused`: reasons by way."""

    architecture: str
    model_class: str = ""
    kept: dict[str, str] = field(default_factory=dict[str, str])
    differences: dict[str, dict[str, list[str]]] = field(default_factory=dict[str, dict[str, list[str]]])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    gathered: bool | None = None
    """Whether the loss of FSDP2, which gathers kept tensors as they are stored, is that of NO_SHARD, which shards nothing."""


def try_precision(name: str, folder: Path, store: Path, on_ranks: Ranks, ways: Sequence[str] = tuple(WAYS)) -> Precision | None:
    """Return what stays in fp32, or None if the class keeps nothing in fp32 or cannot be built."""
    import torch
    from transformers import AutoModelForCausalLM

    found = Precision(name)
    try:
        config = config_of(name)
        made = make_model(config | ({"output_router_logits": False} if "output_router_logits" in config else {}), folder / "made")
        # The base is in the dtypes of transformers, and so is what it loads from it and saves again.
        AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16).save_pretrained(folder / "base")
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
        model.save_pretrained(folder / "theirs")
    except Exception:  # noqa: BLE001  transformers cannot build, save or load it
        return None
    found.model_class = type(model).__name__
    live = {key: str(value.dtype) for key, value in model.state_dict().items()}
    with torch.device("meta"):  # loading makes each parameter one that is trained
        made_by_class = AutoModelForCausalLM.from_config(model.config)
    trained = {key: "P" if p.requires_grad else "F" for key, p in made_by_class.named_parameters()}
    kept = [key for key, dtype in live.items() if dtype == "torch.float32"]
    found.kept = {re.sub(r"(?<=\.)\d+(?=\.)", "N", key): trained.get(key, "B") for key in kept}
    if not kept:
        return None
    for way in ways:
        _try_way(found, way, folder, store, on_ranks, live)
    return found


def _try_way(found: Precision, way: str, folder: Path, store: Path, on_ranks: Ranks, live: Dtypes) -> None:
    changes = WAYS[way]
    try:
        run = train(folder / way, folder / "base", changes, store, on_ranks)
        if way == "full":
            saved = {key: str(tensor.dtype) for key, tensor in runs.saved_parameters(run, STEPS).items()}
            found.differences["live"] = _different(saved, {key: live[key] for key in saved})
            _compare_with_plain(found, run, folder, store, on_ranks)
    except Refused as refused:
        found.refused[way] = str(refused)
        return
    merge_checkpoint(RunDir(folder / way).path, MergeOptions(dtype="bf16", verify="none"))
    found.differences[f"merged {way}"] = _different(dtypes_of(folder / way / "merged"), dtypes_of(folder / "theirs"))


def _compare_with_plain(found: Precision, run: RunDir, folder: Path, store: Path, on_ranks: Ranks) -> None:
    try:
        plain = train(folder / "plain", folder / "base", {"fsdp": {"sharding_strategy": "NO_SHARD"}}, store, on_ranks)
    except Refused as refused:
        found.refused["NO_SHARD"] = str(refused)
        return
    losses, without = ([line["loss"] for line in runs.loss_lines(each)] for each in (run, plain))
    found.gathered = max(abs(a - b) for a, b in zip(losses, without, strict=True)) < 1e-4


class Refused(Exception):
    """A rule or a rank refused or failed the run."""


def train(path: Path, base: Path, changes: Mapping[str, Any], store: Path, on_ranks: Ranks) -> RunDir:
    """Return the finished run, with the files of RUN/model that a merge reads. Raises: Refused."""
    from fsdp_tune.model.loading.inspect import find_facts

    training = TRAINING | {"max_steps": STEPS, "save_steps": STEPS, "per_device_train_batch_size": MICRO_BATCH}
    recipe = {**changes, "data": {"eval": None}, "training": training, "model": {"name_or_path": str(base), "dtype": "bf16"}}
    run = runs.write_run(path, recipe, store)
    inspection = find_facts(Recipe.model_validate_json(run.recipe_json.read_text()))
    if inspection.facts is None or inspection.problems:
        raise Refused(inspection.problems[0].message)
    run.model.mkdir()
    inspection.facts.base_layout.write(run.base_layout_json)
    (run.model / "config.json").write_text(json.dumps(inspection.facts.exported_config))
    if inspection.facts.adapter_config is not None:
        (run.model / "adapter_config.json").write_text(json.dumps(inspection.facts.adapter_config))
    for outcome in on_ranks.run(RANKS, runs.run_worker, str(run.path), limit_seconds=120):
        if (problem := outcome["problem"]) is not None and problem["code"] != "lost-rank":
            raise Refused(problem["message"])
    return run


def dtypes_of(folder: Path) -> Dtypes:
    """Return the dtype of each tensor in the safetensors files of a directory."""
    from safetensors import safe_open

    found: Dtypes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  it is no mapping
    return found


def _different(ours: Dtypes, theirs: Dtypes) -> dict[str, list[str]]:
    """Return {name: [dtype here, dtype of transformers]}. Of a family whose names here and there differ, counts by dtype are compared."""
    if ours.keys() == theirs.keys():
        return {name: [dtype, theirs[name]] for name, dtype in ours.items() if dtype != theirs[name]}
    ours, theirs = (_by_last_part(each) for each in (ours, theirs))
    return {name: [ours.get(name, ""), dtype] for name, dtype in theirs.items() if ours.get(name, dtype) != dtype}


def _by_last_part(dtypes: Dtypes) -> Dtypes:
    """Return the dtypes of tensors by the last two parts of their names, which a renaming of a family often keeps."""
    found: dict[str, set[str]] = {}
    for name, dtype in dtypes.items():
        found.setdefault(".".join(name.split(".")[-2:]), set()).add(dtype)
    return {name: "+".join(sorted(each)) for name, each in found.items()}


_INTRODUCTION = """# Precision that a model's class keeps

{count} of the families that transformers {transformers} lists for causal language modelling, and that can be built in tiny form, have
tensors that stay in fp32 when the model is loaded in bf16: by `_keep_in_fp32_modules_strict` or by their constructor. Each was trained
in tiny form with `model.dtype: bf16` for two steps on two CPU ranks with FSDP2, in full and with LoRA on `o_proj`, and merged with
`--dtype bf16`. `python -m tests.architectures.precision --write` measures this table ([data](data/precision.json)).

- **live, merged**: every tensor of the checkpoint, and of `merged/`, has the dtype that it has in a model that transformers loads in bf16
  and saves; the base was saved in the same way.
- **gathered**: the losses are those of `NO_SHARD` within 1e-4, so FSDP2 computes with these tensors in fp32 too.
- Kept tensors: P is trained, F is a parameter that the model's code freezes, B is a buffer. Training never changes F and B: in
  transformers, no code updates `e_score_correction_bias` and `expert_bias`. They leave in fp32, with the values of the base.

What the base alone stores in fp32 (`e_score_correction_bias` of MiniMax M2 and LongCat, which their classes load in bf16) is not in this
table: here each base was saved in the dtypes of its class. A merge leaves such tensors in fp32 as well, if most elements of the base's
files are in 16 bits ([Merging](../guide/merging.md#types)), and with the bits of the base if they are not trained.

"""
_SHOWN = 3


def page(results: Results, _previous: str = "") -> str:
    rows = [
        (
            f"`{each['architecture']}`",
            _kept(each),
            _verdict(each, "live"),
            _verdict(each, "merged full"),
            _verdict(each, "merged lora"),
            _same(each),
        )
        for each in results.rows
    ]
    header = ("family", "kept in fp32", "live", "merged", "merged (LoRA)", "gathered")
    lines = [_INTRODUCTION.format(count=len(rows), **results.about), table(header, rows), "\n"]
    reasons = [f"- `{each['architecture']}`, {way}: {why}\n" for each in results.rows for way, why in each["refused"].items()]
    return "".join(lines) + ("## Not trained\n\n" + "".join(reasons) if reasons else "")


def _kept(row: Mapping[str, Any]) -> str:
    kinds = sorted({f"{'.'.join(name.split('.')[-2:])} ({kind})" for name, kind in row["kept"].items()})
    return ", ".join(kinds[:_SHOWN]) + (f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else "")


def _verdict(row: Mapping[str, Any], what: str) -> str:
    if what not in row["differences"]:
        return "–"
    return "differs" if row["differences"][what] else "equal"


def _same(row: Mapping[str, Any]) -> str:
    return {True: "yes", False: "no", None: "–"}[row["gathered"]]


EVIDENCE = Evidence(Path("evidence/precision.md"), page)


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", help="all that transformers lists unless given")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/data/precision.json and docs/evidence/precision.md")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="precision-") as scratch:
        store = make_store(Path(scratch) / "rows")
        for name in arguments.architectures or names():
            found = try_precision(name, Path(scratch) / name, store, shared_ranks())
            if found is not None:
                rows.append(asdict(found))
                print(rows[-1], flush=True)
    if arguments.write:
        EVIDENCE.write(Results(installed("transformers"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
