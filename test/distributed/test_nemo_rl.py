"""NeMo-RL's function over ranks: against full logits, and against its own where it is there (see `checkouts`)."""

import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import checkouts
import oracles
from liger_rl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs, patched_nemo_rl
from megatron_layers import gpt_model
from ranks import message_of

HIDDEN, VOCAB, BATCH, LENGTH = 12, 40, 2, 8


def problem():
    torch.manual_seed(5)
    hidden, weight = torch.randn(LENGTH, BATCH, HIDDEN), torch.randn(VOCAB, HIDDEN)
    return hidden, weight, torch.randint(VOCAB, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH - 1)


def chunks_of(context, ranks):
    """Positions that a context parallel rank holds."""
    step = LENGTH // (2 * ranks)
    return torch.cat([torch.arange(step) + chunk * step for chunk in (context, 2 * ranks - 1 - context)])


def solve(rank, function, tensor_ranks, pad=0, **given):
    """-> log-probabilities, gradients of hidden and weight, and the positions of hidden. The rest are for context."""
    group, across = rank.group, None
    context, tensor = divmod(rank.index, tensor_ranks)
    context_ranks = rank.world // tensor_ranks
    if context_ranks > 1:
        group = [dist.new_group([*range(i, i + tensor_ranks)]) for i in range(0, rank.world, tensor_ranks)][context]
        across = [dist.new_group([*range(i, rank.world, tensor_ranks)]) for i in range(tensor_ranks)][tensor]
    hidden, weight, target, upstream = problem()
    positions = chunks_of(context, context_ranks).chunk(tensor_ranks)[tensor]
    leaves = hidden[positions].clone().requires_grad_(), weight.chunk(tensor_ranks)[tensor].clone().requires_grad_()
    rows = VOCAB // tensor_ranks
    logps = function(
        *leaves,
        None,
        target[:, : LENGTH - pad],
        vocab_start_index=tensor * rows,
        vocab_end_index=(tensor + 1) * rows,
        tp_group=group,
        cp_group=across,
        **{"chunk_size": 3, **given},
    )
    if not logps.requires_grad:
        return logps, None, None, positions
    (logps * upstream[:, : LENGTH - pad - 1]).sum().backward()
    return logps.detach(), *(leaf.grad for leaf in leaves), positions


def expected(pad=0):
    hidden, weight, target, upstream = problem()
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logits = (leaves[0] @ leaves[1].T).transpose(0, 1)[:, : LENGTH - pad - 1]
    logps, _ = oracles.logits_logprobs(logits, target[:, 1 : LENGTH - pad])
    return logps.detach(), *torch.autograd.grad((logps * upstream[:, : LENGTH - pad - 1]).sum(), leaves)


def check(results, truth, tensor_ranks):
    """Every context parallel rank gets the sum of all ranks' gradients, as NeMo-RL's gather gives it."""
    context_ranks = len(results) // tensor_ranks
    near = {"rtol": 1e-4, "atol": 1e-5}
    weight = torch.zeros_like(truth[2])
    for rank, (logps, grad_hidden, grad_weight, positions) in enumerate(results):
        assert logps.dtype == torch.float32
        torch.testing.assert_close(logps.double(), truth[0], **near)
        torch.testing.assert_close(grad_hidden.double() / context_ranks, truth[1][positions], **near)
        weight.chunk(tensor_ranks)[rank % tensor_ranks].add_(grad_weight / context_ranks)
    torch.testing.assert_close(weight, truth[2], **near)


@pytest.mark.parametrize(("world", "tensor_ranks", "pad"), [(4, 1, 0), (4, 2, 0), (4, 2, 1), (4, 4, 0)])
def test_equals_full_logits(ranks, world, tensor_ranks, pad):
    """World and vocabulary ranks; the rest have parts of the sequence, of whose end NeMo-RL may have cut padding."""
    results = ranks.run(solve, from_parallel_hidden_states_to_logprobs, tensor_ranks, pad, world=world)
    check(results, expected(pad), tensor_ranks)


def refusals(rank):
    hidden, weight, target, _ = problem()
    given = {"runtime_gather_output": None, "vocab_start_index": 0, "vocab_end_index": VOCAB, "tp_group": rank.group}

    def message(**changed):
        arguments = {"target": target, **given, **changed}
        return message_of(lambda: from_parallel_hidden_states_to_logprobs(hidden, weight, **arguments))

    whole = dist.group.WORLD
    return [
        message(vocab_end_index=VOCAB - 1),
        message(target=torch.zeros(BATCH, LENGTH + 1).long()),
        message(cp_group=whole),  # targets of this rank's part alone
        message(target=target + VOCAB),
    ]


def test_what_does_not_fit_is_refused(ranks):
    (found,) = ranks.run(refusals, world=1)
    beginnings = (
        "ValueError: vocab_end_index must be vocab_start_index + 40",
        "ValueError: target must be the whole sequence of up to 8 ids",
        "ValueError: target must be the whole sequence of up to 32 ids",
        "ValueError: targets must be",
    )
    assert all(map(str.startswith, found, beginnings)), found


# --- NeMo-RL's own ----------------------------------------------------------------------------------------------------


def its_module():
    path = str(checkouts.source("RL").parent)
    if path not in sys.path:
        sys.path.append(path)
    import nemo_rl.distributed.model_utils as module

    return module


def its_own(rank, tensor_ranks, inference_only):
    """-> what NeMo-RL's function gives, and what it gives patched."""
    module = its_module()
    theirs = solve(rank, module.from_parallel_hidden_states_to_logprobs, tensor_ranks)
    with patched_nemo_rl():
        function = module.from_parallel_hidden_states_to_logprobs
        assert function is from_parallel_hidden_states_to_logprobs
        mine = solve(rank, function, tensor_ranks, inference_only=inference_only)
    assert module.from_parallel_hidden_states_to_logprobs is not from_parallel_hidden_states_to_logprobs
    return theirs, mine


@checkouts.needs("RL")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inference_only", [False, True])
def test_equals_its_own(ranks, world, inference_only):
    for (logps, *grads, _), (found, *found_grads, _) in ranks.run(its_own, world, inference_only, world=world):
        torch.testing.assert_close(found, logps, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(found_grads, grads, strict=True):
            if inference_only:
                assert mine is None
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def its_gathered_logits(rank, pad):
    """-> by its function for logits, which takes context parallel ranks, and by ours."""
    module = its_module()
    rows = VOCAB // 2

    def from_logits(hidden, weight, _gather, target, **given):
        gathered = [torch.empty_like(hidden) for _ in range(2)]
        dist.all_gather(gathered, hidden.detach(), given["tp_group"])
        logits = (torch.cat(gathered) @ weight.T).transpose(0, 1).detach()
        assert logits.shape[-1] == rows
        return module.from_parallel_logits_to_logprobs(logits, target, **given)

    found = solve(rank, from_parallel_hidden_states_to_logprobs, 2, pad, inference_only=True)
    return solve(rank, from_logits, 2, pad)[0], found[0]


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
