"""Model FLOP/s and MFU, from the record."""

from __future__ import annotations

import pytest
from synthetic_runs import Record

from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.throughput import PEAK_TFLOPS, Compute, format_mfu, format_tflops, peak_flops


def record(device_name: str, precision: str = "bf16", *, pack: int = 0, devices: int = 1, **run) -> RunRecord:
    run = Record().run() | run
    run["resolved"] = {"device_name": device_name, "precision": precision, "devices": devices}
    status = {"tokens_per_s": 2e5, **({"pack": {"runs": [f"run{i}" for i in range(pack)]}} if pack else {})}
    return RunRecord.parse(RunFolder("runs/abc"), run, status, "finished")


def test_mfu_is_the_share_of_the_peak():
    run = record("NVIDIA H200", flops_per_token=1e9)
    assert (run.flops_per_s, run.mfu) == (2e14, pytest.approx(2e14 / 989.4e12))
    assert record("NVIDIA H200", "fp32", flops_per_token=1e8).mfu == pytest.approx(2e13 / 66.9e12)
    # Datasheets: H100 SXM5 and A100.
    assert (peak_flops("NVIDIA H200", "tf32"), peak_flops("NVIDIA H200", "fp16")) == (494.7e12, 989.4e12)
    assert (peak_flops("NVIDIA A100-SXM4-40GB", "tf32"), peak_flops("NVIDIA A100-SXM4-40GB", "fp16")) == (
        156e12,
        312e12,
    )


def test_mfu_of_a_pack_is_that_of_the_device():
    single, packed = (
        record("NVIDIA A100 80GB PCIe", flops_per_token=1e7),
        record("NVIDIA A100 80GB PCIe", flops_per_token=1e7, pack=4),
    )
    assert packed.flops_per_s == single.flops_per_s
    assert packed.mfu == pytest.approx(4 * (single.mfu or 0))


@pytest.mark.parametrize(
    "name", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA Z1", "H100"]
)
def test_a_device_without_known_peak_has_no_mfu(name):
    run = record(name, flops_per_token=1e9)
    assert (run.mfu, run.flops_per_s) == (None, 2e14)
    assert peak_flops("NVIDIA H200", "fp8") is None


def test_tensor_cores_are_faster_than_cuda_cores():
    assert all(bf16 >= 1.9 * fp32 for fp32, bf16 in PEAK_TFLOPS.values())


def test_a_record_without_a_machine_has_neither():
    assert Compute.parse({}) == Compute(None, None, 1)


def test_texts():
    assert [format_tflops(value) for value in (2.1e10, 9.996e13, 4.123e14, 1.2345e15)] == [
        "0.0210", "100", "412", "1,234",
    ]  # fmt: skip
    assert format_mfu(0.41234) == "41.2 %"


def test_mfu_of_several_devices_is_that_of_all():
    name = "NVIDIA H200"
    one, eight = (record(name, flops_per_token=1e9, devices=devices) for devices in (1, 8))
    assert (one.mfu or 0) == pytest.approx(8 * (eight.mfu or 0))
