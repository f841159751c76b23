"""Load exported models with the transformers of another environment, which has nothing of this project.

    python older.py < jobs.jsonl > results.jsonl

A job is {"folder", "adapter" or null, "ids", "text"}; a result has logits, token ids and generation settings,
or the error.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

SETTINGS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "temperature",
    "top_k",
    "top_p",
    "do_sample",
    "max_length",
)


def load(folder: str, adapter: str | None) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    wrong = {name: sorted(value)[:3] for name, value in report.items() if value}
    if wrong:
        raise ValueError(f"loading reports {wrong}")
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


def describe(folder: str, adapter: str | None, ids: list[int], text: str | None) -> dict[str, Any]:
    """Return logits of the last position, and of the tokenizer and the generation settings what they hold."""
    model = load(folder, adapter).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -4:].flatten().tolist()
    settings = GenerationConfig.from_pretrained(folder)
    found: dict[str, Any] = {
        "logits": logits,
        "generation": {name: getattr(settings, name, None) for name in SETTINGS},
    }
    if text is not None:
        tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
        encoded = tokenizer(text)["input_ids"]
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "4"}]
        found["tokens"] = {
            "ids": encoded,
            "text": tokenizer.decode(encoded, skip_special_tokens=True),
            "special": {
                name: str(token)
                for name, token in tokenizer.special_tokens_map.items()
                if not isinstance(token, list)
            },
            "chat": tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else None,
            "size": len(tokenizer),
        }
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    for line in sys.stdin:
        job = json.loads(line)
        try:
            result = describe(job["folder"], job["adapter"], job["ids"], job["text"])
        except Exception as error:  # noqa: BLE001  the reason is the result
            result = {
                "error": f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            }
        print(json.dumps(result | {"version": transformers.__version__}), file=out, flush=True)


if __name__ == "__main__":
    main()
