"""Distance of a trainer from a top-p sampler, with and without replay: `python -m benchmark.replay_mismatch`.

The policy of `benchmark.real_policy`, 1.24 billion parameters, is trained for a minute. A copy in bfloat16 samples
completions of held-out sources with top-p, and keeps its log-probabilities and the ids of each step. The trainer has
float32 weights and bfloat16 autocast. Two runs of GRPO start from the same weights, one over the whole vocabulary, one
with replay. Before each update the trainer's log-probabilities are compared with the sampler's, in both ways:

gap      log p sampler - log p trainer of a sampled token, in nats
KL       the mean gap, an estimate of KL(sampler || trainer) for each token

Two bfloat16 passes of one model differ by rounding. So no gap is 0, and the one with replay is what rounding leaves.
The reward is the share of letters in a completion: any would do, because the mismatch is what is measured.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmark.command import parser_of, write
from benchmark.environment import describe
from benchmark.table import Columns, environment_line, markdown_table, number
from liger_rl import FusedLinearGRPOLoss, Support

PREFIX = "replay-mismatch-"
RUNS = {"full": "without replay", "replayed": "with replay"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sampled and trained."""

    seconds: float = 60.0  # of the policy's training
    prompts: int = 16
    group: int = 8  # completions of a prompt
    prompt_length: int = 64
    completion_length: int = 64
    micro_batch: int = 32  # completions
    steps: int = 10
    top_p: float = 0.95
    temperature: float = 1.0
    learning_rate: float = 2e-6
    seed: int = 0


TOY = Plan(seconds=3.0, prompts=2, group=2, prompt_length=8, completion_length=8, micro_batch=2, steps=2)


class Rollout:
    """Completions of one step, on the device of the trainer."""

    def __init__(self, ids: Tensor, drawn: Tensor, support: Support, plan: Plan) -> None:
        self.ids = ids  # (B, T)
        self.mask = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) >= plan.prompt_length
        self.sampler = torch.zeros(ids.shape, device=ids.device).masked_scatter(self.mask, drawn)  # log-probabilities
        self.sizes = support.offsets.diff().float()
        # On CPU, where parts of it are taken without a wait.
        self.support = support.placed(self.mask).to("cpu")

    def parts(self, size: int) -> Iterator[tuple[slice, Support]]:
        batch = self.ids.shape[0]
        for start in range(0, batch, size):
            rows = slice(start, min(start + size, batch))
            yield rows, self.support.take(rows, batch=batch)


