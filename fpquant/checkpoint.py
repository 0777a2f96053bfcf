"""The quantized model directory: save and load are inverses.

A Hugging Face directory whose config.json carries `quantization_config`, plus fpquant.json: the record of how it was
made, with the sha256 of each shard. ARCHITECTURE.md lists the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fpquant.activations import INPUTS, InputQuantizer, check_input_pair, check_inputs, input_sizes
from fpquant.cache import check_place, written_whole
from fpquant.errors import FpquantError
from fpquant.linear import QuantLinear
from fpquant.models import is_conv1d
from fpquant.packing import STREAMS, BlockMixedTensor, check, stream_sizes
from fpquant.schemes import BLOCK_SIZE, Pair, block_count, get_pair

QUANT_METHOD = "fpquant"
FORMAT_VERSION = 1
RECORD_FILE = "fpquant.json"
SHARD_BYTES = 5 * 10**9
"""No shard is larger, unless one tensor is."""
MAX_FEATURES = 1 << 24

# What a model directory is made of, and all that --overwrite may take away.
_MODEL_FILE = re.compile(
    r".*\.(safetensors|json|jinja|model|png|svg)|README\.md|LICENSE.*|(merges|vocab)\.txt|\.gitattributes"
)

_DTYPE_NAMES = {torch.uint8: "U8", torch.float32: "F32"}


@dataclass(frozen=True)
class ModuleSpec:
    """What config.json says of a quantized module: every stream's size follows from it. inputs: what its inputs are
    quantized to, None where they are not."""

    shape: tuple[int, int]
    high_blocks: int
    inputs: Pair | None = None

    def sizes(self, pair: Pair) -> dict[str, tuple[int, torch.dtype]]:
        """{tensor: (elements, type)}: the streams of the weight, and the numbers that inputs are quantized by."""
        inputs = input_sizes(self.shape[1], self.inputs)
        return stream_sizes(self.shape, pair, self.high_blocks) | {n: (k, torch.float32) for n, k in inputs.items()}


def quantization_config(packed: Mapping[str, ModuleSpec], pair: Pair, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of config.json. settings: ratio, policy, clip, threshold, seed, activations (None, or
    their pair, ratio and threshold)."""
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        ("scheme" if pair.is_uniform else "pair"): pair.name,
        "block_size": BLOCK_SIZE,
        "activations": None,
        **settings,
        "modules": {n: {"shape": list(m.shape), "high_blocks": m.high_blocks} for n, m in sorted(packed.items())},
    }


def parse_config(config: Mapping[str, Any]) -> tuple[Pair, dict[str, ModuleSpec]]:
    """(pair, modules) of a `quantization_config`. Raises FpquantError where it is not one that this version reads."""
    if (version := config.get("format_version")) != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        remedy = "update fpquant" if newer else "the checkpoint is damaged"
        raise FpquantError(f"checkpoint format version {version!r} is not {FORMAT_VERSION}; {remedy}")
    if config.get("block_size") != BLOCK_SIZE or not isinstance(config.get("modules"), Mapping):
        raise FpquantError("quantization_config lacks block_size 16 or modules; the checkpoint is damaged")
    if ("pair" in config) == ("scheme" in config):
        raise FpquantError("quantization_config needs pair or scheme; the checkpoint is damaged")
    pair, inputs = get_pair(str(config.get("pair") or config.get("scheme"))), None
    if (activations := config.get("activations")) is not None:
        if not isinstance(activations, Mapping) or "pair" not in activations:
            raise FpquantError(
                f"quantization_config has activations {activations!r}, without pair; the checkpoint is damaged"
            )
        inputs = get_pair(str(activations["pair"]))
        check_input_pair(inputs)
    return pair, {str(name): _parse_module(name, m, pair, inputs) for name, m in config["modules"].items()}


def _parse_module(name: object, module: Any, pair: Pair, inputs: Pair | None) -> ModuleSpec:
    try:
        out_features, in_features = module["shape"]
        high = module["high_blocks"]
        numbers = (out_features, in_features, high)
        valid = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        valid = valid and 0 < out_features <= MAX_FEATURES and 0 < in_features <= MAX_FEATURES
        valid = valid and 0 <= high <= (0 if pair.is_uniform else out_features * block_count(in_features))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise FpquantError(
            f"quantization_config describes {name} as {module!r}, which is no weight; the checkpoint is damaged"
        )
    return ModuleSpec((out_features, in_features), high, inputs)


