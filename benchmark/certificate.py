"""The lists of ids that a tolerance keeps, in plain PyTorch: how long they are, and how far off the gradients then are.

The rule is the one of `liger_rl/engines/sparse/certified.py`. docs/design.md states it under "Lists of ids". It runs on
any device and in any shape. The loss is the sum of a_i logp_i with normal a_i. Logits and products are float32, and no
result is rounded to 16 bits. Everything else is float64. Listed entries keep 24 bits of float32, as in the engine.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.kernels.statistics import PART_VOCAB, SAMPLES

SEED = 0
TOLERANCES = (1e-4, 3e-4, 1e-3, 3e-3)
EDGES = (0.5, 0.9, 0.99, 0.999, 0.9999)  # of the target's probability, between groups of tokens
GROUPS = (
    f"p <= {EDGES[0]:g}",
    *(f"{low:g} < p <= {high:g}" for low, high in pairwise(EDGES)),
    f"p > {EDGES[-1]:g}",
)
BYTES_AT_ONCE = {"cpu": 32 << 20, "cuda": 1 << 30}  # of float64 probabilities
# The constants of `sparse_triton` and `listing_triton`, which import Triton.
TILE_SHARE, HALVINGS, CUTS, TILE_MULTIPLE = 0.8, 10, 6, 8
SLACK, SLACK_OF_LSE = 2e-3, 2e-6
SLACK_OF_SUM, SLACK_OF_TERM, SLACK_OF_SHARES = 2.0**-16, 2.0**-23, 1.0 + 2.0**-6
BUDGET_ROUNDING, ENTRY_ROUNDING = 1.0 - 1e-3, 2.0**-16
LEVEL_BITS, ROUNDING_OF_SQUARES = 4, 1.0 - 2.0**-7


class Tokens(NamedTuple):
    """Each token's gradient of its own logp: e_y (1 - p_y) - p elsewhere."""

    most: Tensor  # (n, tiles) upper bound of a tile's norm, without the target's entry
    rest: Tensor  # (n, tiles) sum of a tile's probabilities, without the target's
    least: Tensor  # (n,) lower bound of the squared norm
    at_target: Tensor  # (n,) 1 - p_y
    entropy: Tensor  # (n,)

    def take(self, index: Tensor) -> "Tokens":
        return Tokens(*(values[index] for values in self))


class Tail(NamedTuple):
    """How a tile's ids share the sum of the entries that a token leaves out."""

    shares: Tensor  # (tiles, PART_VOCAB)
    squares: Tensor  # (tiles,)


class Choice(NamedTuple):
    dropped: Tensor  # (n, tiles) bool: parts that are left out whole
    room: Tensor  # (n,) squared norm that a token's entries of kept parts may leave out, over the squared scale
    scale: Tensor  # (n,)


