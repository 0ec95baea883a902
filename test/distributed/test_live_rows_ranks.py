"""Ranks whose batches make different numbers of micro-batches run the model as often as each other."""

from functools import cache

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

from test_models import VOCAB, shard, tiny_llama  # noqa: E402

from liger_rl import FusedLinearGRPOLoss  # noqa: E402
from liger_rl.integrations.transformers import swap_lm_head  # noqa: E402
from liger_rl.step.policy_step import completion_logps, policy_step, policy_steps  # noqa: E402
from ranks import message_of  # noqa: E402

TIME = 12
ENDS = (12, 11, 9, 10, 5, 4)
SHARES = (slice(0, 4), slice(4, 6))  # of two ranks


def batch(device="cpu"):
    """Row 2 has no advantage, and its log-probabilities are in a metric."""
    generator = torch.Generator().manual_seed(1)
    attended = torch.arange(TIME) < torch.tensor(ENDS)[:, None]
    columns = {
        "input_ids": torch.randint(VOCAB, (len(ENDS), TIME), generator=generator),
        "attention_mask": attended.long(),
        "mask": attended & (torch.arange(TIME) >= 2),
        "advantages": torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.7]),
    }
    return {name: column.to(device) for name, column in columns.items()}


def gradients(model):
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).float().cpu() for n, g in grads.items()}


@cache
def reference():
    model, whole = swap_lm_head(tiny_llama()), batch()
    loss = FusedLinearGRPOLoss("bnpo", metrics="basic")
    step = policy_step(model, whole, loss, trim=False, idle="backward")
    step.loss.backward()
    return step.loss.item(), gradients(model), step.per_token_logps


def step_of(rank, wrapper, max_tokens):
    """-> forwards in the order of their shapes' rows, losses, gradients, log-probabilities of this rank's rows."""
    model, calls = swap_lm_head(tiny_llama().to(rank.device)), []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(torch.is_grad_enabled()), with_kwargs=True
    )
    reduced = []
    if wrapper == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=rank.group)
        wrapped.register_comm_hook(rank.group, lambda group, bucket: reduced.append(1) or allreduce_hook(group, bucket))
    else:
        wrapped = shard(model, rank.mesh(), wrapper)
    whole = batch(rank.device)
    part = {name: column[SHARES[rank.index]] for name, column in whole.items()}
    part["num_items_in_batch"] = whole["mask"].sum()
    loss = FusedLinearGRPOLoss("dapo", metrics="basic", world_size=rank.world)
    logps = completion_logps(wrapped, part, loss, max_tokens=max_tokens)
    known = list(calls)
    calls.clear()
    steps = policy_steps(wrapped, part, loss, max_tokens=max_tokens)
    numbers = len(steps), len(known)
    for step in steps:
        step.loss.backward()
    assert len(reduced) == (wrapper == "ddp"), "gradients are reduced once"
    torch.testing.assert_close(steps.total.per_token_logps, logps, rtol=1e-5, atol=1e-5)
    grads = gradients(model)
    policy_step(wrapped, part, loss).loss.backward()  # one rank alone has an idle sequence
    return numbers, calls[:-2], calls[-2:], steps.total.loss.item(), grads, logps.cpu()


@pytest.mark.parametrize("wrapper", ["ddp", "root", "own"])
def test_ranks_with_other_numbers_of_micro_batches(ranks, wrapper, two):
    expected, truth, logps = reference()
    results = ranks.run(step_of, wrapper, 14, **two)
    for numbers, calls, single, *_ in results:
        assert numbers == (3, 4)
        assert calls == [False, True, True, True]
        assert single == [False, True]
    assert sum(found[3] for found in results) / 2 == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(torch.cat([found[5] for found in results]), logps, rtol=1e-5, atol=1e-5)
    for found in results:
        grads = found[4]
        size = sum(g.square().sum() for g in truth.values()).sqrt()
        # torch 2.8's FSDP sums gradients over gloo's ranks.
        scale = round((sum(g.square().sum() for g in grads.values()).sqrt() / size).item())
        assert scale in (1, 2)
        error = sum((grads[name] / scale - g).square().sum() for name, g in truth.items()).sqrt()
        assert error <= 1e-5 * size


def refused_on_one_rank(rank):
    model = fully_shard(swap_lm_head(tiny_llama()), mesh=rank.mesh())
    part = {name: column[SHARES[rank.index]] for name, column in batch().items()}
    loss = FusedLinearGRPOLoss("grpo")
    completion_logps(model, part, loss)  # after it no parameter is a DTensor
    return message_of(lambda: policy_steps(model, part, loss, max_tokens=8))


def test_a_budget_that_one_rank_cannot_keep_is_refused_on_all(ranks):
    mine, other = ranks.run(refused_on_one_rank)
    assert "max_tokens must be at least 12, the longest sequence (row 0 of input_ids" in mine
    assert "another rank has refused its batch" in other
