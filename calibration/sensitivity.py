"""Sensitivity: what a Fisher pass found, kept in one safetensors file with its manifest, and found again.

A Sensitivity belongs to one model and one set of token sequences; the manifest's fingerprints say which. Clipped
scales that were derived from it lie beside it, one file a scheme and kind of clipping.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fpquant.cache import cache_dir, written_whole
from fpquant.calibration.fisher import FisherResult, ModuleStatistics
from fpquant.errors import FpquantError
from fpquant.schemes import MAX_SCALE_CODE

FORMAT_VERSION = 1
_NOT_SETTINGS = ("_name_or_path", "transformers_version", "dtype", "architectures")
FIELDS = ("fisher", "input_sq", "grad_sq", "input_max")


@dataclass(frozen=True)
class SensitivityKey:
    """What must agree for a Sensitivity to be reused: fingerprints of the weights and of the token ids, and the dtype
    that the pass ran in."""

    model: str
    data: str
    dtype: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([FORMAT_VERSION, asdict(self)]).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Sensitivity:
    """Statistics by module, the key they belong to, and the record of the pass."""

    modules: dict[str, ModuleStatistics]
    key: SensitivityKey
    record: dict[str, Any]
    path: Path | None = None


def model_fingerprint(model: Any, modules: Iterable[str]) -> str:
    """A digest of what gradients depend on, and of which modules are asked about.

    Of each parameter, quantized or not: name, shape, the sum of all bit patterns and a strided sample; and the
    settings of the model's config.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_SETTINGS}
    digest = hashlib.sha256(json.dumps([sorted(modules), config], sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        bits = parameter.detach().float().contiguous().view(torch.int32).reshape(-1)
        digest.update(f"{name}{tuple(parameter.shape)}{int(bits.sum(dtype=torch.int64))}".encode())
        digest.update(bits[:: max(1, bits.numel() // 4096)].cpu().numpy().tobytes())
    return digest.hexdigest()


def default_path(key: SensitivityKey) -> Path:
    """Where the cache keeps the Sensitivity of a key."""
    return cache_dir() / "sensitivity" / f"{key.digest}.safetensors"


def sensitivity_of(result: FisherResult, key: SensitivityKey, record: Mapping[str, Any]) -> Sensitivity:
    """The Sensitivity that a Fisher pass gives, not yet kept anywhere."""
    found = {"nonfinite": result.nonfinite, "saturated": result.saturated, "loss_scale": result.loss_scale}
    return Sensitivity(result.modules, key, {**record, **found})


def save_sensitivity(sensitivity: Sensitivity, path: Path) -> Sensitivity:
    """Write a Sensitivity whole, or not at all."""
    tensors = {f"{name}.{f}": getattr(m, f).contiguous() for name, m in sensitivity.modules.items() for f in FIELDS}
    manifest = {"format_version": FORMAT_VERSION, "key": asdict(sensitivity.key), "record": sensitivity.record}
    _save(tensors, path, manifest)
    return replace(sensitivity, path=path)


def load_sensitivity(path: Path, key: SensitivityKey, names: Iterable[str]) -> Sensitivity:
    """Read a Sensitivity. Raises FpquantError, with the reason, where it is damaged or belongs to something else."""
    manifest, tensors = _load(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise FpquantError(f"{path} has format version {manifest.get('format_version')}, expected {FORMAT_VERSION}")
    try:
        theirs, record = SensitivityKey(**manifest["key"]), dict(manifest["record"])
    except (KeyError, TypeError) as error:
        raise FpquantError(f"{path} has no whole manifest ({error}); delete it or name another") from error
    for part, remedy in (
        ("dtype", "--dtype"),
        ("model", "model, --include and --exclude"),
        ("data", "data, --samples, --seq-len or --seed"),
    ):
        if getattr(theirs, part) != getattr(key, part):
            raise FpquantError(
                f"{path} was made from another {part} (its record: {json.dumps(record)}); "
                f"use the same {remedy}, or name a new file with --sensitivity"
            )
    try:
        modules = {n: ModuleStatistics(**{f: tensors[f"{n}.{f}"] for f in FIELDS}) for n in names}
    except KeyError as error:
        raise FpquantError(f"{path} lacks {error.args[0]}; name a new file with --sensitivity") from error
    return Sensitivity(modules, key, record, path)


def clip_path(sensitivity: Path, scheme: str, clip: str) -> Path:
    """Where the clipped scales that go with a Sensitivity file are kept."""
    return sensitivity.with_name(f"{sensitivity.stem}.clip-{scheme}-{clip}.safetensors")


def save_clips(clips: Mapping[str, Tensor], key: SensitivityKey, path: Path) -> None:
    """Keep clipped scales, {module: uint8 [out, blocks]}."""
    _save(
        {n: c.cpu().contiguous() for n, c in clips.items()},
        path,
        {"format_version": FORMAT_VERSION, "key": asdict(key)},
    )


def load_clips(path: Path, key: SensitivityKey, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor] | None:
    """Clipped scales kept for this key, or None where there are none for all of these modules."""
    if not path.is_file():
        return None
    try:
        manifest, tensors = _load(path)
    except FpquantError:
        return None  # a damaged copy of what can be computed again
    if manifest != {"format_version": FORMAT_VERSION, "key": asdict(key)}:
        return None
    for name, shape in shapes.items():
        codes = tensors.get(name)
        if codes is None or codes.dtype != torch.uint8 or tuple(codes.shape) != shape or codes.max() > MAX_SCALE_CODE:
            return None
    return {n: tensors[n] for n in shapes}


def _save(tensors: dict[str, Tensor], path: Path, manifest: Mapping[str, Any]) -> None:
    with written_whole(path) as temporary:
        save_file(tensors, temporary, metadata={"fpquant": json.dumps(manifest)})


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            manifest = json.loads((file.metadata() or {})["fpquant"])
            return manifest, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise FpquantError(f"{path} is not a readable Sensitivity file ({error}); delete it or name another") from error
