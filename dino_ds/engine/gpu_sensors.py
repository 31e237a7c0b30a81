"""Reads load, temperature, power and other users of an NVIDIA GPU through NVML. No kernel waits for a reading."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LIMIT_SECONDS = 2.0
"""Longest wait for a reading; a driver that takes longer is not asked again."""
_GIB = 2**30
# From nvml.h, nvmlClocksEventReasons: software power cap and power brake; software and hardware thermal slowdown.
_POWER, _HEAT = 0x04 | 0x80, 0x20 | 0x40


@dataclass(frozen=True)
class GpuReading:
    """The state of a GPU; None for a value that it does not report.

    utilization: share of the last second or less in which a kernel ran. joules: energy since the driver was loaded.
    slowed_by: why the clock is lowered, "heat", "power" or "". others: number of other processes on the GPU.
    """

    utilization: float | None = None
    memory_gib: float | None = None
    watts: float | None = None
    celsius: float | None = None
    joules: float | None = None
    slowed_by: str = ""
    others: int = 0

    def metrics(self, before: GpuReading | None, images: int) -> dict[str, float]:
        """The values for metrics.jsonl; `images`: how many this GPU has processed since the reading `before`."""
        values = {
            "gpu_utilization": self.utilization,
            "gpu_memory_gib": self.memory_gib,
            "gpu_watts": self.watts,
            "gpu_celsius": self.celsius,
        }
        if before is not None and self.joules is not None and before.joules is not None and images:
            values["gpu_joules_per_1000_images"] = 1000 * (self.joules - before.joules) / images
        return {name: value for name, value in values.items() if value is not None}


class GpuSensors:
    """The sensors of one GPU. `start` begins a reading in a thread, `finish` returns it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._thread: threading.Thread | None = None
        self._reading: GpuReading | None = None
        self._late = False

    def start(self) -> None:
        if self._thread is None:
            self._reading = None
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()

    def finish(self) -> GpuReading | None:
        """The reading that was started, or None without one or if the driver does not answer."""
        if self._thread is None or self._late:
            return None
        self._thread.join(_LIMIT_SECONDS)
        self._late = self._thread.is_alive()
        if self._late:
            return None
        self._thread = None
        return self._reading

    def _read(self) -> None:
        nvml, handle = self._nvml, self._handle

        def ask(question: Callable[[], float]) -> float | None:
            try:
                return float(question())
            except (nvml.NVMLError, AttributeError):  # a MIG slice, an old card, an old driver
                return None

        reasons = int(ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0)
        processes = ask(lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        watts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        self._reading = GpuReading(
            utilization=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            memory_gib=ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB),
            watts=watts,
            celsius=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            joules=ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
            slowed_by="heat" if reasons & _HEAT else "power" if reasons & _POWER else "",
            others=max(0, int(processes or 0) - 1),
        )


def open_sensors(device: torch.device) -> GpuSensors | None:
    """The sensors of an NVIDIA GPU, or None for another device, or without pynvml (nvidia-ml-py) or NVML."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    # By its UUID: NVML knows nothing of CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return GpuSensors(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return None
