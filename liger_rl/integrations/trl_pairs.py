"""TRL's experimental CPOTrainer and ORPOTrainer without logits.

Two methods are replaced. `__init__` gives the model TRL's fused forward, as TRL's stable trainers do, and tries it out.
`concatenated_forward` calls it in place of the forward that makes logits. TRL's own method runs if the trial fails, for
a trainer that was built before the patch, and for a subclass that may read the logits.
"""

import importlib
import inspect
import logging
import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from liger_rl.integrations.head import check_bypassed, checked_head, listen, probed_transform, stop_listening
from liger_rl.integrations.patching import Patch
from liger_rl.integrations.peft import base_model
from liger_rl.integrations.transformers import IGNORE_INDEX, is_swapped
from liger_rl.integrations.trl_batches import zero_3
from liger_rl.kernels.transform import LogitTransform
from liger_rl.step.model_body import no_graph

logger = logging.getLogger("liger_rl")
_served: WeakSet[nn.Module] = WeakSet()  # models whose fused forward is used


def _refusal(trainer: Any, model: Any) -> str | None:
    """Why the trainer needs the model's own logits. If None, the model has TRL's fused forward now."""
    # Under FSDP some ranks may hold no weights to try out, and all ranks must run the same forward.
    if trainer.is_fsdp_enabled or zero_3(model):
        return "the model is sharded"
    if trainer.is_encoder_decoder or is_swapped(model):
        return "it has an encoder, or its head was swapped"
    if getattr(getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False):
        return "the adapter puts tokens of its own before each row"
    training = model.training
    try:
        head = checked_head(model)
        check_bypassed(head, type(model).__name__, nn.Linear)
        listen(head.module)
        try:
            transform = probed_transform(model, head)
        finally:
            stop_listening(model)
        importlib.import_module("trl.trainer.utils").add_fused_lm_head(model, outputs=("log_probs", "mean_logits"))
        same = transform == _trls_transform(model) and _agrees(model.eval(), _router(trainer))
        return None if same else "TRL's fused forward differs from the model's own"
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    finally:
        model.train(training)


def _trls_transform(model: Any) -> LogitTransform:
    """What TRL's fused forward has read from the config."""
    forward = inspect.unwrap(model.forward, stop=lambda function: "logit_scale" in function.__code__.co_freevars)
    values = inspect.getclosurevars(forward).nonlocals
    return LogitTransform(softcap=values["final_logit_softcapping"], scale=values["logit_scale"])


@no_graph()
def _agrees(model: Any, router: dict[str, bool]) -> bool:
    """Whether 8 tokens have the same log-probabilities, and router loss, by the fused forward and by the model's own.

    Some models change the hidden states between their body and their head.
    """
    ids = torch.arange(3, 11, device=model.device)[None] % model.get_output_embeddings().weight.shape[0]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **router}
    own, fused = model(use_cache=False, **inputs), model(labels=ids, fused_lm_head=True, **inputs)
    z = own.logits[:, :-1].float()
    expected = z.log_softmax(-1).gather(-1, ids[:, 1:, None].to(z.device))[..., 0]
    same = torch.allclose(fused.log_probs, expected, rtol=0.0, atol=z.abs().max().item() / 16)
    return same and (not router or torch.allclose(fused.aux_loss, own.aux_loss, rtol=0.05))


def _router(trainer: Any) -> dict[str, bool]:
    return {"output_router_logits": True} if trainer.aux_loss_enabled else {}


def _rows(trainer: str, *, orpo: bool) -> tuple[Patch, Patch]:
    """The rows of a trainer, "module:Class". ORPO's NLL is of the prompt too."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init.original(self, *args, **kwargs)
        model = base_model(self.model)
        reason = _refusal(self, model)
        if reason is None:
            _served.add(model)
        else:
            logger.info("%s: full logits, as without the patch: %s", type(model).__name__, reason)

    def concatenated_forward(self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
        is_trls = all(m.__module__ == forward.module for m in (self.get_batch_logps, self.get_batch_loss_metrics))
        if not is_trls or _served.isdisjoint(model.modules()):
            return forward.original(self, model, batch)
        padding, device = self.padding_value if orpo else self.pad_token_id, self.accelerator.device
        together = self.concatenated_inputs(batch, padding_value=padding, device=device)
        ids, mask, labels = (together[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        pairs, scored = len(batch["chosen_labels"]), labels
        if orpo:
            chosen = ids[:pairs].where(mask[:pairs] == 1, IGNORE_INDEX)
            if bool(((labels[:pairs] != IGNORE_INDEX) & (labels[:pairs] != chosen)).any()):
                return forward.original(self, model, batch)  # two targets of one token
            scored = torch.cat([chosen, labels[pairs:]])
        output = model(input_ids=ids, attention_mask=mask, labels=scored, fused_lm_head=True, **_router(self))
        logps = output.log_probs
        counted, response = ((x[:, 1:] != IGNORE_INDEX).to(logps.device) for x in (scored, labels))
        nll = torch.zeros((), device=device)
        if orpo or self.cpo_alpha != 0:
            nll = -logps[:pairs].sum() / counted[:pairs].sum()
        sums, totals = (torch.where(response, x, 0).sum(-1) for x in (logps, output.mean_logits))
        lengths = response.sum(-1)
        averages = orpo or self.loss_type in ("ipo", "simpo")
        # Of the responses, as in TRL's DPO. A mean over all places, as in TRL's CPO, would need the logits of padding.
        places = slice(pairs), slice(pairs, None)
        mean_logits = [totals[place].sum() / lengths[place].sum().clamp(min=1) for place in places]
        aux_loss = [output.aux_loss] if self.aux_loss_enabled else []
        return (*(sums / lengths if averages else sums).split(pairs), *mean_logits, nll, *aux_loss)

    init = Patch(f"{trainer}.__init__", __init__, None, needed=_importable)
    forward = Patch(f"{trainer}.concatenated_forward", concatenated_forward, needed=_importable)
    return init, forward


def _importable() -> bool:
    """Imports the trainers, without the warning that they are experimental: it is for those who import them. False if
    they need a package that is not there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("cpo", "orpo"):
                importlib.import_module(f"trl.experimental.{name}.{name}_trainer")
    except ImportError:
        return False
    return True


ROWS = (
    *_rows("trl.experimental.cpo.cpo_trainer:CPOTrainer", orpo=False),
    *_rows("trl.experimental.orpo.orpo_trainer:ORPOTrainer", orpo=True),
)
