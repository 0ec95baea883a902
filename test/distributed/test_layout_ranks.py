"""Ranks whose batches make different numbers of micro-batches run the model as often as each other."""

from functools import cache, partial

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

from test_models import VOCAB, shard, tiny_llama, wrap  # noqa: E402

import oracles  # noqa: E402
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head  # noqa: E402
from liger_rl.losses import GlobalTokenMean, TokenLoss  # noqa: E402
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
    # A rank of FSDP1 has no element of some parameters.
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).float().cpu() for n, g in grads.items()}


@cache
def reference():
    model, whole = swap_lm_head(tiny_llama()), batch()
    loss = FusedLinearGRPOLoss("bnpo", metrics="basic")
    step = loss_step(model, whole, loss)
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
        wrapped = DistributedDataParallel(model, process_group=rank.group)
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
    steps = loss_steps(wrapped, part, loss, max_tokens=max_tokens)
    numbers = len(steps), len(known)
    for step in steps:
        step.loss.backward()
    assert len(reduced) == (wrapper == "ddp"), "gradients are reduced once"
    torch.testing.assert_close(steps.total.per_token_logps, logps, rtol=1e-5, atol=1e-5)
    grads = gradients(model)
    loss_step(wrapped, part, loss).loss.backward()  # one rank alone has an idle sequence
    return numbers, calls[:-2], calls[-2:], steps.total.loss.item(), grads, logps.cpu()


def assert_same_gradients(grads, truth):
    found, expected = oracles.whole(grads), oracles.whole(truth)
    # torch 2.8's FSDP sums gradients over gloo's ranks.
    scale = round((found.norm() / expected.norm()).item())
    assert scale in (1, 2)
    assert oracles.relative_error(found / scale, expected) <= 1e-5


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
        assert_same_gradients(found[4], truth)


# --- one rank's mistake -----------------------------------------------------------------------------------------------


class Refusing:
    """An objective whose own check refuses a batch, with an error that does not pickle."""

    scope = "token"

    class Error(RuntimeError):
        pass

    def __init__(self, rank):
        self.rank = rank

    def check(self, batch):
        if self.rank == 1:
            raise self.Error("objective must be told more")

    def __call__(self, logps, batch):
        return TokenLoss(-batch.advantages * logps, torch.ones_like(logps))


IDS = batch()["input_ids"]
# What rank 1 has otherwise: columns, or a keyword, or another argument; and the error of every rank.
MISTAKES = {
    "budget": ({"max_tokens": 3}, "ValueError: max_tokens must be at least 5, the longest sequence (row 0 of"),
    "options": ({"memory": "all"}, "ValueError: memory must be a number from 0 to 1"),
    "extra": ({"bogus": 1}, "TypeError: takes no bogus with fused=True"),
    "extra option": ({"chunk_vocab": 64}, "TypeError: takes no chunk_vocab with fused=True"),
    "importance_ratio": ({"importance_ratio": torch.ones(3)}, "ValueError: importance_ratio must be (B, T) = (2, 12)"),
    "advantages": ({"advantages": [1.0, 2.0]}, "TypeError: advantages must be a real tensor, got list"),
    "mask": ({"mask": IDS}, "ValueError: mask must be (B, T) = (2, 12) on"),
    "column": ({"logits": IDS}, "ValueError: batch has no column 'logits'"),
    "support": ({"support": [[1]]}, "ValueError: batch has no column 'support': call support_logprobs"),
    "no batch": ({"batch": [1]}, "TypeError: batch must be a mapping"),
    "no loss": ({"loss": "grpo"}, "TypeError: loss must be a fused loss, such as FusedLinearGRPOLoss, got str"),
    "another loss": (
        {"loss": FusedLinearGRPOLoss("grpo", softcap=3.0)}, "ValueError: softcap must be left out of the loss"
    ),
    "tokens of all ranks": (
        {"loss": FusedLinearGRPOLoss("dapo"), "num_items_in_batch": 36},
        "ValueError: world_size must be 2 in the loss, the number of ranks whose gradients are averaged",
    ),
    "no model": ({"model": "llama"}, "TypeError: model must be a causal LM of transformers, got str"),
    "its own error": ({}, "Error: objective must be told more"),
}  # fmt: skip
ARGUMENTS = ("batch", "loss", "model")


