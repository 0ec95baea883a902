"""The attention of a tree by flash-attn-4, whose kernels have stand-ins where there is no GPU."""

import logging
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="flex attention stands behind its attention functions")

from test_prefix_trees import grow_sequences

from devices import NEEDS_GPU, skip_without_interpreter
from liger_rl.step import attention, flash, prefix_tree

CPU = torch.device("cpu")
NESTED = torch.tensor([9, 8, 7, 6, 5, 6, 7, 8, 9])  # `ends` of a chain from each of whose tokens one branch goes


def make_ends(depth: int, longest: int = 30, multiple: int = 16) -> Tensor:
    """Of sequences that branch `depth` times, and of two alone."""
    runs = (*grow_sequences(depth, longest), [3] * 5, [4], *grow_sequences(depth, longest))
    sequences = [torch.tensor(run) for run in runs]
    known = prefix_tree.sort_sequences(sequences, [0] * len(sequences))
    return prefix_tree.build_prefix_tree([len(tokens) for tokens in sequences], known, multiple).ends


def see(ends: Tensor) -> Tensor:
    place = torch.arange(ends.numel())
    return (place <= place[:, None]) & (place[:, None] < ends)


def count_pairs(levels: list[flash.Level], n: int) -> Tensor:
    """(n, n) how often each query sees each key."""
    pairs = torch.zeros(n, n, dtype=torch.long)
    for level in levels:
        queries, keys = level.queries.tolist(), level.keys.tolist()
        assert (queries[0], queries[-1]) == (0, level.span.stop - level.span.start)
        assert level.longest == tuple(max(b - a for a, b in pairwise(x)) for x in (queries, keys))
        for of_queries, of_keys in zip(pairwise(queries), pairwise(keys), strict=True):
            assert of_queries[0] < of_queries[1]
            own = torch.arange(*of_keys)
            own = own if level.places is None else level.places[own]
            block = torch.ones(of_queries[1] - of_queries[0], own.numel(), dtype=torch.long)
            rows = torch.arange(*of_queries) + level.span.start
            pairs[rows[:, None], own] += block.tril() if level.places is None else block
    return pairs


@pytest.mark.parametrize("depth", range(4))
def test_levels_have_each_pair_once(depth, monkeypatch):
    monkeypatch.setattr(flash, "MOST_LEVELS", 9)
    monkeypatch.setattr(prefix_tree, "LEAST_SHARED", 1)
    for _ in range(20):
        ends = make_ends(depth)
        levels = flash.cut_into_levels(ends, CPU)
        assert torch.equal(count_pairs(levels, ends.numel()), see(ends).long())


def test_levels_of_known_trees():
    """A prompt and its completions take two, of which the first completion stands in its prompt's chain."""
    prompt, first, second = [9] * 4, [7] * 3, [9] * 2
    causal, further = flash.cut_into_levels(torch.tensor(prompt + first + second), CPU)
    assert causal.queries.tolist() == causal.keys.tolist() == [0, 7, 9]
    assert (further.span, further.queries.tolist(), further.keys.tolist()) == (slice(7, 9), [0, 2], [0, 4])
    assert further.places.tolist() == [0, 1, 2, 3]
    assert len(flash.cut_into_levels(torch.full((9,), 9), CPU)) == 1
    # One branch from each of the first tokens: each is a level of its own.
    assert flash.cut_into_levels(NESTED, CPU) is None
    assert len(flash.cut_into_levels(NESTED[1:] - 1, CPU)) == 4


def test_a_tree_without_levels_is_said_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    monkeypatch.setattr(flash, "is_installed", lambda: False)
    assert flash.find_levels(NESTED, None, CPU) is None
    assert flash.choose_levels(None, 30.0) is None
    assert not caplog.messages
    monkeypatch.setattr(flash, "is_installed", lambda: True)
    flash._say_why_not.cache_clear()
    flat = flash.find_levels(NESTED[1:] - 1, None, CPU)
    assert flash.choose_levels(flat, None) is flat
    for _ in range(2):
        assert flash.choose_levels(flash.find_levels(NESTED, None, CPU), None) is None
        assert flash.choose_levels(flash.find_levels(NESTED, 9, CPU), None) is None
        assert flash.choose_levels(flat, 30.0) is None
    reasons = [message.split("not flash-attn-4: ")[1] for message in caplog.messages]
    assert reasons == [
        "shared prefixes are nested more than 3 deep", "layers have a window", "scores have a softcap",
    ]  # fmt: skip
    flash._say_why_not.cache_clear()


