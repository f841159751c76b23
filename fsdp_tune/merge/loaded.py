"""Load a model directory with transformers. Run as a child process, the only part of a merge that imports
torch.

`python -m fsdp_tune.merge.loaded names DIR` prints the model's own parameter list, from its config alone.
`python -m fsdp_tune.merge.loaded kept DIR` prints the kinds of tensors that its class keeps in fp32.
`python -m fsdp_tune.merge.loaded forward DIR` loads the weights and runs a few tokens through them.
Each prints one JSON object as the last line of stdout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TOKENS = 8
# Loading holds the weights once; the rest is for activations, torch itself and other processes.
_MEMORY_SHARE = 0.6


def main(mode: str, folder: Path) -> dict[str, Any]:
    return {"names": parameter_list, "kept": kept_in_fp32, "forward": load_and_run}[mode](folder)


def parameter_list(folder: Path) -> dict[str, Any]:
    """{"parameters": {name: shape}, "tied": {name: name it is tied to}, "ignored": patterns that may be
    missing}."""
    from fsdp_tune.model.internals.transformers_internals import MAY_BE_MISSING

    model = _on_meta(folder)
    parameters = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return {
        "parameters": parameters,
        "tied": dict(getattr(model, "all_tied_weights_keys", None) or {}),
        "ignored": [*(MAY_BE_MISSING.of(model) or ())],
    }


def kept_in_fp32(folder: Path) -> dict[str, Any]:
    """Return {16-bit dtype: kinds of names}, as `model.loading.kept_precision.kinds_in_fp32`."""
    from fsdp_tune.model.loading.kept_precision import kinds_in_fp32

    return kinds_in_fp32(lambda dtype: _on_meta(folder, dtype))


def _on_meta(folder: Path, dtype: Any = None) -> Any:
    import torch

    with torch.device("meta"):
        return _from_config(folder, dtype)


def _from_config(folder: Path, dtype: Any = None) -> Any:
    """Create the model of the config's class on the current default device, in `dtype`, or in that of the
    config."""
    import torch
    import transformers

    from fsdp_tune.model.internals.transformers_internals import eager_config

    config = eager_config(folder)
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        return transformers.AutoModelForCausalLM.from_config(
            config, **({} if dtype is None else {"dtype": dtype})
        )
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        return kind(config)
    finally:
        torch.set_default_dtype(before)


def load_and_run(folder: Path) -> dict[str, Any]:
    """{"where": "weights" or "shapes", "report": the loading report of transformers, "finite": of the logits,
    None for shapes}."""
    import torch
    import transformers

    from fsdp_tune.model.internals.transformers_internals import eager_config

    size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if size_bytes > _MEMORY_SHARE * available_bytes():
        return {"where": "shapes", "report": {}, "finite": None, "shape": _run_on_shapes(folder)}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=eager_config(folder), dtype="auto", trust_remote_code=False, output_loading_info=True
    )
    model, report = loaded
    logits = _run(model)
    keys = {name: sorted(str(key) for key in found) for name, found in report.items() if found}
    return {
        "where": "weights",
        "report": keys,
        "finite": bool(torch.isfinite(logits).all()),
        "shape": list(logits.shape),
    }


def _run_on_shapes(folder: Path) -> list[int]:
    """Run the forward pass on fake tensors, without weights. Meta tensors do not work: transformers' masks
    read values."""
    from fsdp_tune.model.internals.torch_internals import FAKE_TENSOR_MODE

    with FAKE_TENSOR_MODE.get()():
        return list(_run(_from_config(folder)).shape)


def _run(model: Any) -> Any:
    import torch

    rows = model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        return model.eval()(input_ids=(torch.arange(TOKENS) % rows)[None], use_cache=False).logits


def available_bytes() -> int:
    """Return the host memory available without swapping (MemAvailable), or all of it if the system does not
    report that."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))  # noqa: T201  the one line that the parent reads
