"""Calls of frameworks' functions with hidden states and a head, and what full logits in float64 make of them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_layers
import oracles
from liger_rl import Support
from liger_rl.integrations.megatron import fused_output as of_megatron
from liger_rl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs
from liger_rl.integrations.prime_rl import fused_output as of_prime_rl
from liger_rl.integrations.skyrl import fused_lm_head_logprob_apply, fused_vocab_parallel_entropy_from_hidden
from liger_rl.integrations.verl import linear_cross_entropy

HIDDEN, VOCAB, BATCH, LENGTH, IDS = 12, 40, 2, 8, 5


@dataclass(frozen=True)
class Case:
    framework: str
    temperature: float | str = 1.0  # a number or "of tokens"
    softcap: float | None = None
    scale: float = 1.0
    masked: bool = False
    replay: bool = False  # the ids that were sampled from
    dtype: torch.dtype = torch.float32
    context: int = 1  # context parallel ranks, which hold parts of the sequence
    pad: int = 0  # positions at the end that the targets lack
    sequence_parallel: bool = False
    tied: bool = False
    fusion: bool = False  # the weight's gradient is added in `main_grad`

    def __str__(self):
        named = (f"{k}={v}" for k, v in vars(self).items() if k != "framework" and v != getattr(Case(""), k))
        return ",".join([self.framework, *named])


class Problem(SimpleNamespace):
    """hidden (B, T, H), weight (V, H), next ids (B, T), temperature, rows of ids (B, T, K) or None, live (B, T)."""


def problem(case: Case, device="cpu") -> Problem:
    torch.manual_seed(3)
    hidden, weight = torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN)
    labels, live = torch.randint(VOCAB, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    given = {"hidden": hidden, "weight": weight, "upstream": torch.randn(2, BATCH, LENGTH), "rows": None}
    given["temperature"] = 0.5 + torch.rand(BATCH, LENGTH) if case.temperature == "of tokens" else case.temperature
    if case.masked:
        live = torch.rand(BATCH, LENGTH) < 0.7
        labels[~live] = -100
    if case.framework == "nemo_rl":  # its log-probabilities are of the target's own next ids
        live[:, LENGTH - 1 - case.pad :] = False
    if case.replay:
        given["rows"] = rows_of(labels)
        if case.framework == "megatron":  # where prime-rl takes all ids for a row without its label, the label is added
            given["rows"][..., 0] = labels
    given |= {"labels": labels, "live": live}
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    # The head of SkyRL stays float32.
    narrow = ("hidden",) if case.framework == "skyrl" else ("hidden", "weight")
    return Problem(**given | {name: given[name].to(case.dtype) for name in narrow})


def rows_of(labels: Tensor, vocab: int = VOCAB) -> Tensor:
    """(B, T, K): rows with the label and other ids, one of the label alone, one without ids, one without its label."""
    device = labels.device
    others = torch.rand(*labels.shape, vocab - 1, device=device).argsort(-1)[..., :IDS] + 1  # prime-rl counts repeated
    rows = ((labels[..., None] + others) % vocab).int()
    rows[..., 0] = labels
    rows[..., 3:][torch.rand(labels.shape, device=device) < 0.5] = -1
    rows[0, 0, 1:] = -1
    rows[0, 1] = -1
    rows[1, 2] = (labels[1, 2] + torch.arange(1, 1 + IDS, device=device)) % vocab
    return rows


def full_logits(x: Problem, case: Case, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """-> log-probabilities and entropies in float64, over the ids of the rows that have their label."""
    z = case.scale * hidden.double() @ weight.double().T
    z = z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)
    z = z / (x.temperature.double()[..., None] if case.temperature == "of tokens" else x.temperature)
    if x.rows is not None:
        listed = torch.zeros(*z.shape[:2], z.shape[-1] + 1, dtype=torch.bool, device=z.device)
        listed = listed.scatter(-1, torch.where(x.rows < 0, z.shape[-1], x.rows.long()), True)[..., :-1]
        z = torch.where(listed | ~listed.gather(-1, x.labels[..., None]), z, -1e9)
    values = oracles.logits_logprobs(z, x.labels.clamp(min=0))
    return tuple(torch.where(x.live, value, 0.0) for value in values)


def alone(device="cpu") -> SimpleNamespace:
    """The only rank, without a group."""
    return SimpleNamespace(index=0, world=1, group=None, device=device)


def positions_of(rank: Any, case: Case) -> Tensor:
    """What a context parallel rank holds of the sequence, in NeMo-RL's order; of several vocabulary ranks the same."""
    if case.context == 1:
        return torch.arange(LENGTH)
    part, step = rank.index // (rank.world // case.context), LENGTH // (2 * case.context)
    return torch.cat([torch.arange(step) + chunk * step for chunk in (part, 2 * case.context - 1 - part)])


