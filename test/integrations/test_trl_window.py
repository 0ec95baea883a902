"""GRPO's and RLOO's optimizer steps under the patch: one forward for their micro-batches, and which sequences have no
gradient."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset

pytest.importorskip("trl", reason="TRL is not installed")

from trl import GRPOTrainer, RLOOTrainer

import trl_runs
from liger_rl import patch_trl
from liger_rl.integrations.trl import patched_trl, unpatch_trl
from liger_rl.integrations.trl.forward import CALL, ModelCall

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
    """The inputs of every micro-batch, and of every forward with a graph its idle rows and its outputs' gradients."""

    def __init__(self, trainer) -> None:
        self.micro_batches: list[dict] = []
        self.forwards: list[SimpleNamespace] = []
        self.sizes: list[tuple[bool, int]] = []  # of every forward, whether it has a graph and its micro-batches
        self.gradients: list[torch.Tensor] = []  # of each optimizer step, all parameters in one
        trainer.add_callback(self)
        trainer._prepare_inputs = lambda inputs: self.take(type(trainer)._prepare_inputs(trainer, inputs))
        trainer.model.register_forward_hook(self.after_forward, with_kwargs=True)

    def take(self, inputs):
        self.micro_batches.append(inputs)
        return inputs

    def after_forward(self, model, args, inputs, output):
        call = inputs.get(CALL) or ModelCall()
        if "log_probs" in output:
            self.sizes.append((torch.is_grad_enabled(), max(len(call.shapes), 1)))
        if torch.is_grad_enabled():
            forward = SimpleNamespace(idle=call.idle_rows, output_gradients={})
            self.forwards.append(forward)
            for name in ("log_probs", "entropy"):
                output[name].register_hook(lambda grad, name=name: forward.output_gradients.update({name: grad}))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
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
    if patch:
        patch_trl(whole_step=whole_step)
    trainer = trl_runs.build(kind, moe() if model == "moe" else model, directory, **(OPTIONS | options))
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: scored(score(inputs))
    prepare(trainer)
    recorder = Recorder(trainer)
    trainer.train()
    unpatch_trl()
    recorder.state = torch.get_rng_state()
    return recorder


def pair(*args, **options) -> tuple[Recorder, Recorder]:
    """-> the runs with the patch and without it."""
    return train(*args, patch=True, **options), train(*args, patch=False, **options)


def assert_same_steps(patched, plain, *, forwards=STEPS) -> None:
    """The same gradient of each optimizer step, and the same random numbers. `forwards`: with a graph, of all steps."""
    for mine, theirs in zip(patched.gradients, plain.gradients, strict=True):
        assert theirs.norm() > 0
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    assert torch.equal(patched.state, plain.state)
    assert len(plain.forwards) == len(plain.micro_batches)
    assert len(patched.forwards) == forwards


def has_gradient(forward) -> torch.Tensor:
    return torch.stack([(grad != 0).any(-1) for grad in forward.output_gradients.values()]).any(0)


def assert_idle_rows_have_no_gradient(forwards) -> None:
    """And the others have one."""
    idle = torch.cat([forward.idle for forward in forwards])
    assert idle.tolist() == [not live for forward in forwards for live in has_gradient(forward)]
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


