"""Peak rates and memory of GPUs, from their makers' data sheets: dense, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    name: str  # as it occurs in torch's device name
    bfloat16: float  # operations per second
    float32: float  # of tensor cores where matrices use them (TF32)
    memory: float  # bytes
    source: str


GPUS = {
    "a100": GPU("A100", 312e12, 156e12, 80e9, "NVIDIA A100 80GB data sheet"),
    "h100": GPU("H100", 989e12, 495e12, 80e9, "NVIDIA H100 SXM data sheet"),
    "h200": GPU("H200", 989e12, 495e12, 141e9, "NVIDIA H200 SXM data sheet"),
    "b200": GPU("B200", 2250e12, 1125e12, 192e9, "NVIDIA HGX B200 data sheet, per GPU"),
    "mi300x": GPU("MI300X", 1307e12, 654e12, 192e9, "AMD Instinct MI300X data sheet"),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Of a device by torch's name for it; None if it is not in the table."""
    found = [gpu for gpu in GPUS.values() if gpu.name.lower() in device_name.lower()]
    return getattr(found[0], precision) if found else None
