"""The command line: what goes where, and how it fails: one line, exit code 2 (130 where interrupted), nothing left.

Most tests call fpquant.cli.run in this process, because a new one imports for seconds.
"""

import json
import os
import pty
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import fpquant
from fpquant import api, checkpoint, cli, hub
from fpquant.errors import FpquantError
from fpquant.kernels import build

MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job starts without
    "from fpquant.cli import main; main()"
)


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test runs in a directory of its own, and leaves nothing there that it did not name."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tiny model's operations are so short that threads only wait for one another, seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys):
    """Run a command in this process."""

    def call(*arguments):
        code = cli.run([str(a) for a in arguments])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def fault(command, here):
    """Run a command that must fail, and check how it does. Returns its error line."""

    def call(*arguments, says=()):
        before = tree(here)
        done = command(*arguments)
        assert_fault(done)
        assert tree(here) == before, "something is left"
        line = done.err.splitlines()[-1]
        for text in [says] if isinstance(says, str) else says:
            assert text in line
        return line

    return call


def tree(directory):
    """Every path under a directory with its size and time of change."""
    return {p: (p.lstat().st_size, p.lstat().st_mtime_ns if p.is_file() else 0) for p in directory.rglob("*")}


def assert_fault(done, code=2):
    assert done.code == code, done
    assert [line.startswith("error: ") for line in done.err.splitlines()].count(True) == 1, done.err
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.err and "Exception ignored" not in done.err
    assert done.out == ""


def process(*arguments, code=MAIN, **options):
    """Run a command in a process of its own; options as those of subprocess.run, and env to be added."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | options.pop("env", {})
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)], env=env, capture_output=True, text=True, **options
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def calibrating(tiny_model, text_file, here):
    """The arguments of a small calibration to here / q; later options override."""
    data = ["--dataset", text_file, "--samples", 4, "--seq-len", 64]
    return ["calibrate", "--model", tiny_model, *data, "--device", "cpu", "--out", here / "q"]


@pytest.fixture
def evaluating(tiny_model, text_file):
    return ["eval", tiny_model, "--dataset", text_file, "--window", 64, "--limit", 2, "--device", "cpu"]


@pytest.fixture(scope="module")
def quantized(tiny_model, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "q"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(out.parent / "cache"))
        fpquant.calibrate(str(tiny_model), out=out, dataset=str(text_file), samples=4, seq_len=64, device="cpu")
    return out


# --- What goes where ---


def test_help_is_quick():
    took = []
    for _ in range(3):
        start = time.perf_counter()
        assert process("--help").code == 0
        took.append(time.perf_counter() - start)
    assert statistics.median(took) < 1


def test_help_of_every_command_names_its_options(command):
    assert "calibrate" in command("--help").out
    assert "--ratio" in command("calibrate", "--help").out


def test_version(command):
    assert command("--version") == (0, f"fpquant {fpquant.__version__}\n", "")


def test_no_arguments_show_the_help(command):
    done = command()
    assert done.code == 2
    assert "calibrate" in done.out + done.err


def test_results_go_to_stdout_and_progress_to_stderr(command, calibrating, evaluating, here):
    done = command(*calibrating, "--json", "record.json")
    assert done.code == 0
    assert "bits a weight" in done.out and "Fisher pass" not in done.out
    assert re.search(r"Fisher pass .* 4/4", done.err) and "bits a weight" not in done.err
    assert json.loads((here / "record.json").read_text())["out"] == str(here / "q")
    done = command(*evaluating, "--json", "deeper/record.json")
    assert "perplexity" in done.out and "Perplexity" in done.err
    [result] = json.loads((here / "deeper/record.json").read_text())["results"]
    assert result["metric"] == "perplexity" and result["protocol"]["windows"] == 2


def test_json_on_stdout_is_all_that_is_there(command, calibrating, evaluating, quantized):
    for arguments, key in (
        (calibrating, "bits_per_weight"),
        (evaluating, "results"),
        (["inspect", quantized, "--png", "map.png"], "high_share"),
        (["verify", quantized], "hashed"),
    ):
        done = command(*arguments, "--json", "-")
        assert done.code == 0
        assert key in json.loads(done.out)


def test_json_into_a_pipe_is_written_in_place(command, evaluating, here):
    os.mkfifo(here / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((here / "pipe").read_text()))
    reader.start()
    assert command(*evaluating, "--json", "pipe").code == 0
    reader.join()
    assert json.loads(read[0])["results"]
    assert (here / "pipe").is_fifo()


def test_a_full_stdout_is_one_line(quantized):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-c", MAIN, "verify", str(quantized), "--json", "-"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert_fault(Done(done.returncode, "", done.stderr))


# --- Kernels ---


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A compiler that writes its arguments instead of a library, and fails for BFloat16 where the file `no` is."""
    path = tmp_path / "nvcc"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88" && exit\n'
        'case "$*" in *BFloat16*) [ -e no ] && echo "no such luck" >&2 && exit 3;; esac\n'
        'for last; do :; done\necho "$*" > "$last"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("FPQUANT_NVCC", str(path))
    return path


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_kernels_are_built_ahead_and_listed(command, nvcc, no_gpu):
    arguments = ["kernels", "build", "--arch", "90", "--arch", "sm_80", "--format", "fp6", "--format", "fp8"]
    done = command(*arguments, "--json", "record.json")
    assert done.code == 0
    assert re.search(r"fp8_e4m3, bfloat16, sm_80", done.out)
    assert re.search(r"Compiling .* 8/8", done.err)
    built = json.loads(Path("record.json").read_text())["libraries"]
    assert [(b["format"], b["dtype"], b["arch"]) for b in built][:3] == [
        ("fp6_e3m2", "float16", "90a"),
        ("fp6_e3m2", "bfloat16", "90a"),
        ("fp8_e4m3", "float16", "90a"),
    ]
    for b in built:
        said = Path(b["path"]).read_text()
        assert f"arch=compute_{b['arch']},code=sm_{b['arch']}" in said and b["seconds"] > 0
        assert {"float16": "Half", "bfloat16": "BFloat16"}[b["dtype"]] in said
    done = command(*arguments)
    assert done.out.count("in the cache") == 8

    found = json.loads(command("kernels", "info", "--json", "-").out)
    assert found["compiler"] == {"path": str(nvcc), "version": "13.0.88"} and found["gpus"] == []
    assert {b["path"] for b in built} == {lib["path"] for lib in found["libraries"] if lib["built"]}
    assert len(found["libraries"]) == 2 * 8 * 2
    shown = command("kernels", "info").out
    assert "nvcc 13.0.88" in shown and "on first use" in shown and "built for sm_90a" in shown


