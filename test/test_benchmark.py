"""The benchmark on tiny CPU cases: what it feeds, what it compares with, and what it does when a peer fails."""

import json
import math
import runpy
import sys
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")

from benchmark import floor, gold, plot, run, train_real_runs, variants
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
from benchmark.environment import RESULTS, ROOT, output_directory
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
        "rl-llama-3-8b", "rl-qwen3-1.7b", "rl-gemma-2-2b", "vocab-32768", "vocab-262144",
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
    tolerance = max(1e-5, 1.1 * variants.VARIANTS[variant].options.get("grad_tolerance", 0.0))
    assert errors.pop("error_rows") == case.rows
    assert {"grad_hidden_error", "loss_error"} <= errors.keys() or case.task != STEP
    for name, error in errors.items():
        if case.frozen and name == "grad_weight_error":
            assert error is None
        else:
            assert error < tolerance, name


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
    numbers = {"peak_extra_mib": 3.0, "grad_hidden_error": 1e-3, "grad_weight_error": 2e-3, "mean_entropy": 1.0}
    cases = [replace(DENSE, name=f"n{n}", tokens=n, groups=(TOKENS, VOCABULARY), vocab=100 * n) for n in (4, 8)]
    cases.append(replace(BATCH, groups=(RL,)))
    cases += [replace(DENSE, name=f"p{t}", temperature=t, groups=("policy",)) for t in (0.5, 1.0)]
    rows = [a_row(case, variant, **numbers) for case in cases for variant in plot.STYLES]
    # A long batch has no row of eager, and its size is among the lines' all the same.
    long = replace(cases[0], name="n16", tokens=16, groups=(TOKENS,))
    rows += [a_row(long, variant, **numbers) for variant in ("ours", "ours-one-pass")]
    (tmp_path / "some.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))
    (tmp_path / "none.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": []}))
    (tmp_path / "others.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": [{"variant": "ours"}]}))
    drawn = [path.name for path in plot.plot_directory(tmp_path)]
    assert drawn == [f"{name}-some.png" for name in ("memory", "time", "rl", "entropy")]
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)
    assert len(legends) == 3


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
    runs[1] = curves("default", 0, 0.5, steps=18)
    assert {found["reward"] for found in train_real_runs.ends({"runs": runs}).values()} == {0.25}


@pytest.mark.parametrize("name", ["support", "divergence", "distillation_loss", "head_losses", "targets"])
def test_other_heads_run_on_cpu(name, tmp_path, monkeypatch):
    """The whole command, in this process, which has imported most of it; errors are those of bfloat16 rounding."""
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, f"benchmark.{name}", raising=False)  # it would be there as another module
    runpy.run_module(f"benchmark.{name}", run_name="__main__")
    results = json.loads((tmp_path / f"{name}-cpu.json").read_text())
    rows = results["rows"]
    ours = [row for row in rows if row["variant"].startswith("liger_rl") and "grad_weight_error" in row]
    assert len(ours) >= 3
    for row in ours:
        assert row["step_ms"] > 0
        assert row["grad_hidden_error"] < 6e-3
        assert row["grad_weight_error"] < 6e-3


@pytest.mark.parametrize(("label", "row", "padding"), [("short prompts", 1280, 0.4), ("long prompts", 1889, 0.19)])
def test_a_batch_of_a_step_is_as_rl_makes_it(label, row, padding):
    step_runs = pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    lengths = step_runs.SHAPES["qwen3-1.7b"].batches[label]
    batch = step_runs.rollouts(lengths, torch.arange(1, 9000), "cpu")
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    assert attended.shape == (32, row)
    assert abs(1 - attended.float().mean() - padding) < 0.01
    assert abs(batch["completion_mask"].float().mean() - 0.59) < 0.01
    # Padding on the left of prompts and on the right of completions, and nowhere between.
    assert (batch["prompt_mask"].diff() >= 0).all()
    assert (batch["completion_mask"].diff() <= 0).all()
    assert (batch["completion_mask"][:, 0] == 1).all()
    by_group = batch["advantages"].view(-1, step_runs.GROUP)
    assert (by_group == 0).all(1).float().mean() == 0.25
    torch.testing.assert_close(by_group.sum(1), torch.zeros(4), atol=1e-5, rtol=0)
    prompts = batch["prompt_ids"].view(4, step_runs.GROUP, -1)
    assert (prompts == prompts[:, :1]).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_a_whole_step_has_one_loss_in_every_way(monkeypatch, tmp_path, capsys):
    step_runs = pytest.importorskip("benchmark.step_runs", reason="a whole step needs TRL")
    from benchmark import step

    monkeypatch.setattr(step_runs, "LEAST", 1)
    monkeypatch.setattr(step_runs, "SECONDS", 0.0)
    monkeypatch.setattr(step, "describe", lambda device: ENVIRONMENT | {"device": "cpu", "threads": 1})
    # Every step takes longer than a millisecond.
    options = ["--longest", "1e-3", "--micro-batches", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    step.main()
    results = json.loads((tmp_path / "step-cpu.json").read_text())
    rows = results["rows"]
    assert [row["batch"] for row in rows] == 6 * ["short prompts"] + 6 * ["long prompts"]
    assert {row["status"] for row in rows} == {"ok"}
    assert {(row["longest_sequences"], row["steps"]) for row in rows} == {(32, 1)}
    assert all(0 < row["other_ms"] < row["step_ms"] for row in rows)
    for trl in (rows[1], rows[7]):
        about = step.about_batch(results, trl)
        assert about["entropy"] < step.MOST_NATS
        assert about["surprise"] < step.MOST_NATS
        assert abs(trl["loss"]) > 0.01
    assert step.objections(about, rows[6:]) == []
    assert step.markdown(results) in capsys.readouterr().out
    assert step.markdown(results).count(" | >= 32 |") == 12

    # The check of the losses sees an error of the divisor, and either of a gradient and of a flat policy.
    ours, share = rows[-1], 1 - about["idle_share"]
    for change in ({"loss_difference": trl["loss"] / share - trl["loss"]}, {"grad_norm_x_trl": 1 / share}):
        assert len(step.objections(about | {"dtype": "bfloat16"}, [trl, ours | change])) == 1
    assert "entropy" in step.objections(about | {"entropy": 5.0}, rows[6:])[0]

    # A later run of other shapes keeps this one's, but for another environment.
    of_other = results | {"shapes": {"llama-3-8b": about}, "rows": [{**trl, "shape": "llama-3-8b"}]}
    both = step.with_earlier(of_other, tmp_path / "step-cpu.json")
    assert [row["shape"] for row in both["rows"]] == ["llama-3-8b"] + 12 * ["toy"]
    assert both["shapes"].keys() == {"toy", "llama-3-8b"}
    moved = of_other | {"environment": ENVIRONMENT | {"torch": "2.12"}}
    assert step.with_earlier(moved, tmp_path / "step-cpu.json") == moved
