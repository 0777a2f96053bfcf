"""The command line: parse, call fpquant.api, print.

Results go to stdout, progress and messages to stderr. Exit codes: 0, 1 (a fault of ours), 2 (the user's, one line),
130 (interrupted). Heavy imports wait until a command runs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from fpquant import __version__
from fpquant.cache import check_file_place, written_whole
from fpquant.errors import FpquantError

T = TypeVar("T")

app = typer.Typer(
    name="fpquant",
    help="Quantize causal language models in floating point, mixing FP4 and FP8 (or FP6 and FP16) block by block.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
stdout = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
stderr = Console(stderr=True, markup=False, highlight=False)

Model = Annotated[str, typer.Option("--model", "-m", help="A hub id, a directory, a .gguf file, or `demo`.")]
Directory = Annotated[Path, typer.Argument(help="A directory written by `fpquant calibrate`.", show_default=False)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str, typer.Option(help="auto (fp32 on a CPU, the model's own on a GPU), float32, bfloat16 or float16.")
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model that --out holds.")]


def _file_place(option: typer.CallbackParam, value: Any) -> Any:
    """The value of an option that names a file to write, refused before the work where none can be."""
    if value not in (None, "-"):
        check_file_place(Path(value).expanduser(), option.opts[0])
    return value


Json = Annotated[
    str | None,
    typer.Option(
        "--json", callback=_file_place, help="Also write the result as JSON to this file; - prints it, and no table."
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fpquant {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def calibrate(
    model: Model,
    ratio: Annotated[
        str | None, typer.Option(help="Fraction of blocks in low precision, 0 to 1. [default: 0.7]")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe's name or a .yaml file; flags override it.")] = None,
    pair: Annotated[str | None, typer.Option(help="nvfp4/fp8, fp6/fp16, or one scheme. [default: nvfp4/fp8]")] = None,
    policy: Annotated[str | None, typer.Option(help="fisher, output-error, quantization-error or random.")] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="global, local (one a weight) or layer (each whole layer is low or high). [default: the policy's]"
        ),
    ] = None,
    clip: Annotated[str | None, typer.Option(help="fisher, unweighted or none. [default: the policy's]")] = None,
    activations: Annotated[
        bool | None,
        typer.Option("--activations/--no-activations", help="Quantize the layers' inputs too, while the model runs."),
    ] = None,
    activation_ratio: Annotated[
        str | None, typer.Option(help="Fraction of their blocks in low precision. [default: --ratio]")
    ] = None,
    signed: Annotated[
        bool | None,
        typer.Option("--signed/--unsigned", help="Score weights by how much more the low precision errs."),
    ] = None,
    portable_scales: Annotated[
        bool | None,
        typer.Option(
            "--portable-scales/--own-scales",
            help="Tensor scales that are powers of two, one for q, k and v: other engines then read the very same "
            "values. [default: with --threshold layer]",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="wikitext, vital-articles, or a .txt, .parquet or .jsonl file. [default: wikitext]"),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration sequences. [default: 512]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence. [default: 512]")] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Quantize only modules matching a pattern (repeatable).")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave modules matching a pattern (repeatable).")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    sensitivity: Annotated[
        Path | None, typer.Option(help="Sensitivity file to reuse or write. [default: the cache]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write. [default: named after model, recipe, ratio]")
    ] = None,
    overwrite: Overwrite = False,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Also measure perplexity on the data set's held-out part, before and after.")
    ] = False,
    eval_dataset: Annotated[
        str | None, typer.Option(help="What --eval measures on, where the data set is a file of your own.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the draw of sequences and the random policy. [default: 0]")
    ] = None,
    trust_remote_code: Trust = False,
    json_to: Json = None,
) -> None:
    """Quantize a model: measure its sensitivity, decide each block's precision, write a directory."""
    with quiet():
        from fpquant import api
        from fpquant.report.tables import calibration_table, results_table

        settings = {
            "ratio": None if ratio is None else _number(ratio, "ratio"),
            "pair": pair,
            "policy": policy,
            "threshold": threshold,
            "clip": clip,
            "activations": activations,
            "activation_ratio": None if activation_ratio is None else _number(activation_ratio, "activation-ratio"),
            "signed": signed,
            "portable_scales": portable_scales,
            "dataset": dataset,
            "samples": samples,
            "seq_len": seq_len,
            "seed": seed,
            "include": tuple(include) if include else None,
            "exclude": tuple(exclude) if exclude else None,
        }
        chosen = api.resolve_recipe(recipe, **settings)
        measured = api.evaluation_of(chosen, eval_dataset) if evaluate else None
        result = api.calibrate(
            model,
            chosen,
            out=out,
            overwrite=overwrite,
            sensitivity=sensitivity,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            evaluate_on=measured,
            track=track,
        )
        results = {label: [r.to_dict() for r in rs] for label, rs in result.measured.items()}
        tables = [calibration_table(result.summary, str(result.out))]
        tables += [results_table(label, rs) for label, rs in result.measured.items()]
        _show(tables, {"out": str(result.out), **result.summary, "results": results}, json_to)


