"""`fpquant compare` on the command line: what goes where, and faults in one line with nothing lost."""

import json
import sys

import pytest
import torch

import fpquant
from fpquant import cli
from fpquant.evaluation import compare as compare_


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys):
    def call(*arguments):
        code = cli.run([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def comparing(tiny_model, text_file, tmp_path):
    data = ["--dataset", text_file, "--calibration-dataset", text_file, "--samples", 4, "--seq-len", 64]
    rows = ["--policies", "fisher,random", "--ratios", "0.6,0.9", "--window", 64, "--limit", 4, "--kl-windows", 2]
    return ["compare", "--model", tiny_model, *data, *rows, "--device", "cpu", "--out", tmp_path / "C"]


def fault(done, *says):
    code, out, err = done
    assert (code, out) == (2, "") and "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("error: ") and err.count("error: ") == 1
    for text in says:
        assert text in line, line


def test_a_table_on_stdout_progress_on_stderr_and_files(command, comparing, tmp_path):
    code, out, err = command(*comparing, "--json", tmp_path / "record.json")
    assert code == 0
    for text in ("fisher 60%", "random 90%", "perplexity", "KL(orig‖quant)", "report.html"):
        assert text in out
    assert "the original: perplexity" in out and "best mixed row" in out
    assert "1/9 original" in err and "9/9 random 90%" in err
    written = {p.name for p in (tmp_path / "C").iterdir()}
    assert written == {"comparison.json", "cells", "plots", "report.html", "results.csv", "results.json"}
    assert json.loads((tmp_path / "record.json").read_text()) == json.loads(
        (tmp_path / "C" / "results.json").read_text()
    )


def test_ctrl_c_keeps_what_is_finished(command, comparing, tmp_path, monkeypatch):
    plain, done = compare_.Comparer._measure, []

    def measure(self, cell, position):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell)
        return plain(self, cell, position)

    monkeypatch.setattr(compare_.Comparer, "_measure", measure)
    code, out, err = command(*comparing)
    assert (code, out) == (130, "") and err.splitlines()[-1].endswith("interrupted")
    assert len(list((tmp_path / "C" / "cells").iterdir())) == 3
    monkeypatch.setattr(compare_.Comparer, "_measure", plain)
    code, out, err = command(*comparing)
    assert code == 0 and "3/9" not in err and "4/9" in err


def test_faults_are_one_line(command, comparing, tmp_path, monkeypatch):
    fault(command(*comparing, "--policies", "fischer"), "unknown policy 'fischer'", "did you mean 'fisher'?")
    fault(command(*comparing, "--ratios", "most"), "got 'most'")
    (tmp_path / "tasks").mkdir()
    fault(command(*comparing, "--tasks", "mmlu", "--data-dir", tmp_path / "tasks"), "mmlu")
    fault(command(*comparing, "--window", 4096), "at most 256 tokens", "--window 4096")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fault(command(*comparing), "matplotlib", "pip install 'fpquant[eval]'")
    assert not (tmp_path / "C").exists()


def test_another_models_directory_is_refused(command, comparing, tiny_model, tmp_path):
    assert command(*comparing)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "C").rglob("*")}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")
    fault(command(*comparing, "--model", tmp_path / "other"), "another model", "name another --out")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "C").rglob("*")} == before


def test_tasks_are_measured_and_tested(tiny_model, text_file, tmp_path):
    folder = tmp_path / "data" / "piqa"
    folder.mkdir(parents=True)
    rows = [
        {"query": f"w{i} w{i + 1}", "choices": [f"w{i + 2}", f"w{i * 7 % 200 + 2}"], "gold": i % 2} for i in range(30)
    ]
    (folder / "piqa.foundry.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    compared = fpquant.compare(
        str(tiny_model),
        out=tmp_path / "C",
        data_dir=tmp_path / "data",
        policies="random",
        ratios=0.8,
        datasets=str(text_file),
        calibration_dataset=str(text_file),
        samples=4,
        seq_len=64,
        window=64,
        limit=25,
        kl_windows=0,
        tasks="piqa",
        device="cpu",
    )
    (told,) = [c for c in compared.comparisons if c.row == "random 80%" and c.why == "original" and c.metric == "acc"]
    first, last = (r.result("acc", task="piqa") for r in (compared.rows[0], compared.rows[-1]))
    assert first.protocol["questions"] == 25
    assert told.difference.value == pytest.approx(last.value - first.value) and 0 <= told.difference.p <= 1
    assert any(s.text.startswith("random 80%") and "McNemar" in s.text for s in compared.verdict)
