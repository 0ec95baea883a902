"""What the user sees of the patch: two values in TRL's log, a line and warnings of a training run, and `explain_trl`.

An `OptimizerStep` records the calls of its models. The values and the line are of this process.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from liger_rl.integrations.patching import Patch
from liger_rl.integrations.trl.between import is_trl_trainer, list_own_methods
from liger_rl.integrations.trl.forward import AS_TRL, CallRecord, find_unreadable, find_wrapped
from liger_rl.integrations.trl.optimizer_step import (
    ANOTHER_RANK,
    FUSED_TRAINERS,
    UNMEASURED,
    OptimizerStep,
    find_refusal,
    find_step,
    find_trained_row_reader,
    get_size,
    is_compiled,
)
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.step.facts import COMPILED, fit_facts, read_facts
from liger_rl.step.layout import AS_IT_IS
from liger_rl.step.reason import Reason

TOKENS, SAVED = "liger_rl/body_tokens", "liger_rl/body_tokens_saved"

logger = logging.getLogger("liger_rl.trl")


@dataclass
class _Report:
    """The calls of a trainer's models in one training run."""

    # By role, of the last optimizer step that has such calls.
    last_calls: dict[str, list[CallRecord]] = field(default_factory=dict)
    # Since the last entry of TRL's log.
    steps: int = 0
    body_tokens: int = 0
    padded_tokens: int = 0
    run_steps: int = 0  # optimizer steps
    refusal: Reason | None = None  # of the last one, why each micro-batch had a forward of its own
    is_announced: bool = False  # whether the run's line has been logged


def _get_report(trainer: Any) -> _Report:
    return vars(trainer).get("_liger_rl_report") or _Report()


class Reporter(TrainerCallback):
    """Reports each optimizer step of a training run when it ends, before TRL logs it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._caught = trainer, ExitStack()
        vars(trainer)["_liger_rl_report"] = _Report()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        step = OptimizerStep.of(self._trainer, self._trainer.model_wrapped)
        if list_own_methods(self._trainer, ("training_step",)):  # which may not call the patched one
            self._caught.close()
            self._caught.enter_context(step.catching_calls())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._caught.close()
        trainer, report, step = self._trainer, _get_report(self._trainer), find_step(self._trainer)
        if step is None:
            return
        step.close()
        report.last_calls |= {call.role: [c for c in step.calls if c.role == call.role] for call in step.calls}
        report.run_steps, report.refusal = report.run_steps + 1, step.refusal
        _log_tokens(trainer, report, step.calls)
        step.warn_of_waiting()
        # On a GPU the first step measures memory, so the second one says more.
        is_last = trainer.state.global_step >= trainer.state.max_steps
        if not report.is_announced and (report.run_steps > 1 or is_last or trainer.args.device.type != "cuda"):
            report.is_announced = True
            _announce(step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = find_step(self._trainer)
        if (control.should_training_stop or control.should_epoch_stop) and step is not None:
            step.run_waiting()

    def close(self) -> None:
        self._caught.close()


def _is_reported(trainer: Any) -> bool:
    return any(isinstance(callback, Reporter) for callback in trainer.callback_handler.callbacks)


def train(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`transformers.Trainer.train`, of TRL's trainers with a report."""
    if not (PATCH.patched and is_trl_trainer(self)) or _is_reported(self):
        return PATCH.pristine(self, *args, **kwargs)
    reporter = Reporter(self)
    self.add_callback(reporter)
    try:
        return PATCH.original(self, *args, **kwargs)
    finally:
        if _is_reported(self):  # a callback may have taken all of them away
            self.remove_callback(Reporter)
        reporter.close()


# Another package may have wrapped it.
PATCH = Patch("transformers.trainer:Trainer.train", train, None)


def _log_tokens(trainer: Any, report: _Report, calls: list[CallRecord]) -> None:
    """Set the values of TRL's next log entry: the mean over its optimizer steps, the share of all their tokens."""
    padded, body = _sum_tokens(calls)
    metrics = getattr(trainer, "_metrics", {}).get("train")
    if metrics is None or not padded:
        return
    if TOKENS not in metrics:  # TRL has logged, and has cleared its metrics
        report.steps = report.body_tokens = report.padded_tokens = 0
    report.steps += 1
    report.body_tokens += body
    report.padded_tokens += padded
    # TRL logs the mean of a list.
    metrics[TOKENS] = [report.body_tokens / report.steps]
    metrics[SAVED] = [1 - report.body_tokens / report.padded_tokens]