@app.command("eval")
def eval_(
    model: Annotated[str, typer.Argument(help="A quantized directory, or any model as in `calibrate --model`.")],
    tasks: Annotated[
        str,
        typer.Option(
            help="Comma-separated: perplexity, mmlu, lambada, piqa, arc_easy, winogrande, hellaswag, boolq, race."
        ),
    ] = "perplexity",
    dataset: Annotated[
        str, typer.Option(help="Of perplexity: wikitext, vital-articles, or a .txt, .parquet or .jsonl file.")
    ] = "wikitext",
    window: Annotated[int, typer.Option(help="Of perplexity: tokens a window; windows do not overlap.")] = 2048,
    limit: Annotated[
        int | None,
        typer.Option(help="Only the first windows, and the first questions (MMLU: of each subject). [default: all]"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the other tasks' data lie, a folder each. [default: the hub]")
    ] = None,
    shots: Annotated[int, typer.Option(help="Examples before a question of MMLU, 0 to 5.")] = 5,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts a forward pass. [default: 1 on a CPU, 8 on a GPU]")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    json_to: Json = None,
) -> None:
    """Measure a model, quantized or not, and print each figure with its protocol."""
    with quiet():
        from fpquant import api
        from fpquant.evaluation.records import to_record
        from fpquant.report.tables import results_table

        results = api.evaluate(
            model,
            tasks=tuple(_listed(tasks, "tasks")),
            dataset=dataset,
            window=window,
            limit=limit,
            data_dir=data_dir,
            shots=shots,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            track=track,
        )
        _show([results_table(model, results)], to_record(model, results), json_to)


@app.command()
def compare(
    model: Model,
    policies: Annotated[
        str, typer.Option(help="Comma-separated: fisher, output-error, quantization-error, random.")
    ] = "fisher,output-error,quantization-error",
    ratios: Annotated[str, typer.Option(help="Comma-separated fractions of blocks in low precision.")] = "0.5,0.7,0.9",
    threshold: Annotated[
        str | None, typer.Option(help="Comma-separated: global, local, layer. [default: each policy's]")
    ] = None,
    clip: Annotated[
        str | None, typer.Option(help="Comma-separated: fisher, unweighted, none. [default: each policy's]")
    ] = None,
    activations: Annotated[
        bool, typer.Option("--activations", help="Measure each row also with the layers' inputs quantized.")
    ] = False,
    pair: Annotated[str | None, typer.Option(help="nvfp4/fp8 or fp6/fp16. [default: nvfp4/fp8]")] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="To measure on: wikitext, vital-articles, or a .txt, .parquet or .jsonl file (repeatable). "
            "[default: wikitext]"
        ),
    ] = None,
    calibration_dataset: Annotated[
        str | None, typer.Option(help="To calibrate on: as --dataset. [default: wikitext]")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration sequences. [default: 512]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence. [default: 512]")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens a window of evaluation. [default: 2048]")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the first windows of each data set and questions of each task.")
    ] = None,
    kl_windows: Annotated[
        int | None, typer.Option(help="Windows whose distance from the original is measured; 0: none. [default: 8]")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated: mmlu, lambada, piqa, ... as in `eval`. [default: none]")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the tasks' data lie, a folder each. [default: the hub]")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before a question of MMLU, 0 to 5. [default: 5]")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of tasks: prompts a forward pass. [default: 1 on a CPU, 8 on a GPU]")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Quantize only modules matching a pattern (repeatable).")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave modules matching a pattern (repeatable).")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    sensitivity: Annotated[
        Path | None, typer.Option(help="Sensitivity file to reuse or write. [default: the cache]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write, or to go on with. [default: named after the model]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the draw of sequences and the random policy. [default: 0]")
    ] = None,
    trust_remote_code: Trust = False,
    json_to: Json = None,
) -> None:
    """Measure policies x ratios beside the original and uniform schemes: table, plots, and a page to send.

    What is finished is kept in --out: the same command goes on where it was interrupted.
    """
    with quiet():
        from fpquant import api
        from fpquant.report.comparison import tables

        settings: dict[str, Any] = {
            "policies": tuple(_listed(policies, "policies")),
            "ratios": tuple(_number(r, "ratio") for r in _listed(ratios, "ratios")),
            "thresholds": None if threshold is None else tuple(_listed(threshold, "threshold")),
            "clips": None if clip is None else tuple(_listed(clip, "clip")),
            "activations": activations or None,
            "pair": pair,
            "datasets": tuple(dataset) if dataset else None,
            "calibration_dataset": calibration_dataset,
            "samples": samples,
            "seq_len": seq_len,
            "seed": seed,
            "window": window,
            "limit": limit,
            "kl_windows": kl_windows,
            "tasks": None if tasks is None else tuple(_listed(tasks, "tasks")),
            "shots": shots,
            "include": tuple(include) if include else None,
            "exclude": tuple(exclude) if exclude else None,
        }
        compared = api.compare(
            model,
            out=out,
            data_dir=data_dir,
            batch_size=batch_size,
            sensitivity=sensitivity,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            track=track,
            **settings,
        )
        _show(tables(compared), compared.to_dict(), json_to)