def groups_of(rank: Any, case: Case):
    """-> this rank's vocabulary ranks, and its context parallel ranks or None."""
    if case.context == 1:
        return rank.group, None
    shards = rank.world // case.context
    vocabulary = [dist.new_group([*range(i, i + shards)]) for i in range(0, rank.world, shards)]
    across = [dist.new_group([*range(i, rank.world, shards)]) for i in range(shards)]
    return vocabulary[rank.index // shards], across[rank.index % shards]


# --- rank, case, problem, hidden (B, T, H), this rank's weight -> (B, T) log-probabilities and entropies, or None -----


def verl(rank, case, x, hidden, weight):
    outputs = linear_cross_entropy(hidden, weight, x.labels, x.temperature, "none", rank.group)
    return [values.view(BATCH, LENGTH) for values in outputs]


def prime_rl(rank, case, x, hidden, weight):
    head = SimpleNamespace(weight=weight, **({} if case.softcap is None else {"softcap": case.softcap}))
    temperature = x.temperature if case.temperature == "of tokens" else torch.full_like(hidden[..., 0], x.temperature)
    return [*of_prime_rl(head, hidden, x.labels, temperature, x.rows).values()][:2]


def skyrl(rank, case, x, hidden, weight):
    first = len(weight) * rank.index
    logps = None
    if case.temperature == 1.0:  # which SkyRL's callers put into the weight
        bounds = first, first + len(weight), 4
        logps = fused_lm_head_logprob_apply("torch", hidden, weight, x.labels, *bounds, rank.group, False)
    entropy = fused_vocab_parallel_entropy_from_hidden(hidden, weight, rank.group, 4, temperature=x.temperature)
    return logps, entropy


def nemo_rl(rank, case, x, hidden, weight, function=from_parallel_hidden_states_to_logprobs, **given):
    """Of the whole sequence, though a rank gives the hidden states of a part."""
    shards = rank.world // case.context
    group, across = groups_of(rank, case)
    part = positions_of(rank, case).chunk(shards)[rank.index % shards]
    first = len(weight) * (rank.index % shards)
    target = torch.cat([torch.zeros_like(x.labels[:, :1]), x.labels[:, :-1]], 1)[:, : LENGTH - case.pad]
    logps = function(
        hidden.transpose(0, 1)[part].contiguous(), weight, None, target, vocab_start_index=first,
        vocab_end_index=first + len(weight), tp_group=group, cp_group=across, **{"chunk_size": 3, **given},
    )  # fmt: skip
    return torch.nn.functional.pad(logps, (0, 1 + case.pad)), None


def megatron(rank, case, x, hidden, weight):
    """Outputs are those of a context parallel rank's own tokens, and 0 elsewhere."""
    shards = rank.world // case.context
    positions = positions_of(rank, case).to(hidden.device)
    layer = megatron_layers.output_layer(weight, groups_of(rank, case)[0], sequence_parallel=case.sequence_parallel)
    if not case.tied:  # the layer holds the gradient's leaf
        layer.weight = weight
    if case.fusion:
        layer.gradient_accumulation_fusion = True
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight).float(), False
        weight.zero_out_wgrad = True
    part = positions.chunk(shards)[rank.index] if case.sequence_parallel else positions
    temperature = x.temperature[:, positions] if case.temperature == "of tokens" else x.temperature
    context = {"entropy": True, "temperature": temperature}
    if x.rows is not None:
        context["support"] = Support.from_padded(x.rows)
    out = of_megatron(
        hidden_states=hidden.transpose(0, 1)[part], output_layer=layer, output_weight=weight if case.tied else None,
        labels=x.labels[:, positions].clamp(min=-1), loss_mask=0.3 * x.live[:, positions],
        scale_logits=lambda logits: case.scale * logits, context=context, runtime_gather_output=None,
    )  # fmt: skip
    assert "_forward_impl" not in vars(layer)
    nothing = torch.zeros(BATCH, LENGTH, device=hidden.device)
    return [nothing.index_copy(1, positions, values) for values in (out.logps, out.entropy)]


