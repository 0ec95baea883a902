"""Per-token GRPO losses of logits that are already there, timed beside each other: `python -m benchmark.row_losses`."""

import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.command import parser_of, write
from benchmark.environment import describe, first_line, version
from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms

TEMPERATURE, EPSILON_LOW, EPSILON_HIGH, BETA = 0.9, 0.2, 0.4, 0.04
MASK_SHARE = 0.2
DRIFT_NATS = 0.2  # of the old and the reference policy from the current one, standard deviation per token
CUDA_REPEATS = 30
PREFIX = "row-losses-"  # of the files of results
STAND_IN_SIZE = 12288  # 5 ms on an H200


@dataclass(frozen=True, kw_only=True)
class Shape:
    """(B, L + 1, V) logits, of which the last position predicts nothing."""

    batch: int
    length: int
    vocab: int
    dtype: str


SHAPES = {
    "cuda": Shape(batch=8, length=1024, vocab=12800, dtype="bfloat16"),
    # To see that everything runs: kernels are interpreted there, and their times mean nothing.
    "cpu": Shape(batch=2, length=8, vocab=200, dtype="bfloat16"),
}


class Batch(NamedTuple):
    logits: Tensor  # (B, L + 1, V)
    ids: Tensor  # (B, L)
    old: Tensor  # (B, L) float32
    ref: Tensor  # (B, L) float32
    advantages: Tensor  # (B,) float32
    mask: Tensor  # (B, L) bool
    weights: Tensor  # (B, L) float32, d objective / d loss


def make_batch(shape: Shape, device: str) -> Batch:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=device)

    rows = (shape.batch, shape.length)
    logits = normal(shape.batch, shape.length + 1, shape.vocab)
    ids = torch.randint(shape.vocab, rows, generator=generator, device=device)
    # From a token that the policy did not expect to one that it is sure of.
    peak = uniform(*rows, 1) * 2 * math.log(shape.vocab)
    logits[:, :-1].scatter_add_(-1, ids[..., None], peak)
    logits = logits.to(getattr(torch, shape.dtype))
    current = selected_logps(logits, ids, torch.float32)
    lengths = torch.linspace(1 - 2 * MASK_SHARE, 1.0, shape.batch, device=device) * shape.length
    return Batch(
        logits=logits,
        ids=ids,
        old=current + DRIFT_NATS * normal(*rows),
        ref=current + DRIFT_NATS * normal(*rows),
        advantages=normal(shape.batch),
        mask=torch.arange(shape.length, device=device) < lengths.round()[:, None],
        weights=uniform(*rows),
    )


def selected_logps(logits: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = logits[:, :-1].to(dtype) / TEMPERATURE
    return torch.log_softmax(scaled, dim=-1).gather(-1, ids[..., None]).squeeze(-1)


def written_out(logits: Tensor, batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """The loss as training code has it, and with float64 what the others are compared with."""
    logps = selected_logps(logits, batch.ids, dtype)
    ratio = torch.exp(logps - batch.old)
    advantages = batch.advantages[:, None].to(dtype)
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH) * advantages)
    away = batch.ref - logps
    return torch.where(batch.mask, policy + BETA * (torch.exp(away) - away - 1), 0.0)


LossOf = Callable[[Tensor, Batch], Tensor]
"""(logits, batch) -> (B, L) float32, 0 at masked tokens."""


def _compiled() -> LossOf:
    return torch.compile(written_out, dynamic=False)


def _helion() -> LossOf:
    from benchmark.peers import helion_rows

    reason = helion_rows.available()
    if reason is not None:
        raise Unavailable(reason)
    options = helion_rows.Options(temperature=TEMPERATURE, eps_low=EPSILON_LOW, eps_high=EPSILON_HIGH, beta=BETA)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        columns = (batch.ids, batch.old, batch.ref, batch.advantages, batch.mask)
        return helion_rows.helion_grpo_loss(logits, *columns, options).loss

    return loss


def _liger(in_place: bool) -> LossOf:
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss
    except ImportError as error:
        raise Unavailable(f"liger-kernel cannot be imported: {error}") from error

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return triton_grpo_loss(
            logits,
            batch.old,
            batch.ref,
            batch.ids,
            batch.advantages,
            batch.mask,
            temperature=TEMPERATURE,
            beta=BETA,
            eps_low=EPSILON_LOW,
            eps_high=EPSILON_HIGH,
            inplace=in_place,
            loss_type="grpo",
            reduce=False,
        )[0]

    return loss


def _ours() -> LossOf:
    from liger_rl.fused_linear import grpo_loss_from_logits

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return grpo_loss_from_logits(
            logits,
            batch.ids,
            batch.advantages,
            batch.mask,
            old_per_token_logps=batch.old,
            ref_per_token_logps=batch.ref,
            temperature=TEMPERATURE,
            epsilon_low=EPSILON_LOW,
            epsilon_high=EPSILON_HIGH,
            beta=BETA,
        ).loss

    return loss


class Unavailable(Exception):
    """Why a variant cannot be run here."""


VARIANTS: dict[str, Callable[[], LossOf]] = {
    "eager PyTorch": lambda: written_out,
    "torch.compile": _compiled,
    "Helion": _helion,
    "Liger Triton": lambda: _liger(False),
    "Liger Triton, in place": lambda: _liger(True),
    "liger_rl": _ours,
}


