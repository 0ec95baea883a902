"""Divergence of two heads beside TRL's op, and a loss with an exact KL beside k3: `python -m benchmark.divergence`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.environment import describe, output_directory, slug, write_results
from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms
from liger_rl import FusedLinearGRPOLoss, ReferenceHead, linear_divergence

PREFIX = "divergence-"
SAMPLED, ENTRIES = 48, 8192  # tokens and vocabulary entries that are compared with float64
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


class Heads(NamedTuple):
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor


def make_heads(shape: Shape, device: str) -> Heads:
    g = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    parts = []
    for size in (shape.hidden_size, shape.teacher_hidden_size):
        parts += [normal(shape.tokens, size), normal(shape.vocab, size) * SPREAD / size**0.5]
    return Heads(*(part.to(shape.dtype) for part in parts))


# (heads, kind, factors of the tokens (N,)) -> (per-token divergence (N,), sum of factors * divergence ())
Way = Callable[[Heads, str, Tensor], tuple[Tensor, Tensor]]


def _two_passes(heads: Heads, kind: str, factors: Tensor) -> tuple[Tensor, Tensor]:
    found = linear_divergence(*heads, kind=kind).divergence
    return found, (found * factors).sum()


def _one_pass(heads: Heads, kind: str, factors: Tensor) -> tuple[Tensor, Tensor]:
    found = linear_divergence(*heads, kind=kind, token_weights=factors)
    assert found.loss is not None
    return found.divergence, found.loss


def _trl() -> Way:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def way(heads: Heads, kind: str, factors: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, teacher_hidden, teacher_weight = heads
        beta = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}[kind]
        given = (hidden, weight, None, teacher_hidden, teacher_weight, None, beta)
        found = ChunkedDivergenceFunction.apply(*given)[0]
        return found, (found * factors).sum()

    return way


WAYS: dict[str, Callable[[], Way]] = {
    "TRL": _trl,
    "liger_rl": lambda: _two_passes,
    "liger_rl, one pass": lambda: _one_pass,
}


@torch.no_grad()
def in_float64(heads: Heads, kind: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of some tokens: divergence, gradient of hidden, and of the weight's first ENTRIES for a loss of these alone."""
    hidden, weight, teacher_hidden, teacher_weight = heads

    def log_probs(left: Tensor, right: Tensor) -> Tensor:
        parts = [left[rows].double() @ part.double().T for part in right.split(1 << 14)]
        return torch.cat(parts, dim=1).log_softmax(-1)

    log_p, log_q = log_probs(hidden, weight), log_probs(teacher_hidden, teacher_weight)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        value, slopes = (q * (log_q - log_p)).sum(-1), p - q
    elif kind == "reverse_kl":
        value = (p * (log_p - log_q)).sum(-1)
        slopes = p * (log_p - log_q - value[:, None])
    else:
        log_m = ((p + q) / 2).log()
        own = (p * (log_p - log_m)).sum(-1)
        value = (own + (q * (log_q - log_m)).sum(-1)) / 2
        slopes = p * (log_p - log_m - own[:, None]) / 2
    grad_hidden = torch.zeros(slopes.shape[0], weight.shape[1], dtype=torch.float64, device=weight.device)
    for slope, part in zip(slopes.split(1 << 14, dim=1), weight.split(1 << 14), strict=True):
        grad_hidden += slope @ part.double()
    return value, grad_hidden, slopes[:, :ENTRIES].T @ hidden[rows].double()


class Gold(NamedTuple):
    """What `in_float64` says of some tokens."""

    rows: Tensor
    found: tuple[Tensor, Tensor, Tensor]