def test_a_module_without_a_spec_is_not_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    flash.is_installed.cache_clear()
    assert not flash.is_installed()
    flash.is_installed.cache_clear()


def attend_in_segments(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float | None, causal: bool, **segments: Any
) -> tuple[Tensor, Tensor]:
    """As the kernel: (n, heads, width) and log-sum-exps (heads, n); of a query without keys 0 and -inf."""
    n, m = query.shape[0], key.shape[0]
    of_query, of_key = (
        torch.bucketize(torch.arange(size), segments[name][1:].long(), right=True)
        for size, name in ((n, "cu_seqlens_q"), (m, "cu_seqlens_k"))
    )
    sees = of_query[:, None] == of_key
    if causal:
        sees &= torch.arange(m) <= torch.arange(n)[:, None]
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1).float() for x in (query, *(x.repeat_interleave(group, 1) for x in (key, value))))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q @ k.mT * scale).masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(-1)
    shares = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return (shares @ v).transpose(0, 1).to(query.dtype).contiguous(), lse.contiguous()


def stand_in_forward(*columns: Tensor, return_lse: bool, **options: Any) -> tuple[Tensor | None, ...]:
    assert return_lse
    with torch.no_grad():
        return *attend_in_segments(*columns, **options), None, None, None


def stand_in_backward(query, key, value, output, upstream, lse, *, deterministic, **options):
    """With the joint output and log-sum-exps, as the kernel: dS = P (dP - sum(dO O)), P = exp(S - lse)."""
    assert deterministic
    columns = [x.detach().float().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        own, own_lse = attend_in_segments(*columns, **options)
        share = (own_lse - lse).exp().detach().T[..., None]
        delta = (upstream.float() * output.float()).sum(-1)
        # d own = share dO; d own_lse brings the rest of dS.
        of_lse = share[..., 0] * ((upstream.float() * own.detach()).sum(-1) - delta)
        reached = own_lse > -torch.inf
        total = (own * share * upstream.float()).sum() + torch.where(reached, own_lse * of_lse.T, 0).sum()
    return torch.autograd.grad(total, columns)


def run_densely(columns: list[Tensor], ends: Tensor, scale: float | None) -> Tensor:
    query, key, value = columns
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~see(ends).to(query.device), -torch.inf).softmax(-1) @ value


