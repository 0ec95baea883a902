"""One batch over ranks that hold parts of its sequences, or nothing: losses, gradients and metrics of one process."""

import pytest
import torch

from liger_rl import FusedLinearGRPOLoss
from liger_rl.distributed import merge_over, sum_over
from liger_rl.losses import Segments, reduce_metrics

HIDDEN, VOCAB, COUNT = 8, 30, 4
LENGTHS = [5, 1, 9, 7]
# Whose each token is, by name, out of so many ranks.
OWNERS = {
    "halves": lambda position, index, ranks: (position * ranks) // torch.tensor(LENGTHS)[index],
    "in turn": lambda position, index, ranks: torch.arange(len(index)) % ranks,
    "whole sequences": lambda position, index, ranks: index % ranks,
    "the first rank has nothing": lambda position, index, ranks: 1 + index % (ranks - 1),
    "the last rank has everything": lambda position, index, ranks: torch.full_like(index, ranks - 1),
}
LOSSES = {
    "gspo": {},
    "gmpo": {},
    "vespo": {},
    "grpo": {"beta": 0.1},
    "dapo": {"epsilon_high": 0.3},
}


def batch():
    torch.manual_seed(6)
    index = torch.repeat_interleave(torch.arange(COUNT), torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = len(index)
    return {
        "hidden": torch.randn(tokens, HIDDEN),
        "weight": torch.randn(VOCAB, HIDDEN),
        "ids": torch.randint(VOCAB, (tokens,)),
        "advantages": torch.randn(COUNT)[index],
        "mask": (torch.rand(tokens) < 0.8) | (position == 0),
        "old": torch.randn(tokens) * 0.3 - 5.0,
        "ref": torch.randn(tokens) * 0.3 - 5.0,
        "index": index,
        "position": position,
    }


def solve(rank, loss_type, owners, masked_away=False):
    b, options = batch(), LOSSES[loss_type]
    all_reduce = merge = None
    mine = torch.arange(len(b["index"]))
    if rank is not None:
        mine = (OWNERS[owners](b["position"], b["index"], rank.world) == rank.index).nonzero()[:, 0]
        all_reduce, merge = sum_over(rank.group), merge_over(rank.group)
    if masked_away:
        b["mask"] = torch.zeros_like(b["mask"])
    device = "cpu" if rank is None else rank.device
    part = {name: values[mine].to(device) for name, values in b.items() if name != "weight"}
    count = part["mask"].sum()
    hidden, weight = part["hidden"].clone().requires_grad_(), b["weight"].to(device).requires_grad_()
    result = FusedLinearGRPOLoss(loss_type, metrics="with_entropy", **options)(
        hidden, weight, part["ids"], part["advantages"], part["mask"],
        old_per_token_logps=part["old"], ref_per_token_logps=part["ref"],
        segments=Segments(index=part["index"], count=COUNT, all_reduce=all_reduce),
        num_items_in_batch=count if all_reduce is None else all_reduce(count),
    )  # fmt: skip
    result.loss.backward()
    metrics = reduce_metrics([result.metrics], all_reduce=merge)
    return {
        "mine": mine,
        "loss": result.loss.detach().cpu(),
        "hidden": hidden.grad.cpu(),
        "weight": weight.grad.cpu(),
        "metrics": {name: metric.item() for name, metric in metrics.items()},
    }


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_equals_one_process(ranks, loss_type, owners, world):
    results = ranks.run(solve, loss_type, owners, **world)
    expected = solve(None, loss_type, owners)
    torch.testing.assert_close(sum(r["loss"] for r in results), expected["loss"], rtol=1e-5, atol=1e-6)
    hidden = torch.zeros_like(expected["hidden"])
    for result in results:
        hidden[result["mine"]] = result["hidden"]
    torch.testing.assert_close(hidden, expected["hidden"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sum(r["weight"] for r in results), expected["weight"], rtol=1e-4, atol=1e-6)
    assert expected["weight"].any()
    for result in results:
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_step_without_tokens_anywhere(ranks, loss_type):
    """Extrema of nothing are infinite, and everything else is 0."""
    for result in ranks.run(solve, loss_type, "halves", True):
        assert result["loss"] == 0
        assert not result["weight"].any()
        metrics = result["metrics"]
        assert (metrics.pop("max_advantage"), metrics.pop("min_advantage")) == (-torch.inf, torch.inf)
        assert not any(metrics.values())
