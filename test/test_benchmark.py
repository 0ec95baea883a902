"""The benchmark on tiny CPU cases: what it feeds, what it compares with, and what it does when a peer fails."""

import ast
import json
import math
import re
import runpy
import sys
import time
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")

from benchmark import floor, gold, plot, run, step, step_batches, timing, train_real_runs, variants, whole_step
from benchmark.cases import (
    FLAT,
    LOGPS_AND_ENTROPY,
    MIXED,
    RL,
    STEP,
    TAILED,
    TOKENS,
    VOCABULARY,
    Case,
    default_cases,
    preset,
)
from benchmark.environment import RESULTS, ROOT, output_directory, read_results
from benchmark.errors import measure_errors
from benchmark.inputs import CURVES, make_inputs
from benchmark.measure import Bench
from benchmark.merge import differences, merged
from benchmark.peers import peer
from benchmark.table import markdown
from benchmark.worker import Job, OutOfTime, Workers

ENVIRONMENT = {
    "device": "cuda", "device_name": "Some GPU", "torch": "2.11", "commit": "0123456789ab", "dirty": False,
    "date": "2026-01-01", "load_average": 0.1,
}  # fmt: skip
DENSE = Case(name="dense", batch=4, tokens=12, hidden_size=32, vocab=200, dtype="float32")
BATCH = replace(DENSE, name="rl", mask_share=0.42, idle_share=0.25, beta=0.0, peaks=TAILED)


def test_cases_of_the_presets_have_names_of_their_own_and_variants_that_exist():
    for device in ("cpu", "cuda"):
        for quick in (False, True):
            cases = preset(device, quick=quick)
            assert len({case.name for case in cases}) == len(cases)
            assert {variant for case in cases for variant in case.variants} <= set(variants.VARIANTS)
            assert [Case.from_dict(json.loads(json.dumps(case.to_dict()))) for case in cases] == cases
        default = default_cases(device)
        assert [case in preset(device) for case in default] == [True, True]
        assert [(case.mask_share, case.idle_share) for case in default] == [(0.0, 0.0), (0.42, 0.25)]
        for case in default_cases(device, tokens=100, vocab=3000, hidden=96):
            assert (case.rows, case.vocab, case.hidden_size, case.dtype) == (104, 3000, 96, default[0].dtype)
    assert [case.name for case in preset("cuda", patterns=(RL, "vocab-*"))] == [
        "rl-llama-3-8b", "rl-qwen3-1.7b", "rl-qwen3-0.6b", "rl-gemma-2-2b", "vocab-32768", "vocab-262144",
    ]  # fmt: skip


def test_a_tailed_policy_has_the_curves_that_are_claimed():
    case = Case(name="tailed", batch=8, tokens=64, hidden_size=1024, vocab=8000, dtype="float32", peaks=TAILED)
    inputs = make_inputs(case, "cpu")
    assert inputs.current_entropy.mean().item() == pytest.approx(1.2, abs=0.35)
    log_p = (inputs.hidden.flatten(0, 1) @ inputs.weight.T).log_softmax(-1).detach().sort(-1, descending=True).values
    first = torch.tensor(CURVES)[:, 0].exp().mean()
    assert log_p[:, 0].exp().mean().item() == pytest.approx(first.item(), abs=0.05)
    # With standard normal logits the upper half would have a sixth of what the likeliest ids leave.
    assert log_p[:, 4000:].exp().sum(1).mean() < 1e-4
    # The ids are drawn from the distribution.
    surprise = -inputs.current_logps
    noise = surprise.std() / math.sqrt(surprise.numel())
    assert abs(surprise.mean() - inputs.current_entropy.mean()) < 4 * noise
    assert make_inputs(replace(case, peaks=MIXED), "cpu").current_logps.exp().gt(0.99).float().mean() < 0.6
    assert make_inputs(replace(case, peaks=FLAT), "cpu").current_entropy.min() > math.log(case.vocab) - 1


def test_inputs_follow_the_case():
    case = replace(BATCH, batch=8)
    inputs = make_inputs(case, "cpu")
    assert (inputs.advantages == 0).nonzero().flatten().tolist() == [2, 6]
    assert inputs.ref_logps is None
    assert inputs.mask.sum() == case.live_rows
    assert not make_inputs(replace(DENSE, frozen=True), "cpu").weight.requires_grad


