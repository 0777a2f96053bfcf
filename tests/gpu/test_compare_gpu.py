"""A comparison on a GPU against one on the CPU."""

import pytest
import torch

import fpquant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def compare(tiny_model, text_file, out, **options):
    return fpquant.compare(
        str(tiny_model),
        out=out,
        policies=("fisher", "output-error"),
        ratios=(0.7,),
        datasets=(str(text_file),),
        calibration_dataset=str(text_file),
        samples=8,
        seq_len=64,
        window=64,
        limit=20,
        **options,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.05)])
def test_rows_agree_with_fp32_on_the_cpu(dtype, tolerance, tiny_model, text_file, tmp_path):
    expected = compare(tiny_model, text_file, tmp_path / "cpu", device="cpu")
    got = compare(tiny_model, text_file, tmp_path / "cuda", device="cuda", dtype=dtype)
    for ours, theirs in zip(got.rows, expected.rows, strict=True):
        assert ours.name == theirs.name and ours.bits_per_weight == pytest.approx(theirs.bits_per_weight, rel=1e-3)
        value = theirs.result("perplexity").value
        assert ours.result("perplexity").value == pytest.approx(value, rel=tolerance), ours.name
        if not ours.is_original:
            kl = theirs.result("kl_original_to_quantized").value
            assert ours.result("kl_original_to_quantized").value == pytest.approx(kl, rel=10 * tolerance, abs=1e-3)
