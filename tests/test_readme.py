"""README says what the code does: its commands parse, its names exist, its figures are those of the results file."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import fpquant
from fpquant.cli import app
from fpquant.recipe import recipe_names
from fpquant.schemes import PAIRS, SCHEMES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = [README, *(p.read_text() for p in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = sorted({c for text in DOCS for c in re.findall(r"(?:^|`)(fpquant [a-z]+ [^`\n]*)", text, re.MULTILINE)})


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, arguments)


def test_the_python_example_uses_what_there_is():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(block, "README.md", "exec")
    for name in re.findall(r"fpquant\.(\w+)", block):
        assert name in fpquant.__all__ and callable(getattr(fpquant, name))


def test_recipes_schemes_and_pairs_are_named():
    for name in [*recipe_names(), *SCHEMES, *PAIRS]:
        assert f"`{name}`" in README, name


def test_the_table_is_the_results_file():
    file = json.loads((ROOT / "benchmarks/results/quality-demo-h200.json").read_text())
    measured = {
        (f"{r.get('bits_per_weight', 32):.2f}".replace("32.00", "32"), f"{r['value']:.2f}")
        for r in file["results"]["rows"]
    }
    table = re.findall(r"^\| (?!weights|---).*? \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert len(table) >= 10
    assert set(table) <= measured
    assert file["environment"]["gpu"]["name"] == "NVIDIA H200" and file["environment"]["commit"]
