"""What differs between MLX's backends, in one place: CPU (Linux), CUDA and Metal.

The Metal branch is written from MLX's documentation and is untested: no Mac was at hand.
"""

import ctypes
import os
import sys
from dataclasses import dataclass, field

import mlx.core as mx

from mlxhost.worker.blas import HINT, Blas, use_fast_blas
from mlxhost.worker.kv import PackRule, StepShape
from mlxhost.worker.kv.cuda import CudaSpanAttention

# Many small attention calls starve a GPU, padding costs it little: rows share a pack up to twice the length.
_GPU_PACKS = PackRule(ratio=2.0, floor=256)
# On a CPU only building the graph is dearer for many packs, and a copy of long rows is dearer than that.
_CPU_PACKS = PackRule(ratio=1.25, floor=64, limit=512)
# A CPU passes over a vocabulary slowly; a GPU sorts it slowly.
_CPU_SHAPE = StepShape(rule=_CPU_PACKS, narrow=True, jumps_apart=True)


@dataclass(frozen=True)
class Backend:
    """Facts of the device that MLX computes on."""

    kind: str  # cpu, cuda, metal
    label: str  # for people
    dtype: str  # the fast one
    max_rows: int  # rows worth decoding together
    working_set: int  # bytes; 0 where the device does not say
    blas: Blas | None
    notes: tuple[str, ...] = ()
    shape: StepShape = field(default_factory=StepShape)  # how rows of a step are laid out


def detect() -> Backend:
    """The backend of this process; on Linux CPU it also puts the fast BLAS in place."""
    if mx.metal.is_available():
        info = mx.device_info()
        working_set = int(info.get("max_recommended_working_set_size", 0))
        label = f"metal ({info.get('device_name', '?')})"
        return Backend("metal", label, "bfloat16", 64, working_set, None, shape=StepShape(rule=_GPU_PACKS))
    if mx.cuda.is_available():
        info = mx.device_info()
        working_set = int(info.get("total_memory", info.get("memory_size", 0)))
        label = f"cuda ({info.get('device_name', '?')})"
        # TF32 products keep 10 bits of a float32: rows in company would not give what they give alone.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        shape = StepShape(rule=_GPU_PACKS, kernel=CudaSpanAttention())
        return Backend("cuda", label, "bfloat16", 64, working_set, None, shape=shape)
    blas = use_fast_blas()
    if blas is None or not blas.patched:
        notes = (HINT,) if sys.platform == "linux" else ()
        return Backend("cpu", "cpu", "float32", 16, 0, None, notes, _CPU_SHAPE)
    label = f"cpu ({blas.name})"
    return Backend("cpu", label, "float32", 16, 0, blas, shape=_CPU_SHAPE)


def limit_memory(kind: str, memory_bytes: int, buffer_bytes: int, working_set: int) -> None:
    """Set MLX's limits for its memory and its freed buffers; 0 leaves one as it is. On Metal the memory is
    also wired, as far as the device recommends, so that weights are not paged out between requests."""
    if memory_bytes:
        mx.set_memory_limit(memory_bytes)
        if kind == "metal":
            mx.set_wired_limit(min(memory_bytes, working_set or memory_bytes))
    if buffer_bytes:
        mx.set_cache_limit(buffer_bytes)


def resident_bytes() -> int:
    """This process's memory as the kernel counts it: PSS on Linux, else the unique set size."""
    if sys.platform == "linux":
        with open("/proc/self/smaps_rollup") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.Process().memory_full_info().uss)


def available_bytes() -> int:
    """Memory that could be taken now without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def release_memory() -> None:
    """Give freed memory back to the system: MLX's buffer cache, then the C heap's."""
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)
