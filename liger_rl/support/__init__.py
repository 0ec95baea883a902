"""Log-probabilities over what a sampler could draw: a list of ids for each token. docs/support.md"""

from liger_rl.support.logprobs_over_sets import SupportLogProbs, support_logprobs
from liger_rl.support.sampling_sets import Support

__all__ = ["Support", "SupportLogProbs", "support_logprobs"]
