"""torchao's emulated rounding as `quantization.train` uses it. Import this module only where torchao is
installed; it takes a second."""

from __future__ import annotations

import torch
from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer


class Rounding(IntxFakeQuantizer):
    """Round a weight or inputs in the dtype that the product uses, as the conversion does, and keep no scales
    between calls.

    Under DDP the values are cast here, since autocast would cast the rounded ones. Autocast is off inside: on
    CUDA it computes reciprocals in fp32, which moves weights near an edge to the next value. torchao leaves
    scales and offsets on the module, which at 32 weights a scale is a tenth of the complete weights on each
    rank.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rounded values, of the shape of `x`, in autocast's dtype if that is on, else in the
        dtype of `x`."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                rounded: torch.Tensor = super().forward(x.to(torch.get_autocast_dtype(kind)))
        else:
            rounded = super().forward(x)
        self.scale = self.zero_point = None
        return rounded
