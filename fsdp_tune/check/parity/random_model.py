"""Write a model directory with random weights: the base of an adapter in a rehearsal.

    python -m fsdp_tune.check.parity.random_model < {"config": {"model_type": …}, "folder": DIRECTORY}

prints {"folder": DIRECTORY}.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEED = 0


def write_model(config: dict[str, Any], folder: str) -> None:
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.save_pretrained(folder)


def main() -> None:
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must contain one document only
        write_model(request["config"], request["folder"])
    json.dump({"folder": request["folder"]}, sys.stdout)


if __name__ == "__main__":
    main()
