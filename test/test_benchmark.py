"""The benchmark on tiny CPU cases: what it feeds, what it compares with, and what it does when a peer fails."""

import json
import math
import sys
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")
pytest.importorskip("rich", reason="the benchmark needs rich")

from benchmark import floor, gold, measure, plot, readme, run, timing, variants
from benchmark.cases import (
    FLAT,
    LOGPS,
    LOGPS_AND_ENTROPY,
    MIXED,
    RL,
    STEP,
    SURE,
    SURE_SHARE,
    TOKENS,
    VOCABULARY,
    Case,
    cuda_preset,
    preset,
)
from benchmark.errors import measure_errors
from benchmark.inputs import make_inputs
from benchmark.measure import Bench
from benchmark.merge import merge, merged
from benchmark.peers import peer
from benchmark.table import markdown
from benchmark.worker import Job, OutOfTime, Workers

DENSE = Case(name="dense", batch=4, tokens=12, hidden_size=32, vocab=200, dtype="float32")
BATCH = replace(DENSE, name="rl", mask_share=0.42, idle_share=0.25, beta=0.0, peaks=SURE)


def test_cases_survive_json():
    for case in (DENSE, BATCH, *cuda_preset()):
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_cases_of_the_presets_have_names_of_their_own_and_variants_that_exist():
    for device in ("cpu", "cuda"):
        for quick in (False, True):
            cases = preset(device, quick=quick)
            assert len({case.name for case in cases}) == len(cases)
            assert {variant for case in cases for variant in case.variants} <= set(variants.VARIANTS)


def test_presets_are_selected_by_name_and_by_group():
    assert {case.name for case in preset("cuda", patterns=("llama-3-8b", "vocab-*"))} >= {"llama-3-8b", "vocab-32768"}
    chosen = preset("cuda", patterns=(RL,))
    assert len(chosen) == 3
    assert all(RL in case.groups for case in chosen)


def test_what_a_reader_looks_for_is_measured():
    cases = {case.name: case for case in cuda_preset()}
    assert {"ours", "ours-one-pass", "ours-in-place"} <= set(cases["llama-3-8b"].variants)
    for case in cases.values():
        if RL in case.groups:
            assert {"ours-1e-4", "ours-1e-3", variants.TRL} <= set(case.variants)
            assert "ours-in-place" not in case.variants


def test_a_long_batch_is_measured_before_the_sweeps_and_on_what_can_hold_it():
    cases = cuda_preset()
    names = [case.name for case in cases]
    sweeps = [name for name in names if name.startswith(("vocab-", "tokens-"))]
    assert sweeps[0] == "tokens-131072"
    assert names.index("tokens-131072") > names.index("llama-3-8b-32k-tokens")
    assert cases[names.index("tokens-131072")].variants == ("ours", "ours-1e-3", "trl_chunked")
    assert cases[names.index("tokens-262144")].variants == ("ours", "trl_chunked")


def test_every_head_is_measured_frozen():
    frozen = [case for case in cuda_preset() if case.frozen]
    assert [case.name for case in frozen] == ["llama-3-8b-frozen", "qwen3-1.7b-frozen", "gemma-2-2b-frozen"]
    assert [case.softcap for case in frozen] == [None, None, 30.0]
    assert all({"ours-one-pass", variants.TRL} <= set(case.variants) for case in frozen)


def test_the_rl_batch_is_the_published_one():
    case = next(case for case in cuda_preset() if case.name == "rl-llama-3-8b")
    assert (case.batch, case.tokens, case.hidden_size, case.vocab) == (8, 1024, 4096, 128256)
    assert case.live_rows / case.rows == pytest.approx(1 - 0.42, abs=0.005)
    assert case.idle_sequences == [2, 6]
    assert (case.beta, case.peaks) == (0.0, SURE)


def test_work_of_a_case_is_that_of_the_products_it_needs():
    product = 2 * DENSE.rows * DENSE.hidden_size * DENSE.vocab
    assert DENSE.floor_flops == 3 * product
    assert replace(DENSE, frozen=True).floor_flops == 2 * product
    assert replace(DENSE, task=LOGPS).floor_flops == product
    assert replace(DENSE, task=LOGPS).gradient_bytes == 0
    assert replace(DENSE, frozen=True).gradient_bytes == 4 * DENSE.rows * DENSE.hidden_size


