"""Speeds of GPUs and their links, by kind."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.reshard.forecast.cost_model import SPEEDS


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeeds:
    """Data sheet values of one GPU."""

    flops: float
    """Dense bfloat16 FLOPs per second."""
    memory: float
    """Device memory bandwidth in bytes per second."""
    memory_bytes: float
    nvlink: float
    """NVLink bandwidth in bytes per second, in each direction."""
    network: float
    """Network bandwidth in bytes per second, in each direction."""
    nvlink_gpus: int = 8
    """GPUs connected by NVLink."""
    pcie: float = 55e9
    """Bandwidth to host memory in bytes per second: PCIe 5 with 16 lanes, minus the protocol's share."""
    host_memory: float = 40e9
    """A GPU's share of the host's memory bandwidth in bytes per second. Two sockets of DDR5 have 77 GB/s for each of 8
    GPUs; Adam on the CPU is assumed to reach half.
    """
    is_blackwell: bool = False
    has_grace: bool = False
    """Whether the host is a Grace CPU."""


GPUS = {
    "h100": GpuSpeeds(
        flops=989e12,
        memory=3.35e12,
        memory_bytes=85e9,
        nvlink=SPEEDS["h100"].nvlink,
        network=SPEEDS["h100"].infiniband,
    ),
    "h200": GpuSpeeds(
        flops=989e12,
        memory=4.8e12,
        memory_bytes=150e9,
        nvlink=SPEEDS["h200"].nvlink,
        network=SPEEDS["h200"].infiniband,
    ),
    "b200": GpuSpeeds(
        flops=2250e12,
        memory=8e12,
        memory_bytes=191e9,
        nvlink=SPEEDS["b200"].nvlink,
        network=SPEEDS["b200"].infiniband,
        is_blackwell=True,
    ),
    # Only published steps use it. Its NVLink connects 72 GPUs; parallel groups use powers of two.
    "gb200": GpuSpeeds(
        flops=2500e12,
        memory=8e12,
        memory_bytes=198e9,
        nvlink=900e9,
        network=50e9,
        nvlink_gpus=64,
        is_blackwell=True,
        has_grace=True,
    ),
    "h20": GpuSpeeds(flops=148e12, memory=4.0e12, memory_bytes=102e9, nvlink=450e9, network=50e9),
}
"""Speeds by kind of GPU. Source: NVIDIA's data sheets of the SXM modules, and ConnectX-7 at 400 Gb/s per GPU."""