def test_info_says_what_runs_on_a_gpu_and_why(command, nvcc, monkeypatch):
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    first, second = json.loads(command("kernels", "info", "--json", "-").out)["gpus"]
    assert (first["arch"], first["runs"], first["reason"]) == ("90a", "kernel", None)
    assert (second["arch"], second["runs"]) == (None, "pytorch")
    assert "PyTorch instead: the kernels need compute capability 8.0 or newer, card 1 has 7.5" in " ".join(
        command("kernels", "info").out.split()
    )
    nvcc.unlink()
    build.version.cache_clear()
    found = json.loads(command("kernels", "info", "--json", "-").out)
    assert found["compiler"] is None and found["libraries"] == []
    assert found["gpus"][0]["runs"] == "pytorch" and "fpquant[cuda]" in found["gpus"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no GPU here to build for; name an architecture"),
        (["--arch", "75"], "arch must be 80 or newer"),
        (["--arch", "hopper"], "arch must be 80 or newer"),
        (["--arch", "80", "--format", "fp7"], "unknown kernel format 'fp7'; did you mean"),
        (["--arch", "80", "--dtype", "float32"], "unknown dtype 'float32'"),
    ],
    ids=["no GPU", "old", "name", "format", "dtype"],
)
def test_kernels_that_cannot_be(arguments, says, fault, nvcc, no_gpu):
    fault("kernels", "build", *arguments, says=says)


def test_a_compiler_that_fails_or_is_missing_is_one_line(command, nvcc, here):
    (here / "no").touch()
    done = command("kernels", "build", "--arch", "80", "--format", "fp6")
    assert_fault(done)
    assert "nvcc failed with code 3: no such luck" in done.err
    nvcc.unlink()
    build.version.cache_clear()
    done = command("kernels", "build", "--arch", "80")
    assert_fault(done)
    assert "cannot run" in done.err and "fpquant[cuda]" in done.err


