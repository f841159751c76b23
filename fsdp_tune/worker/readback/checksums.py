"""Checksums of the tensors that a rank holds, computed where they are."""

from __future__ import annotations

from collections import defaultdict

import torch

from fsdp_tune.model.shard.local import local_part

CHECKSUM_PIECE = 1021
"""Values that are hashed together: odd, and no multiple of the sizes at which values of buffers repeat
(prime)."""


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return name → a checksum over the local values of this rank, computed on their device without a
    copy."""
    names, values = [], []
    for name, tensor in tensors.items():
        local = local_part(tensor.detach())
        if local.numel():
            names.append(name)
            values.append(_checksum(local.reshape(-1)))
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        by_device[value.device].append(index)
    numbers = [0] * len(values)
    for indices in by_device.values():
        for index, number in zip(
            indices, torch.stack([values[index] for index in indices]).tolist(), strict=True
        ):
            numbers[index] = number
    return dict(zip(names, numbers, strict=True))


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    """Return a scalar int64 that depends on each value and, beyond `CHECKSUM_PIECE` values, on its position.

    `torch.hash_tensor` is the XOR of all values: of an even number of equal ones (a norm's weights, a bias)
    it is always zero. So it is taken over pieces of an odd length, which are then added with a weight each.
    """
    values = flat.view(torch.uint8) if flat.element_size() == 1 else flat
    whole = values.numel() // CHECKSUM_PIECE * CHECKSUM_PIECE
    rest = values[whole:]
    pieces = [torch.hash_tensor(values[:whole].view(-1, CHECKSUM_PIECE), 1)]
    pieces += [torch.hash_tensor(piece).reshape(1) for piece in (rest[:-1], rest[-1:]) if piece.numel()]
    hashes = torch.cat([piece.view(torch.int64) for piece in pieces])
    return (hashes * torch.arange(1, 2 * len(hashes), 2, device=hashes.device)).sum()
