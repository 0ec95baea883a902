"""Per-token divergence of a student's next-token distribution from a teacher's: the public function."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from liger_rl.call.low_rank import LowRank
from liger_rl.call.options import IDENTITY
from liger_rl.distributed import VocabParallel
from liger_rl.engines.graphs import never_in_a_graph
from liger_rl.engines.pair.run import (
    BETA,
    Divergence,
    DivergenceCall,
    DivergenceKeywords,
    divergence_of,
    divergence_options,
    measure_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Divergence", "linear_divergence"]


@never_in_a_graph
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    mask: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    low_rank: Sequence[LowRank] = (),
    token_weights: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    **options: "Unpack[DivergenceKeywords]",
) -> Divergence:
    """Divergence of softmax(transform(hidden @ weight.T + bias)) from a teacher's, without either's logits in memory.

    With p the student's probabilities, q the teacher's, and KL(a || b) = sum_v a_v (log a_v - log b_v):

        forward_kl   KL(q || p)
        reverse_kl   KL(p || q)
        jsd          beta KL(q || m) + (1 - beta) KL(p || m),  m = (1 - beta) p + beta q;  KL(q || p) at beta = 0,
                     KL(p || q) at beta = 1

    "jsd" is the generalised Jensen-Shannon divergence of arXiv:2306.13649 with the teacher as its P, as computed by TRL
    1.16 (`ChunkedDivergenceFunction`, `GKDTrainer.generalized_jsd_loss`) and per token by liger-kernel 0.8.5
    (`LigerFusedLinearJSDLoss`, `LigerJSD`), both with the KL divergences at the ends, where the formula itself is 0.
    docs/distillation.md says what Liger's loss adds to it.

    In two passes, logits stay float32 from the products' accumulators on and exist one tile of both heads at a time;
    for a "jsd", where the workspace holds them, as whole rows of a few hundred tokens. The backward recomputes them for
    tokens with a non-zero gradient. Only the student's side is differentiable: hidden, weight, bias and low_rank.
    Under autocast the products run in autocast's dtype. Host syncs on CUDA: one in the forward if there is a mask,
    targets or token_weights, which counts the live tokens, and in two passes one in the backward for the tokens with a
    gradient, with a tolerance two or more.

    Args:
        hidden: (B, T, H) or packed (N, H), float32, bfloat16 or float16.
        weight: (V, H), the student's lm_head's; dtype and device of `hidden` (any float dtype under autocast or with a
            compute_dtype).
        teacher_hidden: (B, T, H') or (N, H') for the same tokens; H' need not be H, and its dtype may be another.
        teacher_weight: (V, H'), as weight is to hidden. With `vocab`, its number of rows may be another.
        kind: which divergence.
        mask: (B, T) or (N,), bool or 0/1; tokens at 0 get 0, and whatever they hold changes nothing. Other values
            raise, but count as 1 with fixed_shape.
        targets: (B, T) or (N,) integer token ids in [0, V), whose log-probabilities are returned beside; a negative one
            masks its token, its divergence included. With fixed_shape so does one outside the vocabulary.
        bias, teacher_bias: (V,) and (V',), added to the head's output before the transform; of its dtype, or float32.
        low_rank: terms of the student's head, as in `linear_logprobs`; adapters, say.
        token_weights: (B, T) or (N,), float32, bfloat16 or float16, no gradient: each token's factor in a loss that is
            sum(token_weights * divergence), `1 / mask.sum()` of a mean, say. Its gradients are then made in the
            forward, in one pass, which saves recomputing both heads' logits. Tokens at 0 are masked. A chunk of tokens
            is kept over the whole vocabulary: two float16 numbers for each entry, at most 1.25 GiB, where products have
            an epilogue, else float32 logits, at most 1 GiB on CUDA. If one chunk does not hold all tokens, it takes
            4 V H bytes more. Not with low_rank, fixed_shape, chunk_vocab, grad_tolerance or float16.
        vocab_parallel: where both weights are this rank's rows of sharded heads, as in `linear_logprobs`: bias,
            teacher_bias and a low-rank `b` are too, and both shards start at the same token id. A DTensor weight needs
            none; then the teacher's weight is one over the same ranks, or this rank's rows. Ranks compare notes at the
            first call with a weight, so both should be the same objects from call to call. Not with token_weights.
        options: `beta` (0.5), in [0, 1], the teacher's share in the mixture of a "jsd", which the other kinds have not.
            `teacher_transform`, temperature (one number), softcap and scale of the teacher's logits; `transform` is the
            student's.
            `vocab`, the entries of the vocabulary that count: both distributions are over the first so many rows of
            their weights, and padding after them gets no probability and a gradient of 0. None needs weights of as many
            rows. And fields of `HeadOptions`: transform, entropy, grad_tolerance, compute_dtype, gather, chunk_tokens,
            chunk_vocab and fixed_shape. A `grad_tolerance` of "auto" is exact here. With a number, the
            backward leaves out negligible entries of each token's dL/dlogits. The error of each is at most so much of
            its norm. docs/distillation.md says where the gradient is exact all the same. `gather` is called for each
            of the two heads. A named chunk bounds both tiles of a pair.

    Returns:
        Divergence(divergence, logps, entropy, teacher_logps, loss): (B, T) or (N,) and () of the loss, None where not
            asked for. With token_weights the loss alone is differentiable. A probability of 0 where the other
            distribution's is not gives an infinite KL divergence.

    Raises:
        TypeError: an argument of a type or dtype that is not listed above, an unknown option, or one that
            `linear_logprobs` has and two heads do not.
        ValueError: shapes, devices or values that do not fit; a tensor of the teacher's that requires a gradient, which
            would get none, while gradients are enabled. With a sharded head at the first call with its weights, on
            every rank.
        NotImplementedError: a tensor with a forward-mode tangent.
        RuntimeError: in the backward of a gradient that `create_graph=True` made: there is no second derivative.
        torch._dynamo.exc.Unsupported: a call under torch.compile(fullgraph=True). Without fullgraph the graph breaks.
    """
    measure = measure_of(kind, options.pop("beta", BETA))
    teacher_transform, vocab = options.pop("teacher_transform", IDENTITY), options.pop("vocab", None)
    return divergence_of(
        DivergenceCall(
            hidden=hidden,
            weight=weight,
            bias=bias,
            low_rank=low_rank,
            teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight,
            teacher_bias=teacher_bias,
            teacher_transform=teacher_transform,
            measure=measure,
            mask=mask,
            targets=targets,
            vocab=vocab,
            token_weights=token_weights,
            vocab_parallel=vocab_parallel,
            options=divergence_options("linear_divergence", options),
        )
    )
