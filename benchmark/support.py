"""Log-probabilities over what the sampler could have drawn, and what trainers do today: `python -m benchmark.support`.

Sets of ids per token as runs have them ("field": 46% of the tokens have one id, the mean is 8, the 99th percentile 82),
and uniform ones of growing mean. Ways:

liger_rl                 `support_logprobs`, called from Python
..., one thread          under `torch.autograd.set_multithreading_enabled(False)`: no other thread takes the backward
whole vocabulary         `linear_logprobs`, which is another distribution
TRL                      its chunked operator of log-probabilities, over the whole vocabulary, too
masked logits            the operations of prime-rl and slime: the whole product, a mask of the vocabulary, a softmax
gathered logits          the operations of SkyRL: the whole product, the listed logits, `index_add_` of exponentials

Errors are those against float64, each against its own distribution: of all tokens with few ids, else of SAMPLED ones.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.command import parser_of, write
from benchmark.environment import describe
from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.picture import make_panels, save, write_out
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import measure_ms
from liger_rl import linear_logprobs, support_logprobs
from liger_rl.support import Support

PREFIX = "support-"
FIELD = "field"
SIZES = {  # N, H, V and the mean sizes of sets
    "cuda": ((8192, 4096, 128256), (FIELD, 2, 8, 64, 256, 512, 1024, 2048)),
    "cpu": ((64, 32, 500), (FIELD, 8)),  # to see that everything runs
}
ELEMENTS = 1 << 24  # of float64 rows at a time
SAMPLED = 48  # tokens that are compared where all would take long
TRL_CHUNK = 32768  # vocabulary entries, as its trainers pass it


class Problem(NamedTuple):
    hidden: Tensor  # (N, H) bfloat16
    weight: Tensor  # (V, H) bfloat16
    support: Support
    targets: Tensor  # (N,) each in its row
    slopes: Tensor  # (N,) float32, dL/dlogp

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()

    @property
    def tokens(self) -> Tensor:
        """(P,) the token of each id."""
        rows = torch.arange(self.targets.numel(), device=self.hidden.device)
        return rows.repeat_interleave(self.support.offsets.diff())


def make_problem(shape: tuple[int, int, int], mean: int | str, device: str) -> Problem:
    n, hidden_size, vocab = shape
    g = torch.Generator(device).manual_seed(0)

    def uniform() -> Tensor:
        return torch.rand(n, generator=g, device=device)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    if mean == FIELD:
        several = torch.exp(1.25 * normal(n) + 1.85).clamp(2, 400)
        sizes = torch.where(uniform() < 0.46, 1.0, several).long()
    else:
        sizes = 1 + (uniform() * (2 * int(mean) - 1)).long()
    sizes = sizes.clamp(max=vocab)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    # As rare as words are, and distinct within a row.
    first = (vocab ** uniform()).long().clamp(max=vocab - 1)
    within = torch.arange(int(offsets[-1]), device=device) - offsets[:-1].repeat_interleave(sizes)
    ids = (first.repeat_interleave(sizes) + 37 * within) % vocab
    picked = torch.minimum((uniform() * sizes).long(), sizes - 1)
    support = Support(ids, offsets, distinct=True)
    hidden, weight = normal(n, hidden_size).bfloat16(), (normal(vocab, hidden_size) / hidden_size**0.5).bfloat16()
    return Problem(hidden, weight, support, ids[offsets[:-1] + picked], normal(n) / n)


Logps = Callable[..., Tensor]


def _ours(hidden: Tensor, weight: Tensor, given: Problem) -> Tensor:
    return support_logprobs(hidden, weight, given.targets, given.support).logps


def _whole(hidden: Tensor, weight: Tensor, given: Problem) -> Tensor:
    return linear_logprobs(hidden, weight, given.targets).logps


def _trl(hidden: Tensor, weight: Tensor, given: Problem) -> Tensor:
    function = import_module("trl.trainer.utils")._ChunkedLogProbFunction
    return function.apply(hidden, weight, None, given.targets, 1.0, TRL_CHUNK, None, 1.0, ())[0]


def _masked(hidden: Tensor, weight: Tensor, given: Problem) -> Tensor:
    logits = (hidden @ weight.T).float()
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    allowed[given.tokens, given.support.token_ids] = True
    logps = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return logps.gather(1, given.targets[:, None]).squeeze(1)


def _gathered(hidden: Tensor, weight: Tensor, given: Problem) -> Tensor:
    logits, tokens = hidden @ weight.T, given.tokens
    listed = logits[tokens, given.support.token_ids].float()
    at_target = logits.gather(1, given.targets[:, None]).squeeze(1).float()
    peaks = torch.full_like(at_target, -torch.inf).scatter_reduce(0, tokens, listed.detach(), "amax")
    sums = torch.zeros_like(at_target).index_add_(0, tokens, (listed - peaks[tokens]).exp())
    return at_target - peaks - sums.log()


class Way(NamedTuple):
    logps: Logps
    whole: bool = False  # over the whole vocabulary
    one_thread: bool = False


WAYS = {
    "liger_rl": Way(_ours),
    "liger_rl, one thread": Way(_ours, one_thread=True),
    "whole vocabulary": Way(_whole, whole=True),
    "TRL": Way(_trl, whole=True),
    "masked logits": Way(_masked),
    "gathered logits": Way(_gathered),
}


class Truth(NamedTuple):
    """In float64, of a loss of some tokens alone."""

    rows: Tensor  # (n,) these tokens
    logps: Tensor  # (n,)
    grad_hidden: Tensor  # (n, H)
    grad_weight: Tensor  # (V, H)


def over_listed_ids(given: Problem, rows: Tensor) -> Truth:
    """From the listed rows of the weight alone."""
    place = torch.full(given.targets.shape, -1, device=rows.device).index_copy(
        0, rows, torch.arange(rows.numel(), device=rows.device)
    )
    wanted = (place[given.tokens] >= 0).nonzero().squeeze(1)
    tokens, ids = place[given.tokens[wanted]], given.support.token_ids[wanted]
    hidden, weight, n = given.hidden[rows], given.weight, rows.numel()
    step = max(1, ELEMENTS // hidden.shape[1])
    parts = [slice(first, first + step) for first in range(0, ids.numel(), step)]
    z = torch.cat([(hidden[tokens[p]].double() * weight[ids[p]].double()).sum(1) for p in parts])
    peak = torch.full((n,), -torch.inf, dtype=torch.float64, device=z.device)
    peak = peak.scatter_reduce(0, tokens, z, "amax")
    lse = peak + torch.zeros_like(peak).index_add_(0, tokens, (z - peak[tokens]).exp()).log()
    own = ids == given.targets[rows][tokens]
    slopes = given.slopes[rows][tokens].double() * (own.double() - (z - lse[tokens]).exp())
    grads = [torch.zeros(part.shape, dtype=torch.float64, device=z.device) for part in (hidden, weight)]
    for p in parts:
        grads[0].index_add_(0, tokens[p], slopes[p, None] * weight[ids[p]].double())
        grads[1].index_add_(0, ids[p], slopes[p, None] * hidden[tokens[p]].double())
    return Truth(rows, z[own] - lse, *grads)


def over_whole_vocabulary(given: Problem, rows: Tensor) -> Truth:
    hidden, targets = given.hidden[rows].double(), given.targets[rows][:, None]
    tiles = given.weight.split(max(1, ELEMENTS // hidden.shape[1]))
    log_p = torch.cat([hidden @ tile.double().T for tile in tiles], dim=1).log_softmax(-1)
    slopes = -log_p.exp()
    slopes.scatter_add_(1, targets, torch.ones_like(targets, dtype=torch.float64))
    slopes *= given.slopes[rows, None].double()
    parts = list(zip(slopes.split(tiles[0].shape[0], dim=1), tiles, strict=True))
    grad_hidden = torch.stack([slope @ tile.double() for slope, tile in parts]).sum(0)
    return Truth(rows, log_p.gather(1, targets).squeeze(1), grad_hidden, slopes.T @ hidden)


def measure(way: Way, given: Problem, truth: Truth, device: str) -> dict[str, Any]:
    """Times, memory beside the gradients, and errors."""
    leaves = given.leaves()

    def forward() -> Tensor:
        with torch.no_grad():
            return way.logps(*leaves, given)

    def step(slopes: Tensor = given.slopes) -> tuple[Tensor, ...]:
        logps = way.logps(*leaves, given)
        return logps.detach(), *torch.autograd.grad((logps * slopes).sum(), leaves)

    kept = torch.zeros_like(given.slopes).index_copy(0, truth.rows, given.slopes[truth.rows])
    try:
        logps, *grads = step(kept)
    except ImportError as error:
        return {"status": "unavailable", "reason": str(error)}
    numbers = {
        "compared_tokens": truth.rows.numel(),
        "logp_max_error": (logps[truth.rows].double() - truth.logps).abs().max().item(),
        "grad_hidden_error": relative(grads[0][truth.rows], truth.grad_hidden),
        "grad_weight_error": relative(grads[1], truth.grad_weight),
    }
    del logps, grads
    with PeakMemory(device) as memory:
        held = step()
    numbers["peak_extra_mib"] = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
    del held
    for kind, run in (("forward", forward), ("step", step)):
        with torch.autograd.set_multithreading_enabled(not way.one_thread):
            numbers[f"{kind}_ms"] = measure_ms(run, device).median_ms
    return {"status": "ok", "reason": None, **numbers}


def rows_of(mean: int | str, shape: tuple[int, int, int], device: str) -> list[dict[str, Any]]:
    given = make_problem(shape, mean, device)
    n, pairs = shape[0], given.support.token_ids.numel()
    sampled = torch.arange(0, n, max(1, n // SAMPLED), device=device)[:SAMPLED]
    compared = torch.arange(n, device=device) if pairs < 1 << 20 else sampled
    rows, truth = [], over_listed_ids(given, compared)
    # One truth at a time: its gradient of the weight is the largest tensor.
    for whole in (False, True):
        if whole:
            del truth
            truth = over_whole_vocabulary(given, sampled)
        for name, way in WAYS.items():
            if way.whole == whole:
                rows.append({"mean": mean, "pairs": pairs, "variant": name, **measure(way, given, truth, device)})
    return rows


COLUMNS: Columns = {
    "forward ms": number("forward_ms", ".2f"),
    "forward + backward ms": number("step_ms", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "logp error": number("logp_max_error", ".1e"),
    "dH error": number("grad_hidden_error", ".1e"),
    "dW error": number("grad_weight_error", ".1e"),
}


def markdown(results: dict[str, Any]) -> str:
    n, hidden_size, vocab = results["shape"]
    blocks = [environment_line(results["environment"], ()), f"N = {n}, H = {hidden_size}, V = {vocab}, bfloat16."]
    for mean in dict.fromkeys(row["mean"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["mean"] == mean]
        title = "Sets as runs have them" if mean == FIELD else f"{mean} ids a token in the mean"
        blocks.append(
            f"**{title}** ({rows[0]['pairs']:,} ids)\n\n" + markdown_table(COLUMNS, [(r["variant"], r) for r in rows])
        )
    return "\n\n".join(blocks) + "\n"


def summary(results: dict[str, Any]) -> str:
    """Milliseconds of forward and backward: a row for each way, a column for each mean size.

    The first two columns are the forward alone and the error of log-probabilities, with sets as runs have them.
    """

    def title(row: dict[str, Any]) -> str:
        return "runs, 8" if row["mean"] == FIELD else str(row["mean"])

    columns: Columns = {"forward": number("forward_ms", ".2f"), "logp error": number("logp_max_error", ".1e")}
    columns |= {title(row): number(title(row), ".2f") for row in results["rows"] if row["mean"] not in NOT_SHOWN}
    lines: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:  # those of FIELD come first
        if row["variant"] not in STYLES:
            continue
        line = lines.setdefault(row["variant"], dict(row))
        line[title(row)] = row.get("step_ms")
    return f"{environment_line(results['environment'], ())}\n\n{markdown_table(columns, list(lines.items()))}\n"


NOT_SHOWN = (2, 256, 1024)  # columns that the page has no room for
# What is drawn; "..., one thread" is a line beside another.
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STYLES = {
    "liger_rl": {"color": "#1f6fb4", "linewidth": 3.0, "marker": "o"},
    "gathered logits": {"color": "#2e8b57", "marker": "P"},
    "masked logits": {"color": "#d9822b", "marker": "^"},
    "whole vocabulary": {"color": "#8c8c8c", "marker": "s", "linestyle": "--"},
    "TRL": {"color": "#7d3c98", "marker": ">", "linestyle": ":"},
}


def plot(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`: milliseconds of forward and backward against the mean size of the sets. False without sizes."""
    rows = [row for row in results["rows"] if row["mean"] != FIELD and row["status"] == "ok"]
    if not rows:
        return False
    figure, ((panel,),) = make_panels(1, 1, figsize=(7, 4.4))
    for name, style in STYLES.items():
        line = [(row["mean"], row["step_ms"]) for row in rows if row["variant"] == name]
        panel.plot(*zip(*line, strict=True), label=name, **style)
    panel.set(xscale="log", yscale="log", xlabel="ids of a token, mean", ylabel="forward + backward (ms)")
    panel.set_xticks(sorted({row["mean"] for row in rows}))
    panel.set_yticks([size for size in TICKS if size < 2 * max(row["step_ms"] for row in rows)])
    panel.minorticks_off()
    write_out(panel.xaxis)
    write_out(panel.yaxis)
    panel.grid(color="#dddddd", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    n, hidden_size, vocab = results["shape"]
    shape = f"N = {n:,}, H = {hidden_size:,}, V = {vocab:,}, bfloat16"
    panel.set_title(f"{shape}, {results['environment']['device_name']}", fontsize=10)
    panel.legend(fontsize=9, frameon=False, loc="lower right")
    save(figure, path, results)
    return True


def main() -> None:
    arguments = parser_of("support", __doc__).parse_args()
    environment = describe("auto")
    device = environment["device"]
    shape, means = SIZES[device]
    rows = [row for mean in means for row in rows_of(mean, shape, device)]
    results = {"environment": environment, "shape": shape, "rows": rows}
    plot(results, write(PREFIX, results, arguments, markdown).with_suffix(".png"))


if __name__ == "__main__":
    main()
