"""The whole of compare on the tiny model: rows against calibrate and eval, going on after a fault, refusals."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

import fpquant
from fpquant import api
from fpquant.errors import FpquantError
from fpquant.evaluation import compare as compare_
from fpquant.evaluation.plan import Plan
from fpquant.models import load_model


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def settings(text_file):
    return {
        "policies": ("fisher", "quantization-error"),
        "ratios": (0.6, 0.9),
        "datasets": (str(text_file),),
        "calibration_dataset": str(text_file),
        "samples": 4,
        "seq_len": 64,
        "window": 64,
        "limit": 6,
        "kl_windows": 3,
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def compared(tiny_model, settings, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return fpquant.compare(str(tiny_model), out=tmp_path_factory.mktemp("out") / "C", **settings)


def figures(compared):
    """All that must be equal of two comparisons."""
    record = compared.to_dict()
    for row in record["rows"]:
        del row["seconds"]
    return json.loads(json.dumps(record))


def test_rows_are_the_original_uniform_ones_and_those_asked_for(compared):
    assert [r.name for r in compared.rows] == [
        *("original", "nvfp4", "nvfp4, clip fisher", "fp5", "fp8"),
        *("fisher 60%", "fisher 90%", "quantization-error 60%", "quantization-error 90%"),
    ]
    bits = {r.name: r.bits_per_weight for r in compared.rows}
    assert bits["original"] == 32 and bits["nvfp4"] < bits["fisher 90%"] < bits["fisher 60%"] < bits["fp8"]


@pytest.mark.parametrize("name", ["original", "fp5", "nvfp4, clip fisher", "fisher 60%", "quantization-error 90%"])
def test_a_row_is_what_calibrate_and_eval_give(name, compared, tiny_model, settings):
    row = next(r for r in compared.rows if r.name == name)
    text = settings["datasets"][0]
    if row.is_original:
        model = load_model(str(tiny_model), device=torch.device("cpu"))
    else:
        kept = {k: v for k, v in row.settings.items() if v is not None}
        data = {"dataset": text, "samples": 4, "seq_len": 64}
        made = api.quantize(load_model(str(tiny_model), device=torch.device("cpu")), fpquant.Recipe(**kept, **data))
        model = api.LoadedModel(made.model, made.tokenizer, "q", made.stored_dtype)
        assert row.bits_per_weight == made.summary["bits_per_weight"]
        assert row.ratio == made.summary["ratio_achieved"]
    (judge,) = fpquant.evaluate(model, dataset=text, window=64, limit=6)
    assert row.result("perplexity").to_dict() == judge.to_dict()


def test_distances_are_there_for_all_but_the_original(compared):
    for row in compared.rows:
        found = [row.result(m) for m in compare_.METRICS]
        if row.is_original:
            assert found == [None] * 3
            continue
        assert all(r.protocol["chosen"] == [0, 2, 5] and len(r.windows) == 3 for r in found)
        assert found[0].value > 0 and found[1].value > 0 and 0 < found[2].value <= 1
    kl = {r.name: r.result("kl_original_to_quantized") for r in compared.rows}
    assert kl["fp8"].value < kl["fisher 60%"].value < kl["nvfp4"].value


def test_what_it_writes(compared):
    out = compared.out
    record = json.loads((out / "results.json").read_text())
    assert record == json.loads(json.dumps(compared.to_dict()))
    assert {"task", "metric", "value", "interval", "protocol"} <= set(record["rows"][0]["results"][0])
    with (out / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    (line,) = [x for x in lines if x["row"] == "fisher 60%" and x["metric"] == "perplexity"]
    assert float(line["value"]) == compared.rows[5].result("perplexity").value and line["policy"] == "fisher"
    for name in ("perplexity-bits", "perplexity-ratio", "high-share-fisher-60"):
        assert (out / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "plots" / f"{name}.svg").read_text().startswith("<?xml")


def test_the_verdict_compares_with_policy_size_and_original(compared):
    whys = {(c.row, c.why, c.against) for c in compared.comparisons if c.task == "perplexity"}
    assert ("quantization-error 60%", "reference", "fisher 60%") in whys
    assert ("fisher 90%", "uniform", "nvfp4, clip fisher") in whys or ("fisher 90%", "uniform", "nvfp4") in whys
    assert ("fp8", "original", "original") in whys
    assert not any(why == "reference" and row.startswith("fisher") for row, why, _ in whys)
    assert any("the same file" in w for w in compared.warnings)
    assert any("Only 6 windows" in w for w in compared.warnings)


class Stopped(Exception):
    """Stands for a kill: nothing of ours catches it."""


def test_a_comparison_goes_on_where_it_stopped(compared, tiny_model, settings, tmp_path, monkeypatch):
    original, calls = compare_.Comparer._measure, []

    def measure(self, cell, position):
        if len(calls) == 4:
            raise Stopped
        calls.append(cell.name)
        return original(self, cell, position)

    monkeypatch.setattr(compare_.Comparer, "_measure", measure)
    with pytest.raises(Stopped):
        fpquant.compare(str(tiny_model), out=tmp_path / "C", **settings)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "C" / "cells").iterdir()}
    assert len(kept) == 4
    monkeypatch.setattr(compare_.Comparer, "_measure", original)
    again = fpquant.compare(str(tiny_model), out=tmp_path / "C", **settings)
    assert figures(again) == figures(compared)
    assert all(p.stat().st_mtime_ns == t for p, t in kept.items()), "a finished row was measured again"

    def never(*_):
        raise AssertionError("all is there")

    monkeypatch.setattr(compare_.Comparer, "_measure", never)
    monkeypatch.setattr(api, "fisher_pass", never)
    third = fpquant.compare(str(tiny_model), out=tmp_path / "C", **settings | {"ratios": (0.6,)})
    assert [r.name for r in third.rows if r.is_mixed] == ["fisher 60%", "quantization-error 60%"]


def test_damaged_rows_are_measured_again(compared, tiny_model, settings, tmp_path, caplog):
    shutil.copytree(compared.out, tmp_path / "C")
    (tmp_path / "C" / "cells" / "fp8-none-0.json").write_text('{"name": ')
    again = fpquant.compare(str(tiny_model), out=tmp_path / "C", **settings)
    assert figures(again) == figures(compared)
    assert "fp8-none-0.json is damaged" in caplog.text
    (tmp_path / "C" / "comparison.json").write_text("[]")
    with pytest.raises(FpquantError, match="damaged; delete"):
        fpquant.compare(str(tiny_model), out=tmp_path / "C", **settings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"limit": 5}, "another evaluation"),
        ({"samples": 5}, "another calibration"),
        ({"kl_windows": 2}, "another kl windows"),
        ({"dtype": "bfloat16"}, "another dtype"),
        ({"exclude": ("q_proj",)}, "another model"),
    ],
)
def test_a_directory_of_other_settings_is_refused(change, says, compared, tiny_model, settings):
    before = sorted(compared.out.rglob("*"))
    with pytest.raises(FpquantError, match=says) as fault:
        fpquant.compare(str(tiny_model), out=compared.out, **settings | change)
    assert "\n" not in str(fault.value) and "name another --out" in str(fault.value)
    assert sorted(compared.out.rglob("*")) == before


def test_a_directory_of_something_else_is_refused(tiny_model, settings, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FpquantError, match="no comparison"):
        fpquant.compare(str(tiny_model), out=tmp_path, **settings)


def test_a_model_that_overflows_is_told_with_its_layer(tiny_model, settings, tmp_path):
    """Here in the calibration pass already: the product of gate and up overflows float16."""
    loaded = load_model(str(tiny_model), device=torch.device("cpu"))
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.up_proj.weight[0] = 3e4
        loaded.model.model.layers[1].mlp.gate_proj.weight[0] = 3e4
    loaded.model.save_pretrained(tmp_path / "m")
    loaded.tokenizer.save_pretrained(tmp_path / "m")
    run = settings | {"policies": ("random",), "dtype": "float16", "kl_windows": 0}
    with pytest.raises(FpquantError, match=r"nan, first after model\.layers\.1\.mlp\.\w+; try"):
        fpquant.compare(str(tmp_path / "m"), out=tmp_path / "C", **run)


def test_a_row_that_is_not_finite_loses_nothing(tiny_model, settings, tmp_path, monkeypatch):
    from fpquant.evaluation.inplace import InPlace

    plain = InPlace.apply

    def apply(self, recipe):
        found = plain(self, recipe)
        if recipe.pair == "fp5":
            self._modules["model.layers.1.self_attn.o_proj"].weight.data[3, 3] = float("nan")
        return found

    monkeypatch.setattr(InPlace, "apply", apply)
    with pytest.raises(FpquantError, match=r"fp5: .*first after model\.layers\.1\.self_attn\.o_proj; try"):
        fpquant.compare(str(tiny_model), out=tmp_path / "C", **settings)
    assert len(list((tmp_path / "C" / "cells").iterdir())) == 3


def test_axes_name_the_rows_and_share_their_reference(text_file):
    plan = Plan(policies=("fisher", "random"), ratios=(0.7,), thresholds=("global", "local"), clips=("none",))
    assert [c.name for c in plan.mixed()] == [
        f"{policy} 70%, {threshold}, clip none" for policy in ("fisher", "random") for threshold in ("global", "local")
    ]
    assert len({c.key for c in plan.mixed()}) == 4
    default, asked = Plan(policies=("fisher",), ratios=(0.7,)), Plan(("fisher",), (0.7,), ("global",), ("fisher",))
    assert default.mixed()[0].key == asked.mixed()[0].key, "the same weights are the same row"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policies": ("fischer",)}, "did you mean 'fisher'"),
        ({"ratios": (1.2,)}, "ratio must be a number"),
        ({"ratios": ()}, "at least one of ratios"),
        ({"tasks": ("mmul",)}, "did you mean 'mmlu'"),
        ({"thresholds": ("globl",)}, "did you mean 'global'"),
        ({"clips": ("all",)}, "unknown clip"),
        ({"pair": "fp8"}, "needs a pair"),
        ({"kl_windows": -1}, "--kl-windows"),
        ({"policy": "fisher"}, "did you mean 'policies'"),
        ({"datasets": ("nowhere.txt",)}, "no such file"),
        ({"tasks": ("mmlu",), "data_dir": "/nowhere"}, "no such directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(change, says, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load_model", None)
    monkeypatch.setattr(api.models, "check_model", lambda _: None)
    with pytest.raises(FpquantError, match=says):
        fpquant.compare("m", out=tmp_path / "C", **settings | change)
    assert not (tmp_path / "C").exists()


def test_two_corpora(tiny_model, settings, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(" ".join(reversed(Path(text_file).read_text().split()[:4000])))
    run = settings | {"datasets": (str(text_file), str(other)), "policies": ("random",), "ratios": (0.5,)}
    found = fpquant.compare(str(tiny_model), out=tmp_path / "C", **run)
    values = [found.rows[-1].result("perplexity", str(d)).value for d in (text_file, other)]
    assert values[1] > values[0]
    assert {c.dataset for c in found.comparisons} == {str(text_file), str(other)}
    assert sum("come from one source" in w for w in found.warnings) == 1
    assert (tmp_path / "C" / "plots" / "perplexity-bits-2.svg").is_file()


def test_rows_with_activations_are_what_calibrate_and_eval_give(tiny_model, settings, tmp_path):
    chosen = settings | {"policies": ("fisher", "output-error"), "ratios": (0.7,), "activations": True, "kl_windows": 0}
    compared = fpquant.compare(str(tiny_model), out=tmp_path / "C", **chosen)
    rows = {r.name: r for r in compared.rows}
    ends = ["nvfp4, with activations", "fp8, with activations"]
    mixed = [f"{p} 70%{w}" for p in ("fisher", "output-error") for w in ("", ", with activations")]
    assert set(ends + mixed) <= set(rows)
    text = settings["datasets"][0]
    for name, recipe in {
        "fisher 70%, with activations": {"policy": "fisher", "ratio": 0.7},
        "output-error 70%, with activations": {"policy": "output-error", "ratio": 0.7},
        "fp8, with activations": {"pair": "fp8"},
        "fisher 70%": {"policy": "fisher", "ratio": 0.7, "activations": False},
    }.items():
        out = tmp_path / name
        data = {"dataset": text, "samples": 4, "seq_len": 64, "device": "cpu"}
        fpquant.calibrate(str(tiny_model), out=out, **data, **{"activations": True} | recipe)
        result = fpquant.evaluate(str(out), dataset=text, window=64, limit=6, device="cpu")[0]
        measured = rows[name].result("perplexity")
        assert measured.value == pytest.approx(result.value, rel=1e-5), name
        assert measured.activations == result.activations
    assert rows["fp8, with activations"].result("perplexity").value < rows[ends[0]].result("perplexity").value
    against = {c.row: c.against for c in compared.comparisons if c.why == "uniform"}
    assert against["fisher 70%, with activations"] in (ends[0], "nvfp4, clip fisher, with activations")
    assert "with activations" not in against["fisher 70%"]
    again = fpquant.compare(str(tiny_model), out=tmp_path / "C", **chosen)
    assert figures(again) == figures(compared)
