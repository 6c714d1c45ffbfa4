"""Model FLOP/s of a run, and MFU (model FLOPs utilisation): their share of the device's peak.

The record has the FLOPs per token (`model/flops.py`) and the speed in tok/s; everything else is derived on reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# TFLOP/s without sparsity, as (fp32, bf16). fp32 is that of the CUDA cores, without TF32; bf16 is that of the tensor
# cores with sums in float32. Datasheets that print bf16 with 2:4 sparsity print twice this number. On each of these
# devices the tensor cores have the same peak in fp16, and half of it in TF32.
_H100 = (66.9, 989.4)  # NVIDIA H100 datasheet and Hopper whitepaper (SXM5); the H200 SXM has the same chip
_A100 = (19.5, 312.0)  # NVIDIA A100 datasheet; SXM4 and PCIe are equal
PEAK_TFLOPS: Mapping[str, tuple[float, float]] = {
    "NVIDIA B200": (75.0, 2250.0),  # NVIDIA HGX B200 datasheet, per GPU
    "NVIDIA H200": _H100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": (51.2, 756.0),  # NVIDIA Hopper whitepaper
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A40": (37.4, 149.7),  # NVIDIA A40 datasheet
    "NVIDIA L40S": (91.6, 362.05),  # NVIDIA L40S datasheet
    "NVIDIA GeForce RTX 4090": (82.6, 165.2),  # NVIDIA Ada whitepaper
}
"""Peaks by the name that torch gives a device. A variant or a part of a device (MIG) has another name and no peak.

Only devices whose figures two sources agree on are listed: a wrong peak is a wrong MFU."""


def peak_flops(device_name: str | None, precision: str | None) -> float | None:
    """Return the peak FLOP/s of a device in a precision; None if it is not known, as for every CPU."""
    if device_name is None or device_name not in PEAK_TFLOPS:
        return None
    fp32, bf16 = PEAK_TFLOPS[device_name]
    peaks = {"fp32": fp32, "tf32": bf16 / 2, "bf16": bf16, "fp16": bf16}
    if precision is None or precision not in peaks:
        return None
    return peaks[precision] * 1e12


@dataclass(frozen=True, slots=True)
class Compute:
    """What a run computes for each token, and where."""

    flops_per_token: float
    """Forward and backward pass."""
    peak: float | None
    """Peak FLOP/s of all devices of the run together; None if it is not known."""
    runs: int
    """Runs that train together on the devices: the pack, or 1."""

    @classmethod
    def of(cls, flops_per_token: float, device_name: str | None, precision: str, devices: int, runs: int) -> Compute:
        peak = peak_flops(device_name, precision)
        if peak is not None:
            peak *= devices
        return cls(flops_per_token, peak, runs)

    def flops(self, tokens: float | None) -> float | None:
        """Return the model FLOPs of training on these tokens; for a speed in tok/s the FLOP/s of this run alone."""
        if tokens is None:
            return None
        return self.flops_per_token * tokens

    def mfu(self, tokens_per_s: float | None) -> float | None:
        """Return the MFU of the devices, from 0 to 1: the model FLOP/s of all runs of the pack over the peak."""
        speed = self.flops(tokens_per_s)
        if speed is None or self.peak is None:
            return None
        return speed * self.runs / self.peak


def format_tflops(flops_per_s: float) -> str:
    """Return FLOP/s in units of 10^12 with three digits: `0.0210`, `412`."""
    tflops = flops_per_s / 1e12
    # From 99.95 on, three digits are a whole number, which #.3g would write with a point: `412.`.
    if tflops < 99.95:
        return f"{tflops:#.3g}"
    return f"{tflops:,.0f}"


def format_mfu(mfu: float) -> str:
    """Return an MFU in percent: `41.2 %`."""
    return f"{mfu:.1%}".replace("%", " %")
