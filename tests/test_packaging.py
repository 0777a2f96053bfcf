"""What installs is `fpquant`, whole, and nothing else, from a wheel, an sdist, an editable install or the bare tree."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fpquant

ROOT = Path(__file__).resolve().parents[1]
PURELIB = sysconfig.get_path("purelib")
REAL_KERNELS = Path(PURELIB, "kernels", "__init__.py")
VERSION = fpquant.__version__
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# One file of each kind that is not Python, planted in the copy that is built: the rules hold before such a file exists.
PLANTED = ["kernels/planted/planted.cu", "kernels/planted/planted.cuh", "kernels/planted/README.md", "recipes/p.yaml"]


def run(*command: object, cwd: Path, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))} | env
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip_install(*arguments: object, cwd: Path) -> None:
    common = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "-q"]
    run(sys.executable, "-m", "pip", "install", *common, *arguments, cwd=cwd)


def probe(path: Path, cwd: Path, code: str) -> dict[str, str | None]:
    """Run `code`, which fills the dict `found`, where fpquant is importable from `path` alone.

    -S keeps out what the environment itself has installed as editable; its site-packages come last, as plain files.
    """
    code = (
        "import json, site, sys\n"
        f"site.addsitedir({str(path)!r}); sys.path.append({PURELIB!r})\n"
        "from importlib.util import find_spec\n"
        f"found = {{}}\n{code}\nprint(json.dumps(found))"
    )
    return json.loads(run(sys.executable, "-S", "-c", code, cwd=cwd, HF_HUB_OFFLINE="1").splitlines()[-1])


WHERE = """
import fpquant, fpquant.calibration, fpquant.kernels, fpquant.formats
for module in (fpquant, fpquant.calibration, fpquant.kernels, fpquant.formats):
    found[module.__name__] = module.__file__
for name in ("calibration", "recipes", "kernels"):
    spec = find_spec(name)
    found[name] = spec and spec.origin
"""


def assert_only_fpquant(found: dict[str, str | None], home: Path) -> None:
    for name in ("fpquant", "fpquant.calibration", "fpquant.kernels", "fpquant.formats"):
        file = found[name]
        assert file is not None and Path(file).is_relative_to(home), (name, file)
    assert found["calibration"] is None
    assert found["recipes"] is None
    # The distribution of that name where it is installed, else nothing: never ours.
    assert found["kernels"] == (str(REAL_KERNELS) if REAL_KERNELS.exists() else None)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, symbolic links kept, without anything that was built there."""
    copy = tmp_path_factory.mktemp("tree") / "repository"
    copy.mkdir()
    built = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fpquant", "calibration", "kernels", "recipes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=built)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PLANTED:
        file = copy / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("# planted\n")
    return copy


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out, tree, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"fpquant-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def content(tree: Path) -> dict[str, bytes]:
    """What an installed fpquant consists of, read through the symbolic links of the copy."""
    suffixes = {".py", ".typed", ".yaml", ".html", ".cu", ".cuh"}
    found: dict[str, bytes] = {}
    for folder, _, names in os.walk(tree / "fpquant", followlinks=True):
        for file in (Path(folder, name) for name in names):
            if file.suffix in suffixes or file.name == "README.md":
                found[file.relative_to(tree).as_posix()] = file.read_bytes()
    assert {f"fpquant/{name}" for name in PLANTED} < set(found)
    return found


def test_wheel_holds_fpquant_whole_and_nothing_else(wheel: Path, content: dict[str, bytes]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    metadata = f"fpquant-{VERSION}.dist-info/"
    assert {name: data for name, data in files.items() if not name.startswith(metadata)} == content
    assert files[metadata + "top_level.txt"].decode().split() == ["fpquant"]
    assert "fpquant = fpquant.cli:main" in files[metadata + "entry_points.txt"].decode()
    assert metadata + "licenses/LICENSE" in files


def test_sdist_holds_the_links_content_once_and_builds_the_same_wheel(
    dist: Path, wheel: Path, content: dict[str, bytes], tmp_path: Path
) -> None:
    with tarfile.open(dist / f"fpquant-{VERSION}.tar.gz") as archive:
        assert all(member.isfile() or member.isdir() for member in archive.getmembers())
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"fpquant-{VERSION}"
    top = {entry.name for entry in source.iterdir()}
    assert top >= {"fpquant", "pyproject.toml", "README.md", "LICENSE"}
    assert top.isdisjoint({"calibration", "kernels", "recipes"})
    assert {name: (source / name).read_bytes() for name in content} == content

    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source, cwd=tmp_path)
    with zipfile.ZipFile(wheel) as direct, zipfile.ZipFile(tmp_path / wheel.name) as through_sdist:
        assert {i.filename: i.CRC for i in direct.infolist()} == {i.filename: i.CRC for i in through_sdist.infolist()}


