"""Build TRL's trainer from the options of its configuration, with a small model and given rows. Imports
nothing of TRL on load.

It is `trl.SFTTrainer`, as `trl sft` builds it from the options that TRL's own parser reads. It computes on
the CPU, in fp32.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fsdp_tune.comparison.tool_trainers import BatchOptions, Facts, ToolRequest, row_columns

CODE = (
    "trust_remote_code",
    "code_revision",
    "weights_only",
    "use_kernels",
    "kernel_config",
    "allow_all_kernels",
    "attn_implementation",
)
"""Fields of `model_init_kwargs` that let code of others run, and kernels."""
KERNELS = (
    "attn_implementation",
    "load_in_4bit",
    "load_in_8bit",
    "use_bnb_nested_quant",
    "bnb_4bit_quant_type",
)


class TrlTrainers:
    def __init__(
        self,
        request: ToolRequest,
        raw: list[Facts],
        sources: list[int],  # noqa: ARG002  it has one data set
        folder: str,
        leave_out: Callable[[str], None],
    ) -> None:
        self.trl: Any = importlib.import_module("trl")
        self.request, self.raw, self.folder, self.leave_out = request, raw, folder, leave_out
        self.ignored: list[str] = []

    def complete(self) -> Any:
        return self._built(max_length=None, packing=False, padding_free=False, max_seq_length=1 << 20)

    def batch(self) -> BatchOptions:
        args, _ = self._parsed()
        autocast = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        return BatchOptions(args.per_device_train_batch_size, args.gradient_accumulation_steps, autocast)

    def small(self, size: int, accumulation: int) -> Any:
        return self._built(
            bf16=False, fp16=False, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
        )

    def rows(self, trainer: Any) -> list[Facts]:
        return [row_columns(row) for row in trainer.train_dataset]

    def collated(self, trainer: Any, rows: Sequence[Facts]) -> Facts:
        return trainer.data_collator([dict(row) for row in rows])

    def own_order(self, trainer: Any) -> str | None:  # noqa: ARG002  its sampler is the file's
        return (
            "TRL shuffles the rows before all else (`shuffle_dataset`)"
            if self.request.values.get("shuffle_dataset")
            else None
        )

    def _parsed(self, **changes: Any) -> tuple[Any, Any]:
        """Return SFTConfig and ModelConfig, as TRL's parser reads the file with these changes."""
        trl = self.trl
        classes = [
            getattr(trl, name)
            for name in ("ScriptArguments", "SFTConfig", "ModelConfig", "DatasetMixtureConfig")
            if hasattr(trl, name)
        ]
        known = {field.name for each in classes for field in fields(each)}
        if kernels := [name for name in KERNELS if self.request.values.get(name)]:
            self.leave_out(f"what needs a GPU in TRL: `{'`, `'.join(kernels)}`")
        values = {name: value for name, value in self.request.values.items() if name not in KERNELS}
        trust = {"trust_remote_code": self.request.trust_remote_code}
        changes = {**self.request.settings, **changes, "output_dir": self.folder, **trust}
        values |= {name: value for name, value in changes.items() if name in known}
        path = Path(self.folder, "config.yaml")
        path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        found = trl.TrlParser(tuple(classes)).parse_args_and_config(
            ["--config", str(path)], return_remaining_strings=True
        )
        self.ignored = [word.removeprefix("--") for word in map(str, found[-1]) if word.startswith("--")]
        for name in self.ignored:
            self.leave_out(f"`{name}`, which this TRL ignores")
        by_class = {type(each).__name__: each for each in found[:-1]}
        args, model_args = by_class["SFTConfig"], by_class["ModelConfig"]
        options = {
            name: value for name, value in dict(args.model_init_kwargs or {}).items() if name not in CODE
        }
        args.model_init_kwargs = options | trust
        return args, model_args

    def _built(self, **changes: Any) -> Any:
        """Return a trainer as `trl sft` makes it, with the small model, the tokenizer of the file and the
        given rows."""
        datasets: Any = importlib.import_module("datasets")
        transformers: Any = importlib.import_module("transformers")
        args, model_args = self._parsed(**changes)
        given = getattr(model_args, "dtype", None) or getattr(model_args, "torch_dtype", None)
        name = "dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"
        options = {name: given, **args.model_init_kwargs}
        args.model_init_kwargs = {key: value for key, value in options.items() if value is not None}
        own = {
            "revision": self.request.revision or "main",
            "trust_remote_code": self.request.trust_remote_code,
        }
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.request.tokenizer, **own)
        # `from_list` has those of the first row
        columns = dict.fromkeys(name for row in self.raw for name in row)
        return self.trl.SFTTrainer(
            model=self.request.model,
            args=args,
            train_dataset=datasets.Dataset.from_list(
                [{name: row.get(name) for name in columns} for row in self.raw]
            ),
            processing_class=tokenizer,
            peft_config=self.trl.get_peft_config(model_args),
        )
