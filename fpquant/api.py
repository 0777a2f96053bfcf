"""What the CLI calls and a notebook imports: calibrate, quantize, load, evaluate, compare, generate."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fpquant import __version__, checkpoint, models
from fpquant.activations import InputQuantizer
from fpquant.cache import check_file_place
from fpquant.calibration.activations import InputScores, score_inputs
from fpquant.calibration.data import (
    TokenData,
    calibration_data,
    check_calibration,
    check_evaluation,
    evaluation_data,
)
from fpquant.calibration.fisher import fisher_pass
from fpquant.calibration.pipeline import (
    MatrixScales,
    check_range,
    check_weights,
    choose_scales,
    matrix_scales,
    quantize_weights,
)
from fpquant.calibration.sensitivity import (
    Sensitivity,
    SensitivityKey,
    clip_path,
    default_path,
    load_clips,
    load_sensitivity,
    model_fingerprint,
    save_clips,
    save_sensitivity,
    sensitivity_of,
)
from fpquant.errors import FpquantError, unknown
from fpquant.evaluation import compare as compare_
from fpquant.evaluation import tasks as tasks_
from fpquant.evaluation.compared import Compared
from fpquant.evaluation.inplace import InPlace
from fpquant.evaluation.perplexity import perplexity
from fpquant.evaluation.plan import Plan, make_plan
from fpquant.evaluation.records import Result
from fpquant.evaluation.store import Store, check_directory
from fpquant.linear import QuantLinear, activation_counts, prepack_on_gpu
from fpquant.models import LoadedModel, Skipped, find_modules, load_model, pick_device
from fpquant.packing import BlockMixedTensor
from fpquant.progress import Track, no_progress
from fpquant.recipe import Recipe, load_recipe, override
from fpquant.report import comparison, plots
from fpquant.report.card import model_card
from fpquant.schemes import Pair, block_count

TASKS = ("perplexity", *tasks_.TASKS)
WINDOW = 2048
"""Tokens of an evaluation window, where nothing else is asked for."""

_log = logging.getLogger("fpquant")


@dataclass
class Stages:
    """How long each stage took, in seconds, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Calibration:
    """A quantized model in memory, and how it came about. `summary` is what `fpquant calibrate` prints."""

    model: Any
    tokenizer: Any
    recipe: Recipe
    config: dict[str, Any]
    record: dict[str, Any]
    summary: dict[str, Any]
    skipped: tuple[Skipped, ...]
    stored_dtype: torch.dtype
    out: Path | None = None
    measured: dict[str, list[Result]] = field(default_factory=dict)


def calibrate(
    model: str,
    recipe: Recipe | str | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    sensitivity: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    evaluate_on: str | None = None,
    track: Track = no_progress,
    **settings: Any,
) -> Calibration:
    """Quantize a model and write it: the whole of `fpquant calibrate`.

    model: a hub id, a directory, a .gguf file or `demo`. recipe: a Recipe, a recipe's name or a YAML file; `settings`
    (ratio, pair, policy, dataset, samples, ...) override it. out: the directory to write, by default named after
    model, recipe or pair, and ratio. sensitivity: a file to reuse or to write (default: the cache). evaluate_on: a
    data set to measure perplexity on before and after.
    Raises FpquantError, with nothing written, for anything the user can mend.
    """
    chosen = resolve_recipe(recipe, **settings)
    target = Path(out).expanduser() if out is not None else default_out(model, chosen)
    checkpoint.prepare_out(target, overwrite, Path(model).expanduser())
    if sensitivity is not None:
        check_file_place(Path(sensitivity).expanduser(), "--sensitivity")
    check_original(model)
    if chosen.needs_data:
        check_calibration(chosen.dataset, chosen.samples, chosen.seq_len)
    if evaluate_on is not None:
        check_evaluation(evaluate_on, WINDOW, None)
    stages = Stages()
    with stages.timed("load"):
        loaded = load_model(model, device=pick_device(device), dtype=dtype, trust_remote_code=trust_remote_code)
    measured = {}
    window = min(WINDOW, _positions(loaded))
    if evaluate_on is not None:
        with stages.timed("evaluate"):
            measured["original"] = evaluate(loaded, dataset=evaluate_on, window=window, track=track)
    result = _quantize(loaded, chosen, sensitivity, stages, track)
    if evaluate_on is not None:
        prepack_on_gpu(result.model)  # else left as it is written: compiling a kernel may take longer than the rest
        with stages.timed("evaluate"):
            measured["quantized"] = evaluate(loaded, dataset=evaluate_on, window=window, track=track)
    record = result.record | {"evaluation": {k: [r.to_dict() for r in rs] for k, rs in measured.items()}}
    return save(replace(result, record=record, measured=measured), target, overwrite=overwrite, stages=stages)


