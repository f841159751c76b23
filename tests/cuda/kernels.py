"""Kernels that torch has for CUDA alone, computed on the memory of the emulated device by operations of the
CPU.

Loaded by `emulation.py` in every process of a command; imports nothing of the project. The operations here
are those of one kernel: they are not counted, and their temporaries take no memory of the device.
"""

import itertools

import torch


def install(native):
    library = torch.library.Library("aten", "IMPL")
    library.impl("histc", _histc(native), "CUDA")
    library.impl("_conv_depthwise2d", _depthwise_convolution(native), "CUDA")
    library.impl("_flash_attention_forward", _flash(native), "CUDA")
    library.impl("_flash_attention_backward", _flash_backward(native), "CUDA")
    install.library = library  # registered as long as it lives


def _histc(native):
    def histc(values, bins=100, min=0, max=0):
        """Count integers too, which the CPU's kernel refuses."""
        host = native.on_cpu(values)
        counts = torch.histc(host if host.is_floating_point() else host.double(), bins, min, max)
        return native.to_device(counts.to(values.dtype), values.device.index)

    return histc


def _depthwise_convolution(native):
    def convolution(values, weight, kernel_size, bias, stride, padding, dilation):
        host = [None if each is None else native.on_cpu(each) for each in (values, weight, bias)]
        return native.to_device(
            torch.conv2d(*host, stride, padding, dilation, groups=values.shape[1]), values.device.index
        )

    return convolution


def _examples(query, key, cumulative_q, cumulative_k, longest_q):
    """Yield the rows of query and key of each example: (batch, slice, slice), as FlashAttention requires
    them."""
    assert query.dtype == key.dtype
    assert query.dtype in (torch.float16, torch.bfloat16), (
        "FlashAttention only support fp16 and bf16 data type"
    )
    assert query.shape[-1] == key.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.stride(-1) == key.stride(-1) == 1
    if cumulative_q is None:
        for row in range(query.shape[0]):
            yield row, slice(None), slice(None)
        return
    assert cumulative_q.dtype == torch.int32
    ends_q, ends_k = cumulative_q.tolist(), cumulative_k.tolist()
    assert ends_q[-1] == len(query)
    assert ends_k[-1] == len(key)
    assert max(end - start for start, end in itertools.pairwise(ends_q)) <= longest_q
    for (first, last), (first_key, last_key) in zip(
        itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True
    ):
        yield None, slice(first, last), slice(first_key, last_key)


def _part(tensor, row, rows):
    return (tensor[rows] if row is None else tensor[row]).float()


def _scores(query, key, scale, is_causal, left, right):
    """Return masked scores [heads, queries, keys]; the last query sees the last key."""
    scores = (
        torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)) * scale
    )
    behind = torch.arange(len(query))[:, None] + (len(key) - len(query)) - torch.arange(len(key))[None, :]
    right = 0 if is_causal else right
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= behind > left
    if right is not None and right >= 0:
        hidden |= behind < -right
    return scores.masked_fill(hidden, float("-inf"))


def _settings(query, options):
    """Return the scale of the scores and the window to the left and right, from the keywords of the
    operation."""
    scale = options.get("scale") or query.shape[-1] ** -0.5
    return scale, (options.get("window_size_left"), options.get("window_size_right"))


def _flash(native):
    def forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        **options,
    ):
        assert dropout_p == 0, "the emulated device has no fused attention with dropout"
        q, k, v, ends_q, ends_k = (
            None if each is None else native.on_cpu(each)
            for each in (query, key, value, cum_seq_q, cum_seq_k)
        )
        scale, windows = _settings(q, options)
        out = torch.empty_like(q)
        heads = q.shape[-2]
        lse = torch.empty(
            (heads, len(q)) if ends_q is not None else (q.shape[0], heads, q.shape[1]), dtype=torch.float32
        )
        for row, rows, keys in _examples(q, k, ends_q, ends_k, max_q):
            scores = _scores(_part(q, row, rows), _part(k, row, keys), scale, is_causal, *windows)
            values = _part(v, row, keys).repeat_interleave(heads // v.shape[-2], 1)
            found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
            if row is None:
                out[rows], lse[:, rows] = found, scores.logsumexp(-1)
            else:
                out[row], lse[row] = found, scores.logsumexp(-1)
        state = torch.zeros(2, dtype=torch.uint64)
        results = (out, lse, state, torch.zeros((), dtype=torch.uint64), torch.empty(0, dtype=out.dtype))
        return tuple(native.to_device(each, query.device.index) for each in results)

    return forward


def _flash_backward(native):
    def backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng_state,
        unused,
        **options,
    ):
        upper, q, k, v, lse, ends_q, ends_k = (
            None if each is None else native.on_cpu(each)
            for each in (grad_out, query, key, value, logsumexp, cum_seq_q, cum_seq_k)
        )
        scale, windows = _settings(q, options)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        groups = q.shape[-2] // k.shape[-2]
        for row, rows, keys in _examples(q, k, ends_q, ends_k, max_q):
            part_q, part_k, part_v = _part(q, row, rows), _part(k, row, keys), _part(v, row, keys)
            scores = _scores(part_q, part_k, scale, is_causal, *windows)
            probabilities = (scores - (lse[:, rows] if row is None else lse[row])[..., None]).exp()
            of_out = _part(upper, row, rows)
            of_probabilities = torch.einsum("qhd,khd->hqk", of_out, part_v.repeat_interleave(groups, 1))
            of_scores = (
                probabilities
                * (of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True))
                * scale
            )
            found = (
                torch.einsum("hqk,khd->qhd", of_scores, part_k.repeat_interleave(groups, 1)),
                torch.einsum("hqk,qhd->khd", of_scores, part_q),
                torch.einsum("hqk,qhd->khd", probabilities, of_out),
            )
            for gradient, values, place in zip(gradients, found, (rows, keys, keys), strict=True):
                summed = values.unflatten(1, (gradient.shape[-2], -1)).sum(2).to(gradient.dtype)
                gradient[place if row is None else row] = summed
        return tuple(native.to_device(each, query.device.index) for each in gradients)

    return backward