def test_a_sure_policy_is_sure_of_the_share_that_is_claimed():
    case = Case(name="sure", batch=8, tokens=256, hidden_size=256, vocab=2000, dtype="bfloat16", peaks=SURE)
    sure = make_inputs(case, "cpu").current_logps.exp() > 0.99
    assert sure.float().mean().item() == pytest.approx(SURE_SHARE, abs=0.03)
    assert make_inputs(replace(case, peaks=MIXED), "cpu").current_logps.exp().gt(0.99).float().mean() < 0.6


def test_a_flat_policy_is_flat():
    case = Case(name="flat", batch=2, tokens=32, hidden_size=256, vocab=2000, dtype="float32", peaks=FLAT)
    assert make_inputs(case, "cpu").current_entropy.min() > math.log(case.vocab) - 1


def test_inputs_follow_the_case():
    inputs = make_inputs(replace(BATCH, batch=8), "cpu")
    assert (inputs.advantages == 0).nonzero().flatten().tolist() == [2, 6]
    assert inputs.ref_logps is None
    assert inputs.mask.sum() == replace(BATCH, batch=8).live_rows
    assert not inputs.dense
    frozen = make_inputs(replace(DENSE, frozen=True), "cpu")
    assert frozen.hidden.requires_grad
    assert not frozen.weight.requires_grad
    assert frozen.dense


@pytest.mark.parametrize("case", [DENSE, BATCH, replace(DENSE, softcap=5.0)], ids=["dense", "rl", "softcap"])
def test_gold_in_pieces_is_the_gradient_of_the_whole_loss(case, monkeypatch):
    monkeypatch.setattr(gold, "LOGITS_BYTES", 8 * case.vocab * 7)  # pieces of 7 rows
    inputs = make_inputs(case, "cpu")
    found = gold.gold_of(case, inputs)

    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in (inputs.hidden, inputs.weight))
    logits = hidden @ weight.T
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    logps = torch.log_softmax(logits, -1).gather(-1, inputs.ids[..., None]).squeeze(-1)
    advantages = inputs.advantages.double()[:, None]
    ratio = (logps - inputs.old_logps.double()).exp()
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    if case.beta:
        away = inputs.ref_logps.double() - logps
        losses = losses + case.beta * (away.exp() - away - 1)
    loss = losses[inputs.mask].sum() / inputs.mask.sum()
    expected = torch.autograd.grad(loss, (hidden, weight))

    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.logps, logps.detach())
    torch.testing.assert_close((found.grad_hidden, found.grad_weight), expected)


@pytest.mark.parametrize(("seconds", "runs"), [(0.01, 8), (0.06, 4)])
def test_repeats_come_after_a_device_is_warm(seconds, runs, monkeypatch):
    """As many as that takes behind the first, which may have compiled; one where it is long enough."""
    repeats = timing.Repeats(warm_seconds=0.045, most=2, least=2, seconds=1.0, long_seconds=60.0)
    monkeypatch.setitem(timing.REPEATS, "cpu", repeats)
    begun = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: seconds * len(begun)))
    found = timing.measure_ms(lambda: begun.append(None), "cpu")
    assert (found.repeats, len(begun)) == (2, runs)
    assert found.median_ms == pytest.approx(1e3 * seconds)


def test_every_variant_has_floors_of_its_own(monkeypatch):
    """After its own repeats, each with buffers that are gone before the next one begins."""
    bench, made, said = Bench(DENSE, "cpu"), [], []

    class Counted(floor.Products):
        def __init__(self, *arguments, gradients: bool) -> None:
            super().__init__(*arguments, gradients=gradients)
            self.word = "products" if gradients else "logits"
            made.append(weakref.ref(self))

        def __call__(self) -> None:
            super().__call__()
            said.append(self.word)

    class Said(type(peer.load("eager"))):
        def make(self, *arguments):
            run = super().make(*arguments)

            def step():
                assert all(reference() is None for reference in made), "a floor's buffers take memory from a variant"
                said.append("forward")
                return run()

            return step

    monkeypatch.setattr(measure, "Products", Counted)
    monkeypatch.setattr(peer, "load", lambda name: Said())
    once = timing.Repeats(warm_seconds=0.0, most=2, least=2, seconds=1.0, long_seconds=60.0)
    monkeypatch.setitem(timing.REPEATS, "cpu", once)
    # Where errors are measured, too, a step's forward is timed by itself. Each is run once untimed, but for a variant's
    # own sake before its libraries are loaded; behind them the loss is checked.
    step, alone = ["forward"] * 3 + ["products"] * 3 + ["forward"], ["forward"] * 3 + ["logits"] * 3
    for quantities, timed in ((["time"], step), (["time"], step), (["time", "error"], alone + step)):
        said.clear()
        made.clear()
        row = measure.measure(bench, "eager", quantities)
        assert len(made) == len(timed) // 6
        assert any(said[start : start + len(timed)] == timed for start in range(len(said)))
        assert row["step_x_floor"] == row["step_ms"] / row["step_floor_ms"]
    assert row["forward_x_floor"] == row["forward_ms"] / row["forward_floor_ms"]