def check_original(model: str) -> None:
    """Raise FpquantError, in seconds, for a model that is not to be had, or that was quantized by fpquant."""
    models.check_model(model)
    if checkpoint.is_quantized(Path(model).expanduser()):
        raise FpquantError(f"{model} is quantized already; give the model that it was made from")


def evaluation_of(recipe: Recipe, dataset: str | None) -> str:
    """The data set to evaluate on: the one given, or the held-out part of a named calibration set."""
    if dataset is not None:
        return dataset
    if recipe.dataset in ("wikitext", "vital-articles"):
        return recipe.dataset
    raise FpquantError(
        f"--eval on the calibration text {recipe.dataset} would flatter the result; name other text with --eval-dataset"
    )


def quantize(
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    sensitivity: str | Path | None = None,
    stages: Stages | None = None,
    track: Track = no_progress,
) -> Calibration:
    """Quantize a loaded model in memory: its linear modules become QuantLinears. Nothing but the cache is written."""
    result = _quantize(loaded, recipe, sensitivity, stages or Stages(), track)
    prepack_on_gpu(result.model)
    return result


def _quantize(
    loaded: LoadedModel, recipe: Recipe, sensitivity: str | Path | None, stages: Stages, track: Track
) -> Calibration:
    model = loaded.model
    modules, skipped = find_modules(model, recipe.include, recipe.exclude)
    with stages.timed("check"):
        check_weights(model.named_parameters())
        check_range(modules, recipe.weights)
    known, data = None, recipe_data(loaded, recipe) if recipe.needs_data else None
    if recipe.needs_sensitivity:
        with stages.timed("sensitivity"):
            known = find_sensitivity(loaded, modules, recipe, sensitivity, track, data)
    statistics = known.modules if known else None
    scores = None
    if recipe.inputs is not None:
        assert data is not None
        with stages.timed("activations"):
            scores = score_inputs(
                model, modules, recipe.inputs, recipe.policy, data.ids, statistics, seed=recipe.seed, track=track
            )
    of_matrices = matrix_scales(modules, recipe)
    with stages.timed("clip"):
        scales = _clipped_scales(modules, recipe, known, of_matrices, track)
    with stages.timed("assign and pack"):
        packed, assignment = quantize_weights(modules, recipe, statistics, scales, of_matrices, track)
        inputs: dict[str, InputQuantizer] = {}
        of_inputs: dict[str, Any] | None = None
        if scores is not None:
            assert recipe.threshold is not None
            high = None if assignment is None else assignment.high
            inputs, of_inputs = scores.quantizers(recipe.input_ratio, recipe.threshold, high)
        for name, tensor in packed.items():
            replace_by_quant_linear(model, name, tensor, inputs.get(name))
        _check_runs(model)
    settings = {
        "ratio": None if recipe.weights.is_uniform else recipe.ratio,
        "policy": None if recipe.weights.is_uniform else recipe.policy,
        "clip": recipe.clip,
        "threshold": None if assignment is None else _threshold_record(recipe, assignment.thresholds),
        "seed": recipe.seed,
        "signed": recipe.signed,
        "activations": of_inputs,
    }
    specs = {n: checkpoint.ModuleSpec(t.shape, t.high_blocks, recipe.inputs) for n, t in packed.items()}
    config = checkpoint.quantization_config(specs, recipe.weights, settings)
    _attach(model, config)
    summary = _summary(loaded, recipe, packed, skipped)
    summary["ratio_achieved"] = None if assignment is None else assignment.ratio
    summary["threshold"] = settings["threshold"]
    summary["activations"] = of_inputs
    summary["gradients"] = None if known is None else {k: known.record[k] for k in ("nonfinite", "saturated")}
    record = {
        "fpquant": __version__,
        "versions": _versions(),
        "model": loaded.name,
        "recipe": recipe.to_dict(),
        "sensitivity": None if known is None else {"data": known.key.data, "model": known.key.model, **known.record},
        "skipped": [{"name": s.name, "weights": s.weights, "reason": s.reason} for s in skipped],
    }
    return Calibration(model, loaded.tokenizer, recipe, config, record, summary, tuple(skipped), loaded.stored_dtype)