def refused_on_one_rank(rank, wrapper):
    """-> what each rank raises for each mistake of rank 1. A right step follows."""
    # The first call swaps the head of a sharded model, which runs it.
    model = (
        fully_shard(tiny_llama(), mesh=rank.mesh())
        if wrapper == "fsdp"
        else DistributedDataParallel(swap_lm_head(tiny_llama()), process_group=rank.group)
    )
    part = {name: column[SHARES[rank.index]] for name, column in batch().items()}
    loss = FusedLinearGRPOLoss("grpo")
    options = MISTAKES["budget"][0] if rank.index == 1 else {}
    messages = {"first call": message_of(partial(loss_steps, model, part, loss, **options))}
    completion_logps(model, part, loss)  # after it no parameter of FSDP's is a DTensor
    for name, (mistake, _) in MISTAKES.items():
        call = {"model": model, "batch": dict(part), "loss": loss, "group": rank.group if name == "no model" else None}
        if name == "its own error":
            call["loss"] = FusedLinearGRPOLoss(Refusing(rank.index), reduction=GlobalTokenMean())
        for key, value in mistake.items() if rank.index == 1 else ():
            target = call if key in (*ARGUMENTS, "max_tokens", "memory", "bogus", "chunk_vocab") else call["batch"]
            target[key] = value
        messages[name] = message_of(partial(loss_steps, **call))
    loss_step(model, part, loss).loss.backward()
    return messages


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_what_one_rank_refuses_is_refused_on_all(ranks, wrapper):
    others, own = ranks.run(refused_on_one_rank, wrapper)
    assert own["first call"] == own["budget"]
    assert others["first call"] == others["budget"]
    for name, (_, expected) in MISTAKES.items():
        (kind, text), (own_kind, own_text) = expected.split(": ", 1), own[name].split(": ", 1)
        assert own_kind == kind, name
        assert text in own_text, name
        assert others[name] == f"{kind if kind == 'TypeError' else 'ValueError'}: {own_text} (rank 1)", name


# --- the fused forward of TRL's trainers ------------------------------------------------------------------------------

TRL_ENDS = (40, 36, 38, 34)
LONG = 70  # beyond the rotary embedding's fixed length, so that one rank alone runs its batch as it is


def trl_batch(rank, step, *, long):
    """The rank of the step's number shares prefixes and has idle sequences, and the other has none."""
    generator = torch.Generator().manual_seed(10 + rank.index)
    width = LONG if long and rank.index == 1 else max(TRL_ENDS)
    ids = torch.randint(3, VOCAB, (len(TRL_ENDS), width), generator=generator)
    weights = torch.tensor([1.0, -0.5, 2.0, 0.7])
    if rank.index == step:
        ids[:, :24] = ids[0, :24]
        weights[1:3] = 0.0
    attended = torch.arange(width) < torch.tensor(TRL_ENDS)[:, None] + width - max(TRL_ENDS)
    labels = ids.masked_fill(~attended | (torch.arange(width) < 22), -100)
    return {"input_ids": ids, "attention_mask": attended.long(), "labels": labels}, weights


def trl_steps(rank, wrapper, whole_step, long, micro_batches=1, steps=range(2)):
    """-> gradients after the steps, and the shapes of the body's runs."""
    from trl.trainer import utils

    from liger_rl.integrations.trl import forward, patched_trl

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4} if long else None
    model, runs = tiny_llama(max_position_embeddings=64, rope_parameters=rope), []
    with patched_trl(whole_step=whole_step):
        utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
        model.model.register_forward_pre_hook(
            lambda _, args, inputs: runs.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
        )
        wrapped = wrap(model, rank, wrapper)
        for step in steps:
            inputs, weights = trl_batch(rank, step, long=long)
            call = forward.ModelCall(idle_rows=weights == 0, shapes=((2, 1),) * micro_batches)
            logps = wrapped(**inputs, fused_lm_head=True, **{forward.CALL: call}).log_probs
            (logps.exp() * weights[:, None]).sum().backward()
        return gradients(model), runs


@pytest.mark.parametrize(("wrapper", "long"), [("ddp", False), ("fsdp1", False), ("root", False), ("root", True)])
def test_trls_forward_on_ranks_whose_batches_differ(ranks, wrapper, long):
    pytest.importorskip("trl", reason="TRL is not installed")
    whole, plain = (ranks.run(trl_steps, wrapper, flag, long) for flag in (True, False))
    for (grads, _), (expected, runs) in zip(whole, plain, strict=True):
        assert runs[-2:] == [runs[-1]] * 2
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    runs = [runs for _, runs in whole]
    sequences = len(TRL_ENDS)
    if wrapper == "ddp":  # the tree of the sequences with a gradient and that of the others
        assert runs[0][-3:] == [(1, 51), (1, 51), (sequences, 40)]
        assert runs[1][3] == (sequences, 40)  # behind the proof of the model
        assert runs[1][-2:] == [(1, 51), (1, 51)]
    else:
        assert len(runs[0]) == len(runs[1])
        assert runs[0][-2:] == [(1, 79), (sequences, 40)]
        assert runs[1][-2:] == ([(sequences, LONG)] * 2 if long else [(sequences, 40), (1, 79)])


