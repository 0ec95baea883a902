"""TRL's experimental CPOTrainer and ORPOTrainer without logits.

Two methods are replaced. `__init__` gives the model TRL's fused forward, as TRL's stable trainers do, and tries it out.
`concatenated_forward` calls it in place of the forward that makes logits. TRL's own method runs if the trial fails, for
a trainer that was built before the patch, and for a subclass that may read the logits.
"""

import importlib
import warnings
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.integrations.head import check_bypassed, checked_head, listen, probed_transform, stop_listening
from liger_rl.integrations.patching import Patch
from liger_rl.integrations.peft import base_model
from liger_rl.integrations.transformers import IGNORE_INDEX, is_swapped
from liger_rl.integrations.trl_batches import zero_3
from liger_rl.integrations.trl_step import tell
from liger_rl.step.model_body import no_graph

# Models whose fused forward is used, and its inputs for a router's loss.
_served: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


@no_graph()
def _refusal(trainer: Any, model: Any) -> str | None:
    """Why the trainer needs the model's own logits. If None, the model has TRL's fused forward now, which agrees."""
    # Under FSDP some ranks may hold no weights to try out, and all ranks must run the same forward.
    if trainer.is_fsdp_enabled or zero_3(model) or trainer.args.n_gpu > 1:
        return "the model is sharded, or replicated by DataParallel"
    if trainer.is_encoder_decoder or is_swapped(model) or trainer.args.use_liger_kernel:
        return "it has an encoder, or another fused forward"
    if getattr(getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False):
        return "the adapter puts tokens of its own before each row"
    training, router = model.training, {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    try:
        head = checked_head(model)
        check_bypassed(head, type(model).__name__, nn.Linear)
        listen(head.module)
        softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # the one that TRL reads
        same = probed_transform(model, head).softcap == softcap
        importlib.import_module("trl.trainer.utils").add_fused_lm_head(model, outputs=("log_probs", "mean_logits"))
        model.eval()  # a dropout would differ
        # Some models change the hidden states between their body and their head, or have a router loss of their own.
        ids = torch.arange(3, 11, device=model.device)[None] % head.linear.weight.shape[0]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **router}
        own = model(use_cache=False, **inputs)
        fused = model.forward.__wrapped__(model, labels=ids, fused_lm_head=True, **inputs)  # in its own rows
        z = own.logits[:, :-1].float()
        expected = z.log_softmax(-1).gather(-1, ids[:, 1:, None].to(z.device))[..., 0]
        same = same and torch.allclose(fused.log_probs, expected, rtol=0.0, atol=z.abs().max().item() / 16)
        same = same and (not router or torch.allclose(fused.aux_loss, own.aux_loss, rtol=0.05))
        if same:
            _served[model] = router
        return None if same else "TRL's fused forward differs from the model's own"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    finally:
        stop_listening(model)
        model.train(training)


def _rows(name: str, *, orpo: bool) -> tuple[Patch, Patch]:
    """The rows of trl.experimental.<name>. ORPO's NLL is of the prompt too."""
    trainer = f"trl.experimental.{name}.{name}_trainer:{name.upper()}Trainer"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init.original(self, *args, **kwargs)
        model = base_model(self.model)
        if (reason := _refusal(self, model)) is not None:
            tell(model, f"full logits, as without the patch: {reason}")

    def concatenated_forward(self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
        is_trls = all(m.__module__ == forward.module for m in (self.get_batch_logps, self.get_batch_loss_metrics))
        router = next((_served[module] for module in model.modules() if module in _served), None)
        if not is_trls or router is None:
            return forward.original(self, model, batch)
        padding = self.padding_value if orpo else self.pad_token_id
        together = self.concatenated_inputs(batch, padding_value=padding, device=self.accelerator.device)
        ids, mask, labels = (together[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        pairs, scored = len(batch["chosen_labels"]), labels
        if orpo:
            chosen = ids[:pairs].where(mask[:pairs] == 1, IGNORE_INDEX)
            if bool(((labels[:pairs] != IGNORE_INDEX) & (labels[:pairs] != chosen)).any()):
                return forward.original(self, model, batch)  # two targets of one token
            scored = torch.cat([chosen, labels[pairs:]])
        output = model(input_ids=ids, attention_mask=mask, labels=scored, fused_lm_head=True, **router)
        logps = output.log_probs
        counted, response = ((x[:, 1:] != IGNORE_INDEX).to(logps.device) for x in (scored, labels))
        nll = -logps[:pairs].sum() / counted[:pairs].sum() if orpo or self.cpo_alpha else logps.new_zeros(())
        sums, logits = (torch.where(response, x, 0).sum(-1) for x in (logps, output.mean_logits))
        lengths = response.sum(-1)
        if orpo or self.loss_type in ("ipo", "simpo"):
            sums = sums / lengths
        # TRL logs the mean of all places' logits, which would take those of the padding. Ours is of the responses.
        logits = logits / lengths.clamp(min=1)
        return (*sums.split(pairs), *logits.split(pairs), nll, *([output.aux_loss] if router else []))

    needed = partial(importable, name)
    init = Patch(f"{trainer}.__init__", __init__, None, needed=needed)
    forward = Patch(f"{trainer}.concatenated_forward", concatenated_forward, needed=needed)
    return init, forward


def importable(name: str) -> bool:
    """Imports a trainer, without the warning that it is experimental: users of other trainers need none."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module(f"trl.experimental.{name}.{name}_trainer")
        return True
    return False


ROWS = (*_rows("cpo", orpo=False), *_rows("orpo", orpo=True))