def test_a_floors_tiles_are_aligned(monkeypatch):
    monkeypatch.setattr(floor, "MIN_WORDS", 128)
    case = replace(BATCH, vocab=1000)
    monkeypatch.setitem(floor.TILE_BYTES, "cpu", 4 * case.live_rows * 333)
    assert floor.Products(case, make_inputs(case, "cpu"), "cpu", gradients=False).words == 256


@pytest.mark.parametrize("words", [7, 64, 500])
@pytest.mark.parametrize("tile", [100, 1000, 1 << 20])
def test_a_floor_in_pieces_is_the_whole_products(words, tile, monkeypatch):
    monkeypatch.setattr(floor, "MIN_WORDS", words)
    monkeypatch.setitem(floor.TILE_BYTES, "cpu", 4 * tile)
    inputs = make_inputs(BATCH, "cpu")
    products = floor.Products(BATCH, inputs, "cpu", gradients=True)
    assert products.tile.numel() <= max(tile, words)
    for _ in range(2):
        products()
    hidden, weight = inputs.hidden[inputs.mask], inputs.weight
    logits = hidden @ weight.T
    torch.testing.assert_close(products.grad_hidden, logits @ weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(products.grad_weight, logits.T @ hidden, rtol=1e-5, atol=1e-4)
    assert floor.Products(replace(BATCH, frozen=True), inputs, "cpu", gradients=True).grad_weight is None
    assert floor.Products(BATCH, inputs, "cpu", gradients=False).grad_hidden is None


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
def test_variants_compute_the_same_thing(variant, case):
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


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_every_variant_says_at_once_whether_it_can_run(variant):
    for case in (DENSE, replace(DENSE, softcap=5.0), replace(DENSE, task=LOGPS_AND_ENTROPY)):
        reason = peer.load(variant).reason(case, "cpu")
        assert reason is None or reason.strip()


def test_a_gradient_in_place_is_measured():
    case = replace(DENSE, vocab=600)  # larger than the head that libraries are loaded with
    row = measure.measure(Bench(case, "cpu"), "ours-in-place", ["memory", "time", "error"])
    assert row["status"] == "ok", row["reason"]
    assert row["grad_weight_error"] < 1e-5


def test_liger_triton_is_given_what_its_own_trainer_gives_it():
    pytest.importorskip("liger_kernel", reason="the variant needs liger-kernel")
    if torch.cuda.is_available():
        pytest.skip("measured there")
    head = peer.load("liger_triton")
    for case in (DENSE, BATCH):
        bench = Bench(case, "cpu")
        errors = measure_errors(head, bench.compute(head), case, bench.inputs, bench.gold)
        assert max(error for name, error in errors.items() if name != "error_rows") < 1e-5


def test_a_real_process_measures_and_gives_reasons():
    case = replace(DENSE, groups=(TOKENS,))
    jobs = [Job(case, ("eager", "cce", "ours"), "cpu", ("memory", "time", "error"))]
    saved = []
    rows = run.collect(jobs, run.Console(quiet=True), lambda rows: saved.append(len(rows)))
    assert saved == [1, 2, 3]
    eager, cce, ours = rows
    assert (eager["status"], cce["status"], ours["status"]) == ("ok", "unavailable", "ok")
    assert "cuda" in cce["reason"]
    assert ours["step_ms"] > 0
    assert ours["step_x_floor"] == pytest.approx(ours["step_ms"] / ours["step_floor_ms"])
    assert ours["grad_weight_error"] < 1e-5
    assert "policy" not in ours
    text = markdown({"environment": ENVIRONMENT, "rows": rows})
    assert "unavailable: needs cuda" in text
    assert "| liger_rl |" in text


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
        return [(outcome.variant, outcome.result) for outcome in workers.run(job)]


def test_a_peer_that_kills_its_process_is_a_reason_and_the_others_go_on():
    outcomes = pretend(["a", "dies", "b", "dies", "c"])
    assert [name for name, _result in outcomes] == ["a", "dies", "b", "dies", "c"]
    assert [result["status"] for _name, result in outcomes] == ["ok", "failed", "ok", "failed", "ok"]
    assert outcomes[1][1]["reason"] == "exit status 3 without a result"


def test_a_failure_in_a_process_that_others_used_is_tried_again_in_a_fresh_one():
    (_, first), (_, again), (_, after) = pretend(["a", "fails second", "b"])
    assert again["status"] == "ok"
    assert first["pid"] != again["pid"] == after["pid"]
    assert [result["status"] for _name, result in pretend(["a", "fails", "b"])] == ["ok", "failed", "ok"]


def test_what_failed_in_a_fresh_process_is_not_tried_twice_again():
    outcomes = pretend(["a", "fails", "b", "fails", "c"])
    # A process for `a` and the first failure, one for its second chance, one for `b` and the next failure, one for `c`.
    assert len({result["pid"] for _name, result in outcomes}) == 4


def test_a_peer_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("benchmark.worker.VARIANT_TIMEOUT_S", 1)
    outcomes = pretend(["hangs", "b"])
    assert outcomes[0][1] == {"status": "failed", "reason": "took longer than 1 s"}
    assert outcomes[1][1]["status"] == "ok"


def test_nothing_begins_after_the_deadline_and_what_runs_then_has_no_result():
    with pytest.raises(OutOfTime):
        pretend(["a"], deadline=time.monotonic())
    begun = time.monotonic()
    with pytest.raises(OutOfTime):
        pretend(["hangs"], deadline=time.monotonic() + 1)
    assert time.monotonic() - begun < 30


def test_a_plan_leaves_out_what_is_done():
    done = {("dense", "ours")}
    (job,) = run.plan([DENSE], ["eager", "ours"], "cuda", quick=False, done=done)
    assert job.variants == ("eager",)
    alone = run.plan([DENSE], ["eager", "ours"], "cpu", quick=False, done=done)
    assert [(job.variants, job.quantities, job.alone) for job in alone] == [
        (("eager",), ("memory",), True),
        (("eager",), ("time", "error"), True),
    ]
    (job,) = run.plan([DENSE], None, "cuda", quick=False)
    assert job.variants == variants.EVERYWHERE


ENVIRONMENT = {
    "device": "cuda", "device_name": "Some GPU", "torch": "2.11", "commit": "0123456789ab", "dirty": False,
    "date": "2026-01-01", "load_average": 0.1,
}  # fmt: skip


def a_row(case: Case, variant: str, **numbers) -> dict:
    return run._new_row(case, variant) | {"step_ms": 10.0, "step_floor_ms": 5.0, "step_x_floor": 2.0} | numbers


def test_results_of_one_environment_merge_and_the_later_row_wins():
    one = {"environment": ENVIRONMENT, "rows": [a_row(DENSE, "ours"), a_row(BATCH, "ours")]}
    two = {
        "environment": ENVIRONMENT | {"date": "2026-01-02"},
        "rows": [a_row(BATCH, "ours", step_ms=7.0), a_row(DENSE, "eager"), a_row(DENSE, variants.TRL, step_ms=40.0)],
    }
    both = merge([one, two])
    assert [(row["case"], row["variant"], row["step_ms"]) for row in both["rows"]] == [
        ("dense", "eager", 10.0),
        ("dense", variants.TRL, 40.0),
        ("dense", "ours", 10.0),
        ("rl", "ours", 7.0),
    ]
    # Of a variant that another file had.
    assert [row.get("step_x_trl") for row in both["rows"]] == [0.25, 1.0, 0.25, None]
    assert both["environment"]["date"] == "2026-01-02"
    assert merged(both["rows"], []) == both["rows"]
    with pytest.raises(ValueError, match="torch"):
        merge([one, two | {"environment": ENVIRONMENT | {"torch": "2.12"}}])


def test_a_block_of_the_readme_takes_the_cases_it_names(monkeypatch, tmp_path):
    results = {"environment": ENVIRONMENT, "rows": [a_row(DENSE, "ours"), a_row(BATCH, "ours", kept_share=0.2)]}
    (tmp_path / "some.json").write_text(json.dumps(results))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = readme.filled("<!-- begin table some rl* -->\nold\n<!-- end table some -->")
    assert "**rl:" in text
    assert "**dense:" not in text
    assert "old" not in text
    assert "| 20% |" in text
    assert readme.filled(text) == text
    assert "**dense:" in readme.filled("<!-- begin table some -->\n<!-- end table some -->")


def test_a_table_says_what_the_memory_of_a_gradient_in_place_is():
    row = a_row(DENSE, "ours-in-place", peak_extra_mib=3.0)
    text = markdown({"environment": ENVIRONMENT, "rows": [a_row(DENSE, "ours", peak_extra_mib=9.0), row]})
    assert "| liger_rl, dW in place | 10.0 | 2.00 | 3 |" in text
    assert text.endswith(f"\n\nliger_rl, dW in place: {variants.VARIANTS['ours-in-place'].note}.\n")
    for rows in ([a_row(DENSE, "ours")], [row | {"status": "out of memory", "reason": "none left"}]):
        assert "not part of the extra memory" not in markdown({"environment": ENVIRONMENT, "rows": rows})


def test_a_block_of_row_losses_holds_every_variant(monkeypatch, tmp_path):
    rows = [
        {"variant": "ours", "status": "ok", "reason": None, "forward_ms": 0.1, "step_ms": 0.25, "loss_max_error": 2e-6},
        {"variant": "theirs", "status": "unavailable", "reason": "not installed"},
    ]
    shape = {"batch": 2, "length": 8, "vocab": 200, "dtype": "bfloat16"}
    results = {"environment": ENVIRONMENT, "shape": shape, "mask_share": 0.2, "beta": 0.04, "rows": rows}
    (tmp_path / "row-losses-some.json").write_text(json.dumps(results))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = readme.filled("<!-- begin table row-losses-some -->\nold\n<!-- end table row-losses-some -->")
    assert "B=2, L=8, V=200, bfloat16, 20% masked" in text
    assert "| ours | 0.100 |  | 0.250 |  |  | 2.0e-06 |  |" in text
    assert "| theirs | unavailable: not installed |" in text
    assert "old" not in text
    assert readme.filled(text) == text


def test_pictures_are_drawn_where_there_are_rows_for_them(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    numbers = {"peak_extra_mib": 3.0, "grad_hidden_error": 1e-3, "grad_weight_error": 2e-3, "mean_entropy": 1.0}
    cases = [replace(DENSE, name=f"n{n}", tokens=n, groups=(TOKENS, VOCABULARY), vocab=100 * n) for n in (4, 8)]
    cases.append(replace(BATCH, groups=(RL,)))
    cases += [replace(DENSE, name=f"p{t}", temperature=t, groups=("policy",)) for t in (0.5, 1.0)]
    rows = [a_row(case, variant, **numbers) for case in cases for variant in ("eager", "ours")]
    # A long batch has no row of eager, and its size is among the lines' all the same.
    long = replace(cases[0], name="n16", tokens=16, groups=(TOKENS,))
    rows += [a_row(long, variant, **numbers) for variant in ("ours", "ours-in-place")]
    (tmp_path / "some.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))
    (tmp_path / "none.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": []}))
    (tmp_path / "others.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": [{"variant": "ours"}]}))
    drawn = [path.name for path in plot.plot_directory(tmp_path)]
    assert drawn == [f"{name}-some.png" for name in ("memory", "time", "rl", "entropy")]
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    real_policy = pytest.importorskip("benchmark.real_policy", reason="training a policy needs transformers")
    folder = tmp_path_factory.mktemp("policy")
    recipe = replace(real_policy.TOY, text_bytes=100 << 10, tokenizer_bytes=20 << 10)
    real_policy.make_policy(recipe, 4.0, "cpu", folder, run.Console(quiet=True))
    return folder, json.loads((folder / "policy.json").read_text())


def test_a_policy_learns_and_says_what_it_is(policy):
    _folder, about = policy
    assert about["training_loss"] < about["first_loss"] - 0.5
    entropies = {sample["temperature"]: sample["entropy"] for sample in about["samples"]}
    assert entropies[0.4] < entropies[0.6] < entropies[1.0] < math.log(about["vocab"])


def test_cases_of_a_policy_are_its_own_tokens(policy):
    folder, about = policy
    cases = [case for case in preset("cpu", quick=True, policy=str(folder)) if case.policy]
    assert [case.name for case in cases] == ["policy-0.6", "policy-1", "policy-0.4"]
    for case, sample in zip(cases, about["samples"], strict=True):
        inputs = make_inputs(case, "cpu")
        assert inputs.hidden.shape == (about["batch"], about["tokens"], about["hidden_size"])
        # The plain softmax of what is stored is the distribution that was sampled.
        assert inputs.current_entropy.mean().item() == pytest.approx(sample["entropy"], rel=1e-3)
        surprise = -inputs.current_logps
        noise = surprise.std() / math.sqrt(surprise.numel())
        assert abs(surprise.mean() - sample["entropy"]) < 4 * noise