NEVER, FIRST, ALWAYS = (), (0,), (0, 1)
EACH = ACCUMULATED * STEPS  # forwards, if each micro-batch has its own
# -> the trainer, its options, the optimizer steps in which idle rows are known.
LOSSES = {
    **{name: ("GRPO", {"loss_type": name}, ALWAYS) for name in ("grpo", "dapo", "cispo", "sapo", "vespo", "luspo")},
    "dr_grpo": ("GRPO", {"loss_type": "dr_grpo", "off_policy_mask_threshold": 1.0}, ALWAYS),
    "at sequence level": ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence"}, ALWAYS),
    # As long as the policy is the reference, the KL has no gradient.
    "KL": ("GRPO", {"beta": 0.1, "delta": 1.5, "learning_rate": 1e-3}, NEVER),
    "RLOO": ("RLOO", {"beta": 0.1}, ALWAYS),
    "bnpo": ("GRPO", {"loss_type": "bnpo"}, ALWAYS),
    "quantile": ("GRPO", {"top_entropy_quantile": 0.9}, ALWAYS),
    "entropy": ("GRPO", {"entropy_coef": 0.1}, NEVER),
    # Without a measured entropy there is no adaptive bonus.
    "adaptive": ("GRPO", {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}, FIRST),
    "router": ("GRPO", {}, NEVER),
    "router of RLOO": ("RLOO", {}, NEVER),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, path_of, tmp_path):
    kind, options, steps_with_idle_rows = LOSSES[name]
    has_router = name.startswith("router")
    model = "moe" if has_router else path_of["qwen3"]
    patched, plain = pair(kind, model, tmp_path, scored=half_without_advantage(), **options)
    assert_same_steps(patched, plain)
    for number, forward in enumerate(patched.forwards):
        if number in steps_with_idle_rows:
            assert_idle_rows_have_no_gradient([forward])
        else:
            assert forward.idle is None
    # A router's loss reaches the model past the log-probabilities.
    if steps_with_idle_rows != ALWAYS and not has_router:
        assert has_gradient(patched.forwards[-1]).all()


def test_a_forward_knows_its_number_of_micro_batches(path_of, tmp_path):
    """The old policy's log-probabilities are those of a generation, the others those of an optimizer step."""
    recorder = train("GRPO", path_of["qwen3"], tmp_path, patch=True)
    assert recorder.sizes == [(False, STEPS * ACCUMULATED), *[(True, ACCUMULATED)] * STEPS]


@pytest.mark.parametrize("options", [{"per_token": True}, {"tool_mask": True}], ids=str)
def test_rows_are_idle_by_their_tokens(options, path_of, tmp_path):
    recorder = train("GRPO", path_of["qwen3"], tmp_path, patch=True, scored=half_without_advantage(**options))
    assert_idle_rows_have_no_gradient(recorder.forwards)


@pytest.mark.parametrize(("per_generation", "steps"), [(2, [4, 4]), (4, [6, 6, 4]), (3, [2, 2])])
def test_an_optimizer_step_begins_anywhere_within_a_generation(per_generation, steps, path_of, tmp_path):
    """The last one of an epoch may be short."""

    def prepare(trainer):
        trainer.train_dataset = Dataset.from_dict({"prompt": [f"w{i}" for i in range(16)]})

    options = {"steps_per_generation": per_generation, "gradient_accumulation_steps": steps[0], "num_iterations": 2}
    options |= {"num_generations": 2, "max_steps": len(steps)}
    patched, plain = pair("GRPO", path_of["qwen3"], tmp_path, prepare=prepare, **options)
    assert_same_steps(patched, plain, forwards=len(steps))
    assert len(plain.forwards) == sum(steps)


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
    ("prepare", "forwards"),
    [
        (rows_reversed, EACH),
        (subclass_with("_compute_loss"), EACH),
        (subclass_with("compute_loss"), EACH),
    ],
    ids=["a call of the model", "a subclass", "a public method of a subclass"],
)
def test_idle_rows_are_not_known_for(prepare, forwards, path_of, tmp_path):
    patched, plain = pair("GRPO", path_of["qwen3"], tmp_path, prepare=prepare, scored=half_without_advantage())
    assert_same_steps(patched, plain, forwards=forwards)
    assert all(forward.idle is None for forward in patched.forwards)


def test_the_whole_step_can_be_left_out(path_of, tmp_path):
    patched, plain = pair("GRPO", path_of["qwen3"], tmp_path, whole_step=False)
    assert_same_steps(patched, plain, forwards=EACH)
    assert all(forward.idle is None for forward in patched.forwards)


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_nothing_is_left(trainer):
    def methods():
        return [vars(trainer)[name] for name in ("_get_per_token_logps_and_entropies", "_compute_loss")]

    before = methods()
    with patched_trl():
        assert not set(before) & set(methods())
    assert methods() == before