@pytest.mark.parametrize(("entries", "tile"), [(7, 100), (500, 1 << 20)])
def test_a_floor_in_pieces_is_the_whole_products(entries, tile, monkeypatch):
    monkeypatch.setattr(floor, "MIN_ENTRIES", entries)
    monkeypatch.setitem(floor.TILE_BYTES, "cpu", 4 * tile)
    case = replace(BATCH, peaks=MIXED)
    inputs = make_inputs(case, "cpu")
    products = floor.Products(case, inputs, "cpu", gradients=True)
    products()
    hidden, weight = inputs.hidden[inputs.mask], inputs.weight
    torch.testing.assert_close(products.grad_hidden, hidden @ weight.T @ weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(products.grad_weight, (hidden @ weight.T).T @ hidden, rtol=1e-5, atol=1e-4)
    assert floor.Products(replace(case, frozen=True), inputs, "cpu", gradients=True).grad_weight is None


@pytest.mark.parametrize("variant", variants.VARIANTS)
@pytest.mark.parametrize(
    "case",
    [
        DENSE,
        BATCH,
        replace(DENSE, name="softcap", softcap=5.0, mask_share=0.3),
        replace(DENSE, name="frozen", frozen=True),
        replace(DENSE, name="logps and entropy", task=LOGPS_AND_ENTROPY),
    ],
    ids=lambda case: case.name,
)
def test_variants_compute_the_same_thing(variant, case, monkeypatch):
    """Compared with a gold that is computed in pieces of 7 rows."""
    monkeypatch.setattr(gold, "LOGITS_BYTES", 8 * case.vocab * 7)
    head = peer.load(variant)
    reason = head.reason(case, "cpu")
    if reason is not None:
        pytest.skip(reason)
    bench = Bench(case, "cpu")
    errors = measure_errors(head, bench.compute(head), case, bench.inputs, bench.gold)
    assert errors.pop("error_rows") == case.rows
    assert {"grad_hidden_error", "loss_error"} <= errors.keys() or case.task != STEP
    for name, error in errors.items():
        if case.frozen and name == "grad_weight_error":
            assert error is None
        else:
            assert error < 1e-5, name


def test_a_real_process_measures_and_gives_reasons():
    case = replace(DENSE, vocab=600)  # larger than the head that libraries are loaded with
    jobs = [Job(case, ("eager", "cce", "ours"), "cpu", ("memory", "time", "error"))]
    saved = []
    rows = run.collect(jobs, lambda rows: saved.append(len(rows)))
    assert saved == [1, 2, 3]
    eager, cce, ours = rows
    assert (eager["status"], cce["status"], ours["status"]) == ("ok", "unavailable", "ok")
    assert "cuda" in cce["reason"]
    assert ours["step_ms"] > 0
    assert ours["step_x_floor"] == pytest.approx(ours["step_ms"] / ours["step_floor_ms"])
    assert ours["grad_weight_error"] < 1e-5
    assert "policy" not in ours
    text = markdown({"environment": ENVIRONMENT, "rows": rows})
    assert text.count("unavailable") == 0 < text.count("Not in every table: cut-cross-entropy (needs cuda")
    assert "| cut-cross-entropy |" not in text


# Answers as `benchmark.measure` does, or as the variant's name has it, which no real one can be made to.
PRETENDER = """
import json, os, sys, time
first = True
for line in sys.stdin:
    for name in json.loads(line)["variants"]:
        if name == "dies":
            os._exit(3)
        if name == "hangs":
            time.sleep(60)
        status = "failed" if name == "fails" or name == "fails second" and not first else "ok"
        print(json.dumps({"status": status, "reason": name, "pid": os.getpid()}), flush=True)
        first = False
"""


def pretend(variants, **options):
    job = Job(DENSE, tuple(variants), "cpu", ("time",))
    with Workers(command=(sys.executable, "-c", PRETENDER), **options) as workers:
        return list(workers.run(job))


def test_a_peer_that_fails_is_a_reason_and_the_others_go_on():
    outcomes = pretend(["hangs", "a", "dies", "b", "fails", "c", "hangs"], limit_seconds=3)
    limit = ("stopped", "after 3 s, the benchmark's own limit; --limit-seconds raises it")
    assert [(result["status"], result["reason"]) for _name, result in outcomes] == [
        limit, ("ok", "a"), ("failed", "exit status 3 without a result"), ("ok", "b"), ("failed", "fails"), ("ok", "c"),
        limit,  # without a second try, which would take as long again
    ]  # fmt: skip


def test_a_failure_in_a_process_that_others_used_is_tried_again_in_a_fresh_one():
    (_, first), (_, again), (_, after) = pretend(["a", "fails second", "b"])
    assert again["status"] == "ok"
    assert first["pid"] != again["pid"] == after["pid"]


def test_what_runs_at_the_deadline_has_no_result():
    begun = time.monotonic()
    with pytest.raises(OutOfTime):
        pretend(["hangs"], deadline=time.monotonic() + 1)
    assert time.monotonic() - begun < 30


def test_a_plan_leaves_out_what_is_done():
    done = {("dense", "ours")}
    (job,) = run.plan([DENSE], ["eager", "ours"], "cuda", quick=False, done=done)
    assert job.variants == ("eager",)
    assert run.plan([DENSE], ["ours"], "cpu", quick=False, done=done) == []
    jobs = run.plan([DENSE], ["eager", "ours"], "cpu", quick=False)
    assert [(job.variants, job.quantities, job.alone) for job in jobs] == [
        (("eager",), ("memory",), True), (("ours",), ("memory",), True), (("eager", "ours"), ("time", "error"), False),
    ]  # fmt: skip


def test_options_select_cases_and_nothing_tracked_is_written_unasked(monkeypatch, tmp_path):
    def names(*arguments):
        monkeypatch.setattr(sys, "argv", ["run", *arguments])
        return [case.name for case in run.select(run.parse_arguments(), "cpu")]

    assert names() == names("--vocab", "50") == ["dense", "rl"]
    assert names("--cases", "vocab-*") == ["vocab-8000", "vocab-16000", "vocab-64000"]
    assert names("--record") == names("--cases", "*") == [case.name for case in preset("cpu")]
    with pytest.raises(SystemExit, match="none of"):
        names("--cases", "nothing")
    for refused in (["--record", "--cases", "rl"], ["--tokens", "8", "--cases", "rl"], ["--record", "--out", "x"]):
        with pytest.raises(SystemExit, match="2"):
            names(*refused)
    assert output_directory(None, record=False).relative_to(ROOT).parts[0] == "out"
    assert output_directory(tmp_path, record=False) == tmp_path
    assert output_directory(None, record=True) == RESULTS
    with pytest.raises(SystemExit, match="--record writes there"):
        output_directory(RESULTS, record=False)


def a_row(case: Case, variant: str, **numbers) -> dict:
    return run._new_row(case, variant) | {"step_ms": 10.0, "step_floor_ms": 5.0, "step_x_floor": 2.0} | numbers


def test_results_of_one_environment_merge_and_the_later_row_wins():
    one = [a_row(DENSE, "ours"), a_row(BATCH, "ours")]
    two = [a_row(BATCH, "ours", step_ms=7.0), a_row(DENSE, "eager"), a_row(DENSE, variants.TRL, step_ms=40.0)]
    both = merged(one, two)
    assert [(row["case"], row["variant"], row["step_ms"]) for row in both] == [
        ("dense", "eager", 10.0),
        ("dense", variants.TRL, 40.0),
        ("dense", "ours", 10.0),
        ("rl", "ours", 7.0),
    ]
    # Of a variant that another file had.
    assert [row.get("step_x_trl") for row in both] == [0.25, 1.0, 0.25, None]
    assert merged(both, []) == both
    assert differences(ENVIRONMENT, ENVIRONMENT | {"torch": "2.12", "date": "2026-01-02"}) == ["torch"]


def test_pictures_are_drawn_where_there_are_rows_for_them(tmp_path, monkeypatch):
    """Each whole: the legend of all variants is within the picture."""
    figure_class = pytest.importorskip("matplotlib.figure", reason="pictures need matplotlib").Figure
    save, legends = figure_class.savefig, []

    def checked(figure, *arguments, **keywords):
        save(figure, *arguments, **keywords)
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert figure.bbox.contains(box.x0, box.y0)
            assert figure.bbox.contains(box.x1, box.y1)
            legends.append(legend)

    monkeypatch.setattr(figure_class, "savefig", checked)
    numbers = {"peak_extra_mib": 3.0, "grad_hidden_error": 1e-3, "grad_weight_error": 2e-3}
    cases = [replace(DENSE, name=f"n{n}", tokens=n, groups=(TOKENS, VOCABULARY), vocab=100 * n) for n in (4, 8)]
    cases.append(replace(BATCH, groups=(RL,)))
    rows = [a_row(case, variant, **numbers) for case in cases for variant in plot.STYLES]
    # A long batch has no row of eager, and its size is among the lines' all the same.
    long = replace(cases[0], name="n16", tokens=16, groups=(TOKENS,))
    rows += [a_row(long, variant, **numbers) for variant in ("ours", "trl_chunked")]
    (tmp_path / "some.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))
    (tmp_path / "none.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": []}))
    (tmp_path / "others.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": [{"variant": "ours"}]}))
    drawn = [path.name for path in plot.plot_directory(tmp_path)]
    assert drawn == [f"{name}-some.png" for name in ("memory", "time", "rl")]
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)
    assert len(legends) == 2


