"""GRPO's and RLOO's micro-batches under the patch: which sequences share one, and which have no gradient."""

from collections import Counter
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset

pytest.importorskip("trl", reason="TRL is not installed")

from trl import GRPOTrainer, RLOOTrainer

import trl_runs
from liger_rl.integrations.trl import patch_trl, patched_trl, unpatch_trl
from liger_rl.integrations.trl.trl_batches import get_idle_rows, order_by_prompt

ACCUMULATED, STEPS = 2, 2  # micro-batches of an optimizer step, optimizer steps of a generation
OPTIONS = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": ACCUMULATED,
    "steps_per_generation": ACCUMULATED * STEPS,
    "num_iterations": 1,
    "max_steps": STEPS,
    "max_completion_length": 5,
    # The weights stay, so that all steps of two runs have the same completions.
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "beta": 0.0,
}


class Recorder(transformers.TrainerCallback):
    """Of every micro-batch the inputs, `get_idle_rows` and the gradients of the forward's outputs."""

    def __init__(self, trainer) -> None:
        self.micro_batches: list[SimpleNamespace] = []
        self.steps: list[list[SimpleNamespace]] = []  # the micro-batches of each optimizer step
        self.gradients: list[torch.Tensor] = []  # of each optimizer step, all parameters in one
        trainer.add_callback(self)
        trainer._prepare_inputs = lambda inputs: self.take(type(trainer)._prepare_inputs(trainer, inputs))
        trainer.model.register_forward_hook(self.after_forward)

    def take(self, inputs):
        self.micro_batches.append(SimpleNamespace(inputs=inputs, idle=None, output_gradients={}))
        return inputs

    def after_forward(self, model, args, output):
        if torch.is_grad_enabled():
            micro_batch = self.micro_batches[-1]
            micro_batch.idle = get_idle_rows()
            for name in ("log_probs", "entropy"):
                output[name].register_hook(lambda grad, name=name: micro_batch.output_gradients.update({name: grad}))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(self.micro_batches[sum(map(len, self.steps)) :])
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.gradients.append(torch.cat([gradient.flatten() for gradient in gradients]))


def moe() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.1}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**trl_runs.SIZES, **sizes))


def train(
    kind,
    model,
    directory,
    *,
    patch,
    scored=lambda batch: batch,
    prepare=lambda trainer: None,
    whole_step=True,
    **options,
) -> Recorder:
    """One run. `scored` changes a generation's batch before TRL shuffles it; `prepare` changes the trainer."""
    trainer = trl_runs.build(kind, moe() if model == "moe" else model, directory, **(OPTIONS | options))
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: scored(score(inputs))
    prepare(trainer)
    recorder = Recorder(trainer)
    if patch:
        patch_trl(whole_step=whole_step)
    trainer.train()
    unpatch_trl()
    recorder.state = torch.get_rng_state()
    return recorder


def pair(*args, **options) -> tuple[Recorder, Recorder]:
    """-> the runs with the patch and without it."""
    return train(*args, patch=True, **options), train(*args, patch=False, **options)


def prompts(micro_batch) -> list[bytes]:
    ids, mask = (micro_batch.inputs[name] for name in ("prompt_ids", "prompt_mask"))
    return [row[live].numpy().tobytes() for row, live in zip(ids, mask != 0, strict=True)]


def sequences(micro_batches) -> list[tuple[bytes, bytes]]:
    return [
        (prompt, completion.numpy().tobytes())
        for micro_batch in micro_batches
        for prompt, completion in zip(prompts(micro_batch), micro_batch.inputs["completion_ids"], strict=True)
    ]


def prompts_to_run(micro_batches) -> int:
    """The number of prompts that run, if equal prompts beside each other run once."""
    return sum(len(list(groupby(prompts(micro_batch)))) for micro_batch in micro_batches)


def assert_same_steps(patched, plain, *, same_order=False) -> None:
    """The same sequences and the same gradient in each optimizer step, and the same random numbers."""
    for mine, theirs in zip(patched.steps, plain.steps, strict=True):
        assert Counter(sequences(mine)) == Counter(sequences(theirs))
    for mine, theirs in zip(patched.gradients, plain.gradients, strict=True):
        assert theirs.norm() > 0
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    assert torch.equal(patched.state, plain.state)
    assert (sequences(patched.micro_batches) == sequences(plain.micro_batches)) == same_order


