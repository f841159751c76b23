"""Templates of LLaMA-Factory: which of them is meant, and what they train besides the answers."""

from __future__ import annotations

from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.rules import FileKey, Outcome, is_on, remarked
from fsdp_tune.recipe.outcome import Drop

LINE_ENDS = frozenset(
    (
        *("alpaca", "chatml", "chatml_de", "cpm4", "dbrx", "deepseekcoder", "default", "ernie", "exaone"),
        *("falcon_h1", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4n", "granite3"),
        *("granite4", "intern2", "intern_s1", "intern_vl", "keye_vl", "lfm2", "lfm2_vl"),
        *("llava_next_qwen", "llava_next_video_yi", "llava_next_yi", "mimo", "mimo_v2", "mimo_vl"),
        *("minicpm_o", "minicpm_v", "minicpm_v_4_6", "minimax1", "minimax2", "moss_vl", "opencoder"),
        *("paligemma_chat", "phi", "phi_small", "qwen", "qwen2_audio", "qwen2_omni", "qwen2_vl", "qwen3"),
        *("qwen3_5", "qwen3_5_nothink", "qwen3_6", "qwen3_nothink", "qwen3_omni", "qwen3_omni_nothink"),
        *(
            "qwen3_vl",
            "qwen3_vl_nothink",
            "sailor",
            "smollm",
            "smollm2",
            "starchat",
            "yi",
            "youtu_vl",
            "yuan",
        ),
    )
)
"""Templates that end an answer with white space after the token that ends the turn (`format_assistant` in its
data/template.py, 2026-08); `python -m tests.migrate.tool_keys --check` finds new ones."""
_LINE_END = (
    "LLaMA-Factory also trains the line end that its template writes after the last token of an answer; here "
    "it is context, which only labels of your own train (`format: segments` or `tokenized`)"
)
OF_TOKENIZER = (
    "Without `template`, LLaMA-Factory also trains white space that the tokenizer's template writes after "
    "the last token of an answer, as ChatML does; here it is context"
)


def _trains_all(key: FileKey) -> bool:
    return is_on(key.of_file("train_on_prompt") or False)


def is_template_of_tokenizer(key: FileKey) -> bool:
    """Return whether answers alone are trained, as the tokenizer's template renders them."""
    return not key.of_file("template") and not _trains_all(key)


def template(key: FileKey) -> Outcome:
    """Return what becomes of `template`, with what it trains besides the answers."""
    if key.of_file("stage") == "pt":
        return Drop("`stage: pt` renders no template")
    outcome = chat_template(key)
    has_line_end = str(key.value) in LINE_ENDS and not _trains_all(key)
    return remarked(outcome, _LINE_END) if has_line_end and not isinstance(outcome, Drop) else outcome
