"""Draws from the head, beside torch, and what batch invariance costs: `python -m benchmark.sampling`.

A head of H = 4096, V = 128256 in bfloat16. Times are those of a CUDA graph, without the host. Ways:

product                 `hidden @ weight.T`, of which nothing is read
liger_rl                `sample_tokens` with fixed_shape: plain, greedy, and under a limit
torch                   logits, float32 softmax; drawn with exponential noise, under top-p after a sort of all ids
liger_rl, logps         `linear_logprobs` without a gradient, by default and with batch_invariant
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmark.command import run
from benchmark.memory import PeakMemory
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms
from liger_rl import linear_logprobs, sample_tokens

PREFIX = "sampling-"
SHAPES = {"cuda": (4096, 128256, (1, 16, 256, 512)), "cpu": (16, 600, (3,))}  # H, V, N
SPREAD = 6.0  # of the logits, in nats
LIMITS: dict[str, dict[str, Any]] = {
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
}


def torch_draw(hidden: Tensor, weight: Tensor) -> Tensor:
    p = (hidden @ weight.T).float().softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


def torch_top_p(hidden: Tensor, weight: Tensor, top_p: float) -> Tensor:
    ordered, ids = (hidden @ weight.T).float().sort(dim=-1, descending=True)
    p = ordered.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    return ids.gather(1, (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)).squeeze(1)


def ways(hidden: Tensor, weight: Tensor, ids: Tensor) -> dict[str, Callable[[], Any]]:
    fixed = hidden.is_cuda  # on CPU limits need a host that waits

    def drawn(**options: Any) -> Callable[[], Tensor]:
        return lambda: sample_tokens(hidden, weight, seed=1, fixed_shape=fixed, **options).ids

    def logps(**options: Any) -> Callable[[], Tensor]:
        return lambda: linear_logprobs(hidden, weight, ids, fixed_shape=True, **options).logps

    return {
        "product": lambda: hidden @ weight.T,
        "liger_rl, plain": drawn(),
        "liger_rl, greedy": drawn(temperature=0),
        **{f"liger_rl, {name}": drawn(**limits) for name, limits in LIMITS.items()},
        "torch, plain": lambda: torch_draw(hidden, weight),
        "torch, top-p 0.95": lambda: torch_top_p(hidden, weight, 0.95),
        "liger_rl, logps": logps(),
        "liger_rl, logps, batch_invariant": logps(batch_invariant=True),
    }


def in_graph(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    if device == "cpu":
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def rows_of(hidden: Tensor, weight: Tensor, device: str) -> list[dict[str, Any]]:
    n, vocab = hidden.shape[0], weight.shape[0]
    ids = torch.arange(n, device=device) % vocab
    found = sample_tokens(hidden, weight, seed=1, top_p=0.95, support=True)
    assert found.support is not None
    listed = found.support.offsets.diff().float()
    shared = {
        "status": "ok",
        "reason": None,
        "tokens": n,
        "nucleus": listed.mean().item(),
        "fallbacks": found.fallbacks.item(),
    }
    rows = []
    for name, call in ways(hidden, weight, ids).items():
        call()
        with PeakMemory(device) as memory:
            call()
        milliseconds = measure_ms(in_graph(call, device), device)[0]
        rows.append(shared | {"variant": name, "ms": milliseconds, "peak_extra_mib": memory.peak_bytes / 2**20})
    return [row | {"x_product": row["ms"] / rows[0]["ms"]} for row in rows]


COLUMNS: Columns = {
    "ms": number("ms", ".2f"),
    "x the product": number("x_product", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
}


def measure_all(device: str) -> dict[str, Any]:
    size, vocab, tokens = SHAPES[device]
    g = torch.Generator(device).manual_seed(0)
    weight = (torch.randn(vocab, size, generator=g, device=device) * SPREAD / size**0.5).bfloat16()
    rows = []
    for n in tokens:
        hidden = torch.randn(n, size, generator=g, device=device).bfloat16()
        rows += rows_of(hidden, weight, device)
    return {"hidden_size": size, "vocab": vocab, "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    lines = [(f"N = {row['tokens']}: {row['variant']}", row) for row in results["rows"]]
    nuclei = {row["tokens"]: row for row in results["rows"]}
    about = "; ".join(
        f"N = {n}: {row['nucleus']:.0f} ids in a nucleus of 0.95, {row['fallbacks']} fallbacks"
        for n, row in nuclei.items()
    )
    head = f"H = {results['hidden_size']}, V = {results['vocab']}, bfloat16. {about}."
    return f"{environment_line(results['environment'], ())}\n\n{head}\n\n{markdown_table(COLUMNS, lines)}\n"


if __name__ == "__main__":
    run("sampling", __doc__, PREFIX, measure_all, markdown)
