"""Asks a merged model the questions that were held out, with plain transformers and nothing of this package's
training code.

    python scripts/demo_eval.py RUN/merged [--shown 8]

"before" is the same architecture with random weights. Exits 1 where the trained model answers no better.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdp_tune.data.read.file_access import held_out_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 50
LONGEST_ANSWER_TOKENS = 8


@torch.inference_mode()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """Greedy continuations of the prompts, without special tokens."""
    found: list[str] = []
    for start in range(0, len(prompts), BATCH):
        batch = tokenizer(
            prompts[start : start + BATCH],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=LONGEST_ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        found.extend(tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("merged", type=Path)
    parser.add_argument("--shown", type=int, default=8, help="how many questions to print")
    options = parser.parse_args()

    for name in (
        "torchao",
        "torch.utils._pytree",
    ):  # transformers imports torchao, which warns of kernels for other machines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    questions = held_out_prompts()
    prompts, expected = [prompt for prompt, _ in questions], [answer for _, answer in questions]
    tokenizer = AutoTokenizer.from_pretrained(options.merged)
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.merged)).eval()
    trained = AutoModelForCausalLM.from_pretrained(options.merged).eval()
    before, after = answers(untrained, tokenizer, prompts), answers(trained, tokenizer, prompts)

    print(
        f"\n{len(prompts)} questions that no training row holds; {options.merged} reloaded with "
        "AutoModelForCausalLM\n"
    )
    width = max(len(prompt) for prompt in prompts[: options.shown])
    for prompt, wanted, got in list(zip(prompts, expected, after, strict=True))[: options.shown]:
        mark = "right" if got == wanted else f"wrong, it is{wanted}"
        print(f"  {prompt:<{width}} →{got:<16} {mark}")
    right_before, right_after = (sum(map(str.__eq__, found, expected)) for found in (before, after))
    share = 100 / len(prompts)
    print(
        f"\nexact match on held-out questions: before {right_before * share:.1f} %, after "
        f"{right_after * share:.1f} %"
    )
    return 0 if right_after > right_before else 1


if __name__ == "__main__":
    sys.exit(main())
