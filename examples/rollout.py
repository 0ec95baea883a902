"""Rollouts that bring the sampler's log-probabilities and what it could draw, from a loop around `sample_tokens`.

    python examples/rollout.py                     # a small Qwen3 with random weights; on CPU float32, on GPU bfloat16
    python examples/rollout.py --model Qwen/Qwen3-0.6B --top-p 0.95

It prints how far the trainer's log-probabilities of the same tokens are from the sampler's. The head agrees to the bit.
What is left comes from the body: with a cache it computes a token in other shapes than the trainer does. With
`--cache off` each step runs the body in the trainer's shapes, and on CPU in float32 the ratio of policies is exactly 1.
"""

import argparse
from dataclasses import dataclass

import torch
from text import encode, positions, small_policy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_rl import LogitTransform, Support, linear_logprobs, sample_tokens


@dataclass
class Rollout:
    ids: Tensor  # (B, prompt + new)
    prompt_mask: Tensor  # (B, prompt)
    mask: Tensor  # (B, new) bool: up to the first end of the sequence
    sampling_per_token_logps: Tensor  # (B, new)
    support: Support | None  # a row for each of the B x new tokens

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Of the body. Columns behind the end of a sequence change nothing before it."""
        seen = torch.cat([self.prompt_mask, torch.ones_like(self.mask, dtype=self.prompt_mask.dtype)], dim=1)
        return {"input_ids": self.ids, "attention_mask": seen, "position_ids": positions(seen)}


@torch.no_grad()
def rollout(
    model, prompts: dict[str, Tensor], max_new_tokens: int, *, end: int, seed: int, cache: bool = True, **sampling
) -> Rollout:
    """One completion of each left-padded prompt. `sampling` goes to `sample_tokens`."""
    ids, prompt_mask = prompts["input_ids"], prompts["attention_mask"]
    batch, length = ids.shape
    ids = torch.cat([ids, ids.new_full((batch, max_new_tokens), end)], dim=1)
    found = Rollout(ids, prompt_mask, torch.ones(batch, max_new_tokens, dtype=torch.bool, device=ids.device), ids, None)
    inputs, past, logps, supports = found.inputs, None, [], []
    for step in range(max_new_tokens):
        if cache:
            # The first step reads the prompt, the others their last token.
            fed = slice(0 if past is None else length + step - 1, length + step)
            output = model.model(
                input_ids=ids[:, fed], attention_mask=inputs["attention_mask"][:, : length + step],
                position_ids=inputs["position_ids"][:, fed], past_key_values=past, use_cache=True,
            )  # fmt: skip
            past, hidden = output.past_key_values, output.last_hidden_state[:, -1]
        else:
            hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, length + step - 1]
        place = torch.arange(batch, device=ids.device) * max_new_tokens + step
        drawn = sample_tokens(hidden, model.lm_head.weight, seed=seed, positions=place, **sampling)
        ids[:, length + step] = drawn.ids  # `inputs` has the same tensor
        logps.append(drawn.logps)
        supports.append(drawn.support)
    new = ids[:, length:]
    found.mask = ((new == end).cumsum(1) - (new == end).long()) == 0
    found.sampling_per_token_logps = torch.stack(logps, dim=1)
    found.support = None if supports[0] is None else by_sequence(supports)
    return found


def by_sequence(steps: list[Support]) -> Support:
    """Supports of all sequences at one step each -> one support, sequence after sequence."""
    counts = torch.stack([step.offsets.diff() for step in steps], dim=1)  # (B, steps)
    sequences = torch.arange(counts.shape[0], device=counts.device)
    owner = torch.cat([sequences.repeat_interleave(step.offsets.diff()) for step in steps])
    order = torch.sort(owner, stable=True).indices
    offsets = torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0))
    ids = torch.cat([step.token_ids for step in steps])[order]
    return Support(ids, offsets, may_be_empty=False, distinct=True)


@torch.no_grad()
def trainer_logps(model, found: Rollout, temperature: float) -> Tensor:
    """What the trainer makes of the same tokens: one forward of whole sequences."""
    length = found.prompt_mask.shape[1]
    hidden = model.model(**found.inputs, use_cache=False).last_hidden_state[:, length - 1 : -1]
    return linear_logprobs(
        hidden, model.lm_head.weight, found.ids[:, length:], support=found.support,
        transform=LogitTransform(temperature=temperature), batch_invariant=True,
    ).logps  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal LM's path or hub id; without it a small one with random weights")
    parser.add_argument("--hidden-size", type=int, default=128, help="of the small one")
    parser.add_argument("--layers", type=int, default=3, help="of the small one")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, help="without it, any id may be drawn")
    parser.add_argument("--cache", choices=["on", "off"], default="on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if options.model:
        model, tokenizer = (kind.from_pretrained(options.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        model, tokenizer = small_policy(hidden_size=options.hidden_size, layers=options.layers)
    on_gpu = torch.cuda.is_available()
    model = model.to("cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32).eval()
    texts = [f"{number}+{3 * number}=" for number in range(options.prompts)]
    limits = {} if options.top_p is None else {"top_p": options.top_p, "support": True}
    found = rollout(
        model, encode(tokenizer, texts, model.device), options.max_new_tokens, end=tokenizer.eos_token_id,
        seed=options.seed, cache=options.cache == "on", temperature=options.temperature, **limits,
    )  # fmt: skip
    gap = (trainer_logps(model, found, options.temperature) - found.sampling_per_token_logps)[found.mask].abs()
    print(f"{int(found.mask.sum())} tokens; gap between trainer and sampler in nats: ", end="")
    print(f"mean {gap.mean():.1e}, largest {gap.max():.1e}; tokens with the same bits: {(gap == 0).float().mean():.0%}")


if __name__ == "__main__":
    main()
