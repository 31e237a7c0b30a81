"""The figures of an NVIDIA GPU, read from a fake NVML."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import torch

from dino_ds.engine import gpu_sensors
from dino_ds.engine.gpu_sensors import GpuReading, open_sensors
from dino_ds.run.reports import Reports

_CUDA = torch.device("cuda", 0)


class _NvmlError(Exception):
    pass


def _fake_nvml(**changes):
    """A stand-in for the module pynvml: functions of a handle, in NVML's units."""
    nvml = types.ModuleType("pynvml")
    values = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda h: types.SimpleNamespace(gpu=87, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(used=3 << 30),
        "nvmlDeviceGetPowerUsage": lambda h: 312_000,
        "nvmlDeviceGetTemperature": lambda h, sensor: 61,
        "nvmlDeviceGetTotalEnergyConsumption": lambda h: 5_000_000,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 0x1,
        "nvmlDeviceGetComputeRunningProcesses": lambda h: [object()],
        "NVML_TEMPERATURE_GPU": 0,
        "NVMLError": _NvmlError,
    }
    vars(nvml).update(values | changes)
    return nvml


@pytest.fixture
def sensors_of(monkeypatch):
    def build(**changes):
        monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(**changes))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        about = types.SimpleNamespace(uuid="12345678-90ab")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        return open_sensors(_CUDA)

    return build


def _raise(*_):
    raise _NvmlError("not supported")


def test_a_reading_has_all_that_the_gpu_says(sensors_of):
    asked = []
    sensors = sensors_of(nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid))
    sensors.start()
    assert sensors.finish() == GpuReading(0.87, 3.0, 312.0, 61.0, 5000.0)
    assert sensors.finish() is None  # none was started
    assert asked == ["GPU-12345678-90ab"]


def test_a_driver_that_does_not_answer_holds_nobody_up(sensors_of, monkeypatch):
    monkeypatch.setattr(gpu_sensors, "_LIMIT_SECONDS", 0.05)
    answer, waited = threading.Event(), []
    sensors = sensors_of(nvmlDeviceGetPowerUsage=lambda h: answer.wait() and 1)
    monkeypatch.setattr(threading.Thread, "join", lambda self, seconds: waited.append(seconds))
    for _ in range(3):
        sensors.start()
        assert sensors.finish() is None
    answer.set()
    assert waited == [0.05]


@pytest.mark.parametrize("changes", [{"nvmlInit": _raise}, {"nvmlDeviceGetHandleByUUID": _raise}])
def test_without_nvml_there_are_no_sensors(sensors_of, monkeypatch, changes):
    assert sensors_of(**changes) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_sensors(_CUDA) is None
    assert open_sensors(torch.device("cpu")) is None


def test_metrics_have_the_gpu_s_figures_and_none_on_a_cpu(sensors_of):
    energy = iter((5_000_000, 5_064_000))
    reports = object.__new__(Reports)
    reports._sensors = sensors_of(nvmlDeviceGetTotalEnergyConsumption=lambda h: next(energy))
    reports._last_gpu = None, 0
    step = types.SimpleNamespace(applied_steps=10)
    reports._run = types.SimpleNamespace(step=step, options=types.SimpleNamespace(global_batch=32))
    found = []
    for _ in range(2):
        reports._sensors.start()
        found.append(reports._read_gpu()[1])
        step.applied_steps += 10
    assert found[0] == {"gpu_utilization": 0.87, "gpu_memory_gib": 3.0, "gpu_watts": 312.0, "gpu_celsius": 61.0}
    assert found[1] == found[0] | {"gpu_joules_per_1000_images": 200.0}
    reports._sensors = None
    assert reports._read_gpu() == (None, {})