@torch.inference_mode()
def _check_runs(model: Any) -> None:
    """Raise FpquantError where a model's own code does not work with packed weights (it reads `.weight` itself)."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    try:
        model(input_ids=ids, use_cache=False)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FpquantError(
            f"the model's code does not work with packed weights ({first}); --exclude the modules whose weight it reads"
        ) from error


def save(result: Calibration, out: str | Path, *, overwrite: bool = False, stages: Stages | None = None) -> Calibration:
    """Write a quantized model as a directory; with `overwrite` in the place of a model that `out` holds."""
    target = Path(out)
    checkpoint.prepare_out(target, overwrite)
    seconds = {k: round(v, 2) for k, v in (stages or Stages()).seconds.items()}
    summary = result.summary | {"seconds": seconds, "peak_memory_bytes": peak_memory()}
    record = result.record | {"results": summary}
    checkpoint.save_checkpoint(
        result.model,
        result.tokenizer,
        target,
        config=result.config,
        record=record,
        card=model_card(result.record["model"], result.config, summary),
        stored_dtype=result.stored_dtype,
    )
    summary |= {"tensor_bytes": checkpoint.tensor_bytes(target)}
    return replace(result, record=record, summary=summary, out=target)


def find_sensitivity(
    loaded: LoadedModel,
    modules: Mapping[str, nn.Module],
    recipe: Recipe,
    path: str | Path | None = None,
    track: Track = no_progress,
    data: TokenData | None = None,
) -> Sensitivity:
    """The Sensitivity of these modules and the recipe's data: read where it is kept, or else made and kept.

    data: the recipe's, where it is at hand.
    """
    data = data or recipe_data(loaded, recipe)
    dtype = str(next(iter(modules.values())).weight.dtype).removeprefix("torch.")
    key = SensitivityKey(model=model_fingerprint(loaded.model, modules), data=data.fingerprint, dtype=dtype)
    file = Path(path).expanduser() if path is not None else default_path(key)
    if file.is_file():
        try:
            return load_sensitivity(file, key, modules)
        except FpquantError as error:
            if path is not None:
                raise
            _log.warning("%s; it is made anew", error)
    start = time.perf_counter()
    result = fisher_pass(loaded.model, modules, data.ids, track=track)
    record = {
        "model": loaded.name,
        "dataset": recipe.dataset,
        "samples": recipe.samples,
        "seq_len": recipe.seq_len,
        "seed": recipe.seed,
        "dtype": dtype,
        "seconds": round(time.perf_counter() - start, 2),
    }
    made = sensitivity_of(result, key, record)
    try:
        return save_sensitivity(made, file)
    except FpquantError as error:
        if path is not None:
            raise
        _log.warning("%s; going on without keeping the sensitivity", error)
        return made


def recipe_data(loaded: LoadedModel, recipe: Recipe) -> TokenData:
    """The calibration data of a recipe, as the model's tokens."""
    _check_length(loaded, recipe.seq_len, "--seq-len")
    return calibration_data(
        recipe.dataset, loaded.tokenizer, samples=recipe.samples, seq_len=recipe.seq_len, seed=recipe.seed
    )