def install_empty(model: nn.Module, pair: Pair, modules: Mapping[str, ModuleSpec], dtype: torch.dtype) -> None:
    """Put QuantLinears of the right sizes in the place of a model's linear modules, on the device they are on."""
    for name, spec in modules.items():
        try:
            old = model.get_submodule(name)
        except AttributeError as error:
            raise FpquantError(
                f"the model has no module {name}, which the checkpoint quantizes; it is damaged"
            ) from error
        weight = getattr(old, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise FpquantError(
                f"module {name}, which the checkpoint quantizes, is not linear; the checkpoint is damaged"
            )
        shape = tuple(weight.shape[::-1] if is_conv1d(old) else weight.shape)
        if shape != spec.shape:
            raise FpquantError(f"module {name} is {shape}, the checkpoint says {spec.shape}; the checkpoint is damaged")
        new = QuantLinear(
            spec.shape[1],
            spec.shape[0],
            pair,
            high_blocks=spec.high_blocks,
            inputs=spec.inputs,
            bias=getattr(old, "bias", None) is not None,
            dtype=dtype,
            device=weight.device,
        )
        replace_module(model, name, new)


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where `name` is, in the mode (training or evaluation) of what was there."""
    parent, _, child = name.rpartition(".")
    new.train(model.get_submodule(name).training)
    if isinstance(new, QuantLinear):
        new.name = name
    setattr(model.get_submodule(parent), child, new)


def quant_modules(model: nn.Module) -> dict[str, QuantLinear]:
    """The QuantLinears of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def save_checkpoint(
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    card: str,
    stored_dtype: torch.dtype,
) -> None:
    """Write a quantized model whole, or not at all; a directory that `out` names is replaced.

    What is not quantized is stored in `stored_dtype`. record: what fpquant.json holds besides the shards' sha256;
    card: the text of README.md.
    """
    kept = {f"{name}.{tensor}" for name in config["modules"] for tensor in (*STREAMS, *INPUTS)}
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}  # one tensor stays one (a tied head)
    state = {}
    for name, t in model.state_dict().items():
        if name in kept or not t.is_floating_point() or t.dtype == stored_dtype:
            state[name] = t
        else:
            state[name] = cast.setdefault((t.data_ptr(), t.shape), t.to(stored_dtype))
    with written_whole(out) as temporary:
        with _without_quantizer(model):
            _save_pretrained(model, temporary, state_dict=state)
        path = temporary / "config.json"
        whole = json.loads(path.read_text())
        whole["quantization_config"] = dict(config)
        whole["dtype"] = str(stored_dtype).removeprefix("torch.")
        path.write_text(json.dumps(whole, indent=2) + "\n")
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card)
        hashes = {shard.name: sha256(shard) for shard in shards(temporary)}
        (temporary / RECORD_FILE).write_text(json.dumps({**record, "sha256": hashes}, indent=2) + "\n")


