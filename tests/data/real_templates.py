"""Chat templates of published models, and small tokenizers with their special tokens."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder

HERE = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Published:
    """A template and what the model's tokenizer has of it."""

    template: str
    """`trl/NAME`, `axolotl/NAME`, or NAME in tests/data/templates."""
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    is_sentencepiece: bool = False
    """Whether the tokenizer writes a space before every text, as Llama 2's does."""
    strips_right: bool = False
    """Whether special tokens include the white space after them, as Phi 3's do."""

    def text(self) -> str:
        package, _, name = self.template.rpartition("/")
        return (_folder(package) / f"{name}.jinja").read_text(encoding="utf-8")

    def encoder(self, *, joins_spaces: bool = False) -> TokenizerEncoder:
        """`joins_spaces`: with tokens of several line ends and spaces, and without SentencePiece."""
        tokenizer = (
            _sentencepiece()
            if self.is_sentencepiece and not joins_spaces
            else _byte_level(SPACES if joins_spaces else [])
        )
        texts = dict.fromkeys([self.eos, *([self.bos] if self.bos else []), "<pad>", *self.special])
        tokenizer.add_special_tokens(
            [AddedToken(text, special=True, normalized=False, rstrip=self.strips_right) for text in texts]
        )  # pyright: ignore[reportUnknownMemberType]
        return TokenizerEncoder(
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, eos_token=self.eos, bos_token=self.bos, pad_token="<pad>"
            )
        )


def _folder(package: str) -> Path:
    if not package:
        return HERE
    found = importlib.util.find_spec(package)
    assert found is not None, f"scripts/install adds {package}"
    assert found.origin is not None
    return Path(found.origin).parent / (
        "chat_templates" if package == "trl" else "utils/chat_templates/templates"
    )


LINE_END, SPACE = "\u010a", "\u0120"
"""As byte-level tokenizers write them."""
SPACES = [
    *((LINE_END, LINE_END), (2 * LINE_END, 2 * LINE_END), (SPACE, SPACE), (2 * SPACE, 2 * SPACE)),
    *((LINE_END, SPACE), (":", SPACE), (">", LINE_END)),
]


def _byte_level(merges: list[tuple[str, str]]) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """Return a tokenizer with Llama 2's normaliser and byte fallback, and letters and some words as
    tokens."""
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    words = ["▁a", "▁q", "▁[", "IN", "ST", "▁["]
    pieces = dict.fromkeys(["<unk>", *(f"<0x{code:02X}>" for code in range(256)), *letters, *words])
    merges = [("▁", "a"), ("▁", "q"), ("▁", "["), ("I", "N"), ("S", "T")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
GEMMA4 = (
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
DEEPSEEK = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",  # noqa: E501
    "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",  # noqa: E501
)  # fmt: skip
DEEPSEEK_BOS, DEEPSEEK_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
COMMAND = (
    "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",  # noqa: E501
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>",  # noqa: E501
)  # fmt: skip

PUBLISHED = {
    "llama 2": Published("llama2", "</s>", "<s>", is_sentencepiece=True),
    "llama 3": Published("trl/llama3", "<|eot_id|>", "<|begin_of_text|>", LLAMA3),
    "llama 3.1": Published("trl/llama3_1", "<|eot_id|>", "<|begin_of_text|>", LLAMA3),
    "llama 4": Published(
        "axolotl/llama4", "<|eot|>", "<|begin_of_text|>", ("<|header_start|>", "<|header_end|>", "<|eom|>")
    ),
    "chatml": Published("axolotl/chatml", "<|im_end|>", None, CHATML),
    "qwen 2.5": Published("trl/qwen2_5", "<|im_end|>", None, CHATML),
    "qwen 3": Published("trl/qwen3", "<|im_end|>", None, CHATML),
    "qwen 3 instruct": Published("trl/qwen3_instruct_2507", "<|im_end|>", None, CHATML),
    "qwen 3.5": Published("trl/qwen3_5_think", "<|im_end|>", None, CHATML),
    "mistral v1": Published("axolotl/mistral_v1", "</s>", "<s>", is_sentencepiece=True),
    "mistral v3": Published("axolotl/mistral_v2v3", "</s>", "<s>", MISTRAL, is_sentencepiece=True),
    "mistral v3 tekken": Published("axolotl/mistral_v3_tekken", "</s>", "<s>", MISTRAL),
    "mistral v7 tekken": Published(
        "axolotl/mistral_v7_tekken", "</s>", "<s>", (*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    ),
    "gemma 2": Published("trl/gemma", "<end_of_turn>", "<bos>", GEMMA),
    "gemma 3": Published("trl/gemma3", "<end_of_turn>", "<bos>", GEMMA),
    "gemma 4": Published("axolotl/gemma4", "<turn|>", "<bos>", GEMMA4),
    "diffusion gemma training": Published("trl/diffusion_gemma_training", "<turn|>", "<bos>", GEMMA4),
    "phi 3": Published("trl/phi3", "<|endoftext|>", "<s>", PHI, strips_right=True),
    "phi 3.5": Published("trl/phi3_5", "<|endoftext|>", "<s>", PHI),
    "phi 3.5 that stops at <|end|>": Published("trl/phi3_5", "<|end|>", "<s>", PHI),
    "phi 4": Published("axolotl/phi_4", "<|im_end|>", "<|endoftext|>", (*CHATML, "<|im_sep|>")),
    "deepseek v3": Published("axolotl/deepseek_v3", DEEPSEEK_EOS, DEEPSEEK_BOS, DEEPSEEK),
    "deepseek r1": Published("trl/deepseek_r1_distill", DEEPSEEK_EOS, DEEPSEEK_BOS, DEEPSEEK),
    "deepseek r1 training": Published(
        "trl/deepseek_r1_distill_training", DEEPSEEK_EOS, DEEPSEEK_BOS, DEEPSEEK
    ),
    "gpt-oss": Published("trl/gptoss", "<|return|>", "<|startoftext|>", HARMONY),
    "glm 4": Published("glm4", "<|endoftext|>", None, GLM),
    "glm 4.5": Published("trl/glm4moe", "<|endoftext|>", None, GLM),
    "glm 4.5 whose calls are special": Published(
        "trl/glm4moe", "<|endoftext|>", None, (*GLM, "<tool_call>", "</tool_call>")
    ),
    "granite": Published("granite", "<|end_of_text|>", None, GRANITE),
    "smollm 2": Published("smollm2", "<|im_end|>", None, CHATML),
    "smollm 3": Published("smollm3", "<|im_end|>", None, CHATML),
    "command r": Published("trl/cohere2", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", COMMAND),
    "command a without tools": Published(
        "axolotl/command_a", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", COMMAND
    ),
    "command a": Published("axolotl/command_a_tool_use", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", COMMAND),
}
