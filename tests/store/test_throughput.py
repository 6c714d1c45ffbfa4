"""Model FLOP/s and MFU, from the record."""

import pytest

from normlab.store.throughput import Compute, format_mfu, format_tflops, peak_flops


def compute(name: str, precision: str = "bf16", *, flops: float = 1e9, pack: int = 1, devices: int = 1) -> Compute:
    return Compute.of(flops, name, precision, devices, pack)


def test_mfu_is_the_share_of_the_peak():
    run = compute("NVIDIA H200")
    assert (run.flops(2e5), run.mfu(2e5)) == (2e14, pytest.approx(2e14 / 989.4e12))
    assert compute("NVIDIA H200", "fp32", flops=1e8).mfu(2e5) == pytest.approx(2e13 / 66.9e12)
    # Datasheets: H100 SXM5 and A100.
    assert (peak_flops("NVIDIA H200", "tf32"), peak_flops("NVIDIA H200", "fp16")) == (494.7e12, 989.4e12)
    assert (peak_flops("NVIDIA A100-SXM4-40GB", "tf32"), peak_flops("NVIDIA A100-SXM4-40GB", "fp16")) == (
        156e12,
        312e12,
    )


def test_mfu_is_that_of_the_pack_on_all_devices():
    single = compute("NVIDIA H200").mfu(2e5)
    assert compute("NVIDIA H200", pack=4).mfu(2e5) == pytest.approx(4 * (single or 0))
    assert compute("NVIDIA H200", devices=8).mfu(2e5) == pytest.approx((single or 0) / 8)
    assert compute("NVIDIA H200", pack=4).flops(2e5) == 2e14


@pytest.mark.parametrize(
    "name", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA Z1", "H100"]
)
def test_a_device_without_known_peak_has_no_mfu(name):
    run = compute(name)
    assert (run.mfu(2e5), run.flops(2e5)) == (None, 2e14)
    assert peak_flops("NVIDIA H200", "fp8") is None


def test_texts():
    assert [format_tflops(value) for value in (2.1e10, 9.996e13, 4.123e14, 1.2345e15)] == [
        "0.0210", "100", "412", "1,234",
    ]  # fmt: skip
    assert format_mfu(0.41234) == "41.2 %"