@app.command()
def inspect(
    directory: Directory,
    png: Annotated[
        Path | None,
        typer.Option(callback=_file_place, help="Also draw the shares as a heat map in this file."),
    ] = None,
    json_to: Json = None,
) -> None:
    """Show what a quantized directory holds, and where its high-precision blocks are."""
    with quiet():
        from fpquant.report.inspection import inspect as look

        report = look(directory)
        _show(report.tables(), report.to_dict(), json_to)
        if png is not None:
            if not report.is_mixed:
                raise FpquantError(f"{directory} holds one scheme, {report.pair.name}: there is nothing to draw")
            report.heat_map(png)
            stderr.print(f"heat map written to {png}")


@app.command()
def verify(directory: Directory, json_to: Json = None) -> None:
    """Check a quantized directory: sizes, codes, scales, maps, and the sha256 of each shard."""
    with quiet():
        from fpquant.checkpoint import verify as check

        found = check(directory)
        hashes = f"{len(found['hashed'])} sha256 match" if found["hashed"] else "no hashes were recorded"
        line = f"{directory}: sound; {found['modules']} modules in {found['shards']} shards, {hashes}"
        _show([line], {"directory": str(directory), **found}, json_to)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A quantized directory, or any model as in `calibrate --model`.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.", min=1)] = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Continue a prompt, greedily."""
    with quiet():
        from fpquant import api

        print(api.generate(model, prompt, max_new_tokens=max_new_tokens, device=device, dtype=dtype))


