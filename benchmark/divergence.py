"""Divergence of two heads beside TRL's op: `python -m benchmark.divergence`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.command import run
from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.pairs import ENTRIES, Heads, gradients_of, log_probs, value_and_slopes
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms
from liger_rl import linear_divergence
from liger_rl.distill.divergence import DivergenceCall, compute_in_one_pass_if_free, make_measure
from liger_rl.head import LogitTransform
from liger_rl.head.head_options import HeadOptions

PREFIX = "divergence-"
SAMPLED = 48  # tokens that are compared with float64
SPREAD = 3.0  # of the logits, in nats


class Shape(NamedTuple):
    tokens: int
    vocab: int
    hidden_size: int
    teacher_hidden_size: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "cuda": (Shape(8192, 151936, 2048, 4096), Shape(8192, 151936, 4096, 4096)),
    "cpu": (Shape(64, 500, 16, 32),),  # to see that everything runs
}
KINDS = ("forward_kl", "jsd")
TRLS_BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}


def make_heads(shape: Shape, device: str) -> Heads:
    g = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    parts = []
    for size in (shape.hidden_size, shape.teacher_hidden_size):
        parts += [normal(shape.tokens, size), normal(shape.vocab, size) * SPREAD / size**0.5]
    return Heads(*(part.to(shape.dtype) for part in parts))


# (heads, kind, bool mask (N,)) -> per-token divergence (N,), and its mean () over the mask's tokens
Way = Callable[[Heads, str, Tensor], tuple[Tensor, Tensor]]


def _two_passes(heads: Heads, kind: str, mask: Tensor) -> tuple[Tensor, Tensor]:
    found = linear_divergence(*heads, kind=kind, mask=mask).divergence
    return found, found.sum() / mask.sum()


def _one_pass(heads: Heads, kind: str, mask: Tensor) -> tuple[Tensor, Tensor]:
    """As under TRL's DistillationTrainer, where one pass is free."""
    hidden, weight, teacher_hidden, teacher_weight = heads
    call = DivergenceCall(
        hidden=hidden, weight=weight, bias=None, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_bias=None, teacher_transform=LogitTransform(), measure=make_measure("jsd", TRLS_BETAS[kind]), mask=mask,
        options=HeadOptions(),
    )  # fmt: skip
    factor = 1.0 / mask.sum()
    found, hook = compute_in_one_pass_if_free(call, factor)
    loss = found.divergence.sum() * factor
    return found.divergence, loss if hook is None else loss + hook


def _trl() -> Way:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def way(heads: Heads, kind: str, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, teacher_hidden, teacher_weight = heads
        given = (hidden, weight, None, teacher_hidden, teacher_weight, None, TRLS_BETAS[kind])
        found = ChunkedDivergenceFunction.apply(*given)[0]
        return found, (found * mask).sum() / mask.sum()

    return way


WAYS: dict[str, Callable[[], Way]] = {
    "TRL": _trl,
    "liger_rl": lambda: _two_passes,
    "liger_rl, one pass": lambda: _one_pass,
}


@torch.no_grad()
def in_float64(heads: Heads, kind: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of some tokens: divergence, gradient of hidden, and of the weight's first ENTRIES for their sum."""
    value, slopes = value_and_slopes(*log_probs(heads, rows), kind)
    return value, *gradients_of(slopes, heads, rows)


class Gold(NamedTuple):
    """What `in_float64` says of some tokens."""

    rows: Tensor
    found: tuple[Tensor, Tensor, Tensor]


def gold_of_some(heads: Heads, kind: str) -> Gold:
    n = heads.hidden.shape[0]
    rows = torch.arange(0, n, max(1, n // SAMPLED), device=heads.hidden.device)[:SAMPLED]
    return Gold(rows, in_float64(Heads(*(part.detach() for part in heads)), kind, rows))


def measure(make: Callable[[], Way], heads: Heads, kind: str, device: str, gold: Gold | None = None) -> dict[str, Any]:
    """Errors are those of the mean over the tokens of `gold`."""
    try:
        way = make()
    except ImportError as error:
        return {"status": "unavailable", "reason": str(error)}
    leaves = heads._replace(hidden=heads.hidden.requires_grad_(), weight=heads.weight.requires_grad_())
    n = heads.hidden.shape[0]
    rows, (value, grad_hidden, grad_weight) = gold or gold_of_some(heads, kind)

    def step(mask: Tensor) -> tuple[Tensor, ...]:
        found, loss = way(leaves, kind, mask)
        return found.detach(), *torch.autograd.grad(loss, leaves[:2])

    found = step(torch.zeros(n, dtype=torch.bool, device=rows.device).index_fill(0, rows, True))
    count = rows.numel()
    numbers: dict[str, Any] = {
        "value_error": relative(found[0][rows][None], value[None]),
        "grad_hidden_error": relative(found[1][rows], grad_hidden / count),
        "grad_weight_error": relative(found[2][:ENTRIES], grad_weight / count),
    }
    del found
    every = torch.ones(n, dtype=torch.bool, device=rows.device)
    with PeakMemory(device) as memory:
        held = step(every)
    numbers["peak_extra_mib"] = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
    del held
    numbers["step_ms"] = measure_ms(lambda: step(every), device).median_ms
    return {"status": "ok", "reason": None, **numbers}


COLUMNS: Columns = {
    "forward + backward ms": number("step_ms", ".1f"),
    "x TRL": number("x_trl", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "value error": number("value_error", ".1e"),
    "dH error": number("grad_hidden_error", ".1e"),
    "dW error": number("grad_weight_error", ".1e"),
}


def rows_of(shape: Shape, kind: str, device: str) -> list[dict[str, Any]]:
    heads = make_heads(shape, device)
    ways = {name: make for name, make in WAYS.items() if name != "TRL" or kind in TRLS_BETAS}
    rows = [{"kind": kind, "variant": name, **measure(make, heads, kind, device)} for name, make in ways.items()]
    sizes = shape._asdict() | {"dtype": str(shape.dtype).split(".")[1]}
    floor = next((row.get("step_ms") for row in rows if row["variant"] == "TRL"), None)
    return [sizes | row | {"x_trl": row["step_ms"] / floor if floor and "step_ms" in row else None} for row in rows]


def markdown(results: dict[str, Any]) -> str:
    lines = []
    for row in results["rows"]:
        sizes = f"H = {row['hidden_size']}, teacher's {row['teacher_hidden_size']}"
        lines.append((f"{row['kind']}, {sizes}: {row['variant']}", row))
    return f"{environment_line(results['environment'], ('trl',))}\n\n{markdown_table(COLUMNS, lines)}\n"


def measure_all(device: str) -> dict[str, Any]:
    return {"rows": [row for shape in SHAPES[device] for kind in KINDS for row in rows_of(shape, kind, device)]}


if __name__ == "__main__":
    run("divergence", __doc__, PREFIX, measure_all, markdown)
