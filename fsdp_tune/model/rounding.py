"""fp32 → bf16 by chance: up or down with the probability that makes the mean right, so that small changes add up.

The chance is no stream of random numbers but a hash of (key, place in the tensor). So the same value at the same place of the same
step rounds alike on every rank and on any number of them, and nothing of it has to be saved.
"""

from __future__ import annotations

import hashlib

import torch

_LOW_HALF = 0xFFFF
_HIGH_HALF = -0x10000


def rounding_key(*numbers: int) -> tuple[int, int]:
    """Two 32-bit numbers, from those that tell one rounding from another (seed, tensor, step …)."""
    digest = hashlib.blake2b(b",".join(b"%d" % number for number in numbers), digest_size=8).digest()
    return int.from_bytes(digest[:4], signed=True), int.from_bytes(digest[4:], signed=True)


def _signed(number: int) -> int:
    """The int32 with these 32 bits."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)


def _chances(count: int, start: int, key: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`count` numbers from 0 to 65,535, int32: of the places `start`, `start` + 1 … of a tensor.

    MurmurHash3's finaliser (Appleby, 2011, public domain), the second half of the key between its two multiplications; int32 wraps.
    """
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.add_(_signed(start)).bitwise_xor_(key[0] ^ _signed(start >> 32))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW_HALF)).mul_(_signed(0x85EBCA6B)).bitwise_xor_(key[1])
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW_HALF)).bitwise_and_(_LOW_HALF)


def round_by_chance(values: torch.Tensor, start: int, key: tuple[int, int]) -> torch.Tensor:
    """A flat fp32 tensor as bf16. `start`: the place of its first value in the whole tensor, counted in row-major order.

    What bf16 holds exactly stays; what is not finite stays so.
    """
    # bf16 is the upper half of an fp32: adding up to 65,535 to the lower half carries with the probability of that half.
    carried = values.view(torch.int32) + _chances(values.numel(), start, key, values.device)
    rounded = carried.bitwise_and_(_HIGH_HALF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