def _clipped_scales(
    modules: Mapping[str, nn.Module],
    recipe: Recipe,
    known: Sensitivity | None,
    of_matrices: MatrixScales,
    track: Track,
) -> dict[str, torch.Tensor]:
    statistics = known.modules if known else None
    if recipe.clip == "none" or known is None or known.path is None or recipe.clip is None:
        return choose_scales(modules, recipe, statistics, of_matrices, track)
    kind = f"{recipe.clip}-portable" if recipe.has_portable_scales else recipe.clip
    path = clip_path(known.path, recipe.weights.low.name, kind)
    shapes = {}
    for name, module in modules.items():
        out_features, in_features = models.weight_of(module).shape
        shapes[name] = (out_features, block_count(in_features))
    kept = load_clips(path, known.key, shapes)
    if kept is None:
        kept = choose_scales(modules, recipe, statistics, of_matrices, track)
        try:
            save_clips(kept, known.key, path)
        except FpquantError as error:
            _log.warning("%s; going on without keeping the clipped scales", error)
    return kept


def replace_by_quant_linear(
    model: nn.Module, name: str, packed: BlockMixedTensor, inputs: InputQuantizer | None = None
) -> None:
    """Put a QuantLinear over `packed` in the place of a linear module, with its bias."""
    old = model.get_submodule(name)
    bias = getattr(old, "bias", None)
    new = QuantLinear.from_packed(packed, bias if isinstance(bias, nn.Parameter) else None)
    if inputs is not None:
        new.quantize_inputs(inputs)
    checkpoint.replace_module(model, name, new)


def load(directory: str | Path, *, device: str = "auto", dtype: str = "auto", verify: bool = True) -> Any:
    """Open a quantized model directory; the model is in evaluation mode.

    Checks structure, and with `verify` the recorded sha256 of each shard (1.2 s a GB). Raises FpquantError, naming
    the shard or tensor, for anything damaged or incomplete. For the tokenizer use transformers.AutoTokenizer.
    """
    return open_model(
        str(directory), device=device, dtype=dtype, verify=verify, must_be_quantized=True, with_tokenizer=False
    ).model


