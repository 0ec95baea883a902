"""A head, calls of it, and what their products cost: what the tests of the head and of its losses share."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracles
from devices import HOPPER
from liger_rl import FusedLinearGRPOLoss, linear_divergence, linear_logprobs, support_logprobs, topk_divergence
from liger_rl.distill.divergence import DivergenceCall, compute_in_one_pass_if_free, make_measure
from liger_rl.fused_linear import grpo_loss_from_logits
from liger_rl.head import LogitTransform, logits_logprobs
from liger_rl.head.head_options import HeadOptions
from liger_rl.kernels.devices import GPUS, gpu_of
from liger_rl.kernels.limits import LIMITS
from liger_rl.support import Support


class Problem(NamedTuple):
    hidden: Tensor  # (B, T, H) or (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor
    bias: Tensor | None = None  # (V,)

    def floats(self) -> dict[str, Tensor]:
        parts = {name: getattr(self, name) for name in ("hidden", "weight", "bias")}
        return {name: part for name, part in parts.items() if part is not None}

    def leaves(self, frozen=()) -> "Problem":
        """Fresh leaves with the same values and strides."""
        return self._replace(**{k: t.detach().requires_grad_(k not in frozen) for k, t in self.floats().items()})

    def to(self, dtype: torch.dtype) -> "Problem":
        return self._replace(**{name: t.to(dtype) for name, t in self.floats().items()})

    def grads(self) -> dict[str, Tensor | None]:
        return {name: t.grad for name, t in self.floats().items()}


def problem(
    shape=(3, 5), hidden_size=16, vocab=129, dtype=torch.float32, device="cpu", *, bias=False, seed=0
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    hidden, weight = random(*shape, hidden_size, std=1.0), random(vocab, hidden_size, std=2 / math.sqrt(hidden_size))
    offsets = random(vocab, std=1.0) if bias else None
    found = Problem(hidden, weight, torch.randint(vocab, shape, generator=generator).to(device), offsets)
    return found._replace(**{name: t.to(device, dtype) for name, t in found.floats().items()})


def call(x: Problem, *, support: Support | None = None, **options):
    if support is not None:
        return support_logprobs(x.hidden, x.weight, x.targets, support, bias=x.bias, **options)
    return linear_logprobs(x.hidden, x.weight, x.targets, bias=x.bias, **options)


def functional(*outputs: Tensor | None) -> Tensor:
    """A fixed random linear functional of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(7)
    total = 0.0
    for values in outputs:
        if values is not None:
            total = total + (values * torch.randn(values.shape, generator=generator).to(values)).sum()
    return total


class Result(NamedTuple):
    logps: Tensor
    entropy: Tensor | None
    grads: dict[str, Tensor | None]


def finish(outputs, leaves: Problem) -> Result:
    functional(*outputs[:2]).backward()
    return Result(outputs[0].detach(), None if outputs[1] is None else outputs[1].detach(), leaves.grads())


def solve(inputs: Problem, *, frozen=(), **options) -> Result:
    """Values and gradients of `functional`."""
    leaves = inputs.leaves(frozen)
    return finish(call(leaves, **{"entropy": True, **options}), leaves)


def truth(inputs: Problem, mask: Tensor | None = None, *, entropy: bool = True, **transform) -> Result:
    """The full logits, in float64."""
    leaves = inputs.to(torch.float64).leaves()
    values = oracles.logprobs(leaves.hidden, leaves.weight, leaves.targets, leaves.bias, **transform)
    logps, entropies = values if mask is None else (torch.where(mask, part, 0.0) for part in values)
    return finish((logps, entropies if entropy else None), leaves)


def eager(inputs: Problem, **transform) -> Result:
    """What one writes without thinking."""
    leaves = inputs.leaves()
    logits = torch.nn.functional.linear(leaves.hidden, leaves.weight, leaves.bias)
    return finish(oracles.logits_logprobs(logits.float(), leaves.targets, **transform), leaves)


def assert_same(found, expected) -> None:
    """Results and gradients, however nested: bit for bit."""
    for mine, other in pairs(found, expected):
        assert torch.equal(mine, other)


def assert_close(found, expected, tolerance: float = 1e-5) -> None:
    """Values, and as the last part gradients, each within a tolerance of its largest number, or of 1."""
    for mine, other in pairs(found[:-1], expected[:-1]):
        torch.testing.assert_close(mine.double(), other.double(), rtol=tolerance, atol=tolerance)
    for mine, other in pairs(found[-1:], expected[-1:]):
        bound = tolerance * max(1.0, other.abs().max().item() if other.numel() else 0.0)
        torch.testing.assert_close(mine.double(), other.double(), rtol=tolerance, atol=bound)