class Head(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H) float32
    ids: Tensor  # (N,)

    def probabilities(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> (n, tiles, PART_VOCAB) without the target's; the target's log-probability, and lse, (n,); all float64."""
        logits = (self.hidden[index].float() @ self.weight.T).double()
        lse, target = logits.logsumexp(-1), self.ids[index][:, None]
        p = (logits - lse[:, None]).exp_()
        logps = (logits.gather(1, target) - lse[:, None]).squeeze(1)
        p.scatter_(1, target, 0.0)
        return pad(p, (0, -p.shape[1] % PART_VOCAB)).unflatten(1, (-1, PART_VOCAB)), logps, lse


def bounds_of(head: Head, index: Tensor) -> Tokens:
    """As `sparse_triton.part_bounds`, of tokens whose dL/dlogp is 1."""
    p, logps, lse = head.probabilities(index)
    entropy = -torch.special.xlogy(p, p).sum((1, 2)) - logps.exp() * logps
    at_target, rest, peak = -torch.expm1(logps), p.sum(2), p.amax(2)
    slack = SLACK + SLACK_OF_LSE * lse.abs()
    rounding = SLACK_OF_SUM + SLACK_OF_TERM * lse.abs()
    own = (head.ids[index] // PART_VOCAB)[:, None] == torch.arange(p.shape[1], device=p.device)
    # The forward knows a tile's largest entry and its sum with the target's.
    with_target = torch.where(own, logps.exp()[:, None], 0.0)
    mass = rest + torch.where(own, rounding[:, None] * (rest + with_target), 0.0)
    largest = torch.minimum(torch.maximum(peak, with_target), mass)
    others = torch.where(own, 0.0, peak).square().sum(1)
    return Tokens(
        (largest * mass).sqrt() * slack.exp()[:, None],
        rest,
        at_target.square() + others * (1.0 - 2.0 * slack),
        at_target,
        entropy,
    )


def tail_of(head: Head, tokens: Tokens, factors: Tensor) -> Tail:
    """From SAMPLES tokens, drawn in proportion to the sums of their gradients."""
    size = tokens.rest.sum(1)
    until = (size * factors.abs()).cumsum(0)
    step = (torch.arange(SAMPLES, device=size.device) + 0.5) * (until[-1] / SAMPLES)
    drawn = (until[None, :] <= step[:, None]).sum(1).clamp(max=size.numel() - 1)
    p, _, _ = head.probabilities(drawn)
    sizes = (p / size[drawn][:, None, None]).sum(0)
    entries = torch.full_like(sizes[:, :1], PART_VOCAB)
    entries[-1] -= sizes.numel() - head.weight.shape[0]
    for _ in range(CUTS):
        sizes = torch.minimum(sizes, 2.0 * sizes.sum(1, keepdim=True) / entries)
    total = sizes.sum(1, keepdim=True)
    shares = torch.where(total > 0, sizes / total, 0.0)
    return Tail(shares, shares.square().sum(1))


def choose(tokens: Tokens, tail: Tail, tolerance: float) -> Choice:
    """As `sparse_triton.choose_parts`."""
    energy = tokens.most.square() + tokens.rest.square() * tail.squares * SLACK_OF_SHARES
    tolerated = (tolerance**2 * BUDGET_ROUNDING - ENTRY_ROUNDING**2) * tokens.least
    ceiling = TILE_SHARE * tolerated
    width = -(-energy.shape[1] // TILE_MULTIPLE) * TILE_MULTIPLE
    low, high = torch.full_like(ceiling, 1.0 / (1 << (width - 1).bit_length())), torch.ones_like(ceiling)
    for _ in range(HALVINGS):
        middle = (low * high).sqrt()
        under = torch.where(energy < (middle * ceiling)[:, None], energy, 0.0).sum(1)
        low, high = torch.where(under <= ceiling, middle, low), torch.where(under <= ceiling, high, middle)
    dropped = (energy < (low * ceiling)[:, None]) | (energy == 0.0)
    scale = tokens.most.amax(1)
    spent = torch.where(dropped, energy, 0.0).sum(1)
    return Choice(dropped, (tolerated - spent) / scale.square(), scale)


def listed_gradient(p: Tensor, tokens: Tokens, tail: Tail, choice: Choice) -> tuple[Tensor, Tensor]:
    """-> the listed entries and the spread sums in place of `p` (n, tiles, PART_VOCAB), and ids of each token, (n,).

    The largest size under which a token's entries may be left out is one of a few numbers, eight for each power of 2.
    """
    kept = ~choice.dropped[:, :, None]
    bits = torch.where(kept, p / choice.scale[:, None, None], 0.0).float().view(torch.int32)
    high = ((bits >> 16 << 16) | 1 << 15).view(torch.float32).double()
    values = ((bits >> 8 << 8) | 1 << 7).view(torch.float32).double()
    # The lowest level that is no smaller than an entry.
    level = ((bits >> 16).long() + (1 << LEVEL_BITS) - 1) >> LEVEL_BITS
    energy = torch.zeros(len(p), (0x4000 >> LEVEL_BITS) + 1, dtype=torch.float64, device=p.device)
    energy.scatter_add_(1, level.flatten(1), high.square().flatten(1))
    limit = (energy.cumsum(1) <= (choice.room * ROUNDING_OF_SQUARES)[:, None]).sum(1).sub(1).clamp(min=0)
    listed = kept & (level > limit[:, None, None])
    scale = choice.scale[:, None, None]
    values, left = values * scale, torch.where(kept & ~listed, high * scale, 0.0)
    rest = left.sum(2)
    away = left - rest[:, :, None] * tail.shares
    helps = away.square().sum(2) <= left.square().sum(2)
    rest = torch.where(choice.dropped, tokens.rest, torch.where(helps, rest, 0.0))
    return torch.where(listed, values, 0.0) + rest[:, :, None] * tail.shares, listed.sum((1, 2)) + 1


@torch.no_grad()
def measure_lists(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (N,)
    factors: Tensor | None = None,  # (N,) of dL/dlogp; normal by default
    *,
    tolerances: tuple[float, ...] = TOLERANCES,
) -> dict[str, Any]:
    """-> tokens of each group by the target's probability, and of each tolerance: the share of kept parts, ids a token
    with its target, the largest error of a token's own dL/dlogits, and [dH, dW] errors of each group and of all.

    A part is one token and 256 neighbouring ids. A group's errors are relative to the gradient of its own tokens.
    """
    device, n = hidden.device, hidden.shape[0]
    head = Head(hidden, weight.float(), ids)
    if factors is None:
        factors = torch.randn(n, generator=torch.Generator(device).manual_seed(SEED), device=device)
    factors = factors.double()
    step = max(1, BYTES_AT_ONCE[device.type] // (8 * weight.shape[0]))
    everything = torch.arange(n, device=device)
    bounds = [bounds_of(head, index) for index in everything.split(step)]
    tokens = Tokens(*(torch.cat(values) for values in zip(*bounds, strict=True)))
    del bounds
    tail = tail_of(head, tokens, factors)
    choices = [choose(tokens, tail, tolerance) for tolerance in tolerances]
    lengths = torch.zeros(len(tolerances), dtype=torch.int64, device=device)
    largest = torch.zeros(len(tolerances), dtype=torch.float64, device=device)
    group_of = torch.bucketize(1.0 - tokens.at_target, torch.tensor(EDGES, device=device).double())
    sizes, errors = {}, {}
    # [exact, *errors]: squared norms of dH, and dW
    of_all, all_weights = torch.zeros(len(tolerances) + 1, dtype=torch.float64, device=device), None
    for number, name in enumerate(GROUPS):
        members = everything[group_of == number]
        sizes[name] = members.numel()
        if not members.numel():
            continue
        squares = torch.zeros_like(of_all)
        weights = torch.zeros(len(tolerances) + 1, *head.weight.shape, device=device)
        for index in members.split(step):
            p, _, _ = head.probabilities(index)
            some, rows, factor = tokens.take(index), hidden[index].float(), factors[index][:, None]
            exact = _flat(p, head).neg_().scatter_(1, ids[index][:, None], some.at_target[:, None])
            norm = exact.norm(dim=1)
            _add(squares, weights, 0, exact * factor, head.weight, rows)
            for place, choice in enumerate(choices):
                here = Choice(*(values[index] for values in choice))
                found, length = listed_gradient(p, some, tail, here)
                error = _flat(p - found, head)
                lengths[place] += length.sum()
                largest[place] = torch.maximum(largest[place], (error.norm(dim=1) / norm).nan_to_num(0.0).max())
                _add(squares, weights, place + 1, error * factor, head.weight, rows)
        errors[name] = _relative(squares, weights)
        of_all += squares
        all_weights = weights if all_weights is None else all_weights.add_(weights)
    assert all_weights is not None
    errors["all"] = _relative(of_all, all_weights)
    return {
        "group_tokens": sizes,
        "lists": {
            f"{tolerance:g}": {
                "kept_parts": 1.0 - choices[place].dropped.double().mean().item(),
                "ids": lengths[place].item() / n,
                "largest_token_error": largest[place].item(),
                "errors": {name: pairs[place] for name, pairs in errors.items()},
            }
            for place, tolerance in enumerate(tolerances)
        },
    }


def _flat(parts: Tensor, head: Head) -> Tensor:
    return parts.flatten(1)[:, : head.weight.shape[0]].clone()


def _add(squares: Tensor, weights: Tensor, place: int, grad: Tensor, weight: Tensor, rows: Tensor) -> None:
    """Add dL/dlogits' dH to the squared norms, and its dW."""
    grad = grad.float()
    squares[place] += (grad @ weight).double().square().sum()
    weights[place].addmm_(grad.T, rows)


def _relative(squares: Tensor, weights: Tensor) -> list[list[float]]:
    """-> [dH, dW] errors of each tolerance."""
    of_hidden = (squares[1:] / squares[0]).sqrt().tolist()
    norms = torch.stack([torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights])
    return [list(pair) for pair in zip(of_hidden, (norms[1:] / norms[0]).tolist(), strict=True)]
