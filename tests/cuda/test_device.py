"""The emulated device behaves as CUDA does where a program could tell. Each function runs in a process that
has it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.devices import require
from tests.ranks import Ranks, shared_ranks


@pytest.fixture(scope="module")
def on_ranks() -> Ranks:
    require("cuda")
    return shared_ranks("cuda")


def races_of(act: Any) -> list[str]:
    """The races that `act` has, with the functions of this file that take part."""
    import emulated_cuda as native  # type: ignore[import-not-found]
    import torch

    def site() -> str:
        import sys

        frame = sys._getframe(1)
        while frame.f_back is not None and "test_device" not in frame.f_code.co_filename:
            frame = frame.f_back
        return frame.f_code.co_name

    torch.cuda.synchronize()
    before = len(native.races())
    native.watch_orders(site)
    try:
        act()
        torch.cuda.synchronize()
    finally:
        native.watch_orders(None)
    return native.races()[before:]


def _facts() -> dict[str, Any]:
    import torch

    fresh = torch.empty(1000, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    drawn = torch.randn(8, device="cuda", generator=generator).cpu()
    try:
        fresh + torch.ones(1000)
        mixed = ""
    except RuntimeError as error:
        mixed = str(error)
    return {
        "name": torch.cuda.get_device_name(0),
        "capability": torch.cuda.get_device_capability(),
        "devices": torch.cuda.device_count(),
        "is_written": bool(fresh.isfinite().any()),
        "drawn": bool(torch.equal(drawn, torch.randn(8, generator=torch.Generator().manual_seed(5)))),
        "mixed": mixed,
        "scalar of the cpu": float((fresh.zero_() + torch.tensor(2.0)).sum()),
        "is_compiled": torch.compiler.is_exporting() or torch.backends.cuda.is_built(),
    }


def test_device_says_what_it_is_and_refuses_tensors_of_the_cpu(on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _facts)
    assert found.pop("mixed").startswith(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    )
    assert found == {
        "name": "NVIDIA H100 80GB HBM3",
        "capability": (9, 0),
        "devices": 4,
        "is_written": False,
        "drawn": True,
        "scalar of the cpu": 2000.0,
        "is_compiled": True,
    }


def _generators_advanced_by_dropout() -> tuple[bool, bool]:
    import torch

    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5)
    return not torch.equal(torch.get_rng_state(), host), not torch.equal(torch.cuda.get_rng_state(), device)


def test_dropout_draws_from_the_generator_of_the_device(on_ranks: Ranks) -> None:
    """Its kernel takes no generator as an argument."""
    assert on_ranks.run(2, _generators_advanced_by_dropout) == [(False, True)] * 2


def _memory() -> dict[str, Any]:
    import emulated_cuda as native  # type: ignore[import-not-found]
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    one = torch.empty(100, device="cuda")
    small = torch.cuda.memory_allocated() - base
    big = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del one
    segments = torch.cuda.memory_snapshot()
    found = {"small": small, "peak": torch.cuda.max_memory_allocated() - base, "reserved": reserved}
    found["in segments"] = (
        sum(segment["allocated_size"] for segment in segments) == torch.cuda.memory_allocated()
    )
    found["sizes of segments"] = sorted({segment["total_size"] for segment in segments})
    limit = torch.cuda.memory_reserved() + 2**20
    native.set_memory_limit(limit)
    try:
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["error"] = str(error)
    finally:
        native.set_memory_limit(0)
    del big
    found["ooms"] = torch.cuda.memory_stats()["num_ooms"] > 0
    return found


def test_memory_is_given_out_as_the_caching_allocator_does(on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _memory)
    error = found.pop("error")
    assert error.startswith(
        "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of "
    )
    assert " is reserved by PyTorch but unallocated." in error
    assert found["small"] == 512
    assert found["peak"] == 512 + 3 * 2**20
    assert found["in segments"]
    assert set(found["sizes of segments"]) <= {2 * 2**20, 20 * 2**20}
    assert found["ooms"]


def _copies() -> dict[str, Any]:
    import emulated_cuda as native  # type: ignore[import-not-found]
    import torch

    waits: list[str] = []
    native.on_synchronise(lambda kind, _: waits.append(kind))
    try:
        device = torch.arange(4.0, device="cuda")
        host = torch.zeros(4, pin_memory=True)
        host.copy_(device, non_blocking=True)
        before = bool(host.isnan().all())
        back = host.to("cuda", non_blocking=True)  # the same stream: what it copies is there
        torch.cuda.current_stream().synchronize()
        after = host.tolist()
        waits_of_pinned = list(waits)
        device.cpu()
        device.sum().item()
        device[device > 1]
        torch.ones(3).to("cuda")
    finally:
        native.on_synchronise(None)
    return {
        "before": before,
        "after": after,
        "back": back.tolist(),
        "pinned": waits_of_pinned,
        "then": waits[len(waits_of_pinned) :],
    }


def test_copies_to_pinned_memory_arrive_when_the_host_has_waited(on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _copies)
    assert found == {
        "before": True,
        "after": [0.0, 1.0, 2.0, 3.0],
        "back": [0.0, 1.0, 2.0, 3.0],
        "pinned": ["stream"],
        "then": ["copy to the host", "item", "operation", "copy to the device"],
    }


def _unordered(wait: bool) -> list[str]:
    import torch

    def act() -> None:
        values = torch.zeros(1000, device="cuda")
        side = torch.cuda.Stream()
        if wait:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.add_(1)
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        values.sum()

    return races_of(act)


@pytest.mark.parametrize("wait", [True, False])
def test_work_of_two_streams_without_an_event_between_is_a_race(wait: bool, on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _unordered, wait)
    assert bool(found) != wait, found
    assert wait or all(" at act while it may still be written on stream " in race for race in found)


def _freed(keep: str) -> list[str]:
    import torch

    def act() -> None:
        side = torch.cuda.Stream()
        values = torch.zeros(3000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.sum()
        if keep == "record_stream":
            values.record_stream(side)
        if keep == "wait":
            torch.cuda.current_stream().wait_stream(side)
        del values
        torch.zeros(3000, device="cuda")

    return races_of(act)


@pytest.mark.parametrize("keep", ["", "record_stream", "wait"])
def test_freed_memory_that_another_stream_reads_is_not_given_out_again(keep: str, on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _freed, keep)
    assert [race.startswith("memory is given to a tensor of stream") for race in found] == [True] * (not keep)


def _overwritten(wait: bool) -> list[str]:
    import torch

    def act() -> None:
        host = torch.zeros(64, pin_memory=True)
        host.to("cuda", non_blocking=True)
        if wait:
            torch.cuda.synchronize()
        host.fill_(1)

    return races_of(act)


@pytest.mark.parametrize("wait", [True, False])
def test_pinned_memory_that_is_written_while_it_is_copied_is_a_race(wait: bool, on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _overwritten, wait)
    assert [race.split(",")[0] for race in found] == [
        "pinned memory was changed before its copy to the device"
    ] * (not wait)


def _collectives() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.arange(8.0, device="cuda") + rank
    summed, averaged, narrow = values.clone(), values.clone(), values.bfloat16()
    dist.all_reduce(summed)
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    dist.all_reduce(narrow)
    gathered = torch.empty(8 * size, device="cuda")
    dist.all_gather_into_tensor(gathered, values)
    part = torch.empty(8 // size, device="cuda")
    dist.reduce_scatter_tensor(part, values)
    swapped = torch.empty(8, device="cuda")
    dist.all_to_all_single(swapped, values)

    def unwaited() -> None:
        work = dist.all_reduce(values, async_op=True)
        values.sum()
        work.wait()

    def waited() -> None:
        dist.all_reduce(values, async_op=True).wait()
        values.sum()

    return {
        "sum": summed.tolist(),
        "average": averaged.tolist(),
        "bf16": narrow.dtype == torch.bfloat16 and narrow.tolist() == summed.tolist(),
        "gathered": gathered.tolist(),
        "part": part.tolist(),
        "swapped": swapped.tolist(),
        "races": (len(races_of(unwaited)) > 0, len(races_of(waited))),
    }


def test_collectives_are_those_of_nccl(on_ranks: Ranks) -> None:
    found = on_ranks.run(2, _collectives)
    line = [float(index) for index in range(8)]
    for rank, values in enumerate(found):
        assert values["sum"] == [2 * value + 1 for value in line]
        assert values["average"] == [value + 0.5 for value in line]
        assert values["bf16"]
        assert values["gathered"] == line + [value + 1 for value in line]
        assert values["part"] == [2 * value + 1 for value in line[4 * rank : 4 * rank + 4]]
        assert values["swapped"] == [
            value + other for other in range(2) for value in line[4 * rank : 4 * rank + 4]
        ]
        assert values["races"] == (True, 0)


def _attention(dtype: str, groups: int, declared: bool = True) -> dict[str, Any]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    shape = (2, 4, 24, 16)
    tensors = [
        torch.randn(2, 4 if index == 0 else 4 // groups, 24, 16, dtype=getattr(torch, dtype))
        for index in range(3)
    ]
    upper = torch.randn(shape, dtype=getattr(torch, dtype))
    results = []
    for device in ("cpu", "cuda"):
        inputs = [each.detach().clone().to(device).requires_grad_() for each in tensors]
        out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=declared and groups > 1)
        out.backward(upper.to(device))
        results.append([out.detach().cpu(), *(each.grad.cpu() for each in inputs)])  # type: ignore[union-attr]
        kernel = type(out.grad_fn).__name__
    return {
        "kernel": kernel,
        "differences": [float((a - b).abs().max()) for a, b in zip(*results, strict=True)],
    }


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "Flash"), ("float32", "Efficient")])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_takes_the_kernel_of_cuda_and_gives_the_numbers_of_the_cpu(
    dtype: str, kernel: str, groups: int, on_ranks: Ranks
) -> None:
    (found,) = on_ranks.run(1, _attention, dtype, groups)
    if not (kernel == "Efficient" and groups == 2):
        assert kernel in found["kernel"]
    assert max(found["differences"]) <= (2e-2 if dtype == "bfloat16" else 1e-5)


def test_no_fused_attention_broadcasts_heads(on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _attention, "bfloat16", 4, False)
    assert "Flash" not in found["kernel"]
    assert "Efficient" not in found["kernel"]
    assert max(found["differences"]) <= 2e-2


def _scaled_product(
    scales: str, dtype: str, left: str = "float8_e4m3fn", bias: bool = False
) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    of_left, of_right, wanted = getattr(torch, left), torch.float8_e4m3fn, getattr(torch, dtype)
    one, other = torch.randn(24, 64).to(of_left), torch.randn(48, 64).to(of_right).t()
    shapes = [(), ()] if scales == "tensor" else [(24, 1), (1, 48)]
    by = [torch.rand(shape) + 0.5 for shape in shapes]
    added = (
        torch.randn(48, dtype=torch.float16 if wanted == torch.float16 else torch.bfloat16) if bias else None
    )
    plain = (one.float() @ other.float()) * by[0] * by[1] + (0 if added is None else added.float())
    if wanted.itemsize == 1:
        plain = plain.clamp(-448, 448)
    on_device = [None if each is None else each.to("cuda") for each in (one, other, *by, added)]
    out = torch._scaled_mm(*on_device[:4], bias=on_device[4], out_dtype=wanted)  # type: ignore[arg-type]
    largest = float((out.cpu().float() - plain.to(wanted).float()).abs().max() / plain.abs().max())
    return {"dtype": str(out.dtype).removeprefix("torch."), "shape": tuple(out.shape), "largest": largest}


def _attention_with_dropout(dtype: str) -> dict[str, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    draw = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(2, 2, 24, 16, generator=draw).to("cuda", getattr(torch, dtype)).requires_grad_()
        for _ in range(3)
    ]

    def out(p: float, *states: torch.Tensor) -> torch.Tensor:
        torch.cuda.manual_seed(3)
        return scaled_dot_product_attention(*states, dropout_p=p, is_causal=True)

    one, again = out(0.5, *leaves), out(0.5, *leaves)
    ahead = torch.rand(1, device="cuda")
    many = torch.stack(
        [scaled_dot_product_attention(*leaves, dropout_p=0.5, is_causal=True).float() for _ in range(400)]
    ).mean(0)
    direction = [torch.randn(leaf.shape, generator=draw).to("cuda") for leaf in leaves]
    gradients = torch.autograd.grad(one.float().square().sum(), leaves)
    slope = sum((gradient.float() * each).sum() for gradient, each in zip(gradients, direction, strict=True))
    step = 1e-3
    ahead_of, behind = (
        out(0.5, *(leaf.detach() + sign * step * each for leaf, each in zip(leaves, direction, strict=True)))
        .float()
        .square()
        .sum()
        for sign in (1, -1)
    )
    torch.cuda.manual_seed(3)
    return {
        "differs without a new mask": float((one - again).abs().max()),
        "advances the generator": float(torch.rand(1, device="cuda") != ahead),
        "mean over masks": float(
            (many - out(0.0, *leaves).float()).norm() / out(0.0, *leaves).float().norm()
        ),
        "slope": float((ahead_of - behind) / (2 * step) / slope),
    }


def test_attention_draws_its_dropout_mask_inside(on_ranks: Ranks) -> None:
    """The same seed draws it again in the backward; the mean over masks is the result without dropout."""
    (found,) = on_ranks.run(1, _attention_with_dropout, "float32")
    assert found["differs without a new mask"] == 0
    assert found["advances the generator"] == 1
    assert found["mean over masks"] < 0.15
    assert found["slope"] == pytest.approx(1, abs=1e-2)


def _gradients_with_dropout() -> dict[str, float]:
    import torch

    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.recompute import recompute_activations
    from tests.model.recipes import recipe_of

    model = {
        "model_type": "gpt2",
        "vocab_size": 150,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
    }

    def gradients(recomputed: str) -> torch.Tensor:
        recipe = recipe_of(
            {"from_config": model | {"bos_token_id": 0, "eos_token_id": 1}},
            fsdp={"activation_checkpointing": recomputed},
        )
        torch.manual_seed(0)
        live = build_full(recipe).train().to("cuda")
        recompute_activations(recipe, live)
        torch.cuda.manual_seed(3)
        ids = (torch.arange(96) % 150).view(2, 48).to("cuda")
        live(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in live.parameters()])

    plain = gradients("none")
    return {
        way: float((gradients(way) - plain).norm() / plain.norm()) for way in ("none", "full", "selective")
    }


def test_recomputed_layers_draw_the_masks_of_their_forward(on_ranks: Ranks) -> None:
    """With attention whose mask is drawn in its kernel, as on a GPU. Kept attention gave gradients that were
    28 % off."""
    (found,) = on_ranks.run(1, _gradients_with_dropout)
    assert found == dict.fromkeys(("none", "full", "selective"), pytest.approx(0, abs=1e-6))


@pytest.mark.parametrize(
    ("scales", "dtype", "left", "bias"),
    [
        ("tensor", "float32", "float8_e4m3fn", False),
        ("tensor", "bfloat16", "float8_e5m2", True),
        ("tensor", "float16", "float8_e4m3fn", True),
        ("tensor", "float8_e4m3fn", "float8_e4m3fn", False),
        ("rows", "bfloat16", "float8_e4m3fn", False),
        ("rows", "bfloat16", "float8_e4m3fn", True),
    ],
)
def test_products_of_fp8_are_those_of_fp32_with_scales(
    scales: str, dtype: str, left: str, bias: bool, on_ranks: Ranks
) -> None:
    (found,) = on_ranks.run(1, _scaled_product, scales, dtype, left, bias)
    assert found["dtype"] == dtype
    assert found["shape"] == (24, 48)
    assert found["largest"] <= 1e-6


def _refused_products() -> list[str]:
    import torch

    def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        return torch.ones(rows, columns, device="cuda").to(dtype)

    one = torch.ones((), device="cuda")
    rows = torch.ones(16, 1, device="cuda"), torch.ones(1, 32, device="cuda")
    bias = torch.ones(32, device="cuda", dtype=torch.bfloat16)
    calls: list[tuple[Any, ...]] = [
        (matrix(16, 16), matrix(16, 32), one, one),
        (matrix(16, 24), matrix(32, 24).t(), one, one),
        (matrix(16, 16), matrix(24, 16).t(), one, one),
        (matrix(16, 16, torch.float8_e5m2), matrix(32, 16, torch.float8_e5m2).t(), one, one),
        (matrix(16, 16), matrix(32, 16).t(), *rows, None, torch.float32),
        (matrix(16, 16), matrix(32, 16).t(), rows[0], one),
        (matrix(16, 16), matrix(32, 16).t(), one, one, bias, torch.float32),
        (matrix(16, 16), matrix(32, 16).t(), one, one, bias, torch.float16),
        (matrix(16, 16), matrix(32, 16).t(), one, torch.ones(1)),
    ]
    found = []
    for left, right, by_left, by_right, *rest in calls:
        added, dtype = (*rest, None, torch.bfloat16)[:2] if len(rest) < 2 else rest
        try:
            torch._scaled_mm(left, right, by_left, by_right, bias=added, out_dtype=dtype)
            found.append("")
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


def test_products_of_fp8_that_cuda_refuses_are_refused(on_ranks: Ranks) -> None:
    (found,) = on_ranks.run(1, _refused_products)
    words = [
        "col_major",
        "divisible by 16",
        "divisible by 16",
        "two Float8_e5m2",
        "Only bf16",
        "Invalid scaling",
        "Bias is not",
        "Bias must be",
        "cpu",
    ]
    assert [word in message for word, message in zip(words, found, strict=True)] == [True] * len(words), found


def _moved_bytes() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    values = (torch.arange(8.0, device="cuda") + 8 * rank).to(torch.float8_e4m3fn)
    gathered = torch.empty(8 * size, device="cuda", dtype=values.dtype)
    dist.all_gather_into_tensor(gathered, values)
    swapped = torch.empty_like(values)
    dist.all_to_all_single(swapped, values)
    sent = values.clone()
    dist.broadcast(sent, 1)
    return {
        "gathered": gathered.float().tolist(),
        "swapped": swapped.float().tolist(),
        "sent": sent.float().tolist(),
    }


def test_nccl_moves_fp8(on_ranks: Ranks) -> None:
    line = [float(index) for index in range(16)]
    for rank, values in enumerate(on_ranks.run(2, _moved_bytes)):
        assert values["gathered"] == line
        assert values["sent"] == line[8:]
        assert values["swapped"] == line[4 * rank : 4 * rank + 4] + line[8 + 4 * rank : 12 + 4 * rank]