def test_bars_show_speed_and_memory_and_none_is_cut(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, *_: figures.append(figure))
    found = {name: read_results(RESULTS / f"{name}.json") for name in ("step-nvidia-h200", "nvidia-h200")}
    assert plot.plot_step(found["step-nvidia-h200"], tmp_path)
    assert plot.plot_rl(found["nvidia-h200"], tmp_path)
    widths = [[sorted(bar.get_width() for bar in axes.patches) for axes in figure.axes] for figure in figures]
    batches = [
        [row for row in found["step-nvidia-h200"]["rows"] if row["batch"] == "window" and row["shape"] == shape]
        for shape in ("qwen3-0.6b", "qwen3-1.7b")
    ]
    for speed, memory, rows in zip(widths[0][::2], widths[0][1::2], batches, strict=True):
        drawn = [row for row in rows if row["variant"] in plot.STEP_WAYS]
        assert speed == sorted(row["tokens_per_s"] / 1e3 for row in drawn)
        assert memory == sorted((row["peak_mib"] or 0) / 1024 for row in drawn)  # not of every row
    assert "TRL, no checkpointing" in {row["variant"] for row in drawn}
    rows = [row for row in found["nvidia-h200"]["rows"] if row["case"] == "rl-llama-3-8b"]
    assert widths[1][0] == sorted(row["step_ms"] for row in rows)
    assert widths[1][2] == sorted(row["peak_extra_mib"] for row in rows)


