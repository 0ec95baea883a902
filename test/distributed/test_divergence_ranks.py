"""Two heads that are sharded over their vocabulary are the whole heads: values, gradients, collectives and errors."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_rl import LogitTransform, LowRank, VocabParallel, linear_divergence, topk_divergence
from ranks import assert_whole, message_of, sent

N, H, TEACHER_H, VOCAB = 29, 10, 14, 301
# Rows of each rank's shard; the teacher's last shard may have padding.
SHARDS = {2: [(151, 150), (261, 40)], 4: [(76, 75, 75, 75), (7, 180, 1, 113)]}


@dataclass(frozen=True)
class Case:
    kind: str = "reverse_kl"
    beta: float = 0.5
    shards: int = 0  # which of SHARDS
    padding: int = 0  # rows of the teacher's after the vocabulary
    vocab: int | None = None
    rank: int = 0  # of a low-rank term
    masked: str = "some"
    fixed_shape: bool = False
    chunk_vocab: int | None = None
    frozen: str = ""
    dtype: torch.dtype = torch.float32
    dtensors: str = ""  # which of student and teacher are DTensors; the rows of the other are a plain shard
    placement: Shard | Replicate | None = None  # of hidden states that are DTensors

    def __str__(self):
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k)) or "plain"


CASES = [
    Case(),
    Case(kind="forward_kl", shards=1),
    Case(kind="jsd", beta=0.3, shards=1),
    Case(kind="jsd", fixed_shape=True),
    Case(padding=9, vocab=VOCAB, shards=1),
    Case(kind="jsd", padding=3, vocab=170),  # the last ranks' rows are padding, some of them all
    Case(rank=3, chunk_vocab=64, shards=1),
    Case(kind="forward_kl", masked="all"),
    Case(frozen="weight", rank=2),
    Case(kind="forward_kl", frozen="hidden"),
    Case(dtype=torch.bfloat16, kind="jsd"),
    *(
        Case(kind=kind, dtensors=dtensors, placement=placement)
        for kind in ("reverse_kl", "jsd")
        for dtensors, placement in (("both", None), ("both", Shard(0)), ("student", Replicate()))
    ),
]


def parts_of(case: Case, device="cpu") -> dict[str, Tensor]:
    torch.manual_seed(6)

    def made(*shape):
        return torch.randn(*shape).to(device, case.dtype)

    found = {"hidden": made(N, H), "weight": made(VOCAB, H), "bias": made(VOCAB)}
    found |= {"teacher_hidden": made(N, TEACHER_H), "teacher_weight": made(VOCAB + case.padding, TEACHER_H) * 0.7}
    found |= {"teacher_bias": made(VOCAB + case.padding)}
    if case.rank:
        found |= {"a": made(case.rank, H), "b": made(VOCAB, case.rank)}
    return found


def solve(case: Case, parts: dict[str, Tensor], place=None) -> dict[str, Tensor]:
    """Results and gradients by name."""
    device = parts["hidden"].device
    torch.manual_seed(7)
    ids = torch.randint(case.vocab or VOCAB, (N,)).to(device)
    mask = (torch.rand(N) < (0.0 if case.masked == "all" else 0.7)).to(device)
    upstream = torch.randn(3, N).to(device)
    upstream[:, ::4] = 0.0
    own = {n: parts[n] for n in ("hidden", "weight", "bias", "a", "b") if n in parts}
    leaves = {name: part.requires_grad_() for name, part in own.items() if name != case.frozen}
    found = linear_divergence(
        *(parts[name] for name in ("hidden", "weight", "teacher_hidden", "teacher_weight")),
        kind=case.kind, beta=case.beta, mask=mask, targets=ids, bias=parts["bias"], teacher_bias=parts["teacher_bias"],
        transform=LogitTransform(temperature=0.8), teacher_transform=LogitTransform(softcap=3.0),
        low_rank=[LowRank(a=parts["a"], b=parts["b"])] if case.rank else [], entropy=True, vocab=case.vocab,
        fixed_shape=case.fixed_shape, chunk_vocab=case.chunk_vocab, vocab_parallel=place,
    )  # fmt: skip
    loss = sum((part * factor).sum() for part, factor in zip(found[:3], upstream, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    results = {name: part for name, part in found._asdict().items() if part is not None}
    results |= {f"grad_{name}": whole(grad) for name, grad in zip(leaves, grads, strict=True)}
    return {name: part.detach().cpu() for name, part in results.items()}


def whole(part: Tensor) -> Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


def shard_of(rank, case: Case) -> tuple[dict[str, Tensor], VocabParallel | None]:
    if case.dtensors:
        mesh, parts = rank.mesh("tp"), parts_of(case, rank.device)
        for name in ("weight", "bias", "teacher_weight", "teacher_bias"):
            rows = distribute_tensor(parts[name], mesh, [Shard(0)])
            parts[name] = rows.to_local() if "teacher" in name and case.dtensors == "student" else rows
        if case.placement is not None:
            hidden = ("hidden", "teacher_hidden")
            parts |= {name: distribute_tensor(parts[name], mesh, [case.placement]) for name in hidden}
        return parts, None
    sizes = SHARDS[rank.world][case.shards]
    start, rows = sum(sizes[: rank.index]), sizes[rank.index]
    padding = case.padding if rank.index == rank.world - 1 else 0
    cut = {"weight": rows, "bias": rows, "b": rows, "teacher_weight": rows + padding, "teacher_bias": rows + padding}
    parts = parts_of(case, rank.device)
    parts = {n: p[start : start + cut[n]].clone() if n in cut else p for n, p in parts.items()}
    return parts, VocabParallel(rank.group, start)


def solve_sharded(rank, case: Case) -> dict[str, Tensor]:
    return solve(case, *shard_of(rank, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_whole_heads(ranks, world, case):
    results, expected = ranks.run(solve_sharded, case, **world), solve(case, parts_of(case, world["device"]))
    assert_whole(results, expected, 1e-5, 1e-5 if case.dtype == torch.float32 else 4e-3)
    assert all(truth.any() or case.masked == "all" for truth in expected.values())
    assert ("grad_weight" in expected) == (case.frozen != "weight")


def distilled(rank):
    """From a teacher's lists."""
    parts, place = parts_of(Case()), None
    ids, teacher = torch.randint(VOCAB, (N, 7)), torch.randn(N, 7).log_softmax(-1)
    if rank is not None:
        parts, place = shard_of(rank, Case())
    hidden = parts["hidden"].requires_grad_()
    found = topk_divergence(
        hidden, parts["weight"], ids, teacher, tail="none", bias=parts["bias"], vocab_parallel=place
    ).divergence
    return {"divergence": found.detach(), "grad_hidden": torch.autograd.grad(found.sum(), hidden)[0]}


