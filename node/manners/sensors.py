"""What a machine can tell of itself, for the limits of its owner, without a package for it: battery, metered link,
use by others, temperature of its GPUs. What it cannot tell is None."""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atoll.comm.errors import ConfigError
from atoll.node.config import NodeConfig
from atoll.node.manners.may_train import Observations

ANSWER_SECONDS = 2.0  # that a program that is asked has to answer
NETWORK_MANAGER = ("org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager")
METERED = {1: True, 3: True, 2: False, 4: False}  # NMMetered: yes, guessed yes, no, guessed no
GPU_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU
TERMINALS = ("/dev/tty[0-9]*", "/dev/pts/[0-9]*")


def on_battery() -> bool | None:
    """Whether the machine runs on its battery; None: it shows none."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def on_metered() -> bool | None:
    """Whether NetworkManager says that what the machine sends is counted; None: it is not there, or does not
    know."""
    if not (busctl := shutil.which("busctl")):
        return None
    service, path = NETWORK_MANAGER
    answer = _said([busctl, "--system", "get-property", service, path, service, "Metered"])
    return metered_of(answer)


def metered_of(answer: str) -> bool | None:
    """The meaning of busctl's answer, such as `u 4`."""
    kind, _, number = answer.strip().partition(" ")
    return METERED.get(int(number)) if kind == "u" and number.isdigit() else None


def gpu_celsius() -> float | None:
    """The temperature of the hottest GPU that NVIDIA's driver tells of; None: it tells of none."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
        if driver.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        count, found = ctypes.c_uint(), list[float]()
        driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for number in range(count.value):
            handle, celsius = ctypes.c_void_p(), ctypes.c_uint()
            if not driver.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) and not (
                driver.nvmlDeviceGetTemperature(handle, GPU_TEMPERATURE, ctypes.byref(celsius))
            ):
                found.append(float(celsius.value))
        return max(found, default=None)
    finally:
        driver.nvmlShutdown()


def input_age() -> float | None:
    """Seconds since somebody typed at a terminal of the machine; None: it has none."""
    ages = list[float]()
    for pattern in TERMINALS:
        for terminal in Path("/").glob(pattern.removeprefix("/")):
            with suppress(OSError):
                ages.append(time.time() - os.stat(terminal).st_atime)
    return max(min(ages), 0.0) if ages else None


class OthersLoad:
    """The share of the processors' time that processes other than the node's own take, between two looks."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None  # seconds: all, busy, and the node's own

    def look(self) -> float | None:
        """The share since the last look, 0 to 1; None at the first one."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # they are in user and nice, too
        total = sum(times) - guest
        now = total, total - idle, own_seconds()
        before, self._before = self._before, now
        return None if before is None else others_share(before, now)


def others_share(before: Sequence[float], now: Sequence[float]) -> float:
    """The share of others' processes, of two looks at (all, busy, own) seconds."""
    total, busy, own = (b - a for a, b in zip(before, now, strict=True))
    return min(max(busy - max(own, 0.0), 0.0) / total, 1.0) if total > 0 else 0.0


def own_seconds() -> float:
    """The processors' seconds that this process and its children have taken; those of children that have ended
    count, too."""
    seconds, me = 0.0, psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
    ended = me.cpu_times()
    return seconds + getattr(ended, "children_user", 0.0) + getattr(ended, "children_system", 0.0)


class Sensors:
    """What is asked of the machine: only what a limit needs."""

    def __init__(self) -> None:
        self._load = OthersLoad()

    def observe(self, config: NodeConfig) -> Observations:
        """Look at what the settings' limits are about. It may take seconds: not for an event loop."""
        return Observations(
            on_battery=None if config.battery else on_battery(),
            on_metered=None if config.metered else on_metered(),
            others_share=self._load.look() if config.idle_only else None,
            input_age=input_age() if config.idle_only else None,
            gpu_celsius=gpu_celsius() if config.gpu_temperature else None,
        )


def check_observable(config: NodeConfig) -> None:
    """Raise `ConfigError` for the first limit on what this machine cannot tell."""
    if not config.battery and on_battery() is None:
        raise ConfigError("battery=false, but this machine shows no battery: leave the limit out")
    if not config.metered and on_metered() is None:
        raise ConfigError(
            "metered=false, but NetworkManager does not say whether this machine's link is metered: limit it by "
            "daily=, monthly= or hours="
        )
    if config.gpu_temperature and gpu_celsius() is None:
        raise ConfigError(
            "gpu_temperature= is for GPUs whose driver tells their temperature, and none does here: leave it out"
        )


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
