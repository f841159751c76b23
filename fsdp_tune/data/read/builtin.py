"""`builtin:arithmetic`: a data set of sums in words and its tokenizer, generated without a download.

`thirty seven plus four is` → ` forty one`: a number below a hundred plus a number below ten. A tenth of the thousand sums
is held out: the splits `train` and `test` share no question, so exact match on `test` measures addition and not
memorisation.
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
    """Return `arithmetic` for `builtin:arithmetic`. Raises: usage error (exit 2) for a name that the package does not have."""
    name = path.removeprefix(PREFIX)
    if name not in NAMES:
        raise usage_error(
            "unknown-builtin", f"there is no `{path}`", hint=f"the package has: {', '.join(PREFIX + known for known in NAMES)}"
        )
    return name


def spelled_out(number: int) -> str:
    """Spell a number from 0 to 199 in English words."""
    if number < len(_UNITS):
        return _UNITS[number]
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" {spelled_out(rest)}" if rest else "")
    tens, units = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_UNITS[units]}" if units else "")


def builtin_rows(path: str, split: str) -> list[dict[str, str]]:
    """Return the rows of a split, with `prompt` and `completion`; always the same rows in the same order."""
    builtin_name(path)
    if split not in SPLITS:
        raise usage_error("no-such-split", f"`{path}` has no split `{split}`", hint=f"its splits are: {', '.join(SPLITS)}")
    held_out = split == "test"
    return [{"prompt": prompt, "completion": answer} for prompt, answer in _questions() if _is_held_out(prompt) == held_out]


def held_out_prompts(count: int | None = None) -> list[tuple[str, str]]:
    """Return the first `count` (prompt, answer) pairs that are in no training row, in a hashed order; an answer starts with a space."""
    pairs = sorted((pair for pair in _questions() if _is_held_out(pair[0])), key=lambda pair: _digest(pair[0]))
    return pairs[:count]


def _questions() -> Iterator[tuple[str, str]]:
    for left in range(HIGHEST_LEFT + 1):
        for right in range(HIGHEST_RIGHT + 1):
            yield f"{spelled_out(left)} plus {spelled_out(right)} is", f" {spelled_out(left + right)}"


def _is_held_out(prompt: str) -> bool:
    return _digest(prompt) < HELD_OUT_SHARE * 2**64


def _digest(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest())


def builtin_tokenizer(path: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer: each word of the task is one token, other text is encoded as bytes, so all text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    builtin_name(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_UNITS, *_TENS, *_OTHER_WORDS]
    pieces = [*letters, *words, *(f"Ġ{word}" for word in words)]  # Ġ is how byte-level BPE writes a space
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))  # a full word is looked up first, then its bytes
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in (EOS, PAD, TURN_END, *(f"<|{role}|>" for role in ROLES)):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])  # pyright: ignore[reportUnknownMemberType]
    return tokenizer