def test_installed_wheel_imports_beside_transformers(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip_install("--target", target, wheel, cwd=tmp_path)
    assert {entry.name for entry in target.iterdir()} - {"bin"} == {"fpquant", f"fpquant-{VERSION}.dist-info"}

    # transformers asks for the distribution `kernels` when its models are imported.
    found = probe(target, tmp_path, WHERE + "from transformers import LlamaForCausalLM")
    assert_only_fpquant(found, target)


def test_editable_install_follows_the_tree(tree: Path, tmp_path: Path) -> None:
    # --ignore-installed: leave alone the fpquant that this environment may hold.
    pip_install("--ignore-installed", "--prefix", tmp_path / "prefix", "--editable", tree, cwd=tmp_path)
    [pth] = (tmp_path / "prefix").rglob("__editable__*.pth")

    later = tree / "kernels" / "written_later.py"
    later.write_text("VALUE = 7\n")
    try:
        code = WHERE + "import fpquant.kernels.written_later as m; found['value'] = m.VALUE"
        found = probe(pth.parent, tmp_path, code)
    finally:
        later.unlink()
    assert_only_fpquant(found, tree)
    assert found["value"] == 7


def test_bare_tree_works_from_the_python_path(tree: Path, tmp_path: Path) -> None:
    code = (
        "import json, fpquant, fpquant.calibration, fpquant.kernels\n"
        "from transformers import LlamaForCausalLM\n"
        "print(json.dumps([m.__file__ for m in (fpquant, fpquant.calibration, fpquant.kernels)]))"
    )
    files = json.loads(run(sys.executable, "-c", code, cwd=tree, PYTHONPATH=".").splitlines()[-1])
    assert [Path(file).resolve().relative_to(tree.resolve()).parts[0] for file in files] == [
        "fpquant",
        "calibration",
        "kernels",
    ]


def test_tests_see_the_real_kernels_and_an_installed_fpquant() -> None:
    """How pytest is configured keeps the root of the repository off sys.path."""
    assert str(ROOT) not in [str(Path(entry).resolve()) for entry in sys.path if entry]
    assert importlib.util.find_spec("calibration") is None
    spec = importlib.util.find_spec("kernels")
    assert (spec.origin if spec else None) == (str(REAL_KERNELS) if REAL_KERNELS.exists() else None)


def test_every_python_folder_is_a_package() -> None:
    """A folder without __init__.py would be left out of wheels, and of the check of layers, without a word."""
    for top in ("fpquant", "calibration", "kernels", "recipes"):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} needs an __init__.py"


@pytest.mark.parametrize("name", ["calibration", "kernels", "recipes"])
def test_links_are_relative(name: str) -> None:
    link = ROOT / "fpquant" / name
    assert link.is_symlink(), f"{link} must be a symbolic link; see CONTRIBUTING.md"
    assert os.readlink(link) == f"../{name}"


def normalized(requirement: str) -> str:
    return re.split("[<>=!~;[ ]", requirement)[0].lower().replace("_", "-")


def test_constraints_are_exact_and_portable() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    names = [normalized(line) for line in lines]
    assert all(line.count("==") == 1 and not set(line) & set("@/;+ ") for line in lines), lines
    assert len(set(names)) == len(names)

    wanted = [*PROJECT["dependencies"], *(s for extra in PROJECT["optional-dependencies"].values() for s in extra)]
    assert {normalized(spec) for spec in wanted} <= set(names)


def test_every_import_is_of_a_declared_dependency() -> None:
    declared = {normalized(s) for s in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["eval"]]}
    distributions = importlib.metadata.packages_distributions()
    modules = [m for top in ("fpquant", "calibration", "kernels", "recipes") for m in (ROOT / top).rglob("*.py")]
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            known = {*sys.stdlib_module_names, "fpquant", "triton"}  # torch's builds for GPUs bring triton
            if module.parent.name == "integrations":  # loaded by the library that it is named after
                known.add(module.stem.removesuffix("_plugin"))
            for top in {name.split(".")[0] for name in imported} - known:
                owners = {normalized(owner) for owner in distributions.get(top, [top])}
                assert owners & declared, f"{module} imports {top}, which pyproject.toml does not ask for"
