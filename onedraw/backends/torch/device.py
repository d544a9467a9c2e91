"""The devices and operations to run with.

In: device names and dtypes as the user gave them. Out: devices with their architecture and free memory, and the operations that
compute on them; or an error that lists what exists. A processor is a CPU core as the system numbers it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from onedraw.backends.devices import PACKED, Device, cpu_model, parse_device
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.cpu.library import build
from onedraw.backends.torch.ops.cpu.ops import CpuOps, Packing
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.errors import BadSetting

_FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# The dtype of activations and KV cache, by the dtype name of the model.
DTYPES = {**_FLOATS, **{name: _FLOATS[beside] for name, beside in PACKED.items()}}
DEFAULT_THREADS = torch.get_num_threads()  # torch's own default, or OMP_NUM_THREADS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory for a tensor. Some libraries report it in words only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def find_devices(names: Sequence[str]) -> list[Device]:
    """Devices of this machine, with architecture and free memory (of a CPU only if several devices are named). auto is the first
    CUDA device, or else the CPU. Raises BadSetting for a device that this machine does not have."""
    automatic = "cuda:0" if torch.cuda.is_available() else "cpu"
    return [_find(parse_device(automatic if name == "auto" else name), several=len(names) > 1) for name in names]


def _find(device: Device, *, several: bool) -> Device:
    if device.kind == "cpu":
        free = available_memory() if several and device.memory is None else device.memory
        name = device.name if _usable(device) else "cpu"
        return Device(name, "cpu", memory=free, cores=device.cores)
    if device.hypothetical:
        raise BadSetting(f"--devices: {device.name} is only described, which is enough for `inspect`; to run, name cuda:0 or cpu")
    if not torch.cuda.is_available():
        raise BadSetting(f"--device {device.name}: this torch finds no CUDA device; use --device cpu")
    index = int(device.name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise BadSetting(f"--device {device.name}: this machine has {torch.cuda.device_count()} of them, counted from 0")
    free, _ = torch.cuda.mem_get_info(index)
    if torch.version.hip:
        return Device(f"cuda:{index}", "hip", torch.cuda.get_device_properties(index).gcnArchName, free)
    major, minor = torch.cuda.get_device_capability(index)
    return Device(f"cuda:{index}", "cuda", f"sm{major}{minor}", free)


def _usable(device: Device) -> bool:
    """Whether the device's name says on which processors to run, as in cpu:0-3. Raises BadSetting for processors that do not
    exist."""
    if not device.cores:
        return False
    if not hasattr(os, "sched_setaffinity"):
        raise BadSetting(f"--devices {device.name}: this system does not let a program choose its processors; write cpu")
    there = os.sched_getaffinity(0)
    if not there.issuperset(device.cores):
        raise BadSetting(f"--devices {device.name}: this program may run on the processors {_listed(there)}; name some of these")
    return True


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Pin the calling thread, and with it the threads that it starts, to these processors; if there are none, change nothing."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def available_memory() -> int | None:
    """Bytes of available host memory; None if the system does not report them. A stage on the CPU is planned to fit into them, so
    that it leaves room for other programs."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def copy_bandwidth(name: str) -> float:
    """Bytes per second read and written by a large copy on this GPU."""
    device, size = torch.device(name), 2**30
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(3):
        target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 20 * size / (float(begin.elapsed_time(end)) / 1e3)


def read_bandwidth() -> float:
    """Bytes per second that torch's threads read from the CPU's memory, in the best of several sums over a large array."""
    numbers = torch.ones(2**26, dtype=torch.float32, device="cpu")
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - begin)
    return numbers.nbytes / min(seconds)


def hardware_name(device: torch.device) -> str:
    """The model of a device's chip: devices with equal names compute equal bits."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"


def why_no_cpu_kernels(cache: Path) -> str:
    """Why the CPU kernels cannot be built here; empty where they can."""
    return build(cache).reason


def why_no_gpu_kernels() -> str:
    """Why the GPU kernels for quantized weights cannot be compiled here; empty where they can."""
    from onedraw.backends.torch.ops.cuda import nvrtc

    return nvrtc.why_not()


def why_no_triton() -> str:
    """Why the Triton kernels for quantized weights cannot be compiled here; empty where they can."""
    return "" if find_spec("triton") is not None else "Triton is not installed; pip install triton"


def set_threads(count: int | None, ops: Iterable[Ops], cores: Collection[int] = ()) -> None:
    """Pin the calling thread to these processors, if there are any, and set the number of torch's threads to `count`. None stands
    for the number of processors, or without processors for no change.

    Beside kernels with their own thread pool torch gets one thread: idle threads of its pool spin for a while after every
    operation, on the processors that the kernels need.
    """
    if cores:
        os.sched_setaffinity(0, cores)
        count = len(cores) if count is None else count
    if any(isinstance(one, CpuOps) for one in ops):
        torch.set_num_threads(1)
    elif count is not None:
        torch.set_num_threads(count)


def pick_ops(
    device: str,
    dtype: str,
    *,
    cache: Path,
    threads: int | None = None,
    warn: Callable[[str], object] = lambda line: None,
) -> Ops:
    """Kernels where they exist for this device and these dtypes and can be built, else plain torch."""
    packed = dtype in PACKED
    if torch.device(device).type == "cpu" and DTYPES[dtype] == torch.float32:
        built = build(cache)
        if built.library is not None:
            packing = Packing(as_stored=packed, coded=dtype == "packed")
            return CpuOps(built.library, threads=threads or DEFAULT_THREADS, packing=packing)
        warn(f"no CPU kernels: {built.reason}; computing with plain torch, slower and with other low bits")
    if torch.device(device).type == "cuda":
        return _cuda_ops(torch.device(device), DTYPES[dtype], warn, packed=packed, cache=cache)
    return TorchOps(torch.device(device))


def _cuda_ops(device: torch.device, dtype: torch.dtype, warn: Callable[[str], object], *, packed: bool, cache: Path) -> Ops:
    from onedraw.backends.torch.ops.cuda import nvrtc
    from onedraw.backends.torch.ops.cuda.ops import TritonOps, serves
    from onedraw.backends.torch.ops.cuda.packed.ops import PackedOps
    from onedraw.backends.torch.ops.cuda.packed.portable import PortableOps

    if packed and (torch.version.hip or not serves(device, dtype)):
        return PortableOps(device, dtype)
    if serves(device, dtype):
        pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        nvrtc.cache_in(cache)
        return PackedOps(device, dtype, pdl=pdl) if packed else TritonOps(device, pdl=pdl)
    if dtype != torch.float32:
        warn(f"no kernels for {torch.cuda.get_device_name(device)}: computing with plain torch, slower and with other low bits")
    return TorchOps(device)