@app.command()
def export(
    directory: Directory,
    to: Annotated[str, typer.Option(help="dequantized or compressed-tensors.")] = "dequantized",
    out: Annotated[Path | None, typer.Option(help="Directory to write. [default: DIRECTORY-TO]")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of what is not quantized there: auto (as it is; bfloat16 beside nvfp4 in compressed-tensors), "
            "float32, bfloat16 or float16."
        ),
    ] = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a quantized directory in a form that other tools open without fpquant."""
    with quiet():
        from fpquant.exports import export as export_to

        target = out or directory.resolve().with_name(f"{directory.resolve().name}-{to}")
        written = export_to(
            directory, target, to=to, dtype=dtype, overwrite=overwrite, trust_remote_code=trust_remote_code
        )
        stdout.print(f"written to {written}")


@app.command()
def bench(
    shapes: Annotated[
        str, typer.Option(help="Comma-separated: models (llama-2-7b, llama-3-8b, opt-30b, ...), layers, or OUTxIN.")
    ] = "llama-2-7b",
    batches: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "1,8,16,32,64,128,256,1024,4096",
    formats: Annotated[str, typer.Option(help="Comma-separated: fp6, fp5, fp8, fp6_e2m3, fp5_e3m1.")] = "fp6",
    dtype: Annotated[str, typer.Option(help="Of activations: float16 or bfloat16.")] = "float16",
    plot: Annotated[
        Path | None, typer.Option(callback=_file_place, help="Also plot speed against batch: .png, .svg or .pdf.")
    ] = None,
    json_to: Json = None,
) -> None:
    """Time linear layers in the kernels' formats beside cuBLAS, on this machine's GPU."""
    with quiet():
        from fpquant.kernels.bench.shapes import parse_shapes
        from fpquant.kernels.bench.speed import bench as measure
        from fpquant.kernels.bench.speed import format_named
        from fpquant.report import speed

        sizes = parse_shapes(_listed(shapes, "shapes"))
        numbers = [_batch(b) for b in _listed(batches, "batches")]
        names = [format_named(f) for f in _listed(formats, "formats")]
        if plot is not None:
            speed.check_plot(plot)
        report = measure(sizes, numbers, names, dtype, track=track)
        head = f"{report.device}, {dtype}: reads {report.bandwidth / 1e12:.2f} TB/s"
        tables = [
            speed.shape_table(name, f"{name} [{out} x {in_}]", report.timings, report.bandwidth)
            for name, (out, in_) in sizes.items()
        ]
        means = [speed.means_table(report.timings, list(sizes))] if len(sizes) > 1 else []
        _show([head, *tables, *means], report.to_dict(), json_to)
        if plot is not None:
            speed.plot(report.timings, f"{report.device}, {dtype}", plot)
            stderr.print(f"plot written to {plot}")


def _listed(text: str, name: str) -> list[str]:
    items = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not items:
        raise FpquantError(f"--{name} must list at least one, separated by commas, got {text!r}")
    return items


def _batch(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise FpquantError(f"a batch must be a whole number from 1 to 999999, got {text!r}")
    return int(text)


kernels = typer.Typer(help="The compiled kernels: what there is, and building them ahead of use.", no_args_is_help=True)
app.add_typer(kernels, name="kernels")


@kernels.command("info")
def kernels_info(json_to: Json = None) -> None:
    """Show GPUs, compiler and cache, which kernels are built, and what runs instead where there is none."""
    from fpquant.kernels.inventory import info
    from fpquant.report.tables import kernels_tables

    found = info()
    _show(kernels_tables(found), found, json_to)


@kernels.command("build")
def kernels_build(
    format: Annotated[
        list[str] | None, typer.Option(help="fp6, fp6_e2m3, fp5, fp5_e3m1 or fp8 (repeatable). [default: all]")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float16 or bfloat16 (repeatable). [default: both]")] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="80, 89, 90a, ... (repeatable); needs no GPU. [default: those of the GPUs here]"),
    ] = None,
    json_to: Json = None,
) -> None:
    """Compile the kernels now, side by side, and not when they are first used."""
    from fpquant.kernels.inventory import build_all
    from fpquant.report.tables import built_table

    start = time.perf_counter()
    built = build_all(format or (), dtype or (), arch or (), track)
    seconds = time.perf_counter() - start
    record = [{**vars(b), "path": str(b.path), "bytes": b.path.stat().st_size} for b in built]
    _show([built_table(record, seconds)], {"seconds": seconds, "libraries": record}, json_to)


def _show(tables: Iterable[Any], record: dict[str, Any], json_to: str | None) -> None:
    """Tables on stdout, and the record to the file that --json names; with `-` the record on stdout and no tables."""
    text = json.dumps(record, indent=2)
    if json_to == "-":
        print(text)
        return
    for table in tables:
        stdout.print(table)
    if json_to is not None:
        with written_whole(Path(json_to).expanduser()) as temporary:
            temporary.write_text(text + "\n")


def track(items: Iterable[T], label: str, total: int, /) -> Iterator[T]:
    """A progress bar on stderr with the time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr) as progress:
        yield from progress.track(items, total=total, description=label)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' own progress bars and warnings out of our output (FPQUANT_VERBOSE=1 lets them in)."""
    if not os.environ.get("FPQUANT_VERBOSE"):
        import warnings

        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        warnings.filterwarnings("ignore")
        from transformers.utils import logging

        logging.disable_progress_bar()
    yield


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FpquantError(f"{name} must be a number from 0 to 1, got {text!r}") from None


