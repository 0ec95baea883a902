"""Per-token divergence of a student's next-token distribution from a teacher's: the public function."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from liger_rl.call.dtensors import low_rank_tensors
from liger_rl.call.head_call import shared_errors
from liger_rl.call.low_rank import LowRank
from liger_rl.call.options import IDENTITY, options_of
from liger_rl.distributed import VocabParallel
from liger_rl.engines.graphs import never_in_a_graph
from liger_rl.engines.pair.run import (
    BETA,
    Divergence,
    DivergenceCall,
    DivergenceKeywords,
    divergence_of,
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
    """Per-token divergence of a student's distribution from a teacher's, without either's logits in memory.

    With the student's p = softmax(transform(hidden @ weight.T + bias)), the teacher's q, and
    KL(a || b) = sum_v a_v (log a_v - log b_v):

        forward_kl   KL(q || p)
        reverse_kl   KL(p || q)
        jsd          beta KL(q || m) + (1 - beta) KL(p || m),  m = (1 - beta) p + beta q;  KL(q || p) at beta = 0,
                     KL(p || q) at beta = 1

    "jsd" is the generalised Jensen-Shannon divergence of arXiv:2306.13649, as in TRL 1.16 and liger-kernel 0.8.5.
    docs/distillation.md says which memory, host syncs and rounding a call has. Only hidden, weight, bias and low_rank
    are differentiable.

    Args:
        hidden, weight, mask, bias, low_rank: the student's, as in `linear_logprobs`.
        teacher_hidden: (B, T, H') or (N, H'), for the same tokens, float32, bfloat16 or float16.
        teacher_weight, teacher_bias: (V', H') and (V',). V' = V, unless `vocab` is given.
        kind: as above.
        targets: (B, T) or (N,) integer ids in [0, V), whose log-probabilities are also returned. A negative id masks
            its token in every result.
        token_weights: (B, T) or (N,) floats, no gradient: factors in loss = sum(token_weights * divergence). One pass
            makes the gradients in the forward. Tokens at 0 are masked. With a fused epilogue a "jsd" then has a
            relative error of 1e-4, up to 5e-3 for a token whose student gives one id more than 0.999, and up to 5e-2
            for more than 0.9999. The value of two passes is computed from float32 logits.
        vocab_parallel: this rank's place in two heads whose weights and biases are sharded, from the same id on.
        options: the keys of `DivergenceKeywords`. `beta` (0.5), in [0, 1], is for "jsd" alone. `transform` is the
            student's, `teacher_transform` the teacher's. `vocab` is the number of rows of both weights that count:
            padding after them gets no probability. A grad_tolerance of "auto" is exact here.

    Returns:
        Divergence, with None for results that are not asked for. With token_weights only the loss is differentiable.

    Raises: as `linear_logprobs`, and
        ValueError: batch_invariant, extras, lse or topk; a teacher's tensor that requires a gradient,
            while gradients are enabled.
        torch._dynamo.exc.Unsupported: under torch.compile(fullgraph=True). Without fullgraph the graph breaks.
    """
    tokens = hidden, teacher_hidden, targets, mask, token_weights, *low_rank_tensors(low_rank)
    with shared_errors(vocab_parallel, weight, *tokens):
        measure = measure_of(kind, options.pop("beta", BETA))
        teacher_transform, vocab = options.pop("teacher_transform", IDENTITY), options.pop("vocab", None)
        head_options = options_of("linear_divergence", options)
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
            options=head_options,
        )
    )