@contextmanager
def _without_quantizer(model: Any) -> Iterator[None]:
    """save_pretrained would ask a quantizer for the state, and not write the one it is given."""
    quantizer = model.__dict__.pop("hf_quantizer", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer


def _save_pretrained(model: Any, directory: Path, **options: Any) -> None:
    """save_pretrained, with shards that others may read."""
    model.save_pretrained(directory, max_shard_size=SHARD_BYTES, **options)
    readable(directory)


def readable(directory: Path) -> None:
    """Give shards the permissions that other files get: safetensors makes files that only their owner reads."""
    mask = os.umask(0)  # there is no reading umask without setting it
    os.umask(mask)
    for shard in directory.glob("*.safetensors"):
        shard.chmod(0o666 & ~mask)


def prepare_out(out: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuse, before any work, an output directory that holds something or cannot be written.

    With `overwrite` one that holds a model is accepted, to be replaced at the end; never any other, and never one that
    holds `source`, the model that is read.
    """
    check_place(out, "--out")
    if not out.exists():
        return
    if not out.is_dir():
        raise FpquantError(f"output {out} is a file; choose another --out")
    if os.path.ismount(out):
        raise FpquantError(f"output directory {out} is a mount point, which no rename can fill; choose one inside it")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise FpquantError(f"output directory {out} is not empty; choose another --out or pass --overwrite")
    if source is not None and source.exists() and source.resolve().is_relative_to(out.resolve()):
        raise FpquantError(f"output directory {out} holds the model that is read; choose another --out")
    foreign = [f.name for f in sorted(out.iterdir()) if not (f.is_file() and _MODEL_FILE.fullmatch(f.name))]
    if foreign or not (out / "config.json").is_file():
        why = f"holds {foreign[0]}, which is no part of a model" if foreign else "holds no model"
        raise FpquantError(f"output directory {out} {why}, so --overwrite leaves it alone; choose another --out")


def shards(directory: Path) -> list[Path]:
    """The safetensors files of a directory, in order: those its index names, where there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FpquantError(f"{index} cannot be read: {error}; it is damaged, copy it again") from error
    if wrong := [n for n in names if not isinstance(n, str) or Path(n).name != n]:
        raise FpquantError(f"{index} names {wrong[0]!r}, which is no file of this directory; it is damaged")
    if missing := sorted(n for n in names if not (directory / n).is_file()):
        raise FpquantError(f"{directory} lacks {missing[0]}; the checkpoint is incomplete, copy it again")
    return sorted(directory / n for n in names)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_bytes(directory: Path) -> int:
    """Bytes of all tensors in a directory's shards (headers not counted)."""
    return sum(shard.stat().st_size - 8 - int.from_bytes(_head(shard), "little") for shard in shards(directory))


def _head(shard: Path) -> bytes:
    with shard.open("rb") as file:
        return file.read(8)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a quantized model directory. Raises FpquantError where there is none."""
    try:
        config = json.loads((directory / "config.json").read_text())
        method = config["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FpquantError(
            f"{directory} is not a model quantized by fpquant; give the --out of `fpquant calibrate`"
        ) from error
    if method != QUANT_METHOD:
        raise FpquantError(f"{directory} was quantized by {method!r}, not by fpquant")
    return dict(config)


def is_quantized(directory: Path) -> bool:
    """Whether a directory holds a model quantized by fpquant."""
    try:
        read_config(directory)
    except FpquantError:
        return False
    return True


def read_record(directory: Path) -> dict[str, Any]:
    """fpquant.json, or an empty record where a directory has none (saved again by another tool)."""
    path = directory / RECORD_FILE
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or not isinstance(record.get("sha256", {}), dict):
            raise ValueError("it is no record of fpquant")
        return record
    except (OSError, ValueError) as error:
        raise FpquantError(f"{path} is damaged: {error}; restore it, or delete it to go without hashes") from error


def check_hashes(directory: Path) -> list[str]:
    """Compare each shard with its recorded sha256; returns the shards checked (none where none were recorded)."""
    recorded = read_record(directory).get("sha256", {})
    present = {s.name for s in shards(directory)}
    if missing := sorted(set(recorded) - present):
        raise FpquantError(f"{directory} lacks {missing[0]}; the checkpoint is incomplete, copy it again")
    for name, digest in sorted(recorded.items()):
        if sha256(directory / name) != digest:
            raise FpquantError(
                f"{directory / name} does not match its recorded sha256; it was altered or truncated, copy it again"
            )
    return sorted(recorded)


def check_headers(files: Iterable[Path], pair: Pair, modules: Mapping[str, ModuleSpec]) -> None:
    """Check, from the shards' headers alone, that every stream is there with its size and type.

    Raises FpquantError naming the shard or the tensor.
    """
    wanted = {f"{name}.{stream}": size for name, spec in modules.items() for stream, size in spec.sizes(pair).items()}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in wanted:
                        count, dtype = wanted.pop(name)
                        part = file.get_slice(name)
                        got = (part.get_dtype(), list(part.get_shape()))
                        if got != (_DTYPE_NAMES[dtype], [count]):
                            raise FpquantError(
                                f"{path}: {name} must be {_DTYPE_NAMES[dtype]} [{count}], got {got[0]} {got[1]}; "
                                "the checkpoint is damaged"
                            )
        except (SafetensorError, OSError) as error:
            raise FpquantError(f"{path} cannot be read ({error}); it is truncated or damaged, copy it again") from error
    if wanted:
        raise FpquantError(f"the checkpoint lacks {next(iter(wanted))}; it is incomplete, copy it again")


def load_packed(directory: Path) -> dict[str, BlockMixedTensor]:
    """Every quantized weight of a directory, checked, without building the model; what its inputs are quantized by is
    checked too."""
    pair, modules = parse_config(read_config(directory)["quantization_config"])
    files = shards(directory)
    check_headers(files, pair, modules)
    streams: dict[str, dict[str, torch.Tensor]] = {name: {} for name in modules}
    inputs: dict[str, dict[str, torch.Tensor]] = {name: {} for name in modules}
    for path in files:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                name, _, stream = key.rpartition(".")
                if name in modules and stream in STREAMS:
                    streams[name][stream] = file.get_tensor(key)
                elif name in modules and stream in INPUTS:
                    inputs[name][stream] = file.get_tensor(key)
    packed = {n: BlockMixedTensor(shape=spec.shape, pair=pair, **streams[n]) for n, spec in modules.items()}
    for name, t in packed.items():
        check(t, name)
    for name, spec in modules.items():
        if spec.inputs is not None:
            check_inputs(InputQuantizer(spec.inputs, **inputs[name]), name)
    return packed


def verify(directory: str | Path) -> dict[str, Any]:
    """Check structure and hashes. Returns {"modules", "shards", "hashed"}; raises FpquantError at the first fault."""
    directory = Path(directory)
    read_config(directory)
    hashed = check_hashes(directory)
    packed = load_packed(directory)
    return {"modules": len(packed), "shards": len(shards(directory)), "hashed": hashed}
