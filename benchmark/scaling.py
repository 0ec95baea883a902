"""Predicted time and memory of a head over many ranks: `python -m benchmark.scaling` writes the table of its page.

The model, for N tokens on T ranks, with f and b the milliseconds of a token's forward and backward on one GPU, as
measured, and a(S) = 2 (T - 1) latency + 2 (T - 1) / T S / bandwidth the all-reduce of S bytes in a ring:

    forward   N f / T + a(12 N)                            peak, sum and target, float32
    backward  N b / T + max(0, a(4 N H) - last product)    dH in float32, beneath the last product of dW
    memory    4 V H / T + 8 N H + 40 N + workspace         bfloat16 W and dW; h, dH, dH in float32; statistics; tiles

Bandwidths are taken from the measurement on several GPUs where there is one, else from data sheets.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.environment import RESULTS, ROOT, read_results
from liger_rl.engines.tiles import CHUNK_ALIGNMENT, MAX_CHUNK_TOKENS, WORKSPACE_BYTES

PAGE = ROOT / "docs" / "distributed.md"
DEVICE, CASE = "nvidia-h200", "llama-3-8b"
BLOCK = re.compile(r"(<!-- begin scaling -->\n)(.*?)(<!-- end scaling -->)", re.DOTALL)

RANKS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = (8192, 131072, 1048576)
RANKS_PER_HOST = 8
# NVLink 4: 450 GB/s each way for a GPU. Between hosts a network port of 400 Gbit/s for each of the 8 GPUs, over all of
# which rings are laid, so that a ring over hosts is about as wide as one within.
SHARE_OF_PEAK = 0.75
BANDWIDTH = {"within": 450e9 * SHARE_OF_PEAK, "between": 8 * 50e9 * SHARE_OF_PEAK}  # bytes per second
LATENCY_MS = {"within": 0.004, "between": 0.012}  # of a step of the ring


@dataclass(frozen=True)
class Measured:
    """One GPU's figures, and the link's where two have been measured."""

    tokens: int
    hidden_size: int
    vocab: int
    forward_ms: float
    step_ms: float
    sharded: dict[int, dict[str, Any]]  # ranks -> row of benchmark.tensor_parallel

    @classmethod
    def load(cls) -> "Measured":
        rows = read_results(RESULTS / f"{DEVICE}.json")["rows"]
        row = next(row for row in rows if (row["case"], row["variant"]) == (CASE, "ours"))
        shape = {"tokens": row["rows"], "hidden_size": row["hidden_size"], "vocab": row["vocab"]}
        sharded = {
            found["ranks"]: found
            for path in sorted(RESULTS.glob(f"tensor-parallel-*{DEVICE}*.json"))
            for found in read_results(path)["rows"]
            if found["ranks"] > 1 and all(found[name] == size for name, size in shape.items())
        }
        return cls(**shape, forward_ms=row["forward_ms"], step_ms=row["step_ms"], sharded=sharded)

    def bandwidth(self, ranks: int) -> float:
        if ranks > RANKS_PER_HOST:
            return BANDWIDTH["between"]
        if not self.sharded:
            return BANDWIDTH["within"]
        row = self.sharded[max(self.sharded)]
        return row["bytes"]["backward"] / (row["hidden_grad_alone_ms"] / 1e3)


def all_reduce_ms(measured: Measured, ranks: int, size: float) -> float:
    if ranks == 1:
        return 0.0
    latency = LATENCY_MS["within" if ranks <= RANKS_PER_HOST else "between"]
    return 2 * (ranks - 1) * latency + 2e3 * (ranks - 1) / ranks * size / measured.bandwidth(ranks)


def last_product_ms(measured: Measured, ranks: int, tokens: int) -> float:
    """dW of one tile, at the rate of the measured step: 2 n v H of its 8 N H V FLOP."""
    rows = min(tokens, MAX_CHUNK_TOKENS["cuda"])
    columns = WORKSPACE_BYTES["cuda"] // (2 * rows + 4 * measured.hidden_size) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    share = 2 * rows * min(columns, measured.vocab // ranks) / (8 * measured.tokens * measured.vocab)
    return share * measured.step_ms


def predicted(measured: Measured, ranks: int, tokens: int) -> tuple[float, float, float]:
    """-> milliseconds of the forward and of forward and backward, GiB of each rank."""
    scale = tokens / measured.tokens / ranks
    forward = measured.forward_ms * scale + all_reduce_ms(measured, ranks, 12 * tokens)
    summed = all_reduce_ms(measured, ranks, 4 * tokens * measured.hidden_size)
    exposed = max(0.0, summed - last_product_ms(measured, ranks, tokens))
    backward = (measured.step_ms - measured.forward_ms) * scale + exposed
    size, vocab = measured.hidden_size, measured.vocab
    memory = 4 * vocab * size / ranks + 8 * tokens * size + 40 * tokens + WORKSPACE_BYTES["cuda"]
    return forward, forward + backward, memory / 2**30


def table(measured: Measured) -> str:
    return "\n".join(_lines(measured)) + "\n"


def _lines(measured: Measured) -> Iterator[str]:
    yield f"| ranks | {' | '.join(f'N = {tokens}' for tokens in TOKENS)} |"
    yield "|" + "---|" * (1 + len(TOKENS))
    for ranks in RANKS:
        yield f"| {ranks} | {' | '.join(_cell(measured, ranks, tokens) for tokens in TOKENS)} |"


def _cell(measured: Measured, ranks: int, tokens: int) -> str:
    forward, step, memory = predicted(measured, ranks, tokens)
    if tokens == measured.tokens and ranks in (1, *measured.sharded):
        row = measured.sharded[ranks] if ranks > 1 else {"forward_ms": forward, "step_ms": step}
        return f"**{row['forward_ms']:.1f} / {row['step_ms']:.1f}** / {memory:.1f}"
    return f"{forward:.1f} / {step:.1f} / {memory:.1f}"


def filled(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{table(Measured.load())}{match[3]}", text)


if __name__ == "__main__":
    Path(PAGE).write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