# --- What the user types ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["calibrate"], ["Missing option '--model'", "fpquant calibrate --help"]),
        (["calibrat"], ["No such command 'calibrat'", "fpquant --help"]),
        (["calibrate", "--model", "x", "--ration", "0.5"], ["No such option: --ration", "--ratio"]),
        (["eval"], "Missing argument"),
        (["eval", "x", "--limit", "many"], ["--limit", "integer"]),
        (["generate", "x"], "Missing option '--prompt'"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else None,
)
def test_what_is_no_command_line(arguments, says, fault):
    fault(*arguments, says=says)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--shapes", "llama-2-7", "did you mean 'llama-2-7b'"),
        ("--shapes", "0x64", "got '0x64'"),
        ("--shapes", ",", "--shapes must list at least one"),
        ("--batches", "1,0", "from 1 to 999999, got '0'"),
        ("--formats", "fp4", "unknown kernel format 'fp4'"),
        ("--dtype", "float32", "choices: bfloat16, float16"),
        ("--plot", "speed.gif", "name it .png, .svg or .pdf"),
        ("--json", ".", "it is a directory"),
        ("--formats", "fp6", "needs an NVIDIA GPU"),
    ],
)
def test_benchmarks_that_cannot_be(option, value, says, fault, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fault("bench", option, value, says=says)


def test_a_benchmark_without_a_compiler_says_how_to_get_one(fault, monkeypatch):
    from fpquant.kernels import build
    from fpquant.kernels.bench import speed

    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(speed, "cuda_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fault("bench", says="pip install 'fpquant[cuda]'")


def test_a_benchmark_shows_tables_and_writes_its_record_and_plot(command, here, monkeypatch):
    from fpquant.kernels.bench import speed

    times = (speed.Timing("64x64", "cublas", 8, 12.0, 8192), speed.Timing("64x64", "fp6_e3m2", 8, 5.0, 3072))
    asked = []

    def bench(*arguments, track):
        asked.append(arguments)
        return speed.Report("a card", "float16", 4e12, times)

    monkeypatch.setattr(speed, "bench", bench)
    arguments = ["--shapes", "64x64", "--batches", "8", "--formats", "fp6,fp5"]
    done = command("bench", *arguments, "--json", "speed.json", "--plot", "speed.svg")
    assert done.code == 0 and "plot written to speed.svg" in done.err
    assert asked == [({"64x64": (64, 64)}, [8], ["fp6_e3m2", "fp5_e2m2"], "float16")]
    assert "a card, float16: reads 4.00 TB/s" in done.out and "2.40" in done.out
    assert json.loads((here / "speed.json").read_text())["times"][1]["speedup"] == pytest.approx(2.4)
    assert "<svg" in (here / "speed.svg").read_text()


SETTINGS = [
    ("--ratio", "-0.1", "from 0"),
    ("--ratio", "1.01", "got 1.01"),
    ("--ratio", "nan", "got nan"),
    ("--ratio", "inf", "got inf"),
    ("--ratio", "most", "got 'most'"),
    ("--policy", "fischer", "did you mean 'fisher'"),
    ("--pair", "nvfp4/fp9", "did you mean 'nvfp4/fp8'"),
    ("--threshold", "globl", "did you mean 'global'"),
    ("--clip", "fish", "did you mean 'fisher'"),
    ("--recipe", "fgmp-7", "did you mean 'fgmp-70'"),
    ("--recipe", "nowhere.yaml", "no such recipe file: nowhere.yaml"),
    ("--dataset", "wikitxt", "did you mean 'wikitext'"),
    ("--dataset", "nowhere.txt", "no such file: nowhere.txt"),
    ("--samples", "0", "got 0"),
    ("--samples", "100000", "tokens"),
    ("--seq-len", "1", "of 1"),
    ("--seq-len", "257", "at most 256 tokens"),
    ("--seed", "-1", "got -1"),
    ("--seed", str(1 << 64), "2^63"),
    ("--include", "nothing", "'nothing' matches no module"),
    ("--exclude", "nothing", "'nothing' matches no module"),
    ("--exclude", "*", "no module is left"),
    ("--device", "gpu", "'gpu' is not usable"),
    ("--device", "cuda:99", "'cuda:99' is not usable"),
    ("--device", "meta", "'meta' is not usable"),
    ("--dtype", "float8", "got 'float8'"),
    ("--eval-dataset", "nowhere.txt", "no such file: nowhere.txt"),
]


@pytest.mark.parametrize(("option", "value", "says"), SETTINGS)
def test_settings_that_cannot_be(option, value, says, calibrating, fault):
    fault(*calibrating, *(["--eval"] if option == "--eval-dataset" else []), option, value, says=says)


def test_evaluation_fits_its_windows_to_the_model(calibrating, command, text_file):
    done = command(*calibrating, "--eval", "--eval-dataset", text_file, "--json", "-")
    assert [r["protocol"]["window"] for rs in json.loads(done.out)["results"].values() for r in rs] == [256, 256]


def test_evaluating_on_the_calibration_text_is_refused(calibrating, fault):
    fault(*calibrating, "--eval", says="--eval-dataset")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--limit", "0", "--limit 0"),
        ("--window", "1", "--window 1"),
        ("--window", "257", "at most 256 tokens"),
        ("--tasks", "mmul", "unknown task 'mmul'"),
        ("--dataset", "nowhere.parquet", "no such file"),
    ],
)
def test_evaluations_that_cannot_be(option, value, says, evaluating, fault):
    fault(*evaluating, option, value, says=says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"polcy: fisher", ["mine.yaml", "'polcy'", "did you mean 'policy'"]),
        (b"ratio: [0.7", ["mine.yaml", "YAML"]),
        (b"- ratio", ["mine.yaml", "got list"]),
        (b"", ["mine.yaml", "got NoneType"]),
        (b"ratio: high", ["mine.yaml", "'high'"]),
        (b"ratio: .nan", ["mine.yaml", "nan"]),
        (b"ratio: null", ["mine.yaml", "None"]),
        (b"ratio: true", ["mine.yaml", "True"]),
        (b"samples: 1.5", ["mine.yaml", "1.5"]),
        (b"pair: 4", ["mine.yaml", "pair"]),
        (b"include: 5", ["mine.yaml", "include"]),
        (b"include: {a: b}", ["mine.yaml", "include"]),
        (b"exclude: [1]", ["mine.yaml", "exclude"]),
        (b"1: 2", ["mine.yaml", "unknown key 1"]),
        (b"seed: 2001-99-99", ["mine.yaml"]),
        (b"policy: \xff", ["mine.yaml", "UTF-8"]),
    ],
)
def test_recipe_files_that_cannot_be(text, says, calibrating, fault, here):
    (here / "mine.yaml").write_bytes(text)
    fault(*calibrating, "--recipe", "mine.yaml", says=says)


