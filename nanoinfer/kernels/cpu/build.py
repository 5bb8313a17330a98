"""Compiles the sources here once per content, compiler and processor, into the user's cache directory. Loads no torch.

Called by `ops.py` in the process that computes, and by the multi-process executor before it starts ranks, so that they
find it done. Several processes may ask at once: one compiles under a lock, and the library appears by an atomic rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-std=c++17", "-w"]


class BuildError(RuntimeError):
    """There is no usable compiler, or it failed; the message says which."""


def build_kernels(cache: Path | None = None) -> Path:
    """The path of the compiled library. Raises BuildError."""
    if platform.machine() != "x86_64":
        raise BuildError(f"they are written for x86-64, and this is {platform.machine()}")
    # Not clang: its OpenMP is another runtime than the one that torch brings.
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("there is no C++ compiler (g++) on the PATH")
    cache = cache or _cache_directory()
    library = cache / f"kernels-{_key(compiler)}.so"
    if library.is_file():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                logger.info("compiling the CPU kernels into %s (once, some seconds)", library)
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(f"the kernels cannot be written to {cache}: {error}") from error
    return library


def _cache_directory() -> Path:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        base = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return base / "nanoinfer"


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        objects = {source: Path(directory, source.stem + ".o") for source in sorted(SOURCES.glob("*.cpp"))}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # raises what a compilation raised
            list(pool.map(lambda pair: _run([compiler, *_FLAGS, "-c", pair[0], "-o", pair[1]]), objects.items()))
        linked = Path(directory, "kernels.so")
        # Linked without -fopenmp: its symbols are to come from the OpenMP runtime that torch has loaded.
        _run([compiler, "-shared", "-Wl,-z,now", *objects.values(), "-o", linked])
        os.replace(linked, library)


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))} failed: {done.stderr.strip()[-500:]}")


def _key(compiler: str) -> str:
    """Names a library by all that it depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    digest = hashlib.sha256()
    sources = [path.read_text() for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
    for part in (*sources, version, flags, " ".join(_FLAGS)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]