def test_distillation_from_lists(ranks):
    torch.manual_seed(0)
    assert_whole(ranks.run(distilled), distilled(None), 1e-5, 1e-5)


def collectives(rank, case):
    parts, place = shard_of(rank, case)
    solve(case, parts, place)
    with sent() as calls:
        solve(case, parts, place)
    return calls


@pytest.mark.parametrize(("kind", "sums"), [("reverse_kl", [2, 6]), ("jsd", [2, 5, 2])])
def test_what_a_call_sends(ranks, kind, sums):
    """A maximum and a sum of a few numbers a token, one sum more for a mixture, and the gradient of hidden."""
    for case in (Case(kind=kind), Case(kind=kind, chunk_vocab=32)):
        first, other = ranks.run(collectives, case)
        assert first == other
        assert {name for name, _ in first} == {"all_reduce"}  # the ranks have compared notes
        shapes = [shape for _, shape in first]
        assert [shape[0] for shape in shapes[:-1]] == sums
        assert shapes[-1][1] == H
        assert shapes[-1][0] < shapes[0][1] < N  # tokens without a gradient are not sent


# --- shards of data parallelism ---------------------------------------------------------------------------------------


def problem(device="cpu"):
    torch.manual_seed(8)
    shapes = {"hidden": (4, 8, H), "weight": (37, H), "teacher_hidden": (4, 8, TEACHER_H)}
    shapes |= {"teacher_weight": (37, TEACHER_H)}
    return {name: torch.randn(*shape).to(device) for name, shape in shapes.items()}


def loss_of_trl(rank, patched, chunk_vocab):
    from trl.trainer import distillation_trainer

    from liger_rl.integrations import trl_divergence

    trl_divergence.op.chunk_vocab = chunk_vocab
    loss = vars(trl_divergence if patched else distillation_trainer)[trl_divergence.LOSS]
    parts = problem()
    heads = [distribute_tensor(parts[name], rank.mesh("dp"), [Shard(0)]) for name in ("weight", "teacher_weight")]
    leaves = [parts["hidden"].requires_grad_(), heads[0].requires_grad_()]
    mask = torch.arange(8) < torch.tensor([[8], [5], [1 + rank.index], [0]])
    found = loss(parts["hidden"], parts["teacher_hidden"], *heads, mask, 0.5, 7)
    grads = torch.autograd.grad(found[0], leaves)
    return [found[0].detach(), *found[1:], grads[0], grads[1].full_tensor()]


@pytest.mark.parametrize("chunk_vocab", [None, 16])
def test_trls_loss_of_heads_that_are_dtensors(chunk_vocab, ranks):
    """Gathered as TRL gathers them, in one pass and in two."""
    pytest.importorskip("trl.kernels.chunked_divergence", reason="TRL 1.16 is not installed")
    runs = (ranks.run(loss_of_trl, patched, chunk_vocab) for patched in (True, False))
    for found, theirs in zip(*runs, strict=True):
        for mine, truth in zip(found, theirs, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------


def misaligned(rank):
    """A teacher whose shards are padded each, and so start elsewhere."""
    place = VocabParallel(rank.group, 5 * rank.index)
    parts = torch.randn(6, H), torch.randn(5, H), torch.randn(6, TEACHER_H), torch.randn(6, TEACHER_H)
    whole = distribute_tensor(torch.randn(11, H), rank.mesh("tp"), [Shard(0)])
    other = distribute_tensor(torch.randn(13, TEACHER_H), rank.mesh("tp"), [Shard(0)])
    return [
        message_of(lambda: linear_divergence(*parts, vocab=10, vocab_parallel=place)),
        message_of(lambda: linear_divergence(parts[0], whole, parts[2], other, vocab=10)),
        message_of(lambda: linear_divergence(parts[0], torch.randn(13, H), parts[2], other)),  # not the student's
    ]


def test_shards_that_start_at_other_ids_are_refused(ranks):
    first, last = ranks.run(misaligned)
    for covering, dtensors, whole in (first, last):
        assert "the shards of weight must cover the vocabulary" in covering
        for message in (dtensors, whole):
            assert message.startswith("ValueError: teacher_weight must be sharded over the ranks of weight")
