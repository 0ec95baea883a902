"""Per-token log-probabilities from an lm_head or from logits: the public functions."""

from collections.abc import Collection

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.head.autograd import compute_values
from liger_rl.head.checks import check_flag
from liger_rl.head.given_logits import LogitRows, check_logits
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.head.live_tokens import scatter_rows, start_selection
from liger_rl.head.record import Head, LogProbs, gather_head
from liger_rl.kernels.public_call import public
from liger_rl.kernels.transform import LogitTransform

__all__ = ["LogProbs", "linear_logprobs", "logits_logprobs"]


@public
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    extras: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> LogProbs:
    """Log-probabilities of the targets from an lm_head, without the logits in memory.

    Equal to

        z = transform(hidden @ weight.T + bias)
        logps = torch.log_softmax(z.float(), -1).gather(-1, targets[..., None]).squeeze(-1)

    Tiles of logits are float32. Masked tokens enter no product, nor do tokens without a gradient in the
    backward. Autocast sets the products' dtype. On CUDA the host waits for one count in each direction.

    Args:
        hidden: (B, T, H) or packed (N, H), float32, bfloat16 or float16; position t predicts targets[t].
        weight: (V, H), in hidden's dtype unless under autocast or with a compute_dtype.
        targets: (B, T) or (N,) integer ids in [0, V); a negative id masks its token. Or K <= 1024 ids a token,
            (B, T, K) or (N, K), repeats allowed (docs/distillation.md): logps has this shape, 0 at negative ids; a
            token with only negative ids is masked.
        mask: (B, T) or (N,), bool or 0/1: the tokens that count. Others get 0, whatever they hold. Other values
            raise.
        bias: (V,), added before the transform; hidden's dtype or float32.
        vocab_parallel: the place in a sharded head.
        transform, entropy, lse, extras, compute_dtype, gather: the fields of `HeadOptions`.
        chunk_tokens, chunk_vocab: the same.

    Returns:
        LogProbs, with None for results that are not asked for.

    Raises:
        TypeError: a wrong type or dtype, an unknown option.
        ValueError: shapes, devices, values or options that do not fit, such as a live target outside [0, V).
        NotImplementedError, RuntimeError: a forward-mode derivative or a second derivative is asked for.
    """
    head_options = HeadOptions(
        transform=transform, entropy=entropy, lse=lse, extras=extras, compute_dtype=compute_dtype,
        gather=gather, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
    )  # fmt: skip
    with gather_head(head_options, weight, bias):
        return log_probs(
            Head.of(
                hidden, weight, targets, head_options, mask=mask, bias=bias, vocab_parallel=vocab_parallel,
                several=True,
            )
        )  # fmt: skip


def log_probs(head: Head) -> LogProbs:
    """Log-probabilities where `head.needed` is set. Other tokens get 0 like masked ones; their ids are still checked.

    The caller enters `options.gather`.
    """
    head = head.with_shard()
    live = start_selection(head.ids, head.mask, head.vocab, needed=head.needed, targets_name=head.targets_name)()
    values = compute_values(head._replace(live=live))
    if live is None and len(head.shape) == 1:
        return values
    return LogProbs._make([None if x is None else scatter_rows(x, live, head.shape) for x in values])


@public
def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
) -> LogProbs:
    """log_softmax(transform(logits)) at the targets, in float32, without a float32 copy of the logits.

    For callers who already hold logits. The gradient has the logits' dtype, and is exactly 0 at masked tokens.

    Args:
        logits: (B, T, V) or (N, V), float32, bfloat16 or float16. A slice such as `logits[:, :-1]` is not copied.
        targets: (B, T) or (N,) integer token ids in [0, V). A negative id masks its token.
        mask, transform, entropy: as in `linear_logprobs`.

    Returns, raises: as `linear_logprobs`.
    """
    check_flag("entropy", entropy)
    check_logits(logits, targets, mask, transform)
    raise_if_wrong = start_selection(targets, mask, logits.shape[-1], "logits")
    logps, entropies, _ = LogitRows.apply(logits, targets, mask, transform, entropy)
    raise_if_wrong()
    return LogProbs(logps.view(targets.shape), None if entropies is None else entropies.view(targets.shape))
