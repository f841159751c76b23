"""Build axolotl's trainer from the options of its configuration, with a small model and given rows. Imports
nothing of axolotl on load.

Its configuration, data and trainer builder are called as `axolotl train` calls them, with the dtypes of a GPU
that has bf16. The trainers compute on the CPU, in fp32.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_tune.comparison.tool_trainers import BatchOptions, Facts, ToolRequest, row_columns

QUANTISED = ("load_in_4bit", "load_in_8bit")
ATTENTION = (
    *("attn_implementation", "flash_attention", "xformers_attention", "sage_attention", "flex_attention"),
    *("sdp_attention", "eager_attention"),
)
"""Options of axolotl that choose a kernel."""
ISOLATING = ("flash_attention", "xformers_attention", "sage_attention", "flex_attention")
"""Attentions with which axolotl joins the rows of a micro-batch to one, in which examples do not see each
other."""
STREAMS = ("streaming", "pretraining_dataset", "skip_prepare_dataset")
FSDP = ("fsdp", "fsdp_config")
OF_A_FILE = (
    "path",
    "ds_type",
    "data_files",
    "name",
    "split",
    "revision",
    "shards",
    "shards_idx",
    "preprocess_shards",
    "trust_remote_code",
)
"""Options of an entry of `datasets` that say where its rows are."""


class AxolotlTrainers:
    def __init__(
        self,
        request: ToolRequest,
        raw: list[Facts],
        sources: list[int],
        folder: str,
        leave_out: Callable[[str], None],
    ) -> None:
        self.request, self.raw, self.sources, self.folder, self.leave_out = (
            request,
            raw,
            sources,
            folder,
            leave_out,
        )
        self.ignored: list[str] = []
        tempfile.tempdir = folder  # axolotl keeps a copy of each configuration
        os.environ.update(
            AXOLOTL_DO_NOT_TRACK="1",
            DO_NOT_TRACK="1",
            ACCELERATE_USE_CPU="true",
            HF_DATASETS_CACHE=f"{folder}/datasets",
        )
        if streams := [name for name in STREAMS if request.values.get(name)]:
            raise ValueError(
                f"`{'`, `'.join(streams)}`: rows that are made while the run reads them are not compared"
            )
        config: Any = importlib.import_module("axolotl.cli.config")
        rules: Any = importlib.import_module("axolotl.utils.config")
        sft: Any = importlib.import_module("axolotl.utils.data.sft")
        # As on a GPU with bf16: `bf16: auto` is true there, and without one the file would be refused.
        config.gpu_capabilities = _capabilities
        rules.is_torch_bf16_gpu_available = lambda *_, **__: True
        config.prepare_debug_log = lambda *_, **__: None  # it takes the standard output
        sft.save_preprocessed_dataset = lambda *_, **__: None  # its processes hang after threads were started
        self._config, self._train = config, importlib.import_module("axolotl.train")
        self._mapping = importlib.import_module("axolotl.utils.dict").DictDefault
        self._datasets: Any = importlib.import_module("axolotl.common.datasets")
        self._known = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig.model_fields
        self._files = self._written()

    def complete(self) -> Any:
        return self._built(sequence_len=1 << 20, sample_packing=False)

    def batch(self) -> BatchOptions:
        cfg = self._read()
        autocast = "bf16" if cfg.bf16 else "fp16" if cfg.fp16 else "no"
        return BatchOptions(
            1 if self._joins() else cfg.micro_batch_size, cfg.gradient_accumulation_steps, autocast
        )

    def small(self, size: int, accumulation: int) -> Any:
        # The capacity of a joined row is that of a micro-batch.
        sizes = {} if self._joins() else {"micro_batch_size": size}
        return self._built(gradient_accumulation_steps=accumulation, batch_size=None, **sizes)

    def rows(self, trainer: Any) -> list[Facts]:
        rows = [row_columns(row) for row in trainer.train_dataset]
        if not trainer.args.sample_packing:
            return rows
        bins = [chosen for batch in trainer.get_train_dataloader().batch_sampler for chosen in batch]
        return [_joined([rows[index] for index in chosen]) for chosen in bins]

    def collated(self, trainer: Any, rows: Sequence[Facts]) -> Facts:
        if not trainer.args.sample_packing:
            return dict(trainer.data_collator([dict(row) for row in rows]))
        found = dict(trainer.data_collator([_apart(row) for row in rows]))
        if self._joins():
            found.pop("attention_mask", None)  # the examples are those that `position_ids` begin
        return found

    def own_order(self, trainer: Any) -> str | None:
        in_order = bool(self.request.values.get("curriculum_sampling"))
        if not in_order and trainer.args.sample_packing:
            return "axolotl packs rows that it draws at random"
        trainer.args.curriculum_sampling = in_order
        return None

    def _joins(self) -> bool:
        values = self.request.values
        is_isolating = any(values.get(name) for name in ISOLATING) or str(
            values.get("attn_implementation")
        ).startswith("fl")
        return (
            bool(values.get("sample_packing")) and is_isolating and not values.get("multipack_real_batches")
        )

    def _written(self) -> list[str]:
        """Write the rows of each entry of `datasets` to a file."""
        rows: dict[int, list[Facts]] = {}
        for source, row in zip(self.sources, self.raw, strict=True):
            rows.setdefault(source, []).append(row)
        paths: list[str] = []
        for source in range(len(self.request.values.get("datasets") or [])):
            path = Path(self.folder, f"rows-{source}.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in rows.get(source, [])), encoding="utf-8")
            paths.append(str(path))
        return paths

    def _read(self, **changes: Any) -> Any:
        """Return the configuration as axolotl reads the file with these changes."""
        request = self.request
        if dropped := [name for name in QUANTISED if request.values.get(name)]:
            self.leave_out(f"what needs a GPU in axolotl: `{'`, `'.join(dropped)}`")
        values = {
            name: value
            for name, value in request.values.items()
            if name not in (*QUANTISED, *ATTENTION, *FSDP)
        }
        if values.get("adapter") == "qlora":
            values["adapter"] = "lora"
        if self._joins():
            values["multipack_real_batches"] = False
        values |= request.settings | changes
        entries = [
            {
                **{name: value for name, value in entry.items() if name not in OF_A_FILE},
                "path": path,
                "ds_type": "json",
                "split": "train",
            }
            for entry, path in zip(values["datasets"], self._files, strict=True)
        ]
        values |= {
            "datasets": entries,
            "base_model": request.model,
            "base_model_config": None,
            "tokenizer_config": request.tokenizer,
        }
        values |= {
            "trust_remote_code": request.trust_remote_code,
            "revision_of_model": request.revision or "main",
        }
        values |= {"output_dir": self.folder, "dataset_prepared_path": tempfile.mkdtemp(dir=self.folder)}
        cfg = self._config.load_cfg(
            self._mapping({name: value for name, value in values.items() if value is not None})
        )
        self.ignored = [
            name
            for name, value in values.items()
            if value is not None and name not in self._known and name not in cfg
        ]
        for name in self.ignored:
            self.leave_out(f"`{name}`, which this axolotl ignores")
        return cfg

    def _built(self, **changes: Any) -> Any:
        """Return a trainer as `axolotl train` makes it, with the small model, the tokenizer of the file and
        the given rows."""
        request = self.request
        utilities: Any = importlib.import_module("axolotl.utils.trainer")
        cfg = self._read(**changes)
        meta = self._datasets.load_datasets(cfg=cfg)
        # The dtypes are those of the file, and all is computed in fp32.
        cfg.bf16 = cfg.fp16 = False
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        for name in FSDP:  # the loader leaves the dtypes alone with it
            value = request.values.get(name)
            cfg[name] = self._mapping(value) if isinstance(value, dict) else value
        model, tokenizer, peft_config, processor = self._train.setup_model_and_tokenizer(cfg)
        for name in FSDP:
            cfg[name] = None
        total = math.ceil(meta.total_num_steps / request.ranks)
        if request.epoch_steps is not None:
            total = math.ceil(float(cfg.num_epochs) * request.epoch_steps)
        if cfg.max_steps:
            total = min(total, cfg.max_steps)
        with contextlib.suppress(AttributeError):
            model.config.use_cache = False
        return utilities.setup_trainer(
            cfg=cfg,
            train_dataset=meta.train_dataset,
            eval_dataset=None,
            model=model,
            tokenizer=tokenizer,
            processor=processor,
            total_num_steps=total,
            peft_config=peft_config,
        )


def _capabilities() -> tuple[Facts, Facts]:
    torch: Any = importlib.import_module("torch")
    found = {"bf16": True, "fp8": False, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}
    return found, {"torch_version": str(torch.__version__).partition("+")[0]}


def _joined(rows: Sequence[Facts]) -> Facts:
    """Return the row into which examples are packed."""
    found = {name: [value for row in rows for value in row[name]] for name in rows[0]}
    return {**found, "seq_lengths": [len(row["input_ids"]) for row in rows]}


def _apart(row: Facts) -> list[Facts]:
    """Return the examples of a packed row."""
    found: list[Facts] = []
    at = 0
    for length in row["seq_lengths"]:
        found.append({name: value[at : at + length] for name, value in row.items() if name != "seq_lengths"})
        at += length
    return found