def _sum_tokens(calls: list[CallRecord]) -> tuple[int, int]:
    """(padded tokens of TRL's forwards, tokens that the body ran)."""
    return sum(call.padded_tokens for call in calls), sum(call.body_tokens for call in calls)


# --- the line and the warning of a training run -----------------------------------------------------------------------


def _announce(step: OptimizerStep) -> None:
    """Log what the optimizer step has run, and a warning if a setting of the user keeps it from running less."""
    trainer, calls = step.trainer, step.calls
    name, reasons = type(trainer).__name__, _find_reasons(step)
    if calls:
        text, reason = _describe_calls(calls)
        clauses = [text if reason is None else f"{text}: {reason}"]
        number = trainer.current_gradient_accumulation_steps
        if _count_together(calls) < number:
            clauses.append(_describe_window(trainer, number, calls, step.refusal))
        _log(trainer, logging.INFO, f"{name}: {'; '.join(clauses)}")
    elif not any(reason.fix for reason in reasons):
        gain = AS_TRL if _find_obstacle(trainer, step.model) is None else _name_gain(trainer)
        _log(trainer, logging.INFO, f"{name}: {gain}{''.join(f': {reason}' for reason in reasons[:1])}")
    changes = [f"{reason} (to change that: {reason.fix})" for reason in reasons if reason.fix]
    if changes:
        _log(trainer, logging.WARNING, f"{name} runs more than it must under patch_trl(): {'; '.join(changes)}")


def _name_gain(trainer: Any) -> str:
    """What a trainer gains whose model runs as TRL runs it."""
    modules = {kind.__module__ for kind in type(trainer).__mro__}
    if "trl.trainer.distillation_trainer" in modules:
        return "the loss alone"
    has_head = modules.intersection(FUSED_TRAINERS) and find_wrapped(trainer.model) is not None
    return "the head alone" if has_head else AS_TRL


def _describe_calls(calls: list[CallRecord]) -> tuple[str, Reason | None]:
    """How many tokens have run, and how the last call with a gradient has run."""
    padded, body = _sum_tokens(calls)
    call = ([call for call in calls if call.has_graph] or calls)[-1]
    return f"{body:,} of {padded:,} tokens run; {call.text}", call.reason


def _count_together(calls: list[CallRecord]) -> int:
    """The most micro-batches that one forward with a graph had."""
    return max((call.micro_batches for call in calls if call.has_graph), default=1)


def _describe_window(trainer: Any, number: int, calls: list[CallRecord], reason: Reason | None) -> str:
    """How the micro-batches of an optimizer step ran, or will run if there are no calls yet."""
    together = min(_count_together(calls) if calls else get_size(trainer), number)
    if reason is not None or (calls and together == 1):
        return f"a forward for each of its {number} micro-batches{_describe_reason(reason)}"
    if together == number:
        return f"its {number} micro-batches in one forward"
    is_unmeasured = get_settings().max_tokens is None and trainer.args.device.type != "cuda"
    is_unmeasured = is_unmeasured and get_size(trainer) < number
    bound = _describe_reason(UNMEASURED if is_unmeasured else None)
    return f"{together} of its {number} micro-batches in one forward{bound}"


def _find_reasons(step: OptimizerStep) -> list[Reason]:
    """Why the trainer runs more than it must, as far as known."""
    refusal = step.refusal or find_refusal(step.trainer, step.model)
    reasons = [_find_obstacle(step.trainer, step.model) or refusal, *(call.reason for call in step.calls)]
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def _find_obstacle(trainer: Any, model: nn.Module) -> Reason | None:
    """Why no call of the trainer's policy runs live tokens only; None if calls may."""
    if not get_settings().whole_step:
        return Reason("whole_step=False")
    if find_wrapped(trainer.model) is None:
        return find_refusal(trainer, model)
    return COMPILED if is_compiled(trainer, model) else None


def _log(trainer: Any, level: int, text: str) -> None:
    """Log on the main process, visible unless the trainer's `log_level` or the user's logging says otherwise."""
    asked = trainer.args.log_level != "passive" and trainer.args.get_process_log_level() > level
    if asked or not trainer.is_world_process_zero():
        return
    with _visible_info():
        logger.log(level, text)


