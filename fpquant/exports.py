"""A quantized directory in a form that other tools open without fpquant.

Streaming: shard by shard, a module at a time, on the CPU; nothing but the shard that is being filled is held.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fpquant import compressed
from fpquant.activations import INPUTS, InputQuantizer, check_inputs
from fpquant.cache import written_whole
from fpquant.checkpoint import (
    RECORD_FILE,
    SHARD_BYTES,
    ModuleSpec,
    check_hashes,
    check_headers,
    install_empty,
    parse_config,
    prepare_out,
    read_config,
    readable,
    shards,
)
from fpquant.errors import FpquantError, unknown
from fpquant.models import is_conv1d, model_on_meta, pick_dtype
from fpquant.packing import STREAMS, BlockMixedTensor, check, unpack
from fpquant.schemes import NVFP4, Pair, Scheme

EXPORTS = ("dequantized", "compressed-tensors")


def export(
    directory: str | Path,
    out: str | Path,
    *,
    to: str = "dequantized",
    dtype: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write a quantized directory as one that needs no fpquant.

    to: `dequantized`, an ordinary model, each weight rounded once to the dtype; or `compressed-tensors`, of which see
    fpquant.compressed, with the checkpoint's own codes and scales, for models whose layers are each nvfp4 or fp8.
    dtype: of what is not quantized there, float32, bfloat16 or float16; `auto` leaves it as it is, except beside nvfp4
    in compressed-tensors, whose readers decode that to bfloat16 and need the rest to be so too.
    Raises FpquantError, with nothing written, for what the form cannot hold, and for a directory that is damaged.
    """
    if to not in EXPORTS:
        raise unknown("export", to, EXPORTS)
    given, target = Path(directory).expanduser(), Path(out).expanduser()
    prepare_out(target, overwrite, given)
    source = Checkpoint.open(given, trust_remote_code)
    cast = None if dtype == "auto" else pick_dtype(dtype, torch.device("cpu"), source.dtype)
    form: Dequantized | Compressed
    if to == "dequantized":
        form = Dequantized(source, cast or source.dtype)
    else:
        form = Compressed(source)
        cast = form.dtype_beside(cast)
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    config["dtype"] = str(cast or source.dtype).removeprefix("torch.")
    with written_whole(target) as temporary:
        temporary.mkdir()
        _write_shards(temporary, _tensors(source, form, cast))
        (temporary / "config.json").write_text(json.dumps(config | form.config, indent=2) + "\n")
        for file in source.directory.iterdir():
            if file.is_file() and not _is_rewritten(file.name):
                shutil.copyfile(file, temporary / file.name)
    return target


@dataclass(frozen=True)
class Checkpoint:
    """A quantized directory, checked but for the content of its tensors, which are read when they are asked for.

    modules: what is quantized; conv1d: those of them whose weight is [in, out]; unquantized: the other linear modules.
    """

    directory: Path
    config: dict[str, Any]
    pair: Pair
    modules: Mapping[str, ModuleSpec]
    dtype: torch.dtype
    conv1d: frozenset[str]
    unquantized: tuple[str, ...]
    files: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path, trust_remote_code: bool) -> Checkpoint:
        if not directory.is_dir():
            raise FpquantError(f"no such directory: {directory}; give the --out of `fpquant calibrate`")
        config = read_config(directory)
        pair, modules = parse_config(config["quantization_config"])
        check_hashes(directory)
        check_headers(shards(directory), pair, modules)
        model, dtype = model_on_meta(directory, trust_remote_code)
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        conv1d = frozenset(n for n, m in model.named_modules() if is_conv1d(m))
        install_empty(model, pair, modules, dtype)
        files = {name: file for shard in shards(directory) for file in [safe_open(shard, "pt")] for name in file.keys()}  # noqa: SIM118
        tied = set(getattr(model, "all_tied_weights_keys", {}))
        if missing := [name for name in model.state_dict() if name not in files and name not in tied]:
            raise FpquantError(f"{directory} lacks {missing[0]}; the checkpoint is incomplete, copy it again")
        unquantized = tuple(n for n in linear if n not in modules)
        return cls(directory, config, pair, modules, dtype, conv1d & modules.keys(), unquantized, files)

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    def packed(self, name: str) -> BlockMixedTensor:
        """A module's weight, checked."""
        streams = {s: self.tensor(f"{name}.{s}") for s in STREAMS if f"{name}.{s}" in self.files}
        packed = BlockMixedTensor(shape=self.modules[name].shape, pair=self.pair, **streams)
        check(packed, name)
        return packed

    def inputs(self, name: str) -> InputQuantizer | None:
        """How a module's inputs are quantized, checked."""
        if (pair := self.modules[name].inputs) is None:
            return None
        quantizer = InputQuantizer(
            pair, **{t: self.tensor(f"{name}.{t}") for t in INPUTS if f"{name}.{t}" in self.files}
        )
        check_inputs(quantizer, name)
        return quantizer


