"""Several targets a token, and lse: `python -m benchmark.targets`.

K ids of each token, as common as words are, and one gradient for each. Ways:

liger_rl                `linear_logprobs` with one target, then with lists of K
liger_rl, lse           one target, and the gradient of lse beside it
full logits             verl's operations: bfloat16 logits, `log_softmax`, `gather`
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.command import run
from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms
from liger_rl import linear_logprobs

PREFIX = "targets-"
SAMPLED, ENTRIES = 48, 8192  # tokens and vocabulary entries that are compared with float64
SPREAD = 3.0  # of the logits, in nats
SHAPES = {  # N, V, H
    "cuda": ((8192, 151936, 1024), (8192, 151936, 2048), (8192, 151936, 4096)),
    "cpu": ((64, 500, 16),),  # to see that everything runs
}
COUNTS, FULL_COUNT = (1, 8, 64, 128), 64


class Problem(NamedTuple):
    hidden: Tensor  # (N, H) bfloat16
    weight: Tensor  # (V, H) bfloat16 or float32
    ids: Tensor  # (N, most) int64, distinct within a token
    slopes: Tensor  # (N, most) float32, dL/dlogp

    def of(self, count: int) -> "Problem":
        return self._replace(ids=self.ids[:, :count].contiguous(), slopes=self.slopes[:, :count].contiguous())


def make_problem(
    tokens: int, vocab: int, hidden_size: int, device: str, weight_dtype: torch.dtype = torch.bfloat16
) -> Problem:
    g = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    hidden, weight = normal(tokens, hidden_size).bfloat16(), normal(vocab, hidden_size) * SPREAD / hidden_size**0.5
    first = (vocab ** torch.rand(tokens, 1, generator=g, device=device)).long()
    ids = (first + 37 * torch.arange(max(COUNTS), device=device)) % vocab
    return Problem(hidden, weight.to(weight_dtype), ids, -normal(*ids.shape).softmax(1) / tokens)


class Values(NamedTuple):
    logps: Tensor  # (N, K)
    lse: Tensor | None = None  # (N,)


Way = Callable[[Problem], Values]


def _one(problem: Problem) -> Values:
    return Values(linear_logprobs(problem.hidden, problem.weight, problem.ids[:, 0]).logps[:, None])


def _with_lse(problem: Problem) -> Values:
    found = linear_logprobs(problem.hidden, problem.weight, problem.ids[:, 0], lse=True)
    return Values(found.logps[:, None], found.lse)


def _listed(problem: Problem) -> Values:
    return Values(linear_logprobs(problem.hidden, problem.weight, problem.ids).logps)


def _full_logits(problem: Problem) -> Values:
    return Values((problem.hidden @ problem.weight.T).log_softmax(-1).gather(1, problem.ids))


WAYS: dict[str, tuple[Way, int]] = {
    "liger_rl, one target": (_one, 1),
    **{f"liger_rl, K = {count}": (_listed, count) for count in COUNTS},
    "liger_rl, one target and lse": (_with_lse, 1),
    f"full logits, K = {FULL_COUNT}": (_full_logits, FULL_COUNT),
}


def in_float64(problem: Problem, rows: Tensor, *, lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of some tokens: values (n, K), gradient of hidden, of the weight's first ENTRIES; for a loss of these alone."""
    parts = [problem.hidden[rows].double() @ part.double().T for part in problem.weight.split(1 << 14)]
    log_p = torch.cat(parts, dim=1).log_softmax(1)
    ids, slopes = problem.ids[rows], problem.slopes[rows].double()
    total = slopes.sum(1, keepdim=True) - (slopes[:, :1] if lse else 0.0)
    grad = (-total * log_p.exp()).scatter_add_(1, ids, slopes)
    pairs = zip(grad.split(1 << 14, dim=1), problem.weight.split(1 << 14), strict=True)
    grad_hidden = torch.stack([slope @ part.double() for slope, part in pairs]).sum(0)
    return log_p.gather(1, ids), grad_hidden, grad[:, :ENTRIES].T @ problem.hidden[rows].double()


def sampled(problem: Problem) -> Tensor:
    n = problem.hidden.shape[0]
    return torch.arange(0, n, max(1, n // SAMPLED), device=problem.hidden.device)[:SAMPLED]


def measure(way: Way, problem: Problem, device: str) -> dict[str, Any]:
    leaves = problem._replace(
        hidden=problem.hidden.detach().requires_grad_(), weight=problem.weight.detach().requires_grad_()
    )
    rows = sampled(problem)

    def step(slopes: Tensor) -> tuple[Tensor, ...]:
        found = way(leaves)
        outputs, upstream = [found.logps], [slopes.to(found.logps.dtype)]
        if found.lse is not None:
            outputs, upstream = [found.logps, found.lse], [slopes, slopes[:, 0].contiguous()]
        return found.logps.detach(), *torch.autograd.grad(outputs, leaves[:2], upstream)

    value, grad_hidden, grad_weight = in_float64(problem, rows, lse=way is _with_lse)
    of_rows = torch.zeros_like(problem.slopes).index_copy(0, rows, problem.slopes[rows])
    found = step(of_rows)
    numbers: dict[str, Any] = {
        "max_error": (found[0][rows].double() - value).abs().max().item(),
        "rms_error": (found[0][rows].double() - value).square().mean().sqrt().item(),
        "grad_hidden_error": relative(found[1][rows], grad_hidden),
        "grad_weight_error": relative(found[2][:ENTRIES], grad_weight),
    }
    del found
    with PeakMemory(device) as memory:
        held = step(problem.slopes)
    numbers["peak_extra_mib"] = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
    del held
    return {"status": "ok", "reason": None, **numbers, "step_ms": measure_ms(lambda: step(problem.slopes), device)[0]}


COLUMNS: Columns = {
    "ms": number("step_ms", ".1f"),
    "x one target": number("x_one", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "largest error, nats": number("max_error", ".1e"),
    "dH error": number("grad_hidden_error", ".1e"),
    "dW error": number("grad_weight_error", ".1e"),
}


def rows_of(shape: tuple[int, int, int], device: str) -> list[dict[str, Any]]:
    problem, sizes = make_problem(*shape, device), dict(zip(("tokens", "vocab", "hidden_size"), shape, strict=True))
    steps = {name: measure(way, problem.of(count), device) for name, (way, count) in WAYS.items()}
    one = next(iter(steps.values()))["step_ms"]
    return [sizes | {"variant": name, **row, "x_one": row["step_ms"] / one} for name, row in steps.items()]


def markdown(results: dict[str, Any]) -> str:
    lines = [(f"H = {row['hidden_size']}: {row['variant']}", row) for row in results["rows"]]
    return f"{environment_line(results['environment'], ())}\n\n{markdown_table(COLUMNS, lines)}\n"


def measure_all(device: str) -> dict[str, Any]:
    return {"rows": [row for shape in SHAPES[device] for row in rows_of(shape, device)]}


if __name__ == "__main__":
    run("targets", __doc__, PREFIX, measure_all, markdown)
