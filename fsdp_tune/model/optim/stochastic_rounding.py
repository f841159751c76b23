"""Stochastic rounding from fp32 to bf16: up or down with probabilities that preserve the mean, so that small
changes add up."""

from __future__ import annotations

import hashlib

import torch

_LOW_HALF = 0xFFFF


_HIGH_HALF = -0x10000


def rounding_key(*numbers: int) -> tuple[int, int]:
    """Return two 32-bit numbers, derived from the numbers that identify a rounding (seed, tensor, step …)."""
    digest = hashlib.blake2b(b",".join(b"%d" % number for number in numbers), digest_size=8).digest()
    return int.from_bytes(digest[:4], signed=True), int.from_bytes(digest[4:], signed=True)


def _signed(number: int) -> int:
    """Return the int32 with the low 32 bits of `number`."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)


def _random_bits(count: int, start: int, key: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return `count` pseudorandom numbers from 0 to 65,535, int32, for the indices `start`, `start` + 1 … of
    a tensor.

    MurmurHash3's finaliser (Appleby, 2011, public domain), with the second half of the key between its
    multiplications; int32 wraps.
    """
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.add_(_signed(start)).bitwise_xor_(key[0] ^ _signed(start >> 32))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW_HALF)).mul_(_signed(0x85EBCA6B)).bitwise_xor_(key[1])
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW_HALF)).bitwise_and_(_LOW_HALF)


def round_stochastically(values: torch.Tensor, start: int, key: tuple[int, int]) -> torch.Tensor:
    """Round a flat fp32 tensor to bf16. `start` is the row-major index of its first value in the full tensor.

    Values that bf16 represents exactly stay the same, as do NaN and infinity.
    """
    # bf16 is the upper half of an fp32: adding up to 65,535 to the lower half carries with the probability of
    # that half.
    carried = values.view(torch.int32) + _random_bits(values.numel(), start, key, values.device)
    rounded = carried.bitwise_and_(_HIGH_HALF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
