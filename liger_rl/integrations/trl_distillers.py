"""TRL's experimental distillation trainers without logits: GKD, GOLD, IW-OPD, SDFT, SDPO and server distillation.

While `compute_loss` of such a trainer runs, the models' outputs have `Logits` in place of logits: a head and its input.
TRL's code slices them, divides them by its temperature, and reads log-probabilities of some ids of each token. Each
such reading is a call of `linear_logprobs`. Four functions of TRL that read all ids are replaced: by the divergence of
two heads.

Where `_heads` raises, TRL's own code runs on the models' own logits.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.call.head_call import MOST_IDS
from liger_rl.call.low_rank import LowRank
from liger_rl.call.options import HeadOptions
from liger_rl.engines.pair.run import DivergenceCall, divergence_of, measure_of
from liger_rl.integrations.head import asking, checked_head, current_head, listen, probed_transform, stop_listening
from liger_rl.integrations.patching import Patch
from liger_rl.integrations.peft import base_model, read_head
from liger_rl.integrations.transformers import IGNORE_INDEX, is_swapped
from liger_rl.integrations.trl_batches import zero_3
from liger_rl.integrations.trl_divergence import SINCE, loss_of
from liger_rl.integrations.trl_pairs import importable
from liger_rl.integrations.trl_step import tell
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs
from liger_rl.step.model_body import no_graph

options: dict[str, Any] = {}  # of `patch_trl`, for `linear_logprobs`
_transforms: WeakKeyDictionary[nn.Module, LogitTransform] = WeakKeyDictionary()  # of models that were tried out


@dataclass(frozen=True, eq=False)
class Logits:
    """In place of logits (B, T, V): log-softmax of a head's logits, which is computed where it is read.

    A softmax sees no constant of a token, so log-probabilities are logits, of which logsumexp is 0.
    """

    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    low_rank: list[LowRank]
    transform: LogitTransform
    compute_dtype: torch.dtype  # of the model's own product
    has_graph: bool  # False: the model ran under torch.no_grad

    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int) -> int:
        return (*self.hidden.shape[:-1], self.weight.shape[0])[dim]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> "Logits":
        if index[2] != slice(None):
            raise TypeError(f"logits must be sliced by sequences and tokens alone, got {index}")
        terms = [replace(t, hidden=None if t.hidden is None else t.hidden[index]) for t in self.low_rank]
        return replace(self, hidden=self.hidden[index], low_rank=terms)

    def __truediv__(self, temperature: float) -> "Logits":
        return replace(self, transform=replace(self.transform, temperature=self.transform.temperature * temperature))

    def sum(self) -> Tensor:
        """Any () that depends on the parameters: TRL multiplies it by 0, where no token counts."""
        factors = (factor for term in self.low_rank for factor in (term.a, term.b))
        parts = (part.sum() for part in (self.weight, self.bias, *factors) if part is not None)
        return sum(parts, self.hidden.sum())

    def log_softmax(self, dim: int, **_options: Any) -> "Logits":
        return self

    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        return self.hidden.new_zeros((*self.hidden.shape[:-1], *[1] * keepdim), dtype=self.dtype)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """(B, T, K) ids -> (B, T, K) log-probabilities."""
        one = index.shape[-1] == 1  # a cheaper call
        return self._read(index[..., 0] if one else index).logps.view(index.shape)

    def topk(self, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        """-> log-probabilities and ids, (B, T, k) each."""
        ids = self._read(self.hidden.new_zeros(self.hidden.shape[:-1], dtype=torch.int64), topk=k).topk_ids
        return self.gather(dim, ids), ids

    def argmax(self, dim: int = -1) -> Tensor:
        return self.topk(1)[1][..., 0]

    def _read(self, ids: Tensor, **asked: Any) -> Any:
        several = ids.dim() == self.hidden.dim() or asked
        known = {name: value for name, value in options.items() if name != "grad_tolerance" or not several}
        of_head: dict[str, Any] = {"bias": self.bias, "low_rank": self.low_rank, "transform": self.transform}
        with nullcontext() if self.has_graph else torch.no_grad():
            return linear_logprobs(
                self.hidden, self.weight, ids, **of_head, compute_dtype=self.compute_dtype, **known, **asked
            )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """`torch.gather(logits, ...)` is `logits.gather(...)`."""
        method = vars(cls).get(function.__name__)
        if method is None:
            raise TypeError(f"patch_trl() makes no logits here, and {function.__name__} needs them; call unpatch_trl()")
        return method(*args, **(kwargs or {}))


def _divergence(student: Logits, teacher: Logits, beta: float, mask: Tensor | None = None) -> DivergenceCall:
    head_options = HeadOptions(
        transform=student.transform,
        compute_dtype=student.compute_dtype if student.compute_dtype == teacher.compute_dtype else None,
        **{name: value for name, value in options.items() if name != "grad_tolerance"},
    )
    return DivergenceCall(
        hidden=student.hidden, weight=student.weight, bias=student.bias, low_rank=student.low_rank,
        teacher_hidden=teacher.hidden, teacher_weight=teacher.weight, teacher_bias=teacher.bias,
        teacher_transform=teacher.transform, teacher_may_require_grad=True, measure=measure_of("jsd", beta), mask=mask,
        options=head_options,
    )  # fmt: skip


@no_graph()
def _transform_of(model: Any) -> LogitTransform:
    """What the model does to its logits. TypeError or ValueError for a head that is more than linear."""
    if model not in _transforms:
        head = checked_head(model)
        listen(head.module)
        _transforms[model] = probed_transform(model, head)
    return _transforms[model]


def _heads(trainer: Any, models: list[Any], held: ExitStack) -> dict[Any, LogitTransform]:
    """The transform of each model inside the wrappers `models`. TypeError or ValueError says why TRL's code has to run.

    The heads listen until `held` ends.
    """
    inner, args = [trainer.accelerator.unwrap_model(model) for model in models], trainer.args
    kinds = takewhile(lambda kind: not kind.__module__.startswith("trl."), type(trainer).__mro__)
    own = {name for kind in kinds for name in vars(kind)} - {"compute_loss"}
    prompts = (getattr(model, "active_peft_config", None) for model in inner)
    ids = max(getattr(args, name, None) or 0 for name in ("distillation_topk", "loss_top_k"))
    reasons = {
        "a model is sharded, or replicated by DataParallel":
            trainer.is_fsdp_enabled or args.n_gpu > 1 or any(map(zero_3, inner)),
        "a model is compiled, or has another fused forward":
            args.torch_compile or args.use_liger_kernel or any(map(is_swapped, inner)),
        "an adapter puts tokens of its own before each row":
            any(getattr(prompt, "is_prompt_learning", False) for prompt in prompts),
        "the trainer's class has methods of its own that may read logits":
            any(part in name for name in own for part in ("loss", "logit", "logp")),
        f"more than {MOST_IDS} ids of each token": ids > MOST_IDS,
        "the ULD loss reads whole distributions": getattr(trainer, "use_uld_loss", False),
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)
    for model in inner:
        held.callback(stop_listening, model)
    transforms = {model: _transform_of(model) for model in map(base_model, inner)}
    heads = {model: current_head(model, nn.Linear) for model in transforms}
    teacher = getattr(trainer, "teacher_model", None)
    if teacher is not None and heads[base_model(trainer.accelerator.unwrap_model(teacher))].adapters:
        raise ValueError("the teacher has adapters on its head")
    return transforms


@contextmanager
def _without_logits(trainer: Any, model: Any) -> Iterator[None]:
    """In it the outputs of the student and of the teacher, if there is one, have `Logits`."""
    teacher = getattr(trainer, "teacher_model", None)
    models = [model] if teacher is None or teacher is model else [model, teacher]
    running, made, requests = list[int](), list[Logits](), list[Any]()

    def answer(model: Any, hidden: Tensor) -> Tensor:
        head, kind = read_head(model.get_output_embeddings(), type(model).__name__), hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        parts = head.linear.weight, head.bias(), head.low_rank(hidden)
        made.append(Logits(hidden, *parts, heads[model], dtype, torch.is_grad_enabled()))
        # What the model makes of this is not used. DDP looks in it for the parameters that get a gradient.
        return hidden[..., :1] + 0 * sum(p.flatten()[0] for p in head.module.parameters() if p.requires_grad)

    def leave(_model: Any, _args: Any, output: Any) -> None:
        running.pop()
        if not running:  # the student's wrapper, if it has one, and not the model in it that may be the teacher too
            output.logits = made.pop()
            for request in requests:
                request.hidden = None

    with ExitStack() as held:
        try:
            heads = _heads(trainer, models, held)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            tell(trainer.model, f"full logits, as without the patch: {error}")
        else:
            for each in models:
                held.callback(each.register_forward_pre_hook(lambda *_: running.append(1)).remove)
                held.callback(each.register_forward_hook(leave).remove)
            for each in heads:
                requests.append(held.enter_context(asking(each.get_output_embeddings(), partial(answer, each))))
        yield


def _rows(name: str, kind: str) -> tuple[Patch, ...]:
    """The rows of trl.experimental.<name>, of which the trainer is `kind`."""
    package = f"trl.experimental.{name}"
    trainer = f"{package}.{name}_trainer:{kind}Trainer"
    row = partial(Patch, since=SINCE, needed=partial(importable, name))

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with nullcontext() if return_outputs else _without_logits(self, model):
            return loss.original(self, model, inputs, return_outputs, num_items_in_batch)

    def _compute_rollout_logps(self: Any, *args: Any, **named: Any) -> Any:
        with _without_logits(self, self.model):
            return rollout.original(self, *args, **named)

    def generalized_jsd_loss(student_logits: Any, teacher_logits: Any, *args: Any, **named: Any) -> Tensor:
        if not isinstance(student_logits, Logits) or 0 < named.get("top_k", 0) < student_logits.size(-1):
            return jsd.original(student_logits, teacher_logits, *args, **named)
        student, teacher = (logits / named.get("temperature", 1.0) for logits in (student_logits, teacher_logits))
        call = _divergence(student, teacher, named["beta"], named["labels"] != IGNORE_INDEX)
        return loss_of(call, named["num_items_in_batch"])[0]

    def compute_divergence(student_log_probs: Any, teacher_log_probs: Any, alpha: float) -> Tensor:
        if isinstance(student_log_probs, Logits):
            return divergence_of(_divergence(student_log_probs, teacher_log_probs, alpha)).divergence
        return divergence.original(student_log_probs, teacher_log_probs, alpha)

    def selective_log_softmax(logits: Any, index: Tensor, *args: Any, **named: Any) -> Tensor:
        if isinstance(logits, Logits):
            return logits.gather(-1, index[..., None])[..., 0]
        return selected.original(logits, index, *args, **named)

    loss = row(f"{trainer}.compute_loss", compute_loss)
    parameters = "student_logits teacher_logits labels beta temperature reduction logits_are_probs? top_k? add_tail?"
    jsd = row(f"{trainer}.generalized_jsd_loss", staticmethod(generalized_jsd_loss), f"{parameters} num_items_in_batch")
    rollout = row(f"{trainer}._compute_rollout_logps", _compute_rollout_logps, None)
    divergence = row(f"{package}.loss_utils:compute_divergence", compute_divergence, modules=(package,))
    selected = row(f"{package}.loss_utils:selective_log_softmax", selective_log_softmax, None, modules=(package,))
    if name in ("sdft", "sdpo"):
        return loss, rollout, divergence, selected
    return (loss,) if name == "server_distillation" else (loss, jsd)


ROWS = (
    *_rows("gkd", "GKD"),
    *_rows("gold", "GOLD"),
    *_rows("iw_opd", "IWOPD"),
    *_rows("sdft", "SDFT"),
    *_rows("sdpo", "SDPO"),
    *_rows("server_distillation", "ServerDistillation"),
)
