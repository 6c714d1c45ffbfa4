"""The compilers of the kernels that torch and Triton write for a device."""

import os
import shutil
import sys
from importlib.util import find_spec


def compiler_of(device: str) -> str:
    """Return the compiler that torch uses: on a CPU of C++, on a GPU that of C, with which Triton starts kernels."""
    if device == "cuda":
        return os.environ.get("CC", "gcc")
    default = "clang++" if sys.platform == "darwin" else "g++"
    return os.environ.get("CXX", default)


def missing_compiler(device: str) -> str:
    """Return what compile=on lacks on a device, and what to do; "" if nothing is missing."""
    if device == "cuda" and find_spec("triton") is None:
        return "triton is not installed; install it"
    compiler = compiler_of(device)
    if shutil.which(compiler) is not None:
        return ""
    language, variable = "C++", "CXX"
    if device == "cuda":
        language, variable = "C", "CC"
    return f"the {language} compiler {compiler!r} was not found; install it, set {variable} to a compiler"
