"""The guard of the pretended GPU (`tests/gpu/guard.cpp`), for a script; it must be loaded before torch is imported."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests" / "gpu"


def load_guard() -> None:
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch_folder = Path(found.origin).parent
    libraries = torch_folder / "lib"
    options = [f"-I{torch_folder / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/guard.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", TESTS / "guard.cpp", *options, "-o", library]
        try:
            subprocess.run(command, check=True)
        except OSError:
            sys.exit("error: the pretended GPU needs g++; install it")
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
