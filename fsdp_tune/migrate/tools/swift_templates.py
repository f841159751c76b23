"""Say where ms-swift trains the line end that its template writes after an answer."""

from __future__ import annotations

from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.read.command_line import COMMAND
from fsdp_tune.migrate.rules import FileKey, Outcome, is_on, remarked

LINE_ENDS = frozenset(
    (
        *(
            "chatml",
            "clef",
            "dbrx",
            "diffusion_gemma",
            "gemma4",
            "gemma4_nothinking",
            "got_ocr2",
            "got_ocr2_hf",
        ),
        *("internlm2", "interns1", "internvl", "internvl2", "internvl2_5", "internvl3_5", "internvl_hf"),
        *("iquestcoder", "jev", "keye_vl", "keye_vl_1_5", "llava1_6_yi", "llava1_6_yi_hf", "llava_next_qwen"),
        *("llava_next_qwen_hf", "llava_onevision1_5", "llava_onevision2", "llava_onevision_hf", "marco_o1"),
        *(
            "midashenglm",
            "mimo_rl",
            "mimo_vl",
            "minicpm5",
            "minicpm5_2b",
            "minicpmo",
            "minicpmo4_5",
            "minicpmv2_6",
        ),
        *(
            "minicpmv4",
            "minicpmv4_5",
            "minicpmv4_6",
            "minicpmv4_7",
            "minimax_m2",
            "minimax_m2_1",
            "minimax_m2_5",
        ),
        *(
            "minimax_m2_7",
            "minimax_m3_vl",
            "minimind",
            "molmo2",
            "moss_vl",
            "mplug_owl3",
            "mplug_owl3_241101",
        ),
        *("nemotron_h", "omnijev", "ovis2", "ovis2_5", "ovis_ocr2", "qvq", "qwen", "qwen2_5", "qwen2_5_math"),
        *(
            "qwen2_5_math_prm",
            "qwen2_5_omni",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen2_vl",
            "qwen3",
            "qwen3_5",
            "qwen3_8",
        ),
        *("qwen3_asr", "qwen3_coder", "qwen3_guard", "qwen3_nothinking", "qwen3_omni", "qwen3_reranker"),
        *("qwen3_thinking", "qwen3_tts", "qwen3_vl", "qwen3_vl_reranker", "qwen_audio", "qwen_vl", "qwq"),
        *("qwq_preview", "ring2_5", "sail_vl2", "step3_vl", "valley", "xing4_0", "yi_coder", "yufeng_xguard"),
    )
)
"""Templates that end an answer with white space after the token that ends the turn (`suffix` in its
template/, 4.6); `python -m tests.migrate.tool_keys --check` finds new ones."""
_LINE_END = (
    "ms-swift also trains the line end that its template writes after the last token of an answer; here it "
    "is context, which only labels of your own train (`format: segments` or `tokenized`)"
)
_OF_MODEL = (
    "Without `template`, ms-swift takes its own for the model, and also trains a line end that it writes "
    "after an answer's last token, as ChatML (Qwen) does; here it is context"
)


def _trains_answers(key: FileKey) -> bool:
    """Return whether answers alone are trained, by a template."""
    has_template = key.of_file("use_chat_template") in (None, "") or is_on(key.of_file("use_chat_template"))
    return has_template and key.of_file(COMMAND) != "pt" and key.of_file("loss_scale") != "all"


def template(key: FileKey) -> Outcome:
    outcome = chat_template(key)
    return remarked(outcome, _LINE_END) if str(key.value) in LINE_ENDS and _trains_answers(key) else outcome


def said_of_model(key: FileKey) -> str:
    """Return what the template of the model trains, if the file names none."""
    return "" if key.of_file("template") or not _trains_answers(key) else _OF_MODEL