# --- Data ---


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "0 tokens"),
        ("blank.txt", b" \n\n ", "0 tokens"),
        ("short.txt", b"w1 w2 w3", ["3 tokens", "4 were asked for", "--samples"]),
        ("latin.txt", b"caf\xe9", "UTF-8"),
        ("broken.jsonl", b'{"text": "w1"}\n{"text": ', "line 2"),
        ("other.jsonl", b'{"body": "w1"}', ["line 1", "`text`"]),
        ("number.jsonl", b'{"text": 5}', ["line 1", "`text`"]),
        ("short.jsonl", b'{"text": "w1 w2"}\n\n{"text": "w3"}', "3 tokens"),
        ("no.parquet", b"not one", "no.parquet"),
        ("data.csv", b"w1", "unknown data set"),
    ],
)
def test_data_files_that_cannot_be(name, content, says, calibrating, evaluating, fault, here):
    (here / name).write_bytes(content)
    fault(*calibrating, "--dataset", name, says=says)
    fault(*evaluating, "--dataset", name, says="3 tokens, less than one window" if "short" in name else says)


def test_parquet_without_text(calibrating, fault, here):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["w1"]}), here / "other.parquet")
    fault(*calibrating, "--dataset", "other.parquet", says=["`text`", "body"])


# --- Models ---


@pytest.fixture
def copy(tiny_model, here):
    return shutil.copytree(tiny_model, here / "model")


def set_weight(name, value):
    def change(model):
        tensors = load_file(model / "model.safetensors")
        tensors[name].view(-1)[7] = value
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return change


def drop_weight(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def cut(file, left):
    return lambda model: (model / file).write_bytes((model / file).read_bytes()[:left])


def put(file, content):
    return lambda model: (model / file).write_text(content)


def set_config(**values):
    def change(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_weight("model.layers.0.mlp.up_proj.weight", float("nan")), "model.layers.0.mlp.up_proj.weight"),
        (set_weight("model.layers.1.self_attn.q_proj.weight", -float("inf")), "model.layers.1.self_attn.q_proj.weight"),
        (set_weight("model.norm.weight", float("nan")), "model.norm.weight"),
        (set_weight("model.embed_tokens.weight", float("nan")), "model.embed_tokens.weight"),
        (drop_weight, "model.layers.1.mlp.up_proj.weight"),
        (cut("model.safetensors", 5000), "cannot load"),
        (cut("model.safetensors", 3), "cannot load"),
        (cut("config.json", 100), "cannot load"),
        (cut("tokenizer.json", 100), "cannot load"),
        (put("config.json", "[]"), "cannot load"),
        (put("config.json", "{}"), "cannot load"),
        (set_config(hidden_size="wide"), "cannot load"),
        (set_config(hidden_size=96), "cannot load"),
        (set_config(model_type="llamma"), "llamma"),
        (set_config(quantization_config={"quant_method": "fpquant"}), "is quantized already"),
        (lambda model: (model / "config.json").unlink(), "holds no config.json"),
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors"),
        (lambda model: [f.unlink() for f in model.glob("tokenizer*")], "cannot load"),
    ],
)
def test_models_that_cannot_be(change, says, copy, calibrating, fault):
    change(copy)
    fault(*calibrating, "--model", copy, says=says)


def test_a_nan_is_told_of_in_uniform_recipes_too(copy, calibrating, fault):
    set_weight("model.layers.0.mlp.up_proj.weight", float("nan"))(copy)
    fault(*calibrating, "--model", copy, "--recipe", "nvfp4", says="model.layers.0.mlp.up_proj.weight holds 1 NaN")


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_gguf_files_that_cannot_be(content, calibrating, fault, here):
    (here / "model.gguf").write_bytes(content)
    fault(*calibrating, "--model", "model.gguf", says="cannot load model.gguf")


