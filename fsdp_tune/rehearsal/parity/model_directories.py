"""Write the model directory that a rehearsal starts from, and load the merged one that it ends with.

    python -m fsdp_tune.rehearsal.parity.model_directories < {"config": {"model_type": …}, "folder": DIRECTORY}

writes a model with random weights, the base of an adapter, and prints {"folder": DIRECTORY}.

    python -m fsdp_tune.rehearsal.parity.model_directories < {"run": RUN, "step": N}

compares the merged directory, loaded with transformers alone, with the checkpoint, read with torch alone, and
prints one JSON document. No
code of the merge is used: torch.distributed.checkpoint reads the checkpoint's tensors.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.data.store import RowStore
from fsdp_tune.model.adapters.nf4 import SCALE_DTYPE, dequantise, quantise
from fsdp_tune.rehearsal.parity.plain_loop import evaluate
from fsdp_tune.run.base_model import BaseModel
from fsdp_tune.run.directory import SHARD_FOLDER, RunDir
from fsdp_tune.run.metrics_file import read_metrics

SEED = 0


def write_model(config: dict[str, Any], folder: str) -> dict[str, str]:
    """Write a model directory with random weights: the base of an adapter in a rehearsal."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.save_pretrained(folder)
    return {"folder": folder}


ROWS = 4
ADAPTED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of logits: PEFT multiplies the factors in another order, so that weights may be rounded otherwise."""
FP32_TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
"""Relative difference of the eval loss, for weights rounded to 8 bits of mantissa and kernels other than
those of the run."""


def checkpoint_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the full model tensors of a checkpoint, read by torch (or safetensors) alone."""
    if (file := checkpoint / "model.safetensors").exists():
        from safetensors.torch import load_file

        return load_file(file)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile() as full:
        dcp_to_torch_save(checkpoint / SHARD_FOLDER, full.name)
        tensors: dict[str, torch.Tensor] = torch.load(full.name, weights_only=True)["model"]
    return tensors


def _whole(run: RunDir, step: int, dtype: torch.dtype) -> Any:
    """The checkpoint's tensors in a model of transformers."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.model), dtype=dtype).eval()
    missing, unexpected = model.load_state_dict(checkpoint_tensors(run.checkpoint(step)), strict=False)
    model.tie_weights()
    assert not unexpected, unexpected
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    return model


def _adapted(run: RunDir, step: int, dtype: torch.dtype) -> Any:
    """The checkpoint's adapter on its base, in 4 bits if it was trained so, by PEFT, merged by PEFT in
    fp32."""
    from peft import LoraConfig, get_peft_model

    values = json.loads((run.model / CONFIG_FILE).read_text(encoding="utf-8"))
    base = AutoModelForCausalLM.from_pretrained(values["base_model_name_or_path"], dtype=torch.float32)
    trained_on = BaseModel.read(run.base_json)
    assert trained_on is not None
    if trained_on.nf4_scales is not None:
        for name in trained_on.nf4_weights:
            weight = base.get_parameter(name)
            weight.data = dequantise(*quantise(weight, SCALE_DTYPE[trained_on.nf4_scales]), torch.float32)
    config: Any = LoraConfig.from_peft_type(**{**values, "inference_mode": False})
    model: Any = get_peft_model(base, config)
    names = {name.replace(".modules_to_save.default", ""): name for name, _ in model.named_parameters()}
    saved = {
        names[PREFIX + name]: tensor for name, tensor in checkpoint_tensors(run.checkpoint(step)).items()
    }
    _, unexpected = model.load_state_dict(saved, strict=False)
    assert not unexpected, unexpected
    return model.merge_and_unload().to(dtype).eval()


def reload(run: RunDir, step: int) -> dict[str, object]:
    """Compare the logits of a few rows between both models, and the merged model's eval loss with that of the
    run."""
    merged = AutoModelForCausalLM.from_pretrained(run.merged, dtype="auto").eval()
    AutoTokenizer.from_pretrained(run.merged)
    dtype = next(merged.parameters()).dtype
    other = (_adapted if run.base_json.exists() else _whole)(run, step, dtype)
    data = json.loads(run.data_json.read_text(encoding="utf-8"))
    rows = RowStore(Path(data["train"]))
    differences: list[float] = []
    for index in range(min(ROWS, len(rows))):
        ids = torch.from_numpy(rows[index].input_ids.astype(np.int64))[None]
        with torch.no_grad():
            differences.append(
                float((merged(input_ids=ids).logits - other(input_ids=ids).logits).abs().max())
            )
    allowed = ADAPTED_TOLERANCE[dtype] if run.base_json.exists() else 0.0
    losses = [float(line["eval_loss"]) for line in read_metrics(run) if "eval_loss" in line]
    precision = json.loads(run.recipe_json.read_text(encoding="utf-8"))["precision"]["mixed_precision"]
    evals = [RowStore(Path(path)) for path in data["evals"].values()]
    return {
        "rows": len(differences),
        "logits_equal": all(each <= allowed for each in differences),  # `max` may pass over a NaN
        "logits_difference": max(differences),
        "eval_loss": evaluate(merged, torch.float32, evals) if losses else None,
        "run_eval_loss": losses[-1] if losses else None,
        "tolerance": FP32_TOLERANCE if dtype == torch.float32 and precision == "no" else HALF_TOLERANCE,
    }


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold only the document
        if "config" in request:
            document = write_model(request["config"], request["folder"])
        else:
            document = reload(RunDir(Path(request["run"])), int(request["step"]))
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
