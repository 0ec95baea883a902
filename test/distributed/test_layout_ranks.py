"""Ranks whose batches make different numbers of micro-batches run the model as often as each other."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

from test_models import VOCAB, tiny_llama, wrap  # noqa: E402

import oracles  # noqa: E402
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head  # noqa: E402
from liger_rl.losses import GlobalTokenMean, TokenLoss  # noqa: E402
from liger_rl.step.facts import MEASURED_CAPABILITY  # noqa: E402
from ranks import message_of  # noqa: E402

TIME, WIDTH = 12, 26
ENDS = (12, 11, 9, 10, 5, 4)
SHARES = (slice(0, 4), slice(4, 6))  # of two ranks
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.7])


def batch(device="cpu"):
    """Row 2 has no advantage, and its log-probabilities are in a metric."""
    attended = torch.arange(TIME) < torch.tensor(ENDS)[:, None]
    columns = {
        "input_ids": torch.randint(VOCAB, (len(ENDS), TIME), generator=torch.Generator().manual_seed(1)),
        "attention_mask": attended.long(),
        "mask": attended & (torch.arange(TIME) >= 2),
        "advantages": ADVANTAGES,
    }
    return {name: column.to(device) for name, column in columns.items()}


def branching(device="cpu"):
    """The first four sequences have a prompt in common, the other two have none."""
    ids = torch.randint(VOCAB, (len(ENDS), WIDTH), generator=torch.Generator().manual_seed(1))
    ids[:4, :20] = ids[0, :20]
    mask = torch.arange(WIDTH).expand(len(ENDS), WIDTH) >= 20
    columns = {"input_ids": ids, "mask": mask, "advantages": ADVANTAGES + 0.1}
    return {name: column.to(device) for name, column in columns.items()}


def gradients(model):
    # A rank of FSDP1 has no element of some parameters.
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).float().cpu() for n, g in grads.items()}


def assert_same_gradients(grads, truth):
    found, expected = oracles.whole(grads), oracles.whole(truth)
    # torch 2.8's FSDP sums gradients over gloo's ranks.
    scale = round((found.norm() / expected.norm()).item())
    assert scale in (1, 2)
    assert oracles.relative_error(found / scale, expected) <= 1e-5


class Steps(NamedTuple):
    make: Callable = branching  # the whole batch
    shares: tuple[slice, slice] = SHARES
    options: tuple[dict, dict] = ({}, {})  # of each rank
    max_tokens: int = 35
    reason: str = ""  # why the second rank has no trees


CASES = {
    "other numbers of micro-batches": Steps(batch, max_tokens=14),
    "other prompts": Steps(reason="no two sequences have more than their first 16 tokens in common"),
    # That rank runs the trial for the other.
    "a cache": Steps(
        shares=(slice(2, 6), slice(0, 2)), options=({}, {"use_cache": True}), reason="use_cache=True keeps keys and"
    ),
}


@cache
def reference(make):
    """Loss, gradients and log-probabilities of the whole batch in one process."""
    model = swap_lm_head(tiny_llama())
    step = loss_step(model, make(), FusedLinearGRPOLoss("bnpo", metrics="basic"))
    step.loss.backward()
    return step.loss.item(), gradients(model), step.per_token_logps


class Ran(NamedTuple):
    """Of two steps, whose second has the loss and the gradients."""

    layouts: list[str]
    micro_batches: int
    # Whether each run of the body has a graph: of the steps, of the log-probabilities, of one micro-batch alone.
    runs: list[list[bool]]
    loss: float
    grads: dict[str, Tensor]
    logps: Tensor  # of this rank's rows


def run_steps(rank, wrapper, name) -> Ran:
    case, seen, runs, reduced, layouts = CASES[name], [], [], [], []
    model = swap_lm_head(tiny_llama().to(rank.device))
    model.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    wrapped = wrap(model, rank, wrapper)
    if wrapper == "ddp":
        wrapped.register_comm_hook(rank.group, lambda group, bucket: reduced.append(1) or allreduce_hook(group, bucket))
    whole = case.make(rank.device)
    part = {column: values[case.shares[rank.index]] for column, values in whole.items()}
    part |= {"num_items_in_batch": whole["mask"].sum(), **case.options[rank.index]}
    loss = FusedLinearGRPOLoss("dapo", metrics="basic", world_size=rank.world)

    def note() -> None:
        runs.append(seen.copy())
        seen.clear()

    for _ in range(2):
        model.zero_grad()
        steps = loss_steps(wrapped, part, loss, max_tokens=case.max_tokens)
        for step in steps:
            step.loss.backward()
        layouts.append(steps.layout)
        note()
    assert len(reduced) == 2 * (wrapper == "ddp"), "gradients are reduced once in a step"
    grads = gradients(model)
    logps = completion_logps(wrapped, part, loss, max_tokens=case.max_tokens)
    torch.testing.assert_close(steps.total.per_token_logps, logps, rtol=1e-5, atol=1e-5)
    note()
    loss_step(wrapped, part, loss).loss.backward()
    note()
    return Ran(layouts, len(steps), runs, steps.total.loss.item(), grads, logps.cpu())


@pytest.mark.parametrize("wrapper", ["ddp", "root", "own"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_whose_batches_differ(ranks, wrapper, two, name):
    case = CASES[name]
    loss, truth, logps = reference(case.make)
    results = ranks.run(run_steps, wrapper, name, **two)
    assert sum(ran.loss for ran in results) / 2 == pytest.approx(loss, rel=1e-5)
    for ran, share in zip(results, case.shares, strict=True):
        torch.testing.assert_close(ran.logps, logps[share], rtol=1e-5, atol=1e-5)
        assert_same_gradients(ran.grads, truth)
        assert ran.runs == results[0].runs
    if case.make is batch:
        for ran in results:
            assert ran.micro_batches == 3
            assert ran.runs[:2] == [[False, True, True, True]] * 2
            assert len(ran.runs[2]) == 4
            # One rank alone has an idle sequence. On a GPU a small batch waits for the host, and they run together.
            joins = wrapper == "ddp" and two["device"] == "cuda"
            joins = joins and torch.cuda.get_device_capability()[0] >= MEASURED_CAPABILITY
            assert ran.runs[3] == ([True] if joins else [False, True])
    elif two["device"] == "cpu":  # on GPUs small batches have no trees
        assert len(results[0].runs[0]) == len(results[0].runs[1]) + 10  # the trial
        for ran, text in zip(results, ("in trees of shared prefixes", case.reason), strict=True):
            assert all(text in layout for layout in ran.layouts)


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


def trl_steps(rank, wrapper, whole_step, long, micro_batches, steps):
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


TREES = [(1, 51), (1, 51)]  # of the sequences with a gradient, and of the others
PADDED, PAIRS = [(len(TRL_ENDS), 40)], [(2, 40), (2, 36)]
# Wrapper, whether one rank has long rows, micro-batches of a call, and the shapes of each rank's last runs.
CALLS = [
    ("ddp", False, 1, ([*TREES, *PADDED], TREES)),
    *((wrapper, False, 1, ([(1, 79), *PADDED], [*PADDED, (1, 79)])) for wrapper in ("fsdp1", "root")),
    ("root", True, 1, ([(1, 79), *PADDED], [(len(TRL_ENDS), LONG)] * 2)),
    ("ddp", False, 2, ([*TREES, *PAIRS], [*PAIRS, *PAIRS])),
    # In the first step one rank has trees: a sharded model then runs once on both.
    *((wrapper, False, 2, ([(1, 79), *PAIRS], [*PADDED, *PAIRS])) for wrapper in ("fsdp1", "root", "own")),
]


@pytest.mark.parametrize(("wrapper", "long", "micro_batches", "shapes"), CALLS)
def test_trls_forward_on_ranks_whose_batches_differ(ranks, wrapper, long, micro_batches, shapes):
    pytest.importorskip("trl", reason="TRL is not installed")
    steps = (0, 1) if micro_batches == 1 else (0, 2)
    whole, plain = (ranks.run(trl_steps, wrapper, flag, long, micro_batches, steps) for flag in (True, False))
    for (grads, runs), (expected, as_it_is), last in zip(whole, plain, shapes, strict=True):
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
        assert runs[-len(last) :] == last
        if micro_batches == 1:
            assert as_it_is[-2:] == [as_it_is[-1]] * 2
            assert as_it_is[-1] in runs  # in the step without trees
    assert wrapper == "ddp" or len(whole[0][1]) == len(whole[1][1])
