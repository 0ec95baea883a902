"""SkyRL's functions over ranks against its own where it is there (see `checkouts`). Full logits: test_frameworks.py."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import checkouts
import skyrl_modules
from liger_rl.integrations import skyrl as integration
from liger_rl.integrations.skyrl import fused_lm_head_logprob_apply, patch_skyrl, patched_skyrl
from ranks import message_of

HIDDEN, VOCAB, BATCH, LENGTH = 12, 40, 2, 8


def problem():
    torch.manual_seed(7)
    hidden, weight = torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN)
    return hidden, weight, torch.randint(VOCAB, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH)


def of_rank(rank, weight):
    """-> this rank's rows, and their token ids from and to."""
    rows = VOCAB // rank.world
    return weight.chunk(rank.world)[rank.index].clone(), rank.index * rows, (rank.index + 1) * rows


def test_a_call_without_gradients_and_a_backend_that_is_unknown():
    hidden, weight, target, _ = problem()
    call = "triton", hidden, weight.requires_grad_(), target, 0, VOCAB, 4, None, True
    assert not fused_lm_head_logprob_apply(*call).requires_grad
    with pytest.raises(ValueError, match="backend must be one of"):
        patch_skyrl("jax")


# --- SkyRL's own ------------------------------------------------------------------------------------------------------

NEEDS_SKYRL = checkouts.needs("SkyRL")


def its_calls(module, rank):
    """-> by name, what its callers of the patched functions give: values and gradients."""
    hidden, weight, target, upstream = problem()
    rows, start, end = of_rank(rank, weight)
    bounds = {"vocab_start_index": start, "vocab_end_index": end, "chunk_size": 3, "temperature": 0.7}

    def solved(function, hidden, target, **given):
        leaves = hidden.clone().requires_grad_(), rows
        rows.requires_grad_()
        values = function(*leaves, target, **bounds, **given)
        assert values.requires_grad
        return values.detach(), *torch.autograd.grad((values * upstream[:, : values.shape[1]]).sum(), leaves)

    packed = hidden.flatten(0, 1)[None], target.flatten()[None], torch.tensor([0, 6, BATCH * LENGTH])
    with torch.no_grad():
        entropy = module._fused_vocab_parallel_entropy_from_hidden(hidden, rows, rank.group, 3, temperature=0.7)
    return {
        "plain": solved(module.from_parallel_hidden_to_logprobs, hidden, target, tp_group=rank.group),
        "packed": solved(
            module.from_parallel_hidden_to_logprobs_packed_sequences,
            *packed[:2],
            cu_seqlens_padded=packed[2],
            unpacked_seqlen=LENGTH,
            group=rank.group,
        ),
        "entropy": (entropy,),
    }


def beside_its_own(rank):
    module, gathered = skyrl_modules.load(integration.MODULES["megatron"]), []
    before = {name: value for name, value in vars(module).items() if callable(value)}
    theirs = its_calls(module, rank)
    with patched_skyrl("megatron"), pytest.MonkeyPatch.context() as patch:
        replaced = {name for name, value in before.items() if vars(module)[name] is not value}
        gather = dist.all_gather_object
        patch.setattr(dist, "all_gather_object", lambda *a, **kw: (gathered.append(1), gather(*a, **kw)))
        mine = its_calls(module, rank)
    assert {name: value for name, value in vars(module).items() if callable(value)} == before
    return theirs, mine, replaced, len(gathered)


@NEEDS_SKYRL
@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_its_own(ranks, world):
    """The calls of its Megatron workers. The weight is not copied for the temperature, so the ranks compare it once."""
    for theirs, mine, replaced, compared in ranks.run(beside_its_own, world=world):
        assert replaced == {
            "_fused_lm_head_logprob_apply",
            "_fused_vocab_parallel_entropy_from_hidden",
            "from_parallel_hidden_to_logprobs",
            "from_parallel_hidden_to_logprobs_packed_sequences",
        }
        assert compared == (world > 1)
        for name, values in theirs.items():
            for found, value in zip(mine[name], values, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=name)


IDS = torch.arange(2 * 12).reshape(2, 12) * 5 % 50 + 2
ATTENTION = torch.tensor([[0, 0] + [1] * 10, [1] * 11 + [0]])
ACTIONS = 6


def wrapped_forward(wrapper, upstream):
    """-> log-probabilities and entropies of the actions, and gradients of both together."""
    wrapper.zero_grad()
    logps, output = wrapper(
        IDS, ACTIONS, attention_mask=ATTENTION, temperature=0.8, return_output=True, compute_entropy=True
    )
    entropy = output["entropy"][:, -ACTIONS - 1 : -1]
    real = ATTENTION[:, -ACTIONS - 1 : -1]
    ((logps * upstream[0] + entropy * upstream[1]) * real).sum().backward()
    return (logps * real).detach(), (entropy * real).detach(), {n: p.grad for n, p in wrapper.named_parameters()}


