"""The transformers quantizer `fpquant`: what makes AutoModelForCausalLM.from_pretrained open our directories.

`import fpquant` arranges for `register` to run as soon as transformers loads its own registry of quantizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fpquant.activations import check_inputs
from fpquant.checkpoint import QUANT_METHOD, check_headers, install_empty, parse_config, quant_modules
from fpquant.packing import check


@register_quantization_config(QUANT_METHOD)
class FpQuantConfig(QuantizationConfigMixin):
    """The `quantization_config` of a checkpoint, kept as it was written so that saving again writes the same."""

    def __init__(self, **values: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.values = {k: v for k, v in values.items() if k != "quant_method"}
        parse_config(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": QUANT_METHOD, **self.values}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


@register_quantizer(QUANT_METHOD)
class FpQuantQuantizer(HfQuantizer):
    """Puts QuantLinears in place before the weights are loaded; after that checks them, and prepacks them on a GPU."""

    requires_calibration = True
    quantization_config: FpQuantConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        pair, modules = parse_config(self.quantization_config.values)
        if checkpoint_files:
            check_headers([Path(f) for f in checkpoint_files], pair, modules)
        prefix = model.base_model_prefix
        if prefix and not hasattr(model, prefix):  # the base model, whose names have no prefix
            modules = {name.removeprefix(f"{prefix}."): spec for name, spec in modules.items()}
        dtype = getattr(model, "dtype", None)
        install_empty(model, pair, modules, dtype if isinstance(dtype, torch.dtype) else torch.float32)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in quant_modules(model).items():
            module.freeze()
            if not any(t.is_meta for t in module.packed.streams.values()):
                check(module.packed, name)
                if (quantizer := module.input_quantizer) is not None:
                    check_inputs(quantizer, name)
                module.prepack_on_gpu_()
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def attach(model: Any, config: Mapping[str, Any]) -> None:
    """Mark a model that was quantized in memory as one, so that save_pretrained and dtype casts treat it so."""
    quantization = FpQuantConfig(**config)
    quantizer = FpQuantQuantizer(quantization, pre_quantized=True)
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantization
    model.is_quantized = True
    model.quantization_method = QUANT_METHOD