def make_columns(n: int, heads: int, key_heads: int, width: int, dtype: torch.dtype, device: Any = CPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    # As of a projection: tokens stand before heads.
    return [
        torch.randn(1, n, count, width, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]


@pytest.mark.parametrize(
    ("depth", "heads", "width", "scale"), [(0, (2, 2), 4, None), (1, (4, 2), 6, 0.3), (2, (3, 1), 8, None)]
)
def test_levels_are_joined(depth, heads, width, scale, monkeypatch):
    skip_without_interpreter()
    monkeypatch.setattr(flash, "_load_kernels", lambda: (stand_in_forward, stand_in_backward))
    monkeypatch.setattr(prefix_tree, "LEAST_SHARED", 1)
    monkeypatch.setattr(flash, "MOST_LEVELS", 9)
    ends = make_ends(depth, 12)
    levels = flash.cut_into_levels(ends, CPU)
    assert len(levels) > 1 or depth == 0
    columns = make_columns(ends.numel(), *heads, width, torch.float32)
    found, expected = flash.attend(*columns, levels, scale), run_densely(columns, ends, scale)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(output, columns, upstream, retain_graph=True) for output in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.square().sum(), columns[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # a part of it would have no gradient
        gradient.sum().backward()


def test_what_cannot_run_is_said_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "liger_rl")
    shape = (CPU, torch.bfloat16, 16, 8, 128, 128)
    flash.can_attend.cache_clear()
    monkeypatch.setattr(flash, "is_installed", lambda: False)
    assert not flash.can_attend(*shape)
    assert not caplog.messages
    flash.can_attend.cache_clear()
    monkeypatch.setattr(flash, "is_installed", lambda: True)
    for _ in range(2):
        assert not flash.can_attend(*shape)
    (line,) = caplog.messages
    assert line.endswith("16 heads of 128: flex attention, not flash-attn-4: the GPU is no Hopper")
    flash.can_attend.cache_clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"dtype": torch.float32}, "float32"), ({"width": 80}, "80 and 128"), ({"value_width": 64}, "128 and 64")],
)
def test_shapes_that_cannot_run(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "width": 128, "value_width": 128}
    assert flash._find_obstacle(**shape) is None
    assert reason in flash._find_obstacle(**shape | change)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("raises", "RuntimeError: no kernel"),
        ("scales", "off"),
        ("counts what sees no key", "off"),
        ("has no gradient", "nan off"),
        (None, "None"),
    ],
)
def test_kernels_are_tried_on_a_small_tree(broken, expected, monkeypatch):
    skip_without_interpreter()

    def forward(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        if broken == "raises":
            raise RuntimeError("no kernel\nand a long dump")
        output, lse, *rest = stand_in_forward(query * (1.1 if broken == "scales" else 1), *others, **options)
        return output, lse.nan_to_num(neginf=0.0) if broken == "counts what sees no key" else lse, *rest

    def backward(*columns: Tensor, **options: Any) -> tuple[Tensor, ...]:
        *others, of_value = stand_in_backward(*columns, **options)
        return *others, of_value * torch.nan if broken == "has no gradient" else of_value

    monkeypatch.setattr(flash, "_load_kernels", lambda: (forward, backward))
    reason = flash._try_kernels(CPU, torch.float32, 2, 1, 16)
    assert expected in str(reason)
    assert "dump" not in str(reason)


def test_a_checkpoint_does_not_see_the_try(monkeypatch):
    """It compares what its first forward saves with what the recomputation saves, in which nothing is tried."""
    skip_without_interpreter()
    monkeypatch.setattr(flash, "_load_kernels", lambda: (stand_in_forward, stand_in_backward))
    monkeypatch.setattr(flash, "is_installed", lambda: True)
    monkeypatch.setattr(flash, "_find_obstacle", lambda *_: None)
    flash.can_attend.cache_clear()
    ends = make_ends(1, 12)
    levels, columns = flash.cut_into_levels(ends, CPU), make_columns(ends.numel(), 2, 1, 16, torch.float32)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert flash.can_attend(CPU, torch.float32, 2, 1, 16, 16)
        return flash.attend(query * 2, key, value, levels).square()

    checkpoint(layer, *columns, use_reentrant=False).sum().backward()
    flash.can_attend.cache_clear()


@pytest.mark.parametrize("width", [pytest.param(width, marks=NEEDS_GPU) for width in flash.WIDTHS])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_kernels(depth, width, monkeypatch):
    monkeypatch.setattr(flash, "MOST_LEVELS", 9)
    if not flash.is_installed():
        pytest.skip("flash-attn-4 is not installed")
    device = torch.device("cuda", 0)
    ends = make_ends(depth, 400, attention.BLOCK)
    mask = attention._make_block_mask(ends, torch.arange(ends.numel()), None, device)
    columns = make_columns(ends.numel(), 4, 2, width, torch.bfloat16, device)
    assert flash.can_attend(device, torch.bfloat16, 4, 2, width, width)
    assert isinstance(mask.levels, list)
    levels, mask.levels = mask.levels, None
    upstream = torch.randn(1, 4, ends.numel(), width, generator=torch.Generator().manual_seed(1)).to(device)
    exact = [x.detach().double().requires_grad_() for x in columns]
    runs = {
        "flash": (columns, flash.attend(*columns, levels, None)),
        "again": (columns, flash.attend(*columns, levels, None)),
        "flex": (columns, attention._run_flex_attention(*columns, mask, None, None)),
        "exact": (exact, run_densely(exact, ends, None)),
    }
    values = {
        name: [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(output.dtype))]
        for name, (inputs, output) in runs.items()
    }
    for ours, again, flex, exact_values in zip(*values.values(), strict=True):
        assert torch.equal(ours, again)
        scale = exact_values.norm()
        assert (ours - exact_values).norm() < 1.5 * (flex - exact_values).norm() + 1e-3 * scale
        assert (ours - exact_values).norm() < 1e-2 * scale
