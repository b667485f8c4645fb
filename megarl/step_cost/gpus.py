"""Speeds of GPUs and their links, by kind."""

from __future__ import annotations

from typing import NamedTuple

from megarl.reshard.cost_model import SPEEDS


class GpuSpeeds(NamedTuple):
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
    """Bandwidth to host memory in bytes per second: PCIe 5 with 16 lanes, less its protocol's share."""
    host_memory: float = 40e9
    """A GPU's share of the host's memory bandwidth in bytes per second. Two sockets of DDR5 have 77 GB/s for each of 8
    GPUs, and Adam on the CPU is assumed to reach half of it."""
    is_blackwell: bool = False
    has_grace: bool = False
    """Whether the host is a Grace CPU."""


GPUS = {
    "h100": GpuSpeeds(989e12, 3.35e12, 85e9, SPEEDS["h100"].nvlink, SPEEDS["h100"].infiniband),
    "h200": GpuSpeeds(989e12, 4.8e12, 150e9, SPEEDS["h200"].nvlink, SPEEDS["h200"].infiniband),
    "b200": GpuSpeeds(2250e12, 8e12, 191e9, SPEEDS["b200"].nvlink, SPEEDS["b200"].infiniband, is_blackwell=True),
    # Used by published steps only. Its NVLink connects 72 GPUs; parallel groups use powers of two.
    "gb200": GpuSpeeds(2500e12, 8e12, 198e9, 900e9, 50e9, nvlink_gpus=64, is_blackwell=True, has_grace=True),
    "h20": GpuSpeeds(148e12, 4.0e12, 102e9, 450e9, 50e9),
}
"""Speeds by kind of GPU. Source: NVIDIA's data sheets of the SXM modules, and ConnectX-7 at 400 Gb/s for each GPU."""