def open_model(
    spec: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    verify: bool = True,
    must_be_quantized: bool = False,
    with_tokenizer: bool = True,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Open any model, quantized or not; a quantized directory is checked first."""
    directory = Path(spec).expanduser()
    if must_be_quantized and not directory.is_dir():
        raise FpquantError(f"no such directory: {spec}; give the --out of `fpquant calibrate`")
    if must_be_quantized or checkpoint.is_quantized(directory):
        config = checkpoint.read_config(directory)
        pair, specs = checkpoint.parse_config(config["quantization_config"])
        if verify:
            checkpoint.check_hashes(directory)
        checkpoint.check_headers(checkpoint.shards(directory), pair, specs)
    return load_model(
        spec,
        device=pick_device(device),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        with_tokenizer=with_tokenizer,
    )


def evaluate(
    model: str | LoadedModel,
    *,
    tasks: tuple[str, ...] = ("perplexity",),
    dataset: str = "wikitext",
    window: int = WINDOW,
    limit: int | None = None,
    data_dir: str | Path | None = None,
    shots: int = tasks_.SHOTS,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    track: Track = no_progress,
) -> list[Result]:
    """Measure a model: a spec as in `calibrate`, a quantized directory, or one already loaded.

    tasks: `perplexity`, on `dataset` in windows of `window` tokens, and question tasks through lm-eval, whose data come
    from `data_dir` or the hub; `shots` are MMLU's examples, `batch_size` prompts share a forward pass. limit: only the
    first windows, and the first questions (of MMLU, of each subject). Raises FpquantError, before the model is loaded,
    for a task or data that is not to be had.
    """
    for task in tasks:
        if task not in TASKS:
            raise unknown("task", task, TASKS)
    if batch_size is not None and batch_size < 1:
        raise FpquantError(f"--batch-size must be at least 1, got {batch_size}")
    if isinstance(model, str):
        models.check_model(model)
    if "perplexity" in tasks:
        check_evaluation(dataset, window, limit)
    if limit is not None and limit < 1:
        raise FpquantError(f"--limit must be at least 1, got {limit}")
    questions = {t: tasks_.load_task(t, data_dir, shots=shots) for t in tasks if t != "perplexity"}
    loaded = (
        open_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        if isinstance(model, str)
        else model
    )
    results = []
    for task in dict.fromkeys(tasks):
        if task == "perplexity":
            _check_length(loaded, window, "--window")
            data = evaluation_data(dataset, loaded.tokenizer, window=window, limit=limit)
            activation_counts(loaded.model, reset=True)
            result = perplexity(loaded.model, loaded.tokenizer, data, track=track)
            results.append(replace(result, activations=activation_counts(loaded.model)))
        else:
            with _dense_on_cpu(loaded.model):
                results += tasks_.measure(questions[task], loaded, limit=limit, batch_size=batch_size, track=track)
    return results


def compare(
    model: str,
    plan: Plan | None = None,
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    batch_size: int | None = None,
    sensitivity: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    track: Track = no_progress,
    **settings: Any,
) -> Compared:
    """Measure policies x ratios, the original and uniform schemes on one loaded model: the whole of `fpquant compare`.

    plan: what to measure; `settings` (policies, ratios, datasets, calibration_dataset, samples, limit, tasks, ...; see
    Plan) override it. The weights take each row's values in place, from one calibration pass. Finished rows are kept
    in `out`, by default named after the model: a comparison that was interrupted goes on, and more policies or ratios
    are added to what is there. results.json, results.csv, plots and report.html lie there at the end.
    Raises FpquantError for anything the user can mend, and where `out` holds another comparison; finished rows stay.
    """
    chosen = make_plan(plan, **settings)
    target = Path(out).expanduser() if out is not None else Path(f"{default_name(model)}-compare")
    plots.check()
    check_directory(target)
    check_original(model)
    chosen.check_data()
    questions = [tasks_.load_task(t, data_dir, shots=chosen.shots) for t in chosen.tasks]
    loaded = load_model(model, device=pick_device(device), dtype=dtype, trust_remote_code=trust_remote_code)
    _check_length(loaded, chosen.window, "--window")
    modules, _ = find_modules(loaded.model, chosen.include, chosen.exclude)
    check_weights(loaded.model.named_parameters())
    recipe = chosen.recipe(pair=chosen.pair)
    check_range(modules, recipe.weights)
    data = recipe_data(loaded, recipe)
    corpora = [
        compare_.Corpus.of(
            loaded,
            evaluation_data(d, loaded.tokenizer, window=chosen.window, limit=chosen.limit),
            chosen.kl_windows,
        )
        for d in chosen.datasets
    ]
    fingerprint = {
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "model": f"{loaded.name} {model_fingerprint(loaded.model, modules)[:16]}",
        "calibration": f"{chosen.samples} x {chosen.seq_len} tokens {data.fingerprint[:16]}",
        "evaluation": [
            f"{c.data.source}, {len(c.data.ids)} x {chosen.window} tokens {c.data.fingerprint[:16]}" for c in corpora
        ],
        "kl_windows": [len(c.chosen) for c in corpora],
        "tasks": [f"{q.task} from {q.source}, {q.shots} shots, limit {chosen.limit}" for q in questions],
        "fpquant_version": __version__,
    }
    store = Store(target, fingerprint)
    cells = compare_.cells(chosen, modules)
    rows = [row for cell in cells if (row := compare_.kept_row(store, cell))]
    if len(rows) < len(cells):
        known = find_sensitivity(loaded, modules, recipe, sensitivity, track, data)
        recipes = {
            c.recipe.clip: c.recipe for c in cells if c.recipe is not None and c.recipe.clip not in (None, "none")
        }
        clipped = {}
        for clip, of_clip in recipes.items():
            of_matrices = matrix_scales(modules, of_clip)
            clipped[str(clip)] = _clipped_scales(modules, of_clip, known, of_matrices, track)

        def inputs(pair: Pair, policy: str) -> InputScores:
            return score_inputs(
                loaded.model, modules, pair, policy, data.ids, known.modules, seed=chosen.seed, track=track
            )

        quantizer = InPlace(modules, known.modules, clipped, inputs)
        comparer = compare_.Comparer(loaded, quantizer, corpora, questions, store, chosen.limit, batch_size, track)
        rows = comparer.rows(cells)
    compared = Compared.of(loaded.name, chosen, rows, _versions(), target)
    comparison.write(compared)
    return compared


@contextmanager
def _dense_on_cpu(model: Any) -> Iterator[None]:
    """On a CPU the QuantLinears keep their dense weights within: decoding them anew for a short prompt, or for each
    token, would take most of the time."""
    on_cpu = model.device.type == "cpu"
    cached = [m for m in checkpoint.quant_modules(model).values() if on_cpu and not m.has_cached_dense]
    try:
        for module in cached:
            module.cache_dense(model.dtype)
        yield
    finally:
        for module in cached:
            module.cache_dense(None)


def generate(
    model: str | LoadedModel, prompt: str, *, max_new_tokens: int = 64, device: str = "auto", dtype: str = "auto"
) -> str:
    """Greedy continuation of a prompt (through the chat template where the model has one is left to the caller)."""
    from transformers import GenerationConfig

    loaded = open_model(model, device=device, dtype=dtype) if isinstance(model, str) else model
    network, tokenizer = loaded.model, loaded.tokenizer
    encoded = tokenizer(prompt, return_tensors="pt").to(network.device)
    inputs = {k: encoded[k] for k in ("input_ids", "attention_mask")}
    if inputs["input_ids"].numel() == 0:
        raise FpquantError("the prompt is empty; give --prompt some text")
    stop = network.generation_config.eos_token_id
    pad = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), None)
    settings = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=pad)
    with _dense_on_cpu(network):
        tokens = network.generate(**inputs, generation_config=settings)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def resolve_recipe(recipe: Recipe | str | None, **settings: Any) -> Recipe:
    """A recipe from its name, file or nothing, with settings that are not None put over it."""
    base = load_recipe(recipe) if isinstance(recipe, str) else recipe or Recipe()
    return override(base, **settings)


def default_out(model: str, recipe: Recipe) -> Path:
    """The directory name that says model, recipe or pair, and ratio."""
    parts = [default_name(model), recipe.name or recipe.pair.replace("/", "-")]
    if not recipe.weights.is_uniform:
        parts.append(f"{recipe.ratio:g}")
    return Path("-".join(parts))


def default_name(model: str) -> str:
    """What outputs are named after."""
    if model == "demo":
        return models.DEMO_NAME
    return Path(model).stem if model.endswith(".gguf") else Path(model).resolve().name


def peak_memory() -> dict[str, int]:
    """Peak resident memory of this process, and of its allocations on the GPU, in bytes."""
    peak = {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["cuda"] = torch.cuda.max_memory_allocated()
    return peak


def _positions(loaded: LoadedModel) -> int:
    """The longest sequence, in tokens, that a model was made for."""
    longest = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else sys.maxsize


def _check_length(loaded: LoadedModel, tokens: int, option: str) -> None:
    """Beyond its positions one kind of model fails, and another computes what it was never trained for."""
    if tokens > (longest := _positions(loaded)):
        raise FpquantError(f"{loaded.name} was made for at most {longest} tokens, got {option} {tokens}; lower it")


def _attach(model: Any, config: dict[str, Any]) -> None:
    from fpquant.integrations.transformers import attach

    attach(model, config)


def _threshold_record(recipe: Recipe, limits: Mapping[str, float]) -> float | str | dict[str, float | str]:
    as_json = {n: t if abs(t) != float("inf") else str(t) for n, t in limits.items()}
    return as_json if recipe.threshold == "local" else next(iter(as_json.values()))


def _summary(
    loaded: LoadedModel, recipe: Recipe, packed: Mapping[str, BlockMixedTensor], skipped: list[Skipped]
) -> dict[str, Any]:
    weights = sum(t.shape[0] * t.shape[1] for t in packed.values())
    stored = sum(t.nbytes for t in packed.values())
    return {
        "model": loaded.name,
        "pair": recipe.pair,
        "modules": len(packed),
        "weights": weights,
        "bits_per_weight": 8 * stored / weights,
        "original_bits_per_weight": 8 * loaded.stored_dtype.itemsize,
        "quantized_bytes": stored,
        "skipped_modules": len(skipped),
        "skipped_weights": sum(s.weights for s in skipped),
    }


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