def has_gradient(micro_batch) -> torch.Tensor:
    return torch.stack([(grad != 0).any(-1) for grad in micro_batch.output_gradients.values()]).any(0)


def assert_idle_rows_have_no_gradient(micro_batches) -> None:
    """And the others have one."""
    idle = torch.cat([micro_batch.idle for micro_batch in micro_batches])
    assert idle.tolist() == [not live for micro_batch in micro_batches for live in has_gradient(micro_batch)]
    assert 0 < idle.sum() < len(idle)


def half_without_advantage(*, per_token=False, tool_mask=False):
    """Completions of all lengths. Every other one gets no advantage. Padding has any ids and, per token, advantages."""

    def scored(batch):
        rows, tokens = batch["completion_ids"].shape
        padding = batch["prompt_mask"] == 0
        batch["prompt_ids"] = torch.where(padding, torch.arange(rows)[:, None], batch["prompt_ids"])
        if "old_logps" not in batch:  # RLOO's, of the whole completions
            batch["completion_mask"] *= torch.arange(tokens) <= torch.arange(rows)[:, None] % tokens
        advantages = (torch.arange(rows) % 2) * (torch.arange(rows) - rows / 2)
        if per_token:
            advantages = advantages[:, None] * (torch.arange(tokens) % 2 == 0)
            advantages = torch.where(batch["completion_mask"] == 0, 1.0, advantages)
        if tool_mask:
            batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
            batch["tool_mask"][1::4] = 0
        return {**batch, "advantages": advantages}

    return scored


@pytest.mark.parametrize(
    ("names", "size", "expected"),
    [
        ("abab", 2, "aabb"),
        ("abcabdaa", 4, "aaaabbcd"),
        ("aaabbbcd", 4, "aaacbbbd"),
        ("aaaaaabb", 4, "bbaaaaaa"),
        ("ababab", 2, "aaabbb"),
        ("abc", 3, "abc"),
        ("", 2, ""),
    ],
)
def test_groups_fill_micro_batches(names, size, expected):
    order = order_by_prompt([name.encode() for name in names], size)
    assert "".join(names[row] for row in order) == expected
    assert sorted(order) == list(range(len(names)))