class Notes(logging.Handler):
    """What fpquant logs, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr.print(Text.assemble(("warning:", "yellow"), " ", record.getMessage()), soft_wrap=True)


notes = Notes(logging.WARNING)
INTERRUPTED = 130


class Interrupts:
    """What Ctrl-C does: raise KeyboardInterrupt, but not again within seconds, so that cleaning up is not cut short."""

    GRACE_S = 5.0

    def __init__(self) -> None:
        self.last: float | None = None

    def __call__(self, *_: object) -> None:
        now = time.monotonic()
        if self.last is None or now - self.last > self.GRACE_S:
            self.last = now
            raise KeyboardInterrupt


interrupts = Interrupts()


def main() -> None:
    """The entry point: runs a command and turns what went wrong into one line and an exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a job in the background of a script
        signal.signal(signal.SIGINT, interrupts)
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said; the interpreter's own end would only complain
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return code or _fail(f"cannot write the result to standard output: {error.strerror}", 2)
    return code


def _run(arguments: list[str]) -> int:
    logging.getLogger("fpquant").addHandler(notes)
    try:
        result: Any = app(args=arguments, prog_name="fpquant", standalone_mode=False)
        if result == INTERRUPTED:  # what typer makes of KeyboardInterrupt
            return _fail("interrupted", INTERRUPTED)
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except FpquantError as error:
        return _fail(str(error), 2)
    except MemoryError as error:
        return _fail(f"out of memory: {error}; use a smaller model, --seq-len or window, or more memory", 2)
    except Exception as error:
        kind = {c.__name__ for c in type(error).__mro__}
        if interrupts.last is not None or "Abort" in kind:  # a library may have made another exception of it
            return _fail("interrupted", INTERRUPTED)
        if "NoArgsIsHelpError" in kind:
            return 2
        if "ClickException" in kind:
            command = getattr(getattr(error, "ctx", None), "command_path", "fpquant")
            return _fail(f"{error.format_message().rstrip('.')}; see {command} --help", 2)  # type: ignore[attr-defined]
        if "OutOfMemoryError" in kind:
            return _fail(
                f"the GPU is out of memory ({str(error).splitlines()[0]}); try --seq-len 256 or --device cpu", 2
            )
        if isinstance(error, OSError):
            return _fail(f"{error}; check that path, its permissions and the free space", 2)
        raise


def _fail(message: str, code: int) -> int:
    stderr.print(Text.assemble(("error:", "red"), " ", " ".join(message.split())), soft_wrap=True)
    return code
