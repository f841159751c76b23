"""`builtin:arithmetic`: sums in words, and a tokenizer for them, made here and not downloaded.

`thirty seven plus four is` → ` forty one`: any number below a hundred plus one below ten. A tenth of the thousand sums
is held out: the splits `train` and `test` share no question, so the exact match on `test` shows that a model has learnt
to add and not to repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdp_tune.core.errors import usage_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIX = "builtin:"
NAMES = ("arithmetic",)
SPLITS = ("train", "test")
HIGHEST_LEFT, HIGHEST_RIGHT = 99, 9
HELD_OUT_SHARE = 0.1

EOS, PAD, TURN_END = "<|endoftext|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODEL_MAX_LENGTH = 1 << 20

# fmt: off
_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
_OTHER_WORDS = ("hundred", "plus", "is")


def is_builtin(name: str) -> bool:
    return name.startswith(PREFIX)


def builtin_name(path: str) -> str:
    """`builtin:arithmetic` → `arithmetic`; exit 2 for a name that the package does not have."""
    name = path.removeprefix(PREFIX)
    if name not in NAMES:
        raise usage_error(
            "unknown-builtin", f"there is no `{path}`", hint=f"the package has: {', '.join(PREFIX + known for known in NAMES)}"
        )
    return name


def in_words(number: int) -> str:
    """0 ≤ number ≤ 199."""
    if number < len(_UNITS):
        return _UNITS[number]
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" {in_words(rest)}" if rest else "")
    tens, units = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_UNITS[units]}" if units else "")


def builtin_rows(path: str, split: str) -> list[dict[str, str]]:
    """Rows with `prompt` and `completion`, always the same ones in the same order."""
    builtin_name(path)
    if split not in SPLITS:
        raise usage_error("no-such-split", f"`{path}` has no split `{split}`", hint=f"its splits are: {', '.join(SPLITS)}")
    held_out = split == "test"
    return [{"prompt": prompt, "completion": answer} for prompt, answer in _questions() if _is_held_out(prompt) == held_out]


def held_out_prompts(count: int | None = None) -> list[tuple[str, str]]:
    """(prompt, answer) pairs that no training row holds, the first `count` in a scattered order; the answer starts with a space."""
    pairs = sorted((pair for pair in _questions() if _is_held_out(pair[0])), key=lambda pair: _digest(pair[0]))
    return pairs[:count]


def _questions() -> Iterator[tuple[str, str]]:
    for left in range(HIGHEST_LEFT + 1):
        for right in range(HIGHEST_RIGHT + 1):
            yield f"{in_words(left)} plus {in_words(right)} is", f" {in_words(left + right)}"


def _is_held_out(prompt: str) -> bool:
    return _digest(prompt) < HELD_OUT_SHARE * 2**64


def _digest(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest())


def builtin_tokenizer(path: str) -> Tokenizer:
    """A byte-level BPE: every word of the task is one token, and any other text is spelt by bytes, so all text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    builtin_name(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_UNITS, *_TENS, *_OTHER_WORDS]
    pieces = [*letters, *words, *(f"Ġ{word}" for word in words)]  # Ġ is how byte-level BPE writes a space
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))  # a word is looked up whole, then spelt
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in (EOS, PAD, TURN_END, *(f"<|{role}|>" for role in ROLES)):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])  # pyright: ignore[reportUnknownMemberType]
    return tokenizer