FUNCTIONS = {"verl": verl, "prime_rl": prime_rl, "skyrl": skyrl, "nemo_rl": nemo_rl, "megatron": megatron}


def solve(rank: Any, case: Case, function: Callable | None = None) -> dict[str, Tensor]:
    """Outputs, and gradients of hidden, whole, and of this rank's rows of the weight."""
    x = problem(case, rank.device)
    shards = rank.world // case.context
    weight = torch.nn.Parameter(x.weight.chunk(shards)[rank.index % shards].clone())
    hidden = x.hidden.requires_grad_()
    outputs = (function or FUNCTIONS[case.framework])(rank, case, x, hidden, weight)
    found = {name: values for name, values in zip(("logps", "entropy"), outputs, strict=True) if values is not None}
    pairs = zip(outputs, x.upstream, strict=True)
    sum((values * factor).sum() for values, factor in pairs if values is not None).backward()
    grad = weight.grad
    if case.fusion:
        assert weight.grad_added_to_main_grad
        assert not grad.any()
        grad = weight.main_grad - 1
    return {n: v.detach().cpu() for n, v in (found | {"grad_hidden": hidden.grad, "grad_weight": grad}).items()}


def assert_full_logits(results: list[dict[str, Tensor]], case: Case) -> None:
    x, shards = problem(case), len(results) // case.context
    leaves = [tensor.double().requires_grad_() for tensor in (x.hidden, x.weight)]
    truths = dict(zip(("logps", "entropy"), full_logits(x, case, *leaves), strict=True))
    total = sum((truths[name] * x.upstream[place]).sum() for place, name in enumerate(truths) if name in results[0])
    grads = torch.autograd.grad(total, leaves)
    # Megatron's ranks have their own tokens of a sequence, where NeMo-RL's gather hands all ranks' gradients to each.
    parts, copies = (case.context, 1) if case.framework == "megatron" else (1, case.context)
    for name in results[0].keys() & truths.keys():
        for rank in range(shards):
            found = sum(result[name] for result in results[rank : rank + parts * shards : shards])
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), truths[name].detach(), rtol=1e-5, atol=1e-5)
    # Of hidden: parts, which the framework's caller adds up, but for Megatron's, which are whole without them.
    if case.framework == "megatron" and not case.sequence_parallel:
        for rank, result in enumerate(results):
            assert torch.equal(result["grad_hidden"], results[rank // shards * shards]["grad_hidden"])
        results = [result | {"grad_hidden": result["grad_hidden"].double() / shards} for result in results]
    found = [
        sum(result["grad_hidden"].double() for result in results) / copies,
        torch.cat([sum(r["grad_weight"].double() for r in results[s::shards]) / copies for s in range(shards)]),
    ]
    near = {"rtol": 1e-4, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for mine, truth in zip(found, grads, strict=True):
        assert truth.any()
        torch.testing.assert_close(mine, truth, **near)