def pairs(found, expected) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors in the same places; None stands beside None."""
    for mine, other in zip(*(tree_leaves(tuple(tree)) for tree in (found, expected)), strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            yield mine, other


# --- one table of public calls, of which test_properties.py asks every property ---------------------------------------


class Batch(NamedTuple):
    """The tensors of every call of the table, (B, T) tokens."""

    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,)
    teacher_hidden: Tensor  # (B, T, G)
    teacher_weight: Tensor  # (V, G)
    logits: Tensor  # (B, T, V)
    targets: Tensor  # (B, T)
    ids: Tensor  # (B, T, K)
    mask: Tensor  # (B, T)
    advantages: Tensor  # (B, T)
    teacher_logps: Tensor  # (B, T, K)

    def leaves(self, names: tuple[str, ...]) -> "Batch":
        """Fresh leaves of these names, with the same values and strides; no other tensor requires a gradient."""
        return self._replace(
            **{n: t.detach().requires_grad_(n in names) for n, t in self._asdict().items() if n in FLOATS}
        )

    def tokens(self, index) -> "Batch":
        """Of some sequences, or of all tokens in another order."""
        whole = ("weight", "bias", "teacher_weight")
        return self._replace(**{n: t[index] for n, t in self._asdict().items() if n not in whole})


def batch(shape=(3, 5), hidden_size=16, vocab=129, dtype=torch.float32, device="cpu", *, count=4, seed=0) -> Batch:
    x = problem(shape, hidden_size, vocab, dtype, device, bias=True, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    ids = torch.randint(vocab, (*shape, count), generator=generator)
    ids[..., -1] = ids[..., 0]  # a repeated id
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[..., 0] = True
    return Batch(
        *x[:2], *x[3:], random(*shape, hidden_size + 8).to(dtype), random(vocab, hidden_size + 8).to(dtype) / 4,
        random(*shape, vocab).to(dtype), x.targets, ids.to(device), mask.to(device), random(*shape),
        random(*shape, count).log_softmax(-1),
    )  # fmt: skip


FLOATS = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "logits")


class PublicCall(NamedTuple):
    function: Callable[..., tuple[Tensor, ...]]  # Batch, options -> differentiable results; (B, T, ...) or a scalar
    inputs: tuple[str, ...] = ("hidden", "weight", "bias")  # tensors of the Batch that get a gradient
    takes: frozenset[str] = frozenset()  # which of the properties' options

    def solve(self, x: Batch, *, frozen: tuple[str, ...] = (), **options) -> tuple[list[Tensor], dict]:
        """-> values, and gradients of a fixed linear functional of them by name."""
        leaves = x.leaves(tuple(name for name in self.inputs if name not in frozen))
        values = self.function(leaves, **options)
        functional(*values).backward()
        return [part.detach() for part in values], {name: getattr(leaves, name).grad for name in self.inputs}


def _support_logprobs(x: Batch, *, has_empty_rows=False, **options):
    rows = x.ids.clone()
    if has_empty_rows:
        rows[:, ::2] = -1
    support = Support.from_padded(rows)
    found = support_logprobs(x.hidden, x.weight, x.targets, support, mask=x.mask, bias=x.bias, entropy=True, **options)
    return found.logps, found.entropy


def _logprobs(x: Batch, *, several=False, transformed=False, **options):
    given = {"transform": LogitTransform(temperature=0.7, softcap=9.0)} if transformed else {}
    if several:
        given["lse"] = True
    options = {"entropy": True, **given, **options}
    found = linear_logprobs(x.hidden, x.weight, x.ids if several else x.targets, mask=x.mask, bias=x.bias, **options)
    others = ("lse" if options.get("lse") else None, *options.get("extras", ()))
    names = ("logps", "entropy" if options["entropy"] else None, *others)
    return tuple(getattr(found, name) for name in names if name is not None)


def _topk_divergence(x: Batch, **options):
    ids, logps = x.ids[..., :-1], x.teacher_logps[..., :-1]
    return (topk_divergence(x.hidden, x.weight, ids, logps, mask=x.mask, bias=x.bias, **options).divergence,)


def _divergence(x: Batch, **options):
    found = linear_divergence(
        x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, mask=x.mask, bias=x.bias, **options
    )
    return (found.divergence,)


def _divergence_in_one_pass(x: Batch, **options):
    """As TRL's DistillationTrainer gets it."""
    call = DivergenceCall(
        hidden=x.hidden, weight=x.weight, bias=x.bias, teacher_hidden=x.teacher_hidden, teacher_weight=x.teacher_weight,
        teacher_bias=None, teacher_transform=LogitTransform(), measure=make_measure("jsd", 0.5), mask=x.mask,
        options=HeadOptions(**options),
    )  # fmt: skip
    found, hook = compute_in_one_pass_if_free(call, x.hidden.new_full((), 0.25, dtype=torch.float32))
    return (0.25 * found.divergence.sum() + hook,)


