"""NeMo-RL's function against its own where it is there (see `checkouts`). Full logits: test_frameworks.py."""

import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

import checkouts
from framework_calls import Case, nemo_rl, problem, solve
from liger_rl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs, patched_nemo_rl
from megatron_layers import gpt_model


def its_module():
    path = str(checkouts.source("RL").parent)
    if path not in sys.path:
        sys.path.append(path)
    import nemo_rl.distributed.model_utils as module

    return module


def its_own(rank, inference_only):
    """-> what NeMo-RL's function gives, and what it gives patched."""
    module, case, found = its_module(), Case("nemo_rl"), []
    for context, given in ((nullcontext, {}), (patched_nemo_rl, {"inference_only": inference_only})):
        with context():
            function = module.from_parallel_hidden_states_to_logprobs
            assert (function is from_parallel_hidden_states_to_logprobs) == (context is patched_nemo_rl)
            called = partial(nemo_rl, function=function, **given)
            found.append(
                without_gradients(rank, case, called) if given.get("inference_only") else solve(rank, case, called)
            )
    return found


def without_gradients(rank, case, called):
    x = problem(case)
    logps, _ = called(rank, case, x, x.hidden.requires_grad_(), x.weight.chunk(rank.world)[rank.index])
    assert not logps.requires_grad
    return {"logps": logps}


@checkouts.needs("RL")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inference_only", [False, True])
def test_equals_its_own(ranks, world, inference_only):
    for theirs, mine in ranks.run(its_own, inference_only, world=world):
        for name, found in mine.items():
            torch.testing.assert_close(found, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def its_gathered_logits(rank, pad):
    """-> by its function for logits, which takes context parallel ranks, and by ours."""
    module, case = its_module(), Case("nemo_rl", context=2, pad=pad)

    def from_logits(hidden, weight, _gather, target, **given):
        gathered = [torch.empty_like(hidden) for _ in range(2)]
        dist.all_gather(gathered, hidden.detach(), given["tp_group"])
        logits = (torch.cat(gathered) @ weight.T).transpose(0, 1).detach()
        return module.from_parallel_logits_to_logprobs(logits, target, **given)

    own = partial(nemo_rl, function=from_logits, inference_only=True)
    x = problem(case)
    weight = x.weight.chunk(2)[rank.index % 2]
    return own(rank, case, x, x.hidden, weight)[0], nemo_rl(rank, case, x, x.hidden, weight)[0]


@checkouts.needs("RL")
@pytest.mark.parametrize("pad", [0, 1])
def test_context_parallel_ranks_as_its_function_for_logits(ranks, pad):
    """Values: its backward needs CUDA."""
    for theirs, mine in ranks.run(its_gathered_logits, pad, world=4):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def in_its_model(rank):
    """-> log-probabilities and gradients of Megatron's model with NeMo-RL's forward, by its function and by ours."""
    module, results = its_module(), []
    with gpt_model(sequence_parallel=True, tied=True, mup=False) as model:
        kind, forward = type(model), type(model).forward
        module.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5)
        try:
            for context in (nullcontext, patched_nemo_rl):
                model.zero_grad()
                torch.manual_seed(1 + rank.index // 2)
                ids, upstream = torch.randint(64, (2, 12)), torch.rand(2, 11)
                with context():
                    logps = model(
                        ids,
                        torch.arange(12).expand(2, -1),
                        torch.ones(1, 1, 12, 12).tril() < 0.5,
                        labels=ids,
                        return_logprobs_for_linear_ce_fusion=True,
                    )
                (logps * upstream).sum().backward()
                results.append((logps.detach(), {name: p.grad for name, p in model.named_parameters()}))
        finally:
            kind.forward = forward
            del kind._linear_ce_fusion_forward_patched
    return results


@checkouts.needs("RL")
@checkouts.needs("Megatron-LM")
def test_in_its_forward_of_megatrons_model(ranks):
    for (logps, grads), (found, found_grads) in ranks.run(in_its_model, world=4):
        torch.testing.assert_close(found, logps, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