def fsdp_wrapper(rank, remove_padding, sharded):
    torch.manual_seed(3)
    upstream = torch.randn(2, 2, ACTIONS)
    plain = wrapped_forward(skyrl_modules.tiny_wrapper(remove_padding=remove_padding), upstream)
    wrapper = skyrl_modules.tiny_wrapper(remove_padding=remove_padding)
    if sharded:
        for layer in wrapper.model.model.layers:
            fully_shard(layer, mesh=rank.mesh("dp"))
        fully_shard(wrapper.model, mesh=rank.mesh("dp"))
    with patched_skyrl("fsdp"):
        logps, entropy, grads = wrapped_forward(wrapper, upstream)
        again = wrapper(IDS, ACTIONS, attention_mask=ATTENTION)
        messages = {}
        for name, value in (("sequence_parallel_size", 2), ("is_vlm", True)):
            before = getattr(wrapper, name)
            setattr(wrapper, name, value)
            messages[name] = message_of(lambda: wrapper(IDS, ACTIONS, attention_mask=ATTENTION))
            setattr(wrapper, name, before)
        replay = {"enable_sample_support_replay": True}
        messages["replay"] = message_of(lambda: wrapper(IDS, ACTIONS, attention_mask=ATTENTION, **replay))
    after = wrapper(IDS, ACTIONS, attention_mask=ATTENTION)
    real = ATTENTION[:, -ACTIONS - 1 : -1]
    torch.testing.assert_close(again * real, after * real, rtol=1e-5, atol=1e-5)
    if sharded:
        grads = {name: grad.full_tensor() for name, grad in grads.items()}
    return plain, (logps, entropy, grads), messages


@NEEDS_SKYRL
@pytest.mark.parametrize(("remove_padding", "sharded"), [(False, False), (True, False), (False, True)])
def test_its_wrapper_of_huggingface_models(ranks, remove_padding, sharded):
    """Under `fully_shard`, too, whose ranks have the same batch here."""
    pytest.importorskip("transformers", reason="the wrapper holds a model of transformers")
    for plain, found, messages in ranks.run(fsdp_wrapper, remove_padding, sharded, world=2 if sharded else 1):
        for mine, theirs in zip(found[:2], plain[:2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for name, grad in plain[2].items():
            torch.testing.assert_close(found[2][name], grad, rtol=1e-3, atol=1e-5, msg=name)
        assert messages["sequence_parallel_size"].startswith("ValueError: sequence_parallel_size must be 1, got 2")
        assert messages["is_vlm"].startswith("ValueError: is_vlm must be False")
        assert messages["replay"].startswith("ValueError: sample_support must be given")


def replayed(_rank, remove_padding):
    """-> log-probabilities, entropies and gradients over sample supports, without the patch and with it; a message."""
    skyrl_modules.load(integration.MODULES["fsdp"])
    packed_tensor = importlib.import_module("skyrl.backends.skyrl_train.utils.packed_tensor")
    attention, targets = torch.tensor([[0, 0] + [1] * 10, [1] * 12]), IDS[:, -ACTIONS:]
    rows = torch.stack([targets, (targets + 7) % 52, (targets + 3) % 52], dim=-1).to(torch.int32)
    rows[:, ::2, 2] = -1
    rows[1, 0] = -1
    loss_mask = torch.ones(2, ACTIONS)
    loss_mask[1, 0] = 0
    given = {"attention_mask": attention, "temperature": 0.8, "return_output": True, "compute_entropy": True}
    given |= {"sample_support": packed_tensor.PackedTensor.from_segments(list(rows)), "loss_mask": loss_mask}

    def solved():
        torch.manual_seed(3)
        wrapper, upstream = skyrl_modules.tiny_wrapper(remove_padding=remove_padding), torch.randn(2, 2, ACTIONS)
        logps, output = wrapper(IDS, ACTIONS, **given, enable_sample_support_replay=True)
        entropy = output["entropy"][:, -ACTIONS - 1 : -1]
        (logps * upstream[0] + entropy * upstream[1]).sum().backward()
        return [logps.detach(), entropy.detach(), *(parameter.grad for parameter in wrapper.parameters())]

    plain = solved()
    with patched_skyrl("fsdp"):
        found = solved()
        loss_mask[1, 0] = 1
        return plain, found, message_of(solved)


@NEEDS_SKYRL
@pytest.mark.parametrize("remove_padding", [False, True])
def test_replay_of_sample_supports(ranks, remove_padding):
    if not (checkouts.source("SkyRL") / "backends/skyrl_train/utils/packed_tensor.py").exists():
        pytest.skip("SkyRL 0.3 has no replay")
    for plain, found, message in ranks.run(replayed, remove_padding, world=1):
        for mine, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert message.startswith("ValueError: sample_support must have a row for each token of loss_mask")