class Dequantized:
    """An ordinary model. Raises FpquantError where inputs are quantized, which it could not say."""

    def __init__(self, source: Checkpoint, dtype: torch.dtype) -> None:
        if any(spec.inputs is not None for spec in source.modules.values()):
            raise FpquantError(
                "the layers' inputs are quantized, which an ordinary directory cannot say; "
                "calibrate without --activations"
            )
        self._source, self._dtype = source, dtype
        self.config: dict[str, Any] = {}

    def tensors(self, name: str) -> dict[str, Tensor]:
        weight = unpack(self._source.packed(name), self._dtype)
        return {"weight": weight.t().contiguous() if name in self._source.conv1d else weight}


class Compressed:
    """compressed-tensors. Raises FpquantError for what that cannot hold."""

    def __init__(self, source: Checkpoint) -> None:
        if source.conv1d:
            raise FpquantError(
                f"compressed-tensors has no form for {min(source.conv1d)}, a Conv1D; export --to dequantized"
            )
        modules = source.modules
        self._source = source
        self._schemes: dict[str, Scheme] = {n: compressed.scheme_of(n, s, source.pair) for n, s in modules.items()}
        compressed.check_siblings(self._schemes, {n: source.tensor(f"{n}.weight_global_scale") for n in modules})
        with_inputs = any(spec.inputs is not None for spec in modules.values())
        for name, spec in modules.items():
            if spec.inputs is not None:
                self._check_inputs(name, self._schemes[name])
        quantization = compressed.quantization_config(self._schemes, source.unquantized, with_inputs)
        self.config: dict[str, Any] = {"quantization_config": quantization}

    def dtype_beside(self, asked: torch.dtype | None) -> torch.dtype | None:
        """What the rest is stored in, None as it is. Raises FpquantError for what readers could not multiply by."""
        if NVFP4 not in self._schemes.values():
            return asked
        if asked not in (None, torch.bfloat16):
            name = str(asked).removeprefix("torch.")
            raise FpquantError(f"compressed-tensors decodes nvfp4 to bfloat16, got --dtype {name}; leave it out")
        return torch.bfloat16

    def _check_inputs(self, name: str, scheme: Scheme) -> None:
        """Inputs of a pair are all of the weight's scheme, which their thresholds say, or are refused."""
        inputs = self._source.inputs(name)
        assert inputs is not None
        if inputs.input_threshold is None:
            same = inputs.pair.low is scheme
        else:
            same = float(inputs.input_threshold) == (torch.inf if inputs.pair.low is scheme else -torch.inf)
        if not same:
            raise FpquantError(
                f"the inputs of {name} are not all {scheme.name} as its weight is; calibrate with --threshold layer"
            )

    def tensors(self, name: str) -> dict[str, Tensor]:
        return compressed.tensors(self._source.packed(name), self._schemes[name], self._source.inputs(name))


def _tensors(
    source: Checkpoint, form: Dequantized | Compressed, cast: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the export by name. cast: what floating-point tensors beside the modules become."""
    done = set()
    for key in source.files:
        name, _, part = key.rpartition(".")
        if name not in source.modules or part not in (*STREAMS, *INPUTS):
            tensor = source.tensor(key)
            yield key, tensor.to(cast) if cast is not None and tensor.is_floating_point() else tensor
        elif name not in done:
            done.add(name)
            yield from ((f"{name}.{part}", tensor) for part, tensor in form.tensors(name).items())


def _write_shards(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors in shards as save_pretrained does: one file, or several and their index."""
    parts: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        path = directory / f"part-{len(parts):05}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        parts.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for i, (path, names) in enumerate(parts, 1):
        final = "model.safetensors" if len(parts) == 1 else f"model-{i:05}-of-{len(parts):05}.safetensors"
        path.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    readable(directory)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _is_rewritten(name: str) -> bool:
    """Whether a file of the directory is about the quantized weights, and has no place in the export."""
    return name in ("config.json", "README.md", RECORD_FILE) or name.endswith(
        (".safetensors", ".safetensors.index.json")
    )