NEVER, FIRST, ALWAYS = (), (0,), (0, 1)
# -> the trainer, its options, whether the sequences are rearranged, the optimizer steps with a mask of idle rows.
LOSSES = {
    **{
        name: ("GRPO", {"loss_type": name}, True, ALWAYS)
        for name in ("grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
    },
    "dr_grpo": ("GRPO", {"loss_type": "dr_grpo", "off_policy_mask_threshold": 1.0}, True, ALWAYS),
    "at sequence level": ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence"}, True, ALWAYS),
    # As long as the policy is the reference, the KL has no gradient.
    "KL": ("GRPO", {"beta": 0.1, "delta": 1.5, "learning_rate": 1e-3}, True, NEVER),
    "RLOO": ("RLOO", {"beta": 0.1}, True, ALWAYS),
    "bnpo": ("GRPO", {"loss_type": "bnpo"}, False, ALWAYS),
    "quantile": ("GRPO", {"top_entropy_quantile": 0.9}, False, ALWAYS),
    "entropy": ("GRPO", {"entropy_coef": 0.1}, False, NEVER),
    # Without a measured entropy there is no adaptive bonus.
    "adaptive": ("GRPO", {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}, False, FIRST),
    "router": ("GRPO", {}, False, NEVER),
    "router of RLOO": ("RLOO", {}, False, NEVER),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, path_of, tmp_path):
    kind, options, rearranged, steps_with_idle_rows = LOSSES[name]
    model = "moe" if name.startswith("router") else path_of["qwen3"]
    patched, plain = pair(kind, model, tmp_path, scored=half_without_advantage(), **options)
    assert_same_steps(patched, plain, same_order=not rearranged)
    for mine, theirs in zip(patched.steps, plain.steps, strict=True) if rearranged else ():
        groups = len({prompt for micro_batch in mine for prompt in prompts(micro_batch)})
        assert prompts_to_run(mine) <= groups + ACCUMULATED - 1
        assert prompts_to_run(mine) < prompts_to_run(theirs)
    for number, step in enumerate(patched.steps):
        if number in steps_with_idle_rows:
            assert_idle_rows_have_no_gradient(step)
        else:
            assert all(micro_batch.idle is None for micro_batch in step)
    # A router's loss reaches the model past the log-probabilities.
    if steps_with_idle_rows != ALWAYS and model != "moe":
        assert has_gradient(patched.micro_batches[-1]).all()
    assert get_idle_rows() is None


@pytest.mark.parametrize("options", [{"per_token": True}, {"tool_mask": True}], ids=str)
def test_rows_are_idle_by_their_tokens(options, path_of, tmp_path):
    recorder = train("GRPO", path_of["qwen3"], tmp_path, patch=True, scored=half_without_advantage(**options))
    assert_idle_rows_have_no_gradient(recorder.micro_batches)


@pytest.mark.parametrize(
    ("per_generation", "steps", "rearranged"), [(2, [4, 4], True), (4, [6, 6, 4], True), (3, [2, 2], False)]
)
def test_sequences_stay_in_their_optimizer_step(per_generation, steps, rearranged, path_of, tmp_path):
    """Wherever an optimizer step begins within a generation. The last one of an epoch may be short."""

    def prepare(trainer):
        trainer.train_dataset = Dataset.from_dict({"prompt": [f"w{i}" for i in range(16)]})

    options = {"steps_per_generation": per_generation, "gradient_accumulation_steps": steps[0], "num_iterations": 2}
    options |= {"num_generations": 2, "max_steps": len(steps)}
    patched, plain = pair("GRPO", path_of["qwen3"], tmp_path, prepare=prepare, **options)
    assert_same_steps(patched, plain, same_order=not rearranged)
    assert [len(step) for step in plain.steps] == steps


def subclass_with(name):
    """The subclass doubles the result of a method."""

    def method(self, *args, **options):
        return 2 * getattr(super(type(self), self), name)(*args, **options)

    def prepare(trainer):
        trainer.__class__ = type("Subclass", (type(trainer),), {name: method})

    return prepare


def rows_reversed(trainer):
    """The subclass runs the model on the rows in another order."""

    def method(self, model, ids, mask, *args, **options):
        outputs = super(type(self), self)._get_per_token_logps_and_entropies(
            model, ids.flip(0), mask.flip(0), *args, **options
        )
        return tuple(None if values is None else values.flip(0) for values in outputs)

    trainer.__class__ = type("Subclass", (type(trainer),), {"_get_per_token_logps_and_entropies": method})


@pytest.mark.parametrize(
    ("options", "idle_rows_are_known"),
    [
        ({"prepare": rows_reversed, "scored": half_without_advantage()}, False),
        ({"prepare": lambda trainer: setattr(trainer.model.model.norm.weight, "ds_id", 0)}, False),
        ({"prepare": subclass_with("_compute_loss")}, False),
        ({"prepare": subclass_with("compute_loss")}, False),
        ({"scored": lambda batch: {**batch, "num_images": [0] * len(batch["prompt_ids"])}}, True),
    ],
    ids=["a call of the model", "ZeRO-3", "a subclass", "a public method of a subclass", "images"],
)
def test_the_order_stays_for(options, idle_rows_are_known, path_of, tmp_path):
    patched, plain = pair("GRPO", path_of["qwen3"], tmp_path, **options)
    assert_same_steps(patched, plain, same_order=True)
    assert all((micro_batch.idle is not None) == idle_rows_are_known for micro_batch in patched.micro_batches)


def test_the_whole_step_can_be_left_out(path_of, tmp_path):
    patched, plain = pair("GRPO", path_of["qwen3"], tmp_path, whole_step=False)
    assert_same_steps(patched, plain, same_order=True)
    assert all(micro_batch.idle is None for micro_batch in patched.micro_batches)


def test_columns_move_with_their_sequence(path_of, tmp_path):
    """A list, a tensor, a value that all share, and a column without a value."""

    def scored(batch):
        ids = batch["completion_ids"]
        return {**batch, "list": ids.tolist(), "tensor": ids.clone(), "none": None, "shared": torch.tensor(3)}

    for micro_batch in train("GRPO", path_of["qwen3"], tmp_path, patch=True, scored=scored).micro_batches:
        inputs = micro_batch.inputs
        assert len(inputs["list"]) == OPTIONS["per_device_train_batch_size"]
        assert inputs["list"] == inputs["completion_ids"].tolist() == inputs["tensor"].tolist()
        assert inputs["none"] is None
        assert inputs["shared"].item() == 3


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_nothing_is_left(trainer):
    def methods():
        return [vars(trainer)[name] for name in ("_prepare_inputs", "_compute_loss")]

    before = methods()
    with patched_trl():
        assert not set(before) & set(methods())
    assert methods() == before