def test_the_brief_table_compares_like_with_like():
    def a_step(batch, variant, ms, gib):
        return {
            "shape": "toy",
            "batch": batch,
            "variant": variant,
            "status": "ok",
            "step_ms": ms,
            "peak_mib": gib * 1024,
        }

    rows = [
        a_step("window", "TRL", 80.0, 4.0),
        a_step("window", "TRL, use_liger_kernel", 40.0, 3.0),
        a_step("window", "TRL, patch_trl()", 20.0, 8.0),
        a_step("window", "TRL, patch_trl(memory=0), use_liger_kernel", 10.0, 2.0),
        a_step("window", "loss_steps", 16.0, 8.0),
        a_step("sft", "TRL", 60.0, 4.0),
        a_step("sft", "TRL, patch_trl(), use_liger_kernel, flash-attn-4", 20.0, 5.0),
        a_step("8k", "TRL, patch_trl()", 20.0, 5.0),
        a_step("8k", "TRL, use_liger_kernel, packing", 50.0, 4.0),
        a_step("8k", "TRL, use_liger_kernel, flash_attention_4, packing", 30.0, 4.0),
        a_step("8k", "TRL, patch_trl(), use_liger_kernel, packing, flash-attn-4", 15.0, 5.0),
    ]
    lines = step.brief({"environment": ENVIRONMENT, "rows": rows}).splitlines()
    assert lines[4:] == [
        "| toy, window | neither | 80 | 20 | 4.0 | 4.0 | 8.0 |",
        "| toy, window, memory=0 | both | 40 | 10 | 4.0 | 3.0 | 2.0 |",
        "| toy, window, loss_steps | neither | 80 | 16 | 5.0 | 4.0 | 8.0 |",
        "| toy, sft, flash-attn-4 on one side | this | 60 | 20 | 3.0 | 4.0 | 5.0 |",
        "| toy, 8k | neither |  | 20 |  |  | 5.0 |",
        "| toy, 8k, flash-attn-4 on both sides | both | 30 | 15 | 2.0 | 4.0 | 5.0 |",
    ]
    assert step.markdown({"environment": ENVIRONMENT, "rows": rows}, "brief", "*sft").splitlines()[4:] == lines[7:8]


def test_a_loss_of_few_tokens_may_be_further_off_in_bfloat16():
    row = {"shape": "toy", "batch": "window", "variant": "TRL, patch_trl()", "loss": 0.25, "grad_norm_x_trl": 1.0}
    about = {"dtype": "bfloat16", "policy": "random", "lora_dropout": None, "mean_advantage": 1.0}
    for tokens, off, wrong in ((1696, 2e-3, 0), (1696, 3e-3, 1), (40_000, 9e-4, 0), (40_000, 2e-3, 1)):
        found = step.objections(about | {"counted_tokens": tokens}, [row | {"loss_difference": off}])
        assert len(found) == wrong


@pytest.mark.parametrize(
    ("differences", "flips"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2 / 32),
        ([1.0, 2.0, -3.0], 1.0),  # a sum of 0 is reached or passed by every flip
        ([1.0, 1.0, 1.0, -1.0], 10 / 16),  # of the sums of four +-1, those beyond 2 in size
    ],
)
def test_signs_are_flipped_in_every_way(differences, flips):
    assert train_real_runs.sign_flip_p(differences) == flips


def test_a_run_ends_with_the_mean_of_its_last_fifth():
    def curves(variant, seed, end, steps=20):
        return {"variant": variant, "seed": seed} | dict.fromkeys(
            train_real_runs.CURVES, [0.0] * 16 + [end] * (steps - 16)
        )

    runs = [curves(variant, 0, 0.5) for variant in train_real_runs.VARIANTS]
    runs.append(curves("trl", 1, 0.9))  # a seed without its other runs
    ends = dict.fromkeys(train_real_runs.CURVES, 0.5)
    assert train_real_runs.ends({"runs": runs}) == {(variant, 0): ends for variant in train_real_runs.VARIANTS}
    # One that was stopped early cuts all of them: the last 4 of 18 steps are half before the rise.
    runs[1] = curves("patch", 0, 0.5, steps=18)
    assert {found["reward"] for found in train_real_runs.ends({"runs": runs}).values()} == {0.25}


@pytest.mark.parametrize("name", ["support", "divergence", "distillation_loss", "head_losses", "targets"])
def test_other_heads_run_on_cpu(name, tmp_path, monkeypatch):
    """The whole command, in this process, which has imported most of it; errors are those of bfloat16 rounding."""
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, f"benchmark.{name}", raising=False)  # it would be there as another module
    monkeypatch.setitem(timing.REPEATS, "cpu", replace(timing.REPEATS["cpu"], most=1, least=1))
    with torch._dynamo.config.patch(disable=True):  # peers would compile for a minute
        runpy.run_module(f"benchmark.{name}", run_name="__main__")
    results = json.loads((tmp_path / f"{name}-cpu.json").read_text())
    rows = results["rows"]
    ours = [row for row in rows if row["variant"].startswith("liger_rl") and "grad_weight_error" in row]
    assert len(ours) >= (2 if name == "head_losses" else 3)
    for row in ours:
        assert row["step_ms"] > 0
        assert row["grad_hidden_error"] < 6e-3
        assert row["grad_weight_error"] < 6e-3


@pytest.mark.parametrize(
    ("label", "row", "padding", "completion"),
    [
        ("short prompts", 1280, 0.40, 0.59),
        ("long prompts", 1889, 0.19, 0.59),
        ("window", 2560, 0.54, 0.41),
        ("window 8k", 8704, 0.57, 0.41),
    ],
)
def test_a_batch_of_a_step_is_as_rl_makes_it(label, row, padding, completion):
    task = step_batches.tasks()[label]
    about, batch = step_batches.describe_batch(task), step_batches.make_rollouts(task, torch.arange(1, 9000), "cpu")
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    assert attended.shape == (32, row) == (about["sequences"], about["row_tokens"])
    assert abs(1 - attended.float().mean() - padding) < 0.01
    assert about["padding_share"] == pytest.approx(1 - attended.double().mean().item())
    assert abs(batch["completion_mask"].float().mean() - completion) < 0.01
    # Padding on the left of prompts and on the right of completions, and nowhere between.
    assert (batch["prompt_mask"].diff() >= 0).all()
    assert (batch["completion_mask"].diff() <= 0).all()
    assert (batch["completion_mask"][:, 0] == 1).all()
    for name in ("prompt", "completion"):  # the pad id tells padding from tokens
        assert ((batch[f"{name}_ids"] != 0) == (batch[f"{name}_mask"] != 0)).all()
    by_group = batch["advantages"].view(4, -1)
    assert (by_group == 0).all(1).float().mean() == about["idle_share"] == 0.25
    torch.testing.assert_close(by_group.sum(1), torch.zeros(4), atol=1e-5, rtol=0)
    prompts = batch["prompt_ids"].view(4, 8, -1)
    assert (prompts == prompts[:, :1]).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum() == about["counted_tokens"]


