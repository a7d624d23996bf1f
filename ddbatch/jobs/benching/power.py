"""Watts and clocks of a GPU, read beside what is measured.

pynvml where it can be imported, else nvidia-smi, else nothing. Knows nothing about what runs.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import TracebackType
from typing import Any, NamedTuple

import torch

PERIOD_MS = 100
MEAN_SECONDS = 1.0  # watts are means of what was drawn so long before
_QUERY = "power.draw,power.limit,clocks.sm,clocks.mem"


class Reading(NamedTuple):
    """What a GPU tells of itself: watts and MHz; None: it does not say."""

    watts: float | None = None
    limit_watts: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None


class Watch:
    """Reads a device again and again while it is open; source: what reads it, or why nothing
    does."""

    def __init__(self, device: torch.device) -> None:
        self._readings: list[tuple[float, Reading]] = []
        self._stop = threading.Event()
        self._smi: subprocess.Popen[str] | None = None
        self.source, self._read = "", _no_readings
        if device.type != "cuda":
            self.source = "not measured: no GPU"
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        if find_spec("pynvml") is not None:
            self.source, self._read = "pynvml", lambda: _nvml_readings(uuid, self._stop)
        elif shutil.which("nvidia-smi") is not None:
            self.source, self._read = "nvidia-smi", lambda: self._smi_readings(uuid)
        else:
            self.source = "not measured: neither pynvml nor nvidia-smi is there"

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._follow, name="watts", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._smi is not None:
            self._smi.terminate()
        self._thread.join(timeout=10)

    def _follow(self) -> None:
        for reading in self._read():
            self._readings.append((time.monotonic(), reading))

    def _smi_readings(self, uuid: str) -> Iterator[Reading]:
        """Lines of one nvidia-smi that goes on until it is ended."""
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        command += [f"--id={uuid}", f"--loop-ms={PERIOD_MS}"]
        self._smi = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._stop.is_set():  # closed before it was there to be ended
            self._smi.terminate()
        assert self._smi.stdout is not None
        for line in self._smi.stdout:
            yield parse_smi(line)

    def during(self, started: float, stopped: float) -> Reading:
        """Medians of what was read in a span of time.monotonic(), once MEAN_SECONDS of it are over;
        nothing of a shorter one."""
        first = started + MEAN_SECONDS
        return medians([item for at, item in list(self._readings) if first <= at <= stopped])


def medians(readings: list[Reading]) -> Reading:
    """Of each figure by itself; None where nothing told it."""
    columns = zip(*readings, strict=True) if readings else [()] * len(Reading._fields)
    there = [[value for value in column if value is not None] for column in columns]
    return Reading(*(statistics.median(column) if column else None for column in there))


def parse_smi(line: str) -> Reading:
    """A line of nvidia-smi; "[N/A]" and the like are None."""
    cells = [cell.strip() for cell in line.split(",")]
    numbers = [float(cell) if cell.replace(".", "", 1).isdecimal() else None for cell in cells]
    return Reading(*numbers) if len(numbers) == len(Reading._fields) else Reading()


def _no_readings() -> Iterator[Reading]:
    return iter(())


def _nvml_readings(uuid: str, stop: threading.Event) -> Iterator[Reading]:
    """The same from the library in this process."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:  # no driver that it knows: nothing is told, and the report says so
        return

    def told(read: Callable[..., float], *args: object, scale: float = 1.0) -> float | None:
        try:
            return read(handle, *args) / scale
        except nvml.NVMLError:  # this card does not say
            return None

    while not stop.wait(PERIOD_MS / 1000):
        yield Reading(
            told(nvml.nvmlDeviceGetPowerUsage, scale=1000),
            told(nvml.nvmlDeviceGetEnforcedPowerLimit, scale=1000),
            told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        )
    nvml.nvmlShutdown()