@contextmanager
def _visible_info() -> Iterator[None]:
    """INFO is logged in this context, to stderr if no handler is configured, unless the user has set a level."""
    level, handler = logger.level, None
    if logging.getLogger("liger_rl").level == level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[liger_rl] %(message)s"))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)


# --- explain_trl ------------------------------------------------------------------------------------------------------


def explain_trl(trainer: Any) -> str:
    """How the models of a TRL trainer run under `patch_trl()`, and why. Before, during or after training.

    One line for the optimizer step and one for each model: the tokens of the last optimizer step, or what is known
    before the first. A reason comes with the setting to change, if there is one.

    Raises:
        TypeError: `trainer` is not a trainer of TRL.
    """
    from transformers import Trainer

    if not (isinstance(trainer, Trainer) and is_trl_trainer(trainer)):
        raise TypeError(f"trainer must be a trainer of TRL, got {type(trainer).__name__}")
    name, model = type(trainer).__name__, trainer.model_wrapped
    if not PATCH.patched:
        return f"{name}: runs as TRL runs it, because patch_trl() is not in place"
    obstacle = _find_obstacle(trainer, model)
    if obstacle is not None:
        return f"{name}: {_name_gain(trainer)}{_describe_reason(obstacle)}"
    report, own = _get_report(trainer), list_own_methods(trainer)
    lines = [f"optimizer step: {_explain_window(trainer, model, report)}"]
    for role, calls in sorted(report.last_calls.items()):
        text, reason = _describe_calls(calls)
        lines.append(f"{role}: {text}{_describe_reason(reason)}")
    if not report.last_calls and (own or report.run_steps):
        text = (
            f"{AS_TRL}: its loss does not call TRL's fused head" if report.run_steps else "known after the first step"
        )
        lines.append(f"policy: {text}")
    elif not report.last_calls:
        others = {"reference": "ref_model", "teacher": "teacher_model"}
        models = {"policy": trainer.model} | {role: getattr(trainer, name, None) for role, name in others.items()}
        known = {"policy": find_trained_row_reader(trainer)}
        lines += [f"{role}: {_predict(model, known.get(role))}" for role, model in models.items() if model is not None]
    return "\n".join([name, *(f"- {line}" for line in lines)])


def _describe_reason(reason: Reason | None) -> str:
    """A clause with the reason and its fix, behind another one."""
    fix = "" if reason is None or reason.fix is None else f" (to change that: {reason.fix})"
    return "" if reason is None else f": {reason}{fix}"


def _explain_window(trainer: Any, model: nn.Module, report: _Report) -> str:
    number, calls = trainer.args.gradient_accumulation_steps, report.last_calls.get("policy", [])
    reason = find_refusal(trainer, model)
    if report.refusal is ANOTHER_RANK:  # which this rank cannot find
        reason = reason or ANOTHER_RANK
    if number == 1:
        return f"one micro-batch{_describe_reason(reason if reason is not None and reason.fix else None)}"
    if not (calls or reason) and get_size(trainer) < number and get_settings().max_tokens is None:
        return f"as many of its {number} micro-batches in one forward as fit into memory"
    if calls and _count_together(calls) == 1:
        reason = reason or calls[-1].reason
    return _describe_window(trainer, number, calls, reason)


def _predict(model: nn.Module, reason: Reason | None) -> str:
    """How a model will run text, from what is known without a batch, such as a reason to leave it as it is."""
    wrapped = find_wrapped(model)
    if wrapped is None:
        return AS_TRL
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(wrapped.parameters()).device)
    training = {module: module.training for module in wrapped.modules()}
    try:
        wrapped.train()  # with dropout
        facts = fit_facts(
            read_facts(wrapped, joined_hooks=get_settings().joined_hooks), {"attention_mask": torch.ones_like(ids)}, ids
        )
        reason = find_unreadable(facts, {"input_ids": ids, "labels": ids}) or facts.obstacle or reason
    finally:
        for module, mode in training.items():
            module.training = mode
    if reason is not None:
        return f"{AS_IT_IS}{_describe_reason(reason)}"
    if facts.no_tree is not None:
        return f"live tokens only, no prefix shared{_describe_reason(facts.no_tree)}"
    return "live tokens only, prompts once"