@pytest.mark.parametrize(("label", "row", "micro_batches"), [("window 32k", 33280, 4), ("default group", 768, 1)])
def test_the_only_group_of_a_step_has_advantage(label, row, micro_batches):
    task = step_batches.tasks()[label]
    about, batch = step_batches.describe_batch(task), step_batches.make_rollouts(task, torch.arange(1, 40000), "cpu")
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    assert attended.shape == (8, row) == (about["sequences"], about["row_tokens"])
    assert attended.any(0).all()
    assert (batch["prompt_ids"] == batch["prompt_ids"][0]).all()
    assert (batch["advantages"] != 0).all()
    assert (about["idle_share"], about["micro_batches"]) == (0.0, micro_batches)


@pytest.mark.parametrize("scale", [1, 32])
def test_packed_sequences_fill_the_rows_of_a_step(scale):
    trl = pytest.importorskip("trl", reason="TRL packs")
    datasets = pytest.importorskip("datasets", reason="TRL packs data sets")
    for name, shared in (("sft packed", 160 // scale), ("sft packed apart", 0)):
        task = step_batches.tasks(scale)[name]
        about, examples = step_batches.describe_batch(task), step_batches.make_examples(task, torch.arange(1, 9000))
        lengths = [len(example["input_ids"]) for example in examples]
        assert about["counted_tokens"] == sum(lengths) - len(lengths)
        assert {tuple(example["input_ids"][:shared]) for example in examples} == {
            tuple(examples[0]["input_ids"][:shared])
        }
        assert len({tuple(example["input_ids"][: shared + 1]) for example in examples}) > 1
        packed = trl.pack_dataset(datasets.Dataset.from_list(examples), task.lengths.packed_row)
        assert len(packed) == 2 * task.micro_batches
        assert sum(map(len, packed["input_ids"])) == sum(lengths) > 0.9 * 16 * task.lengths.packed_row
        if shared:
            assert shared == pytest.approx(sum(lengths) / len(lengths) / 3, rel=0.05)


def test_ranks_share_the_groups_of_a_step():
    text, task = torch.arange(1, 9000), replace(step_batches.tasks()["window"], ranks=2)
    about = step_batches.describe_batch(task)
    batches = [step_batches.make_rollouts(replace(task, rank=rank), text, "cpu") for rank in (0, 1)]
    counted = [int(batch["completion_mask"].sum()) for batch in batches]
    assert [len(batch["advantages"]) for batch in batches] == [32, 32]
    assert about["sequences"] == 64
    # TRL's number of tokens is that of all ranks, and one rank has more of them than the other.
    assert all(batch["num_items_in_batch"] == sum(counted) == about["counted_tokens"] for batch in batches)
    assert counted[0] != counted[1]


def test_micro_batches_of_sft_and_dpo_are_padded_apart():
    text = torch.arange(1, 9000)
    for name in ("sft", "dpo"):
        task = step_batches.tasks()[name]
        about, examples = step_batches.describe_batch(task), step_batches.make_examples(task, text)
        assert len(examples) == 16
        if name == "sft":
            rows = [[len(example["input_ids"])] for example in examples]
            assert about["counted_tokens"] == sum(n - 1 for (n,) in rows)
        else:
            rows = [
                [len(x["prompt_ids"]) + len(x[which]) for which in ("chosen_ids", "rejected_ids")] for x in examples
            ]
        pairs = [first + second for first, second in zip(rows[::2], rows[1::2], strict=True)]
        padded = sum(len(pair) * max(pair) for pair in pairs)
        assert about["padding_share"] == pytest.approx(1 - sum(map(sum, pairs)) / padded)
        assert max(map(max, pairs)) == about["row_tokens"] <= 2048


def test_the_flop_of_a_step_are_those_that_torch_counts():
    """Of one sequence; torch counts attention as if it were not causal, and no norms."""
    transformers = pytest.importorskip("transformers", reason="a whole step needs transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.Qwen3Config(
        vocab_size=400, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    lengths = step_batches.Lengths(prompt=0, completion=48, median=1.0, spread=0.0, groups=1, members=1)
    task, ids = step_batches.Task(lengths=lengths, trainer="SFT"), torch.ones(1, 48, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, logits_to_keep=slice(0, 47)).logits.sum().backward()
    by_op = counter.get_flop_counts()["Global"]
    matmuls = sum(flop for op, flop in by_op.items() if "attention" not in str(op))
    size = step_batches.ModelSize.of(model)
    attention = 3 * 4 * 2 * 32 * (48 * 49 // 2)
    assert step_batches.count_flop(task, size) == pytest.approx(matmuls + attention, rel=0.01)
    # The common prompt of packed sequences is in the FLOP once: two that differ in one token cost little more.
    pair = replace(lengths, prompt=47, completion=1, members=2)
    twice = step_batches.count_flop(replace(task, lengths=pair), size) / step_batches.count_flop(task, size)
    assert 1 < twice < 1.05
    # LoRA does not need the weights' gradients, and an idle group has no backward.
    window = step_batches.tasks()["window"]
    full, lora = (step_batches.count_flop(replace(window, lora_dropout=x), size) for x in (None, 0.0))
    assert 0.67 < lora / full < 0.9
    groups = step_batches.draw_groups(window)
    body = size._replace(layers=0, vocab=0)
    live, idle = (sum(g.prompt + sum(g.completions) for g in groups if g.idle == x) for x in (False, True))
    assert step_batches.count_flop(window, body) == size.body_parameters * (6 * live + 2 * idle)


def test_a_whole_step_has_one_loss_in_every_way(monkeypatch, tmp_path, capsys):
    pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["step", *arguments, "--steps", "1", "--out", str(tmp_path)])
        step.main()
        return json.loads((tmp_path / "step-cpu.json").read_text())

    environment = ENVIRONMENT | {"device": "cpu", "threads": 1}
    monkeypatch.setattr(step, "describe", lambda device: environment)
    run("--batches", "short prompts", "window", "--rows", "trl", "head", "patch", "loss-steps")
    results = run("--batches", "window LoRA", "sft", "dpo", "--rows", "trl", "patch")
    by_batch = {name: list(rows) for name, rows in groupby(results["rows"], key=lambda row: row["batch"])}
    assert {name: len(rows) for name, rows in by_batch.items()} == {
        "short prompts": 4, "window": 4, "window LoRA": 2, "sft": 2, "dpo": 2
    }  # fmt: skip
    assert {row["status"] for row in results["rows"]} == {"ok"}
    assert all(0 < row["other_ms"] < row["step_ms"] and row["steps"] == 1 for row in results["rows"])
    assert [row["forwards"] for row in by_batch["window"]][:2] == [4, 4]
    # What the benchmark looks at keeps no step from running live tokens alone.
    saved = {row["batch"]: row["saved_share"] for row in results["rows"] if row["variant"] == "TRL, patch_trl()"}
    assert saved.keys() == by_batch.keys()
    assert min(saved.values()) > 0
    assert min(saved["short prompts"], saved["window"], saved["window LoRA"]) > 0.3
    for rows in by_batch.values():
        about = step.about_batch(results, rows[0])
        assert abs(rows[0]["loss"]) > 0.01
        assert step.objections(about, rows) == []
    about, rows = step.about_batch(results, by_batch["short prompts"][0]), by_batch["short prompts"]
    assert max(about["entropy"], about["surprise"]) < step.MOST_NATS
    assert step.markdown(results) in capsys.readouterr().out

    # The check of the losses sees an error of the divisor, and either of a gradient and of a flat policy.
    trl, ours, share = rows[0], rows[-1], 1 - about["idle_share"]
    for change in ({"loss_difference": trl["loss"] / share - trl["loss"]}, {"grad_norm_x_trl": 1 / share}):
        assert len(step.objections(about | {"dtype": "bfloat16"}, [trl, ours | change])) == 1
    assert "entropy" in step.objections(about | {"entropy": 5.0}, rows)[0]

    # A row that is run again replaces the earlier one, and all of its batch are compared anew; another environment
    # begins anew.
    again = step.add_row(results, about, trl | {"tokens_per_s": 2 * trl["tokens_per_s"]})
    assert len(again["rows"]) == len(results["rows"])
    (ours_again,) = (
        row for row in again["rows"] if step.label(row) == step.label(ours) and row["variant"] == ours["variant"]
    )
    assert ours_again["tokens_x_trl"] == pytest.approx(ours["tokens_per_s"] / trl["tokens_per_s"] / 2)
    assert step.read_earlier(environment, tmp_path / "step-cpu.json") == results
    assert step.read_earlier(environment | {"torch": "2.12"}, tmp_path / "step-cpu.json")["rows"] == []


def test_weights_are_in_float32_as_trl_loads_them(monkeypatch, tmp_path):
    runs = pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    from benchmark.step_policy import SHAPES

    monkeypatch.setitem(SHAPES, "toy", replace(SHAPES["toy"], dtype="bfloat16", weights="bfloat16"))
    monkeypatch.setattr(step, "describe", lambda device: ENVIRONMENT | {"device": "cpu", "threads": 1})
    made, make = [], runs.make_model
    monkeypatch.setattr(runs, "make_model", lambda *arguments: made.append(make(*arguments)) or made[-1])
    for options in ([], ["--float32-weights"]):
        batch = ["--batches", "window", "--rows", "trl", "patch", "--random-policy", "--steps", "1"]
        monkeypatch.setattr(sys, "argv", ["step", *batch, *options, "--out", str(tmp_path)])
        step.main()
    results = json.loads((tmp_path / "step-cpu.json").read_text())
    assert [str(model.dtype) for model in made] == ["torch.bfloat16"] * 3 + ["torch.float32"] * 3
    by_batch = {name: list(rows) for name, rows in groupby(results["rows"], key=lambda row: row["batch"])}
    assert list(by_batch) == ["window", "window, float32 weights"]
    for rows in by_batch.values():
        about = step.about_batch(results, rows[0])
        assert (about["dtype"], [row["status"] for row in rows]) == ("bfloat16", ["ok", "ok"])
        assert step.objections(about, rows) == []


def test_the_summary_compares_like_with_like():
    """A peer with Liger's kernels beside the patch with them; plain TRL too, but only where nothing else ran."""
    ways = {
        "TRL": 8.0, "TRL, no checkpointing": 7.0, "TRL, use_liger_kernel": 6.0, "Unsloth": 5.0, "loss_steps": 1.0,
        "TRL, patch_trl()": 2.0, "TRL, patch_trl(), use_liger_kernel": 1.0,
        "TRL, patch_trl(memory=0), use_liger_kernel": 1.5,
        "TRL, packing": 4.0, "TRL, patch_trl(), packing": 3.0,
        "TRL, use_liger_kernel, flash_attention_4, no checkpointing": 3.0,
        "TRL, patch_trl(), use_liger_kernel, flash-attn-4": 0.5,
    }  # fmt: skip
    rows = [
        {"variant": way, "step_ms": ms, "tokens_per_s": 1e3 / ms, "peak_mib": 1024 * ms} for way, ms in ways.items()
    ]

    def found(*left_out):
        pairs = step.pairs([row for row in rows if row["variant"] not in left_out])
        of_pair = ("peer", "patch", "recomputed")
        return {pair["beside"]: tuple(pair[name] and pair[name]["step_ms"] for name in of_pair) for pair in pairs}

    alike = {
        "TRL, both with Liger": (6.0, 1.0, 1.5),
        "TRL, both without Liger": (8.0, 2.0, None),
        "TRL, no checkpointing, both without Liger": (7.0, 2.0, None),
        "TRL, no checkpointing, both with Liger, flash-attn-4": (3.0, 0.5, None),
        "Unsloth, patch with Liger": (5.0, 1.0, 1.5),
        "TRL, packing, both without Liger": (4.0, 3.0, None),
    }
    assert found() == alike
    assert next(iter(found())) == "TRL, both with Liger"
    without = found("TRL, patch_trl()", "TRL, use_liger_kernel")
    assert without["TRL, patch with Liger"] == (8.0, 1.0, 1.5)
    assert not any("TRL, patch" in name for name in found("TRL, patch_trl()"))

    about = {"shape": "toy", "batch": "window", "status": "ok", "commit": "c"}
    results = {"environment": ENVIRONMENT, "rows": [row | about for row in rows]}
    line = "| toy, window | Unsloth, patch with Liger | 5 | 1 | 5.0 x | 5.0 | 1.0 | 3.3 x | 1.5 |"
    assert line in step.summary(results)
    assert "toy" not in step.summary(results, "*8k")


def test_ways_without_padding_have_the_loss_of_padded_ones(monkeypatch, tmp_path):
    runs = pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    monkeypatch.setattr(step, "describe", lambda device: ENVIRONMENT | {"device": "cpu", "threads": 1})
    rows = ["trl", "trl-packing", "patch-packing", "patch-padding_free"]
    options = ["--batches", "sft packed", "--rows", *rows, "--steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    step.main()  # which objects to other losses and norms
    results = json.loads((tmp_path / "step-cpu.json").read_text())
    assert [row["status"] for row in results["rows"]] == ["ok"] * 4
    assert [row["loss"] > 1 and "loss_difference" in row for row in results["rows"]] == [True] * 4
    assert "64 completions of 1 prompt, 53 tokens a row" in step.markdown(results)

    # TRL's own packing, of batches that fill whole rows alone.
    packing = {"gradient_accumulation_steps": 2, "packing": True}
    for most, message in ((None, "packed_row"), (2, "multiple of the 2 micro-batches, got 1")):
        with pytest.raises(ValueError, match=message):
            runs.sft_trainer(None, None, [{"input_ids": [1, 2], "labels": [1, 2]}], packing | {"max_length": most})


def test_scoring_is_a_part_of_a_step_and_the_forward_of_the_patch(monkeypatch, tmp_path):
    runs = pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    monkeypatch.setattr(step, "describe", lambda device: ENVIRONMENT | {"device": "cpu", "threads": 1})
    options = ["--batches", "window", "--rows", "trl", "patch", "--score", "--steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    step.main()
    results = json.loads((tmp_path / "step-cpu.json").read_text())
    assert [(row["status"], row["scoring_ms"] > 0) for row in results["rows"]] == [("ok", True)] * 2
    trl, patch = results["rows"]
    assert (trl["batch"], trl["forwards"], patch["forwards"]) == ("window, scored in each step", 8, 2)
    assert "| scoring ms | share |" in step.markdown(results)
    assert not step.objections(step.about_batch(results, trl), results["rows"])

    clock = runs.Clock("cpu", settling=0)
    for number in (1, 2):
        clock.on_step_begin()
        with clock.timed_scoring():
            time.sleep(0.2)
        clock.on_pre_optimizer_step()
        clock.on_step_end(None, SimpleNamespace(global_step=number), None)
    assert clock.scoring_ms[1] >= 200
    assert clock.step_ms[1] >= clock.scoring_ms[1]
    assert clock.other_ms[1] < 100


def test_a_whole_step_is_generation_scoring_and_training(monkeypatch, tmp_path, capsys):
    pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    monkeypatch.setattr(whole_step, "describe", lambda device: ENVIRONMENT | {"device": "cpu", "threads": 1})
    # Without sizes the cache takes half of the machine's memory.
    small = {"seed": 0, "num_blocks": 64, "block_size": 32, "max_batch_tokens": 256}
    continuous = whole_step.GENERATIONS["continuous batching"]
    monkeypatch.setitem(continuous, "transformers_continuous_batching_config", small)

    def run(*options):
        options = ["--shape", "toy", "--completions", "8", "--micro-batches", "2", "--tokens", "8", *options]
        monkeypatch.setattr(sys, "argv", ["whole_step", *options, "--generations", "1", "--out", str(tmp_path)])
        whole_step.main()
        return json.loads((tmp_path / "whole-step-cpu.json").read_text())

    results = run("--generation", "generate")
    trl, patch = results["rows"]
    assert [row["status"] for row in (trl, patch)] == ["ok", "ok"]
    for row in (trl, patch):
        parts = [row[f"{name}_ms"] for name in ("generation", "scoring", "training")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["step_ms"])
        assert sum(row[f"{name}_share"] for name in ("generation", "scoring", "training")) == pytest.approx(1)
        # A random model ends no completion, and its groups have advantages.
        assert (row["tokens"], row["idle_share"]) == (64, 0)
    assert patch["grad_norm"] == pytest.approx(trl["grad_norm"], rel=1e-4)
    assert whole_step.markdown(results) in capsys.readouterr().out

    drawn = run("--generation", "none", "--tokens", "32")["rows"]  # the last --tokens counts
    assert drawn[0]["tokens"] == drawn[1]["tokens"] < 8 * 32
    assert drawn[1]["grad_norm"] == pytest.approx(drawn[0]["grad_norm"], rel=1e-4)
    assert [row["idle_share"] for row in drawn] == [0, 0]

    (row,) = run("--generation", "continuous batching", "--rows", "patch", "--at-once", "1")["rows"]
    assert (row["status"], row["tokens"], row["reason"]) == ("ok", 64, None)

    monkeypatch.setattr(whole_step, "run", lambda *arguments: 1 / 0)
    (row,) = run("--generation", "generate", "--rows", "trl")["rows"]
    assert (row["status"], "ZeroDivisionError" in row["reason"]) == ("failed", True)
    for options in (["--completions", "12"], ["--at-once", "0"]):
        with pytest.raises(SystemExit):
            run(*options)


def test_an_answer_is_rewarded_by_how_close_it_is():
    prompts = whole_step.make_prompts(3)
    for text, right in zip(prompts["prompt"], prompts["answer"], strict=True):
        assert sum(map(int, re.findall(r"\d+", text))) == right
    assert whole_step.reward_answers(["5 + 7 = 12", "It is 10.", "no idea"], [12, 12, 12]) == [1.0, 1 / 3, 0.0]


def test_rows_of_a_step_are_ways_and_a_default_has_those_that_can_run(monkeypatch):
    runs = pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    from transformers.utils import import_utils

    assert sorted(step.ROWS) == sorted(runs.WAYS)
    assert len({way.label for way in runs.WAYS.values()}) == len(runs.WAYS)
    for name, way in runs.WAYS.items():
        assert ("flash" in name) == ("flash_attention_4" in way.label) == (way.prepare is runs.use_flash_attention)
        assert ("no-checkpointing" in name) == (way.options.get("gradient_checkpointing") is False)
        assert ("liger" in name) == way.options.get("use_liger_kernel", False)
    for available in (True, False):
        monkeypatch.setattr(import_utils, "is_flash_attn_4_available", lambda available=available: available)
        for task in step_batches.tasks().values():
            cpu, cuda = (step.choose_rows(task, device) for device in ("cpu", "cuda"))
            assert not [row for row in cpu if "liger" in row or "flash" in row]
            assert set(cpu) | set(cuda) <= set(step.ROWS)
            packs, flash = (any(part in row for row in cuda) for part in ("packing", "flash"))
            assert packs == (task.lengths.packed_row is not None)
            assert flash == (available and (packs or task.trainer == "GRPO"))


def test_a_row_that_fails_has_a_reason_and_the_others_go_on(monkeypatch, tmp_path):
    pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    monkeypatch.delenv("UNSLOTH_PACKAGES", raising=False)
    monkeypatch.setattr(step, "describe", lambda device: ENVIRONMENT | {"device": "cpu", "threads": 1})
    options = ["--batches", "window", "--micro-batches", "1", "--rows", "unsloth", "trl", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["step", *options, "--out", str(tmp_path)])
    step.main()
    failed, trl = json.loads((tmp_path / "step-cpu.json").read_text())["rows"]
    assert (failed["status"], "UNSLOTH_PACKAGES" in failed["reason"]) == ("failed", True)
    assert (trl["batch"], trl["forwards"], trl["tokens_x_trl"]) == ("window, 1 micro-batch", 1, 1.0)


def test_old_log_probabilities_stay_with_their_tokens_in_unsloths_layout():
    """Its module cannot be imported without Unsloth, but the function needs torch alone."""
    source = (ROOT / "benchmark" / "peers" / "unsloth_step.py").read_text()
    name = "align_old_logps"
    (function,) = (node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(compile(ast.Module([function], []), name, "exec"), scope)
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    old = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    aligned = scope[name]({"prompt_mask": mask, "old_per_token_logps": old})
    # Both rows without their padding on the left: the last four of five columns.
    assert aligned["old_per_token_logps"].tolist() == [[0, 0, 1, 2], [3, 4, 0, 0]]
    assert aligned["max_left_pad"].tolist() == [[2], [2]]
