"""The code of docs/transformers.md runs, block after block, on a small model in the place of its `demo-70`."""

import re
from pathlib import Path

import pytest

import fpquant

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_every_block_of_the_page_runs(tiny_model, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fpquant.calibrate(str(tiny_model), out="demo-70", ratio=0.7, dataset=str(text_file), samples=4, seq_len=64)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["tokens"].shape[1] == names["inputs"].input_ids.shape[1] + 8
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert Path("adapter", "adapter_model.safetensors").is_file()
    assert fpquant.load("copy") is not None
