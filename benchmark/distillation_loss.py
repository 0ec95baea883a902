"""The loss of TRL's DistillationTrainer with and without `patch_trl()`: `python -m benchmark.distillation_loss`.

Under autocast in bfloat16, as TRL trains. TRL loads models in float32 unless it is told otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmark.command import run
from benchmark.divergence import SHAPES as HEADS
from benchmark.divergence import gold_of_some, make_heads
from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.pairs import ENTRIES, Heads
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms

PREFIX = "distillation_loss-"
TOKENS = {"cuda": (2048, 8192), "cpu": (64,)}
DTYPES = (torch.float32, torch.bfloat16)  # of both weights
BETAS = {"reverse_kl": 1.0, "jsd": 0.5}  # the first is TRL's default


def _trl() -> Callable[..., tuple[Tensor, ...]]:
    from trl.trainer import distillation_trainer

    return distillation_trainer._chunked_divergence_loss


def _patched() -> Callable[..., tuple[Tensor, ...]]:
    from liger_rl.integrations.trl import distillation

    return distillation._chunked_divergence_loss


WAYS = {"TRL": _trl, "liger_rl": _patched}


def measure(make: Callable[[], Callable], heads: Heads, kind: str, device: str) -> dict[str, Any]:
    """Errors are those of a loss of some tokens."""
    try:
        loss = make()
    except ImportError as error:
        return {"status": "unavailable", "reason": str(error)}
    rows, (value, grad_hidden, grad_weight) = gold_of_some(heads, kind)
    leaves = heads.hidden.detach().requires_grad_(), heads.weight.detach().requires_grad_()

    def step(mask: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            found = loss(
                leaves[0][None], heads.teacher_hidden[None], leaves[1], heads.teacher_weight, mask[None], BETAS[kind],
                num_items_in_batch=mask.sum(),
            )  # fmt: skip
        return found[0].detach(), *torch.autograd.grad(found[0], leaves)

    n = heads.hidden.shape[0]
    found = step(torch.zeros(n, dtype=torch.int64, device=device).index_fill(0, rows, 1))
    count = rows.numel()
    numbers: dict[str, Any] = {
        "value_error": relative(found[0][None, None], value.mean()[None, None]),
        "grad_hidden_error": relative(found[1][rows], grad_hidden / count),
        "grad_weight_error": relative(found[2][:ENTRIES], grad_weight / count),
    }
    del found
    every = torch.ones(n, dtype=torch.int64, device=device)
    with PeakMemory(device) as memory:
        held = step(every)
    numbers["peak_extra_mib"] = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
    del held
    return {"status": "ok", "reason": None, **numbers, "step_ms": measure_ms(lambda: step(every), device).median_ms}


COLUMNS: Columns = {
    "forward + backward ms": number("step_ms", ".1f"),
    "x TRL": number("x_trl", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "loss error": number("value_error", ".1e"),
    "dH error": number("grad_hidden_error", ".1e"),
    "dW error": number("grad_weight_error", ".1e"),
}


def rows_of(tokens: int, dtype: torch.dtype, kind: str, device: str) -> list[dict[str, Any]]:
    shape = HEADS[device][0]._replace(tokens=tokens)
    heads = make_heads(shape, device)
    heads = heads._replace(weight=heads.weight.to(dtype), teacher_weight=heads.teacher_weight.to(dtype))
    sizes = shape._asdict() | {"dtype": str(shape.dtype)[6:], "weight_dtype": str(dtype)[6:], "kind": kind}
    rows = [sizes | {"variant": name} | measure(make, heads, kind, device) for name, make in WAYS.items()]
    floor = rows[0].get("step_ms")
    return [row | {"x_trl": row["step_ms"] / floor if floor and "step_ms" in row else None} for row in rows]


def markdown(results: dict[str, Any]) -> str:
    lines = [
        (f"{row['tokens']:,} tokens, {row['weight_dtype']} weights, {row['kind']}: {row['variant']}", row)
        for row in results["rows"]
    ]
    return f"{environment_line(results['environment'], ('trl',))}\n\n{markdown_table(COLUMNS, lines)}\n"


def measure_all(device: str) -> dict[str, Any]:
    cases = ((tokens, dtype, kind) for tokens in TOKENS[device] for dtype in DTYPES for kind in BETAS)
    return {"rows": [row for case in cases for row in rows_of(*case, device)]}


if __name__ == "__main__":
    run("distillation_loss", __doc__, PREFIX, measure_all, markdown)
