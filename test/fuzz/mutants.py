# ruff: noqa: E501 - a mutant is a line
"""Does the fuzzer find bugs? Each mutant is one bug, put into a copy of the package; the fuzzer must fail on it.

    python test/fuzz/mutants.py [NAME ...]

Each has the budget of `make test`, 500 cases, the same in every run, so that what is caught here is caught there.

A mutant is (name, file of the package, text, text with the bug). The text must occur exactly once, else the mutant is
an error, not a success: after a change of the package, find the line that does now what the name says, and put it here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = (
    ("entropy gradient lacks the entropy", "kernels/reference.py", "log_p.add_(tokens.entropy.unsqueeze(1)).mul_(", "log_p.mul_("),
    ("softcap's derivative dropped", "kernels/reference.py", "grad_z.mul_(tanh_square(z, transform).neg_().add_(1.0))", "pass"),
    ("gradient lacks 1/T", "kernels/reference.py", "grad_z.mul_(factor) if factor != 1.0 else grad_z", "grad_z.mul_(transform.scale)"),
    ("entropy without temperature", "kernels/reference.py", "(exp * shifted).sum(-1)", "(exp * shifted * transform.temperature).sum(-1)"),
    ("target at a tile's first column is missed", "kernels/reference.py", "return clamped, clamped == column", "return clamped, (clamped == column) & (column > 0)"),
    ("target logit off by 2e-5", "kernels/reference.py", "target = torch.where(hit, z.gather(1, column),", "target = torch.where(hit, z.gather(1, column) + 2e-5,"),
    ("probabilities off by 5e-5", "kernels/reference.py", "return p.mul_(-tokens.grad_logps.unsqueeze(1))", "return p.mul_(-1.00005 * tokens.grad_logps.unsqueeze(1))"),
    ("bias gradient lacks a tile's first token", "head/two_pass.py", "self.bias_total += gemm.column_sums(tile)", "self.bias_total += gemm.column_sums(tile[1:])"),
    ("first token of a tile dropped from the weight's gradient", "head/two_pass.py", "(self.total, tile.T, hidden)", "(self.total, tile[1:].T, hidden[1:])"),
    ("one row lost between chunks", "head/tiles.py", "range(0, total, max(step, 1))]", "range(0, total, max(step, 1) + (0 < step < total))]"),
    ("gradients of masked tokens kept", "kernels/reference.py", "has_gradient = has_gradient & _live_mask(logits, targets, mask)", "pass"),
    ("mask is multiplied", "losses/loss.py", "logps = per_token_logps.masked_fill(masked, 0.0)", "logps = per_token_logps * ~masked"),
    ("padding counted in a sequence's length", "losses/batch.py", "self.sequence_sum(self.mask.to(self.advantages.dtype))", "self.sequence_sum(self.mask.to(self.advantages.dtype) * 0 + 1)"),
    ("sign of k1", "losses/penalties.py", "return logps - ref_per_token_logps", "return ref_per_token_logps - logps"),
    ("k3 without its -1", "losses/penalties.py", "torch.expm1(difference) - difference", "difference.exp() - difference"),
    ("importance-weighted KL without the ratio's gradient", "losses/penalties.py", "kl = kl * ratio", "kl = kl * ratio.detach()"),
    ("a tie on the clip's bound loses gradient", "losses/objectives.py", "ratio.masked_fill(clip_low, low).masked_fill(clip_high, high)", "ratio.masked_fill(clip_low | (ratio == low), low).masked_fill(clip_high | (ratio == high), high)"),
    ("dual clip on the wrong side", "losses/objectives.py", "torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)", "torch.where(advantages > 0, torch.minimum(loss, -self.dual_clip * advantages), loss)"),
    ("GSPO-token without the token's gradient", "losses/objectives.py", "* torch.exp(logps - detached)", "* torch.exp(detached - detached)"),
    ("CISPO's bound is taken from 1", "losses/objectives.py", "ratio.detach().clamp(low, high)", "ratio.detach().clamp(self.ratio_min, 1 + self.epsilon_high)"),
    ("world size ignored", "losses/reductions.py", "weights * self.world_size / divisor(batch.num_items_in_batch)", "weights / divisor(batch.num_items_in_batch)"),
    ("entropy bonus over every token", "losses/penalties.py", "torch.where(mask, entropy, 0.0).sum()", "entropy.sum()"),
    ("sampler ratio not bounded below", "losses/corrections.py", "ratio.clamp(low, high)", "ratio.clamp(max=high)"),
    ("a repeated id counts twice", "support/slots.py", "if not distinct:", "if False:"),
    ("the target's gradient is another id's", "support/slots.py", "torch.where(is_target, gradients.at_target[token], -gradients.grad_logps[token] * log_p.exp())", "-gradients.grad_logps[token] * log_p.exp()"),
    ("tokens whose row is empty get nothing", "support/logprobs_over_sets.py", "self._empty_rows = torch.argsort(self.slots.full.logical_not(), stable=True)[:count] if count else None", "self._empty_rows = None"),
    ("a target that its row does not list is left out", "support/slots.py", "missing = counts & (end > begin) & (target_position == pairs)", "missing = counts & (end > begin) & (target_position == pairs); counts = counts & ~missing; kinds = torch.where(missing, IGNORED, kinds).to(torch.uint8)"),
    ("gradients of a repeated target do not add up", "head/several.py", "torch.where(same, part[:, None, :], 0.0).sum(2)", "part"),
    ("a gradient of lse is lost beside several targets", "head/several.py", "total - grads.lse.float()", "total - 0 * grads.lse.float()"),
    ("a gradient of the mean logit is lost at the targets of several", "head/several.py", "with_uniform(grad, gradients)", "grad"),
    ("a token with a gradient of the mean logit alone is dropped", "kernels/statistics.py", "(self.grad_entropy, self.uniform)", "(self.grad_entropy,)"),
    ("merged metrics lose a count", "losses/metrics.py", "else a.count + b.count", "else a.count"),
    ("ld_alpha begins after the longer sequence", "losses/preference.py", "torch.minimum(*self._sum_sides(", "torch.maximum(*self._sum_sides("),
    ("sorted pairs are sums in place of means", "losses/preference.py", "(self._weigh_sides(x, batch) for x in (logps, reference))", "(self._sum_sides(x, batch) for x in (logps, reference))"),
    ("means of pairs count every token of both", "losses/preference.py", "return chosen.clamp(min=1), rejected.clamp(min=1)", "return (chosen + rejected).clamp(min=1), (chosen + rejected).clamp(min=1)"),
    ("undesirable sequences have the weight of desirable ones", "losses/preference.py", "torch.where(chosen, self.desirable_weight, self.undesirable_weight)", "torch.where(chosen, self.desirable_weight, self.desirable_weight)"),
    ("the NLL term counts what the pair does not", "losses/batch.py", "return self.advantages > 0 if self.nll_mask is None else self.nll_mask != 0", "return self.advantages > 0"),
    ("a preset's icepop keeps tokens above its bound", "losses/objectives.py", "return ratio < self.ratio_min, ratio > self.ratio_max", "return ratio < self.ratio_min, ratio < 0"),
    ("EAFT's entropy without its scale", "losses/supervised.py", "(batch.entropy / self.eaft_scale).pow(", "batch.entropy.pow("),
    ("ids that are not listed have a part in the normaliser", "distill/lists.py", "values.masked_fill(left_out, -torch.inf).logsumexp", "values.masked_fill(left_out, -200.0).logsumexp"),
    ("a bucket of the unlisted ids has another mass", "distill/lists.py", "-torch.expm1(log_p.logsumexp(", "torch.exp(log_p.logsumexp("),
    ("Triton: tiles before a higher peak not moved to it", "kernels/merge_folds_triton.py", "rescale = tl.exp(peak - new_peak)", "rescale = tl.exp(peak - peak)"),
    ("Triton: an epilogue's gradient lacks the softcap's derivative", "kernels/tile_epilogues.py", "times_derivative(with_uniform(grad, gradients, token[:, None], live[:, None]), square, steps)", "with_uniform(grad, gradients, token[:, None], live[:, None])"),
    ("Triton: tiles lack the gradient of the mean logit", "kernels/logit_rows_triton.py", "with_uniform(grad, tokens, token, has_token)", "grad"),
    ("Triton: dual clip on the wrong side", "losses/fused_triton.py", "dual = advantage < 0.0", "dual = advantage > 0.0"),
    ("Triton: merged tiles not moved to their peak", "kernels/merge_folds_triton.py", "total * rescale + tl.sum(weight * tile_sum, 0)", "total * rescale + tl.sum(tile_sum, 0)"),
    ("Triton: entropies of listed ids lack their peak", "support/slots_triton.py", "tl.where(has_ids, peak.to(tl.float64) + log_sum, float(\"inf\"))", "tl.where(has_ids, log_sum, float(\"inf\"))"),
    ("Triton: a row that is a target alone counts as several", "support/slots_triton.py", "kind = tl.where(others > 0, SEVERAL, SINGLE)", "kind = tl.where(others >= 0, SINGLE, SEVERAL)"),
    ("Triton: listed ids lack the softcap's derivative", "support/slots_triton.py", "tl.where(needed, times_derivative(grad, square, steps), 0.0)", "tl.where(needed, grad, 0.0)"),
    ("Triton: the last piece of a cut segment is too short", "support/segment_sums_triton.py", "tl.where(has_first_piece | valid, last, first)", "tl.where(has_first_piece, last, first)"),
    ("Triton: entries of an id in another order than their tokens", "support/segment_sums_triton.py", "tl.load(entries.tokens + before, mask=inside, other=0)", "tl.load(entries.tokens + place, mask=inside, other=0)"),
    ("Triton: an empty row of a support has no ids", "support/slots_triton.py", "tl.where(counts, tl.where(end > begin, kind, FULL), IGNORED)", "tl.where(counts, tl.where(end > begin, kind, SINGLE), IGNORED)"),
    ("Triton: k3's slope has another sign", "losses/fused_triton.py", "slope = -tl.where(near, d + d * d * tail, exp - 1.0)", "slope = tl.where(near, d + d * d * tail, exp - 1.0)"),
    ("Triton: id 0 masks its token", "kernels/select_tokens_triton.py", "counted = inside & (target >= 0)", "counted = inside & (target > 0)"),
)  # fmt: skip


def outcome(name: str, file: str | None, text: str, bug: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "liger_rl", Path(folder, "liger_rl"), ignore=shutil.ignore_patterns("__pycache__"))
        if file is not None:
            source = Path(folder, "liger_rl", file)
            found = source.read_text() if source.exists() else ""
            if found.count(text) != 1:
                return f"ERROR: the text occurs {found.count(text)} times in {file}"
            source.write_text(found.replace(text, bug))
        env = os.environ | {"PYTHONPATH": folder, "FUZZ_SHRINK": "0", "OMP_NUM_THREADS": "1"}
        # Beside the copy, because python -m looks there first.
        where = [sys.executable, "-c", "import liger_rl; print(liger_rl.__file__)"]
        if not subprocess.run(where, cwd=folder, env=env, capture_output=True, text=True).stdout.startswith(folder):
            return "ERROR: the copy of the package is not the one that Python imports"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "0"]
        command += ["-c", str(ROOT / "pyproject.toml"), str(ROOT / "test" / "fuzz")]
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if run.returncode == 0:
            return "survived"
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
        if run.returncode != 1 or not failed:
            return f"ERROR: pytest ended with {run.returncode}: {(run.stdout + run.stderr)[-500:]}"
        return f"caught by {failed[0].split('::')[-1][:90]}"


def main() -> int:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m[0] in sys.argv[1:]]
    clean = outcome("none", None, "", "")
    print(f"without a bug: {clean}", flush=True)
    if clean != "survived":
        return 1
    results = []
    for mutant in chosen:
        results.append(outcome(*mutant))
        print(f"{mutant[0]}: {results[-1]}", flush=True)
    caught = sum(result.startswith("caught") for result in results)
    print(f"{caught} of {len(results)} caught")
    return int(caught != len(results))


if __name__ == "__main__":
    sys.exit(main())