def _loss(x: Batch, *, vocab_parallel=None, **options):
    module, place = FusedLinearGRPOLoss("gpg", **options), {"vocab_parallel": vocab_parallel}
    return (module(x.hidden, x.weight, x.targets, x.advantages, x.mask, bias=x.bias, **place).loss,)


def _given_logits(x: Batch, *, transformed=False, **options):
    given = {"transform": LogitTransform(temperature=0.7, softcap=9.0)} if transformed else {}
    return logits_logprobs(x.logits, x.targets, mask=x.mask, entropy=True, **given, **options)[:2]


def _policy_of_given_logits(x: Batch, **options):
    return (grpo_loss_from_logits(x.logits, x.targets, x.advantages, x.mask, loss_type="gpg", **options).loss,)


_EVERY = frozenset(("chunks", "autocast", "gather", "vocab_parallel"))
_TWO_HEADS = frozenset(("autocast", "gather"))
CALLS = {
    "dense": PublicCall(_logprobs, takes=_EVERY),
    "label smoothing": PublicCall(partial(_logprobs, lse=True, extras=("mean_logits",)), takes=_EVERY),
    "a temperature and a softcap": PublicCall(partial(_logprobs, transformed=True), takes=_EVERY),
    "several targets": PublicCall(partial(_logprobs, several=True), takes=_EVERY - {"gather"}),
    "a teacher's lists": PublicCall(_topk_divergence, takes=frozenset(("autocast", "vocab_parallel"))),
    "support": PublicCall(_support_logprobs, takes=frozenset(("gather",))),
    "support with empty rows": PublicCall(
        partial(_support_logprobs, has_empty_rows=True), takes=frozenset(("gather",))
    ),
    "forward KL": PublicCall(partial(_divergence, kind="forward_kl"), takes=_TWO_HEADS),
    "reverse KL": PublicCall(partial(_divergence, kind="reverse_kl"), takes=_TWO_HEADS),
    "JSD": PublicCall(partial(_divergence, kind="jsd", beta=0.3), takes=_TWO_HEADS),
    "JSD in one pass": PublicCall(_divergence_in_one_pass, takes=frozenset(("gather",))),
    "loss": PublicCall(_loss, takes=_EVERY - {"gather"}),
    "given logits": PublicCall(_given_logits, ("logits",)),
    "given logits, a temperature and a softcap": PublicCall(partial(_given_logits, transformed=True), ("logits",)),
    "policy of given logits": PublicCall(_policy_of_given_logits, ("logits",)),
}  # fmt: skip


class Products(TorchDispatchMode):
    """The factors and FLOPs of every matrix product, and the shape and dtype of every tensor made.

    On CUDA the backward runs in a thread of its own, out of the mode's sight, and so do products in Triton.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[Tensor, Tensor]] = []
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = []

    @property
    def flops(self) -> int:
        return sum(2 * a.numel() * b.shape[-1] for a, b in self.factors)

    def logits(self, hidden_size: int) -> list[tuple[int, int]]:
        """(tokens, vocabulary entries) of each tile of logits: a product with the transpose of a weight's tile."""
        tiles = [(a, b) for a, b in self.factors if b.shape[0] == hidden_size and b.stride(0) == 1]
        return [(a.shape[0], b.shape[1]) for a, b in tiles]

    def largest(self) -> int:
        return max(math.prod(shape) for shape, _ in self.made)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.factors.append(tuple([t for t in args if isinstance(t, Tensor)][-2:]))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.made.append((tuple(t.shape), t.dtype))
        return result


def run_triton(monkeypatch, *, epilogue: bool = False) -> None:
    """All kernels are Triton's, on CPU in its interpreter; with `epilogue` 16-bit products of any tokens have one."""
    import pytest

    pytest.importorskip("triton", reason="Triton is not installed")
    gpu = HOPPER if epilogue else HOPPER._replace(capability=(7, 5))
    monkeypatch.setitem(GPUS, torch.device("cpu"), gpu)
    if epilogue:
        monkeypatch.setattr(LIMITS, "product_tokens", 1)


def run_pytorch(monkeypatch, device: torch.device) -> None:
    """All kernels of the device are PyTorch's."""
    gpu = gpu_of(device)
    monkeypatch.setitem(GPUS, device, gpu and gpu._replace(triton=None))


def in_short_pieces(monkeypatch) -> None:
    """Segments, rows of ids, columns and masks in pieces that are short enough for a test to have several."""
    for name in ("by_token", "by_long_token", "by_id"):
        monkeypatch.setattr(LIMITS, name, replace(getattr(LIMITS, name), piece=8, columns=16))
    for name in ("row_ids", "sorted_ids", "select_tokens"):
        monkeypatch.setattr(LIMITS, name, 8)
    monkeypatch.setattr(LIMITS, "merge_tiles", 2)