@pytest.mark.parametrize("spec", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", "a/b/c", "no such name"])
def test_models_that_are_nowhere(spec, calibrating, evaluating, fault):
    fault(*calibrating, "--model", spec, says=["no such", spec])
    fault("eval", spec, *evaluating[2:], says=["no such", spec])


# --- The hub ---


@pytest.fixture
def online(monkeypatch):
    """Let this process ask a hub at an address; the cache of the hub's files is empty."""

    def use(address, cache):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(hub, "_last_silence", None)

    return use


@contextmanager
def silent_server():
    """An address where connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def server_without_repositories():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


OFFLINE_MODEL = ["out of reach", "a directory", ".gguf", "--model demo"]
OFFLINE_DATA = ["out of reach", ".txt, .parquet or .jsonl", "vital-articles"]


def test_a_hub_out_of_reach_is_told_within_ten_seconds(tiny_model, text_file, here):
    """From the start of the process, its imports included."""
    commands = (
        (["--model", "some/model", "--dataset", text_file], OFFLINE_MODEL),
        (["--model", tiny_model, "--dataset", "wikitext"], OFFLINE_DATA),
    )
    for arguments, says in commands:
        start = time.monotonic()
        environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(here / "hub")}
        done = process("calibrate", *arguments, "--out", "q", env=environment)
        assert time.monotonic() - start < 10
        assert_fault(done)
        assert all(text in done.err for text in says), done.err
        assert not (here / "q").exists()


def test_a_hub_that_never_answers_is_left_in_seconds(calibrating, evaluating, fault, online, here, tmp_path):
    with silent_server() as address:
        for arguments, says in (
            ([*calibrating, "--model", "some/model"], OFFLINE_MODEL),
            ([*calibrating, "--dataset", "wikitext"], OFFLINE_DATA),
            ([*evaluating, "--dataset", "wikitext"], OFFLINE_DATA),
        ):
            if says is OFFLINE_MODEL:
                online(address, tmp_path / "hub")
            start = time.monotonic()
            fault(*arguments, says=says)
            assert time.monotonic() - start < 6  # which leaves four of the ten seconds for imports


def test_a_model_of_the_local_cache_is_opened_though_the_hub_never_answers(
    tiny_model, evaluating, command, online, tmp_path
):
    repository = tmp_path / "hub/models--some--model"
    shutil.copytree(tiny_model, repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    with silent_server() as address:
        online(address, tmp_path / "hub")
        start = time.monotonic()
        done = command("eval", "some/model", *evaluating[2:])
    assert done.code == 0, done.err
    assert time.monotonic() - start < 10
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE is False  # only while it was loaded


def test_an_unknown_model_is_not_a_hub_out_of_reach(calibrating, fault, online, tmp_path):
    with server_without_repositories() as address:
        online(address, tmp_path / "hub")
        line = fault(*calibrating, "--model", "some/model", says=["unknown model 'some/model'", "spelling"])
    assert "out of reach" not in line


def test_offline_by_choice(calibrating, fault):
    """HF_HUB_OFFLINE=1, as all tests run."""
    fault(*calibrating, "--model", "some/model", says=["'some/model'", "HF_HUB_OFFLINE is set", *OFFLINE_MODEL[1:]])
    fault(*calibrating, "--dataset", "wikitext", says=["HF_HUB_OFFLINE is set", *OFFLINE_DATA[1:]])


# --- Where it is written ---


def test_an_output_that_holds_something(calibrating, quantized, fault, here):
    (here / "q").mkdir()
    (here / "q/notes.txt").write_text("keep me")
    fault(*calibrating, says=["not empty", "--overwrite"])
    fault(*calibrating, "--overwrite", says=["holds notes.txt", "no part of a model"])
    fault("export", quantized, "--out", "q", says=["not empty", "--overwrite"])
    fault(*calibrating, "--out", "q/notes.txt", says="is a file")
    fault(*calibrating, "--out", "q/notes.txt/deeper/q", says=["notes.txt is a file", "--out"])


def test_an_output_that_is_the_model_itself(copy, calibrating, fault):
    fault(*calibrating, "--model", copy, "--out", copy, "--overwrite", says="holds the model that is read")
    fault(*calibrating, "--model", copy, "--out", copy.parent, "--overwrite", says="choose another --out")


def test_a_model_is_replaced_whole_where_a_link_points_at_it(calibrating, command, here):
    (here / "real").mkdir()
    (here / "q").symlink_to("real")
    assert command(*calibrating).code == 0
    (here / "real/old.json").write_text("{}")
    assert command(*calibrating, "--overwrite").code == 0
    assert (here / "q").is_symlink()
    assert checkpoint.verify(here / "real")["modules"] == 14
    assert not (here / "real/old.json").exists()
    assert {p.name for p in here.iterdir()} == {"q", "real"}


@pytest.fixture
def disk(here):
    """Mounts a small disk here; for root only."""
    mounted = []

    def mount(name, options):
        (here / name).mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", here / name], capture_output=True)
        if done.returncode:
            pytest.skip("needs the right to mount a disk")
        mounted.append(here / name)
        return here / name

    yield mount
    for place in mounted:
        subprocess.run(["umount", place], check=True)


def test_a_read_only_parent_and_a_mount_point(calibrating, evaluating, fault, disk):
    place = disk("disk", "size=1m,ro")
    fault(*calibrating, "--out", place / "q", says=["read-only", "--out"])
    fault(*calibrating, "--sensitivity", place / "s.safetensors", says=["read-only", "--sensitivity"])
    fault(*evaluating, "--json", place / "record.json", says=["read-only", "--json"])
    fault(*calibrating, "--out", place, says="disk")


def test_a_mount_point(calibrating, fault, disk):
    fault(*calibrating, "--out", disk("disk", "size=1m"), says="mount point")


@pytest.mark.parametrize("option", ["--json", "--sensitivity"])
def test_files_that_cannot_be_written_are_refused_before_the_work(option, calibrating, fault, here, monkeypatch):
    monkeypatch.setattr(api, "load_model", None)  # no work
    (here / "notes.txt").write_text("keep me")
    (here / "directory").mkdir()
    (here / "directory/inside.txt").write_text("keep me")
    fault(*calibrating, option, "directory", says=["is a directory", option])
    fault(*calibrating, option, "notes.txt/record.json", says=["notes.txt is a file", option])


def test_heat_maps_that_cannot_be(quantized, command):
    done = command("inspect", quantized, "--png", "map.bmp")
    assert done.code == 2 and "'bmp'" in done.err
    assert command("inspect", quantized, "--png", quantized).code == 2


# --- A full disk ---


@contextmanager
def files_of_at_most(limit):
    """Writing a file beyond `limit` bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_any_moment_of_writing(calibrating, command, disk, here):
    """From no room at all to enough: each try but the last fails in one line and leaves nothing."""
    command(*calibrating, "--out", "whole")  # which fills the cache
    pages = sum(-(-f.stat().st_size // 4096) for f in (here / "whole").iterdir())
    place = disk("disk", f"size={4 * (pages + 20)}k")
    tried = 0
    for room in range(0, pages + 20, 2):
        with (place / "filling").open("wb") as file:
            file.write(bytes(4096 * (pages + 18 - room)))
        done = command(*calibrating, "--out", place / "deeper/q")
        if done.code == 0:
            break
        assert_fault(done)
        assert "No space left" in done.err and "free space" in done.err
        assert [p.name for p in place.iterdir()] == ["filling"]
        tried += 1
    assert done.code == 0 and tried > pages / 4


@pytest.mark.parametrize("limit", [100, 1500, 5000, 100_000])
def test_files_that_may_not_grow(limit, quantized, calibrating, command, fault, here):
    """config.json, the tokenizer and the shard, in turn, are the first that cannot be written."""
    command(*calibrating, "--out", "whole")  # which fills the cache
    with files_of_at_most(limit):
        fault(*calibrating, says=["cannot write", "File too large"])
        fault("export", quantized, "--out", "plain", says=["cannot write", "File too large"])


def test_a_full_cache_does_not_cost_the_run(calibrating, command, monkeypatch, disk):
    monkeypatch.setenv("FPQUANT_CACHE", str(disk("disk", "size=16k")))
    done = command(*calibrating)
    assert done.code == 0
    assert done.err.count("No space left") == 1
    full = checkpoint.sha256(Path("q/model.safetensors"))
    monkeypatch.setenv("FPQUANT_CACHE", "cache")
    command(*calibrating, "--overwrite")
    assert checkpoint.sha256(Path("q/model.safetensors")) == full


def test_a_full_disk_for_a_sensitivity_that_was_asked_for(calibrating, fault):
    with files_of_at_most(50_000):
        fault(*calibrating, "--sensitivity", "s.safetensors", says=["s.safetensors", "File too large"])


def test_a_full_disk_for_the_record(evaluating, command, here):
    with files_of_at_most(100):
        done = command(*evaluating, "--json", "record.json")
    assert done.code == 2 and "error: cannot write" in done.err
    assert list(here.iterdir()) == []
    done = command(*evaluating, "--json", "/dev/full")
    assert done.code == 2 and "error: cannot write /dev/full: No space left" in done.err
    assert not Path("/dev/full").is_file()


# --- Damage ---


def truncate(directory):
    os.truncate(directory / "model.safetensors", 50_000)


def alter(directory):
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def miscount(directory):
    """A map that has one high block more than config.json says, with a hash that agrees."""
    shard = directory / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.up_proj.weight_map"][0] ^= 1
    save_file(tensors, shard, metadata={"format": "pt"})
    record = json.loads((directory / "fpquant.json").read_text())
    record["sha256"][shard.name] = checkpoint.sha256(shard)
    (directory / "fpquant.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "named"),
    [(truncate, "model.safetensors"), (alter, "model.safetensors"), (miscount, "model.layers.0.mlp.up_proj")],
)
def test_a_damaged_directory_is_refused(damage, named, quantized, fault, evaluating, here):
    directory = shutil.copytree(quantized, here / "damaged")
    damage(directory)
    fault("verify", directory, says=named)
    fault("eval", directory, *evaluating[2:], says=named)
    fault("export", directory, says=named)
    fault("generate", directory, "--prompt", "w1", says=named)
    with pytest.raises(FpquantError, match=re.escape(named)):
        fpquant.load(directory)


@pytest.mark.parametrize("name", ["verify", "inspect", "export"])
def test_what_is_no_quantized_directory(name, tiny_model, fault, here):
    for directory in ("nowhere", here, tiny_model):
        fault(name, directory, says=str(directory))


def test_a_damaged_record_is_refused(quantized, fault, here):
    directory = shutil.copytree(quantized, here / "damaged")
    for content in ("{", "[1]", '{"sha256": 5}'):
        (directory / "fpquant.json").write_text(content)
        fault("verify", directory, says=["fpquant.json", "damaged"])


# --- Sensitivity files ---


def test_a_sensitivity_of_something_else(calibrating, command, fault, copy):
    assert command(*calibrating, "--sensitivity", "s.safetensors").code == 0
    again = [*calibrating, "--sensitivity", "s.safetensors", "--out", "again"]
    fault(*again, "--seq-len", 32, says=["s.safetensors", "another data", "--seq-len"])
    fault(*again, "--dtype", "bfloat16", says=["s.safetensors", "another dtype"])
    set_weight("model.layers.0.mlp.up_proj.weight", 0.5)(copy)
    fault(*again, "--model", copy, says=["s.safetensors", "another model"])


@pytest.mark.parametrize("damage", [lambda f: f.write_bytes(b"no"), lambda f: os.truncate(f, 50_000)])
def test_a_damaged_sensitivity(damage, calibrating, command, fault, here):
    """One that was named is an error; one of the cache is made anew."""
    assert command(*calibrating, "--sensitivity", "s.safetensors").code == 0
    damage(here / "s.safetensors")
    again = [*calibrating, "--sensitivity", "s.safetensors", "--out", "again"]
    fault(*again, says=["s.safetensors is not a readable Sensitivity file", "delete it"])

    shutil.rmtree(here / "q")
    assert command(*calibrating).code == 0
    first = checkpoint.sha256(here / "q/model.safetensors")
    kept = list(Path(os.environ["FPQUANT_CACHE"], "sensitivity").iterdir())
    assert len(kept) == 2  # the Sensitivity and its clipped scales
    for file in kept:
        damage(file)
    done = command(*calibrating, "--overwrite")
    assert done.code == 0
    assert "made anew" in done.err
    assert checkpoint.sha256(here / "q/model.safetensors") == first


# --- Ctrl-C ---

INTERRUPTING = """
import importlib, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)
from fpquant import cli

def interrupt_at(place, nth=1):
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    real, calls = getattr(owner, name), []
    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)
    setattr(owner, name, interrupted)

class InterruptedImport:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            os.kill(os.getpid(), signal.SIGINT)

def run(places, arguments, directory):
    os.mkdir(directory)
    os.chdir(directory)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"../{os.path.basename(directory)}.{name}", os.O_WRONLY | os.O_CREAT), number)
    for place in places:
        if place == "imports":
            sys.meta_path.insert(0, InterruptedImport())
        else:
            interrupt_at(place)
    sys.argv = ["fpquant", *arguments]
    cli.main()

# Imported once; each run is a fork, which ends quickly where its parent's objects are out of the collector's sight.
import gc, json
runs = json.load(sys.stdin)
if not any(places == ["imports"] for _, places, _ in runs):
    import fpquant.api, fpquant.report.tables, scipy.stats, transformers.generation
    import transformers.models.auto.tokenization_auto, transformers.models.llama.modeling_llama
gc.freeze()
codes = {}
for directory, places, arguments in runs:
    child = os.fork()
    if child == 0:
        run(places, arguments, directory)
    codes[directory] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""

STAGES = {
    "config": ["transformers:AutoConfig.from_pretrained"],
    "model": ["transformers.modeling_utils:PreTrainedModel._load_pretrained_model"],
    "tokens": ["fpquant.calibration.data:_tokenize"],
    "forward": ["fpquant.calibration.fisher:_InputTap.enter"],
    "backward": ["fpquant.calibration.fisher:add_squares"],
    "keeping": ["fpquant.calibration.sensitivity:save_file"],
    "clipping": ["fpquant.calibration.clipping:_walk"],
    "scoring": ["fpquant.calibration.pipeline:round_blocks"],
    "packing": ["fpquant.calibration.pipeline:pack"],
    "shards": ["transformers.modeling_utils:safe_save_file"],
    "hashing": ["fpquant.checkpoint:sha256"],
    "twice": ["fpquant.checkpoint:sha256", "shutil:rmtree"],
    "twice at once": ["fpquant.checkpoint:sha256", "fpquant.cli:_fail"],
    "evaluation": ["fpquant.evaluation.perplexity:window_losses"],
    "evaluation within": ["fpquant.evaluation.perplexity:nn.functional.cross_entropy"],
    "export": ["fpquant.exports:save_file"],
    "export within": ["fpquant.exports:unpack"],
    "json": ["pathlib:Path.write_text"],
}


def stage_command(stage, tiny_model, text_file, quantized):
    data = ["--dataset", text_file, "--device", "cpu"]
    if "evaluation" in stage or stage == "json":
        return ["eval", tiny_model, *data, "--window", 64, "--limit", 2, "--json", "record.json"]
    if "export" in stage:
        return ["export", quantized, "--out", "q"]
    return ["calibrate", "--model", tiny_model, *data, "--samples", 4, "--seq-len", 64, "--out", "q"]


def interrupt(runs, directory):
    """Each of {name: (places to interrupt at, arguments)} run under Ctrl-C: {name: (Done, paths left)}."""
    specs = [(str(directory / name), places, [str(a) for a in arguments]) for name, (places, arguments) in runs.items()]
    command, env = [sys.executable, "-P", "-c", INTERRUPTING], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=json.dumps(specs), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    result = {}
    for name in runs:
        out, err = ((directory / f"{name}.{stream}").read_text() for stream in ("out", "err"))
        result[name] = Done(codes[str(directory / name)], out, err), sorted((directory / name).rglob("*"))
    return result


@pytest.fixture(scope="module")
def interrupted(tiny_model, text_file, quantized, tmp_path_factory):
    directory = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        runs = {s: (places, stage_command(s, tiny_model, text_file, quantized)) for s, places in STAGES.items()}
        return interrupt(runs, directory)


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_at_any_stage_is_one_line_and_leaves_nothing(stage, interrupted):
    done, left = interrupted[stage]
    if stage == "json":  # the table is out already
        assert "perplexity" in done.out
        done = done._replace(out="")
    assert_fault(done, code=130)
    assert done.err.splitlines()[-1] == "error: interrupted"
    assert left == []


def test_ctrl_c_while_importing(tiny_model, tmp_path):
    [(done, left)] = interrupt({"imports": (["imports"], ["eval", tiny_model])}, tmp_path).values()
    assert_fault(done, code=130)
    assert left == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_terminal(times, calibrating, here):
    """The real thing, in the middle of the Fisher pass, once and twice in a moment."""
    controller, terminal = pty.openpty()
    arguments = [*map(str, calibrating), "--samples", "500"]
    child = subprocess.Popen([sys.executable, "-P", "-c", MAIN, *arguments], stdout=terminal, stderr=terminal)
    os.close(terminal)
    said = b""
    try:
        while not re.search(rb"Fisher pass.* [1-9]\d*/500", said):
            said += os.read(controller, 4096)
        for _ in range(times):
            child.send_signal(signal.SIGINT)
            time.sleep(0.02)
        with pytest.raises(OSError):  # how the end of a terminal reads
            while True:
                said += os.read(controller, 4096)
        assert child.wait(timeout=20) == 130
    finally:
        child.kill()
        child.wait()
        os.close(controller)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode())
    assert text.count("error:") == 1
    assert text.rstrip().endswith("error: interrupted")
    assert "Traceback" not in text and "Exception ignored" not in text
    assert list(here.iterdir()) == []


def test_a_model_that_is_quantized_already_is_refused(command, quantized, tmp_path):
    for name in ("calibrate", "compare"):
        done = command(name, "--model", quantized, "--out", tmp_path / "again")
        assert done.code == 2 and "is quantized already; give the model that it was made from" in done.err
    assert not (tmp_path / "again").exists()


def test_inspect_draws_only_where_it_is_asked_to(command, quantized, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("inspect", quantized).code == 0
    assert not list(tmp_path.glob("*.png"))