def gold_of_some(heads: Heads, kind: str) -> Gold:
    n = heads.hidden.shape[0]
    rows = torch.arange(0, n, max(1, n // SAMPLED), device=heads.hidden.device)[:SAMPLED]
    return Gold(rows, in_float64(Heads(*(part.detach() for part in heads)), kind, rows))


def measure(make: Callable[[], Way], heads: Heads, kind: str, device: str, gold: Gold | None = None) -> dict[str, Any]:
    """Errors are those of a loss of the tokens of `gold`."""
    try:
        way = make()
    except ImportError as error:
        return {"status": "unavailable", "reason": str(error)}
    leaves = heads._replace(hidden=heads.hidden.requires_grad_(), weight=heads.weight.requires_grad_())
    n = heads.hidden.shape[0]
    rows, (value, grad_hidden, grad_weight) = gold or gold_of_some(heads, kind)

    def step(factors: Tensor) -> tuple[Tensor, ...]:
        found, loss = way(leaves, kind, factors)
        return found.detach(), *torch.autograd.grad(loss, leaves[:2])

    sampled = torch.zeros(n, device=rows.device).index_fill(0, rows, 1.0)
    found = step(sampled)
    numbers: dict[str, Any] = {
        "value_error": relative(found[0][rows][None], value[None]),
        "grad_hidden_error": relative(found[1][rows], grad_hidden),
        "grad_weight_error": relative(found[2][:ENTRIES], grad_weight),
    }
    del found
    factors = torch.ones(n, device=rows.device) / n
    with PeakMemory(device) as memory:
        held = step(factors)
    numbers["peak_extra_mib"] = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
    del held
    numbers["step_ms"] = measure_ms(lambda: step(factors), device).median_ms
    return {"status": "ok", "reason": None, **numbers}


# A loss with a KL penalty, by (estimator, passes). With k3 the reference's log-probabilities are a call of their own.
PENALTIES = [(estimator, passes) for passes in ("two", "one") for estimator in ("k3", "exact")]


def penalised(estimator: str, passes: Any, heads: Heads, ids: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    """-> the loss and its metrics."""
    loss = FusedLinearGRPOLoss("bnpo", beta=0.04, kl_estimator=estimator, passes=passes)
    hidden, weight, ref_hidden, ref_weight = heads
    if estimator == "exact":
        reference = ReferenceHead(hidden=ref_hidden, weight=ref_weight)
        return loss(hidden, weight, ids, advantages, mask, reference=reference)
    ref = loss.reference_logps(ref_hidden, ref_weight, ids, mask)
    return loss(hidden, weight, ids, advantages, mask, ref_per_token_logps=ref)


def penalty_rows(shape: Shape, device: str) -> list[dict[str, Any]]:
    heads = make_heads(shape, device)
    heads = heads._replace(hidden=heads.hidden.requires_grad_(), weight=heads.weight.requires_grad_())
    n, place = shape.tokens, heads.hidden.device
    ids = torch.randint(shape.vocab, (n,), device=place)
    advantages, every = torch.randn(n, device=place), torch.ones(n, dtype=torch.bool, device=place)
    sampled = torch.arange(0, n, max(1, n // SAMPLED), device=place)[:SAMPLED]
    exact = in_float64(Heads(*(part.detach() for part in heads)), "reverse_kl", sampled)[0].mean()
    rows: list[dict[str, Any]] = []
    for estimator, passes in PENALTIES:

        def step(estimator: str = estimator, passes: str = passes) -> tuple[Tensor, ...]:
            loss = penalised(estimator, passes, heads, ids, advantages, every).loss
            return torch.autograd.grad(loss, heads[:2])

        few = every.clone().fill_(False).index_fill(0, sampled, True)
        with torch.no_grad():
            kl = penalised(estimator, passes, heads, ids, advantages, few).metrics["kl_ref"].value
        with PeakMemory(device) as memory:
            held = step()
        extra = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
        del held
        row = {"status": "ok", "reason": None, "estimator": estimator, "passes": passes, "peak_extra_mib": extra}
        if estimator == "exact":
            row["kl_error"] = relative(kl[None, None], exact[None, None])
        row["step_ms"] = measure_ms(step, device).median_ms
        row["x_k3"] = row["step_ms"] / next(r["step_ms"] for r in [*rows, row] if r["passes"] == passes)
        rows.append(shape._asdict() | {"dtype": str(shape.dtype).split(".")[1]} | row)
    return rows


PENALTY_COLUMNS: Columns = {
    "forward + backward ms": number("step_ms", ".1f"),
    "x k3": number("x_k3", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "KL error": number("kl_error", ".1e"),
}

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
    rows = [{"kind": kind, "variant": name, **measure(make, heads, kind, device)} for name, make in WAYS.items()]
    sizes = shape._asdict() | {"dtype": str(shape.dtype).split(".")[1]}
    floor = rows[0].get("step_ms")
    return [sizes | row | {"x_trl": row["step_ms"] / floor if floor and "step_ms" in row else None} for row in rows]


def markdown(results: dict[str, Any]) -> str:
    lines = []
    for row in results["rows"]:
        sizes = f"H = {row['hidden_size']}, teacher's {row['teacher_hidden_size']}"
        lines.append((f"{row['kind']}, {sizes}: {row['variant']}", row))
    table = f"{environment_line(results['environment'], ('trl',))}\n\n{markdown_table(COLUMNS, lines)}\n"
    losses = []
    for row in results.get("penalties", ()):
        sizes = f"H = {row['hidden_size']}, reference's {row['teacher_hidden_size']}"
        passes = "one pass" if row["passes"] == "one" else "two passes"
        losses.append((f"a loss with {row['estimator']}, {passes}, {sizes}", row))
    return f"{table}\n{markdown_table(PENALTY_COLUMNS, losses)}\n" if losses else table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.divergence", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: benchmark/results on CUDA")
    arguments = parser.parse_args()
    environment = describe("auto")
    device = environment["device"]
    rows = [row for shape in SHAPES[device] for kind in KINDS for row in rows_of(shape, kind, device)]
    penalties = [row for shape in SHAPES[device] for row in penalty_rows(shape, device)]
    results = {"environment": environment, "rows": rows, "penalties": penalties}
    target = output_directory(arguments.output, whole=device == "cuda") / f"{PREFIX}{slug(environment)}.json"
    write_results(target, results)
    print(markdown(results))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
