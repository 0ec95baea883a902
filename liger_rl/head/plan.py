"""Chooses the engine and the tiles of a call of the head from shapes alone, and says why.

`ENGINES` is ordered: the first engine that has no `reason_against` the call runs. A call with a support has its own
engine, `listed/listed_ids.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from liger_rl.head import checks
from liger_rl.head.autograd import Engine
from liger_rl.head.dense import two_pass
from liger_rl.head.dense.several import SeveralTargets
from liger_rl.head.dense.two_pass import TwoPasses
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.head.tiles import Tiles
from liger_rl.head.workload import Workload
from liger_rl.kernels.devices import family_of, gpu_of
from liger_rl.kernels.public_call import public
from liger_rl.kernels.transform import LogitTransform

ENGINES: tuple[type[Engine], ...] = (SeveralTargets, TwoPasses)


def choose_engine(work: Workload) -> type[Engine]:
    """The first engine that takes the call."""
    return next(engine for engine in ENGINES if engine.reason_against(work) is None)


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """How `linear_logprobs` or `FusedLinearGRPOLoss` computes a call. `str(plan)` is a summary of three lines."""

    tokens: int
    """N. The plan is that of a call in which all of them count."""
    device: str
    """"cpu", or the name of a GPU's device with what it is: "cuda, compute capability 9.0"."""
    path: str
    """"several targets" or "two passes"."""
    reason: str
    """The needs of the engines before this one. Then the dtype of a copied weight, and on a GPU the need of an epilogue
    that does not apply."""
    epilogue: bool
    """Whether tiles are folded in the product's epilogue, with no float32 tile in memory."""
    family: str | None
    """How the product with the epilogue reads memory: "tma" or "portable" (pointers). None without an epilogue."""
    tiles: Tiles
    """Upper bounds of a tile's sides."""

    def __str__(self) -> str:
        work = f"in the product's epilogue ({self.family})" if self.epilogue else "in float32 tiles of logits"
        sides = f"tiles of up to {self.tiles.tokens} tokens x {self.tiles.vocab} vocabulary entries"
        call = f"for {self.tokens} tokens that all count, on {self.device}"
        return f"{self.path}, {work}, {sides}\n{call}\n{self.reason}"


def _plan(work: Workload) -> LinearPlan:
    engine = choose_engine(work)
    before = ENGINES[: ENGINES.index(engine)]
    remarks = [f"{other.name}: needs {other.reason_against(work)}" for other in before]
    forward, backward = two_pass.tiles_of(work)
    tiles = Tiles(*map(max, forward, backward))
    reason = work.reason_against_fold
    if reason is None and work.casts_weight:
        remarks.append(f"products read a copy of the weight in {str(work.compute_dtype).split('.')[1]}")
    if reason is None and True in work.needs and work.reason_against_grad:
        remarks.append(f"no epilogue in the backward, which needs {work.reason_against_grad}")
    if work.device.type == "cuda" and reason is not None:
        remarks.append(f"no epilogue, which needs {reason}")
    gpu = gpu_of(work.device)
    return LinearPlan(
        tokens=work.tokens,
        device=str(work.device) if gpu is None else f"{work.device}, {gpu.name}",
        path=engine.name,
        reason="; ".join(remarks),
        epilogue=reason is None,
        family=None if reason else family_of(work.device).name,
        tiles=tiles,
    )


@public
def plan_linear_logprobs(
    tokens: int,
    vocab: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    needs: tuple[bool, bool] = (True, True),
    aligned: bool = True,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    topk: int | None = None,
    extras: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> LinearPlan:
    """The engine that `linear_logprobs` or `FusedLinearGRPOLoss` uses for these shapes, and the reason.

    The first engine of this list that takes the call runs:

    1. "several targets", with `topk`.
    2. "two passes".

    docs/design.md says which products have an epilogue, and what memory engines take.

    Args:
        tokens, vocab, hidden_size: N, V, H. All N tokens count.
        dtype, weight_dtype: dtypes of hidden and of weight. weight_dtype=None is the dtype of hidden.
        device: None is this machine's GPU, or the CPU without one. "cuda" without one is compute capability 9.0.
        needs: whether hidden needs a gradient, and whether weight does.
        aligned: whether the weight's rows start at multiples of 16 bytes; in a view (FSDP1) they may not.
        transform, entropy, lse, topk, extras, compute_dtype, gather: the fields of `HeadOptions`.
        chunk_tokens, chunk_vocab: the same.

    Raises:
        TypeError, ValueError: a bad argument; options that exclude each other.
    """
    counts = {"tokens": tokens, "vocab": vocab, "hidden_size": hidden_size}
    for name, count in counts.items():
        checks.check_count(name, count, least=0 if name == "tokens" else 1)
    for name, value in (("dtype", dtype), ("weight_dtype", weight_dtype)):
        if value not in checks.FLOAT_DTYPES and (value is not None or name == "dtype"):
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {value!r}")
    if not isinstance(needs, (tuple, list)) or len(needs) != 2:
        raise TypeError(f"needs must be a pair of bools, of hidden and of weight, got {needs!r}")
    flags = {"aligned": aligned, "needs[0]": needs[0], "needs[1]": needs[1]}
    for name, flag in flags.items():
        checks.check_flag(name, flag)
    head_options = HeadOptions(
        transform=transform, entropy=entropy, lse=lse, topk=topk, extras=extras, compute_dtype=compute_dtype,
        gather=gather, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
    )  # fmt: skip
    used = head_options.compute_dtype or dtype
    return _plan(
        Workload(
            tokens, vocab, hidden_size, dtype, weight_dtype or dtype, used, _device(device),
            (needs[0], needs[1], False), head_options, aligned=aligned,
        )
    )  # fmt: skip


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device must be a torch.device, the name of one or None, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device, the name of one or None, got {device!r}") from error
