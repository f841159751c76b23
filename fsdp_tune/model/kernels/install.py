"""Resolve `kernels:` for a model, with a reason for each choice, and install what was chosen.

Liger's Triton kernels (arXiv:2410.10989) for RMSNorm, rotary embedding and gated MLP of a model are installed in the model object by
Liger's own function for the model type. That function also replaces names in modules of transformers; the classes are restored
afterwards, so that later models of the process are unchanged. The rotary function is not an attribute of the model object, so its
replacement stays until the next model of the type gets Liger's kernels.

Compiled is each decoder layer separately, as in torchtitan: equal layers share one graph, and the code between them (gathering, the loss)
stays eager. A layer's `forward` is compiled, not its `__call__`: FSDP's hooks and the gathering stay outside of the graph. The
recomputation of the layer is inside, so that the compiler chooses the tensors to keep within the recipe's policy.
"""

from __future__ import annotations