@torch.no_grad()
def sample(sampler: Any, prompts: Tensor, plan: Plan, generator: torch.Generator) -> Rollout:
    """(B, prompt_length) ids -> their completions, drawn from the smallest sets of mass top_p."""
    from transformers import DynamicCache

    cache, given, steps = DynamicCache(), prompts, []
    for _ in range(plan.completion_length):
        hidden = sampler.model(input_ids=given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        z = sampler.lm_head(hidden).float() / plan.temperature
        support = Support.from_logits(z, top_p=plan.top_p)
        rows = torch.arange(z.shape[0], device=z.device).repeat_interleave(support.offsets.diff())
        kept = torch.full_like(z, -torch.inf)
        kept[rows, support.token_ids] = z[rows, support.token_ids]
        log_p = kept.log_softmax(-1)
        given = torch.multinomial(log_p.exp(), 1, generator=generator)
        steps.append((given, log_p.gather(1, given), support))
    batch, length = prompts.shape[0], plan.completion_length
    counts = torch.cat([support.offsets.diff() for _, _, support in steps])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    by_step = Support(torch.cat([support.token_ids for _, _, support in steps]), offsets, distinct=True)
    order = torch.arange(length * batch, device=prompts.device).view(length, batch).T.reshape(-1)
    by_sequence = by_step.take(order, batch=length * batch)
    drawn = torch.cat([log_p for _, log_p, _ in steps], dim=1)
    return Rollout(torch.cat([prompts, *(ids for ids, _, _ in steps)], dim=1), drawn.reshape(-1), by_sequence, plan)


@torch.no_grad()
def gaps(model: Any, rollout: Rollout, plan: Plan) -> dict[str, Any]:
    """The trainer beside the sampler, over the whole vocabulary and over the sampler's support."""
    found: dict[str, list[Tensor]] = {name: [] for name in (*RUNS, "entropy", "missing")}
    for rows, support in rollout.parts(plan.micro_batch):
        ids, mask = rollout.ids[rows], rollout.mask[rows]
        call = {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "use_cache": False, "fused": True}
        with autocast(ids.device.type):
            full = model(**call, entropy=True, temperature=plan.temperature)
            replayed = model(**call, support=support, temperature=plan.temperature)
        for name, output in (("full", full), ("replayed", replayed)):
            found[name].append((rollout.sampler[rows] - output.per_token_logps)[mask])
        found["entropy"].append(full.entropy[mask])
        found["missing"].append(replayed.missing_target[mask].float())
    about: dict[str, Any] = {name: torch.cat(found[name]).mean().item() for name in ("entropy", "missing")}
    for name in RUNS:
        gap = torch.cat(found[name])
        about[name] = {
            "mean_gap": gap.abs().mean().item(),
            "largest_gap": gap.abs().max().item(),
            "kl": gap.mean().item(),
            "kl_standard_error": (gap.std() / gap.numel() ** 0.5).item(),
            "sequence_gap": (gap.sum() / rollout.ids.shape[0]).item(),
        }
    return about | {"ids": rollout.sizes.mean().item(), "single": (rollout.sizes == 1).float().mean().item()}


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def letters(text: str) -> float:
    return sum(character.isalpha() for character in text) / max(len(text), 1)


def advantages_of(rewards: Tensor, group: int) -> Tensor:
    by_group = rewards.view(-1, group)
    return ((by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)).reshape(-1)


def run(model: Any, tokenizer: Any, held_out: Tensor, plan: Plan, *, replays: bool) -> list[dict[str, Any]]:
    """GRPO from the model's weights; -> for each step what was measured before its update, and after the last one."""
    from benchmark.real_policy import windows
    from liger_rl.step.policy_step import policy_step

    device = model.device.type
    generator = torch.Generator(device).manual_seed(plan.seed)
    places = torch.Generator().manual_seed(plan.seed)
    sampler = copy.deepcopy(model).eval().requires_grad_(False)
    for parameter in sampler.parameters():  # buffers stay: rotary frequencies are no numbers to round
        parameter.data = parameter.data.to(torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.0, fused=device == "cuda")
    loss = FusedLinearGRPOLoss("dapo", epsilon_high=0.28, temperature=plan.temperature, metrics="none")
    history = []
    for step in range(plan.steps + 1):
        begun = time.monotonic()
        prompts = windows(held_out, plan.prompts, plan.prompt_length, places).repeat_interleave(plan.group, 0)
        rollout = sample(sampler, prompts.to(device), plan, generator)
        texts = tokenizer.decode_batch(rollout.ids[:, plan.prompt_length :].tolist())
        rewards = torch.tensor([letters(text) for text in texts], device=device)
        history.append({"reward": rewards.mean().item(), **gaps(model, rollout, plan)})
        if step < plan.steps:
            advantages, count = advantages_of(rewards, plan.group), rollout.mask.sum()
            for rows, support in rollout.parts(plan.micro_batch):
                batch = {
                    "input_ids": rollout.ids[rows],
                    "mask": rollout.mask[rows],
                    "advantages": advantages[rows],
                    "old_per_token_logps": rollout.sampler[rows],
                    "num_items_in_batch": count,
                }
                if replays:
                    batch["support"] = support
                with autocast(device):
                    total = policy_step(model, batch, loss).loss
                total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
                    copied.copy_(parameter)
        history[-1]["seconds"] = round(time.monotonic() - begun, 2)
        print(f"{RUNS['replayed' if replays else 'full']}, step {step}: {history[-1]}", flush=True)
    return history


def measure(plan: Plan, recipe: Any, device: str) -> dict[str, Any]:
    """`recipe` is the policy's, of `benchmark.real_policy`."""
    from benchmark.real_policy import prepare, train

    model, tokenizer, held_out, tokens, _ = prepare(recipe, device)
    trained = train(model, tokens, recipe, plan.seconds, device)
    model.eval()
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    runs = {}
    for name in RUNS:
        model.load_state_dict(start)
        runs[name] = run(model, tokenizer, held_out, plan, replays=name == "replayed")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"policy": {"parameters": parameters, "vocab": model.config.vocab_size, **trained}, "runs": runs}


COLUMNS: Columns = {
    "mean gap": number("mean_gap", ".1e"),
    "largest gap": number("largest_gap", ".1e"),
    "KL a token": number("kl", ".1e"),
    "gap of a sequence": number("sequence_gap", ".2f"),
    "reward": number("reward", ".3f"),
    "entropy": number("entropy", ".2f"),
}


def markdown(results: dict[str, Any]) -> str:
    """Before the first update, and after the last one: of each run the way in which it trains."""
    plan, first = results["plan"], results["runs"]["full"][0]
    completions = plan["prompts"] * plan["group"]
    lines = [
        environment_line(results["environment"], ()),
        f"{results['policy']['parameters'] / 1e9:.2f} billion parameters, top-p {plan['top_p']}; at each step "
        f"{completions} completions of {plan['completion_length']} tokens. Before training the sampler could "
        f"draw {first['ids']:,.1f} ids a token on average. {first['single']:.0%} of the tokens had one id.",
    ]
    rows = []
    for place, when in ((0, "before training"), (-1, f"after {plan['steps']} steps")):
        for name, title in RUNS.items():
            step = results["runs"][name][place]
            rows.append((f"{title}, {when}", {"status": "ok", **step, **step[name]}))
    return "\n\n".join([*lines, markdown_table(COLUMNS, rows)]) + "\n"


def main() -> None:
    parser = parser_of("replay_mismatch", __doc__)
    parser.add_argument("--seconds", type=float, help="of the policy's training")
    parser.add_argument("--steps", type=int, help="of each run")
    arguments = parser.parse_args()
    from benchmark import real_policy

    environment = describe("auto")
    device = environment["device"]
    toy = device == "cpu"  # to see that everything runs
    plan, recipe = (TOY, real_policy.TOY) if toy else (Plan(), real_policy.FULL)
    plan = replace(plan, **{name: value for name in ("seconds", "steps") if (value := getattr(arguments, name))})
    results = {"environment": environment, "plan": asdict(plan), **measure(plan, recipe, device)}
    write(PREFIX, results, arguments, markdown)


if __name__ == "__main__":
    main()
