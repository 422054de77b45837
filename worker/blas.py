"""Fast matrix products on Linux CPUs: point MLX's BLAS calls at OpenBLAS.

MLX's Linux CPU build is linked to the reference BLAS, 20 to 80 times slower than OpenBLAS. The package
scipy-openblas32 has a fast one, but its symbols carry a `scipy_` prefix, so neither preloading nor linking
order helps. libmlx calls BLAS through its procedure linkage table: one pointer per function, filled in by
the dynamic linker. This module writes OpenBLAS's addresses there. It needs no compiler and touches no other
library.

Format: System V ABI, ELF-64 dynamic section (DT_SYMTAB, DT_STRTAB, DT_JMPREL, DT_RELA).
"""

import ctypes
import ctypes.util
import importlib.util
import mmap
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

# What MLX calls in the hot path, and the factorisations that profit most.
FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "sgetrf_", "dgetrf_", "ssyevd_", "dsyevd_")
HINT = "no fast BLAS found: matrix products run 20 to 80 times slower; pip install scipy-openblas32"

_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_STRSZ, _DT_JMPREL = 2, 5, 6, 7, 8, 10, 23
_PROT_READ_WRITE = 3


@dataclass(frozen=True)
class Blas:
    """A loaded BLAS library. `patched` functions of MLX go to it."""

    name: str
    library: ctypes.CDLL
    prefix: str
    patched: int

    def set_threads(self, threads: int) -> None:
        """Use at most `threads` threads from the next call on."""
        getattr(self.library, f"{self.prefix}openblas_set_num_threads")(ctypes.c_int(threads))


def use_fast_blas() -> Blas | None:
    """Redirect MLX's BLAS calls to OpenBLAS: the wheel's, else the system's. None where neither exists
    or the platform is not Linux. Call after importing mlx.core and before the first computation."""
    if sys.platform != "linux":
        return None
    found = _wheel_library() or _system_library()
    if found is None:
        return None
    name, library, prefix = found
    targets = {
        function: ctypes.cast(getattr(library, prefix + function), ctypes.c_void_p).value or 0
        for function in FUNCTIONS
        if hasattr(library, prefix + function)
    }
    return Blas(name, library, prefix, _redirect("libmlx.so", targets))


def _wheel_library() -> tuple[str, ctypes.CDLL, str] | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    return ("scipy-openblas32", ctypes.CDLL(str(path)), "scipy_") if path.is_file() else None


def _system_library() -> tuple[str, ctypes.CDLL, str] | None:
    path = ctypes.util.find_library("openblas")
    if path is None:
        return None
    library = ctypes.CDLL(path)
    return (path, library, "") if hasattr(library, "cblas_sgemm") else None


def _redirect(library: str, targets: dict[str, int]) -> int:
    """Write `targets` into the linkage table of the loaded `library`; how many entries were written."""
    located = _loaded_at(library)
    if located is None:
        return 0
    base, path = located
    dynamic = _dynamic_section(path)

    def memory(address: int, size: int) -> bytes:
        return ctypes.string_at(base + address, size)

    tags: dict[int, int] = {}
    for tag, value in struct.iter_unpack("<QQ", memory(*dynamic)):
        if tag == 0:
            break
        # glibc relocates the addresses of the dynamic section in place; other linkers do not.
        tags[tag] = value - base if value >= base else value
    strings = memory(tags[_DT_STRTAB], tags[_DT_STRSZ])
    written = 0
    for start, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        if start not in tags:
            continue
        for offset, info, _addend in struct.iter_unpack("<QQq", memory(tags[start], tags[size])):
            symbol = info >> 32
            if symbol == 0:
                continue
            (name_at,) = struct.unpack("<I", memory(tags[_DT_SYMTAB] + 24 * symbol, 4))
            name = strings[name_at : strings.index(b"\0", name_at)].decode()
            if target := targets.get(name):
                _write_pointer(base + offset, target)
                written += 1
    return written


def _loaded_at(library: str) -> tuple[int, str] | None:
    """(load address, path) of a mapped shared library."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].rstrip("\n").endswith("/" + library):
                return int(fields[0].split("-")[0], 16), fields[5].rstrip("\n")
    return None


def _dynamic_section(path: str) -> tuple[int, int]:
    """(address relative to the load address, size) of an ELF-64 file's dynamic section."""
    with open(path, "rb") as file:
        header = file.read(64)
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        entries = file.read(entry_size * count)
    for i in range(count):
        kind, _flags, _offset, address, _physical, _in_file, size, _align = struct.unpack_from(
            "<IIQQQQQQ", entries, i * entry_size
        )
        if kind == _PT_DYNAMIC:
            return address, size
    raise OSError(f"{path}: no dynamic section")


def _write_pointer(address: int, value: int) -> None:
    page = address & ~(mmap.PAGESIZE - 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), _PROT_READ_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect on libmlx's linkage table")
    ctypes.c_uint64.from_address(address).value = value