class Gold(NamedTuple):
    loss: Tensor  # (B, L) float64
    grad: Tensor  # (B, L + 1, V) float64


def gold_of(batch: Batch) -> Gold:
    logits = batch.logits.double().requires_grad_()
    loss = written_out(logits, batch, torch.float64)
    (grad,) = torch.autograd.grad((loss * batch.weights).sum(), logits)
    return Gold(loss.detach(), grad)


def measure(make: Callable[[], LossOf], batch: Batch, gold: Gold, device: str) -> dict[str, Any]:
    """-> {"status": "ok", ...numbers} or {"status", "reason"}."""
    try:
        return {"status": "ok", "reason": None, **_numbers(make(), batch, gold, device)}
    except Unavailable as reason:
        return {"status": "unavailable", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}


def _numbers(loss_of: LossOf, batch: Batch, gold: Gold, device: str) -> dict[str, float | None]:
    logits = batch.logits.clone().requires_grad_()

    def restore() -> None:
        # Liger's kernel may write its gradient over the logits. Every repeat of every variant gets them anew, untimed.
        logits.data.copy_(batch.logits)

    def forward() -> Tensor:
        return loss_of(logits, batch)

    def step() -> tuple[Tensor, Tensor]:
        # Not .backward(): the logits of a model are no leaf, and nothing is accumulated in them.
        loss = forward()
        (grad,) = torch.autograd.grad((loss * batch.weights).sum(), logits)
        return loss.detach(), grad

    loss, grad = step()
    numbers: dict[str, float | None] = {
        "loss_max_error": (loss.double() - gold.loss)[batch.mask].abs().max().item(),
        "grad_error": relative(grad, gold.grad),
    }
    del loss, grad
    tokens = batch.mask.sum().item()
    for name, run in (("forward", forward), ("step", step)):
        time_ms = _queued_median_ms(run, restore) if device == "cuda" else measure_ms(run, device, restore).median_ms
        numbers |= {f"{name}_ms": time_ms, f"{name}_tokens_per_s": tokens / time_ms * 1e3}
    if device == "cuda":
        restore()
        with PeakMemory(device) as memory:
            step()
        numbers["step_extra_mib"] = memory.peak_bytes / 2**20  # its gradient included
    return numbers


def _queued_median_ms(run: Callable[[], object], before: Callable[[], object]) -> float:
    """Median of repeats behind a product of some milliseconds, which stands for the model that made the logits.

    As in training, the host is ahead of the device then, and launches cost nothing until something waits. `before` is
    not timed. Copying the logits, as it does here, also leaves nothing useful in the cache.
    """
    model = torch.randn(STAND_IN_SIZE, STAND_IN_SIZE, device="cuda", dtype=torch.bfloat16)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CUDA_REPEATS)]
    for _ in range(3):
        before()
        run()
    torch.cuda.synchronize()
    for start, stop in events:
        torch.mm(model, model)
        before()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


COLUMNS: Columns = {
    "fwd ms": number("forward_ms", ".3f"),
    "fwd Mtok/s": number("forward_tokens_per_s", ".3g", 1e-6),
    "fwd+bwd ms": number("step_ms", ".3f"),
    "fwd+bwd Mtok/s": number("step_tokens_per_s", ".3g", 1e-6),
    "extra MiB": number("step_extra_mib", ",.0f"),
    "loss err": number("loss_max_error", ".1e"),
    "dlogits err": number("grad_error", ".1e"),
}


def title(results: dict[str, Any]) -> str:
    shape = results["shape"]
    size = f"B={shape['batch']}, L={shape['length']}, V={shape['vocab']}, {shape['dtype']}"
    return f"Loss from given logits: {size}, {results['mask_share']:.0%} masked, beta {results['beta']:g}"


def markdown(results: dict[str, Any]) -> str:
    """What `main` writes -> a line on where it was measured and a table."""
    head = environment_line(results["environment"], ("helion", "liger-kernel"))
    table = markdown_table(COLUMNS, [(row["variant"], row) for row in results["rows"]])
    return f"{head}\n\n**{title(results)}**\n\n{table}\n"


def main() -> None:
    arguments = parser_of("row_losses", __doc__).parse_args()
    environment = describe("auto") | {"helion": version("helion")}
    device = environment["device"]
    if device == "cpu":
        # Read when liger-kernel's kernels are decorated, which is when its variant is made.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    shape = SHAPES[device]
    batch = make_batch(shape, device)
    gold = gold_of(batch)
    # `groups` as in a row of `benchmark.run`, whose results lie in the same folder: part of no sweep.
    rows = [{"variant": name, "groups": [], **measure(make, batch, gold, device)} for name, make in VARIANTS.items()]
    results = {
        "environment": environment,
        "shape": asdict(shape),
        "mask_share": 1 - batch.mask.float().mean().item(),
        "beta": BETA,
        "rows": rows,
    }
    write(PREFIX, results, arguments, markdown)
    # A peer that fails is a finding, and its row says so.
    if any(row["status"] == "failed" for row in rows if row["variant"].startswith("liger_rl")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
