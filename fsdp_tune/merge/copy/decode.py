"""Read boxes of a weight that the files of a base store quantised, decoded as training decodes them
(`core.tensors.quantised_weight`)."""

from __future__ import annotations

import math

import numpy as np

from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS
from fsdp_tune.merge.copy.boxes import Box
from fsdp_tune.merge.copy.gather import TensorReader, read_in_full
from fsdp_tune.merge.copy.values import Array, convert
from fsdp_tune.merge.read.reader import EncodedTensor, SourceTensor


class DecodingReader:
    """Reads boxes of one quantised weight, in its own dtype. `scratch` (BUFFER_BYTES) is clobbered.

    Scales are held in full while the weight is read, of stacked mxfp4 matrices the codes of one expert, and
    of GPTQ and AWQ all codes.
    """

    def __init__(self, encoded: EncodedTensor, scratch: Array) -> None:
        self._encoded, self._scratch = encoded, scratch
        self._scales = read_in_full(encoded.scales, scratch)
        self._others = [
            None if tensor is None else read_in_full(tensor, scratch) for tensor in encoded.others
        ]
        self._in_full = read_in_full(encoded.codes, scratch) if encoded.weight.is_read_in_full else None
        self._codes = TensorReader(encoded.codes, scratch, in_order=False)
        self._expert: tuple[int, Array] | None = None

    def read(self, box: Box, target: Array) -> None:
        """Fill `target` (flat, `box.elements` elements of the weight's dtype)."""
        weight = self._encoded.weight
        start, sizes = weight.box_of_codes(box.offsets, box.sizes)
        if self._in_full is not None:
            codes = self._in_full
        else:
            codes = self._of_experts(start, sizes) if weight.rule == "mxfp4" else self._read(start, sizes)
        values = weight.decode(box.offsets, box.sizes, codes, self._scales, *self._others)
        convert(values.reshape(-1), target)

    def _read(self, start: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
        found = np.empty(math.prod(sizes), OF_SAFETENSORS[self._encoded.weight.codes_dtype].numpy)
        self._codes.read(Box(start, sizes, 0), found)
        return found.reshape(sizes)

    def _of_experts(self, start: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
        """Return codes of mxfp4, whose boxes are not contiguous: a row of the weight has codes in each row of
        the file."""
        full = self._encoded.weight.codes_shape[1:]
        if self._expert is None or self._expert[0] != start[0] or sizes[0] > 1:
            self._expert = start[0], self._read((start[0], 0, 0, 0), (sizes[0], *full))
        return self._expert[1][: sizes[0], :, start[2] : start[2] + sizes[2]]

    def finish(self) -> None:
        self._codes.finish()


def reader_of(tensor: SourceTensor, scratch: Array) -> TensorReader | DecodingReader:
    """Return the reader of a tensor. `scratch` (BUFFER_BYTES) is clobbered by its reads."""
    return (
        TensorReader(tensor, scratch) if tensor.encoded is None else DecodingReader(tensor.encoded, scratch)
    )