PAIRS, TOGETHER = [(2, 40), (2, 36)], [(4, 40)]
# The shapes of each rank's runs. In the first step one rank has trees: a sharded model then runs once on both.
RUNS = {
    "ddp": ([(1, 51), (1, 51), *PAIRS], [*PAIRS, *PAIRS]),
    "fsdp1": ([(1, 79), *PAIRS], [*TOGETHER, *PAIRS]),
    "root": ([(1, 79), *PAIRS], [*TOGETHER, *PAIRS]),
    "own": ([(1, 79), *PAIRS], [*TOGETHER, *PAIRS]),
}


@pytest.mark.parametrize("wrapper", RUNS)
def test_a_call_of_two_micro_batches_on_ranks_whose_batches_differ(ranks, wrapper):
    pytest.importorskip("trl", reason="TRL is not installed")
    whole, plain = (ranks.run(trl_steps, wrapper, flag, False, 2, (0, 2)) for flag in (True, False))
    for (grads, runs), (expected, _), shapes in zip(whole, plain, RUNS[wrapper], strict=True):
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
        assert runs[-len(shapes) :] == shapes
    assert wrapper == "ddp" or len(whole[0][1]) == len(whole[1][1])


# --- trees of shared prefixes -----------------------------------------------------------------------------------------


def branching(device="cpu"):
    """The first four sequences have a prompt in common, the other two have none."""
    ids = torch.randint(VOCAB, (len(ENDS), 26), generator=torch.Generator().manual_seed(1))
    ids[:4, :20] = ids[0, :20]
    mask = torch.arange(26).expand(len(ENDS), 26) >= 20
    columns = {"input_ids": ids, "mask": mask, "advantages": batch()["advantages"] + 0.1}
    return {name: column.to(device) for name, column in columns.items()}


def tree_steps_of(rank, wrapper, shares, options):
    """-> layouts and numbers of forwards of two steps, the losses and gradients of the second."""
    model, calls, layouts, numbers = swap_lm_head(tiny_llama().to(rank.device)), [], [], []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model, process_group=rank.group)
    else:
        wrapped = shard(model, rank.mesh(), wrapper)
    part = {name: column[shares[rank.index]] for name, column in branching(rank.device).items()}
    part |= {"num_items_in_batch": 36, **options[rank.index]}
    for _ in range(2):
        model.zero_grad()
        steps = loss_steps(wrapped, part, FusedLinearGRPOLoss("dapo", world_size=rank.world), max_tokens=35)
        for step in steps:
            step.loss.backward()
        layouts.append(steps.layout)
        numbers.append(len(calls))
        calls.clear()
    return layouts, numbers, steps.total.loss.item(), gradients(model)


TREES_OF_ONE_RANK = {
    "other prompts": (SHARES, ({}, {}), "no two sequences have more than their first 16 tokens in common"),
    # That rank runs the trial for the other.
    "a cache": ((slice(2, 6), slice(0, 2)), ({}, {"use_cache": True}), "use_cache=True keeps keys and values"),
}


@pytest.mark.parametrize("wrapper", ["ddp", "root", "own"])
@pytest.mark.parametrize(("shares", "options", "reason"), TREES_OF_ONE_RANK.values(), ids=TREES_OF_ONE_RANK)
def test_trees_on_one_rank(ranks, wrapper, two, shares, options, reason):
    model = swap_lm_head(tiny_llama())
    whole = loss_step(model, branching() | {"num_items_in_batch": 36}, FusedLinearGRPOLoss("dapo"))
    whole.loss.backward()
    results = ranks.run(tree_steps_of, wrapper, shares, options, **two)
    on_gpus = two["device"] == "cuda"  # small batches have no trees there
    for index, text in enumerate(("in trees of shared prefixes", reason)):
        assert on_gpus or all(text in layout for layout in results[index][0])
    (first, *others), *rest = (numbers for _, numbers, *_ in results)
    assert rest == [[first, *others]]
    assert on_gpus or first == others[0] + 10  # the trial
    assert sum(found[2] for found in results) / 2 == pytest.approx(whole.loss.item(), rel=1e-5)
    for found in results:
        assert_same_gradients(found[3], gradients(model))
