"""The kernels of `native.cpp`: compiled once a machine with its C++ compiler, and called through ctypes.

Without a compiler there are none, and the same is done with torch, more slowly. They run in the calling thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 120
_LANES = 16
_LARGEST_HEAD = 512
_SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Heads(Structure):
    """`Heads` of native.cpp. Whoever makes one keeps the tensors behind its addresses."""

    _fields_ = [
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("size", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
    ]


class Plan(Structure):
    """`Plan` of native.cpp, with the same duty."""

    _fields_ = [
        ("sequences", c_int64),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("rows", c_void_p),
        ("ends", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("cos", c_void_p),
        ("signed_sin", c_void_p),
    ]


class Native:
    """The kernels. Tensors are fp32 or bf16 and on the CPU, their last dimension is contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = c_void_p, c_int64

        def functions(name: str, *arguments: Any) -> dict[torch.dtype, Any]:
            found = {dtype: getattr(library, f"{name}_{suffix}") for dtype, suffix in _SUFFIXES.items()}
            for one in found.values():
                one.argtypes, one.restype = arguments, None
            return found

        self._rms_norm = functions("rms_norm", pointer, pointer, size, pointer, c_float, pointer, size, size)
        self._gated = functions("gated", pointer, size, pointer, size, size)
        self._attend = functions("attend", POINTER(Heads), POINTER(Plan), pointer, size, pointer)
        self._draw = functions("draw", pointer, size, size, size, pointer, pointer, pointer, pointer)

    def rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to the contiguous `hidden` in place, if there is one, and give its norm: [N, M] each."""
        out = torch.empty_like(hidden)
        added = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
        self._rms_norm[hidden.dtype](hidden.data_ptr(), *added, weight.data_ptr(), eps, out.data_ptr(), *hidden.shape)
        return out

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [N, 2 * M] side by side: [N, M]"""
        out = both.new_empty((both.shape[0], both.shape[1] // 2))
        self._gated[both.dtype](both.data_ptr(), both.stride(0), out.data_ptr(), *out.shape)
        return out

    def attend(self, heads: Heads, plan: Plan, qkv: torch.Tensor) -> torch.Tensor:
        """Norm, rotate, store and attend: [N, (H + 2K) * D] -> [N, H * D]"""
        out = qkv.new_empty((qkv.shape[0], heads.query_heads * heads.size))
        self._attend[qkv.dtype](byref(heads), byref(plan), qkv.data_ptr(), qkv.stride(0), out.data_ptr())
        return out

    def draw(
        self, logits: torch.Tensor, temperatures: NDArray[np.float32], uniforms: NDArray[np.float64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and log-probs [B] of logits [B, V] as `sampling.sample` says, without `top_k` and `top_p`."""
        tokens, logprobs = np.empty(len(logits), dtype=np.int32), np.empty(len(logits), dtype=np.float32)
        addresses = (array.ctypes.data for array in (temperatures, uniforms, tokens, logprobs))
        self._draw[logits.dtype](logits.data_ptr(), logits.stride(0), *logits.shape, *addresses)
        return tokens, logprobs


def supports(head_dim: int) -> bool:
    """Heads are whole vectors."""
    return head_dim % _LANES == 0 and head_dim <= _LARGEST_HEAD


def load() -> Native | None:
    """The kernels, compiled if need be; None where that can't be done."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        return Native(ctypes.CDLL(str(_compiled(compiler))))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(compiler: str) -> Path:
    """The library in the user's cache; a file's name says what it was made of, so it is never out of date."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
    made_of = [_SOURCE.read_bytes(), " ".join(_OPTIONS).encode(), version.stdout, _processor().encode()]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    folder = Path.home() / ".cache" / "laminar"
    library = folder / f"kernels-{name}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *_OPTIONS, str(_SOURCE), "-o", str(made)]
            subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
            made.replace(library)
    return library


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared by several machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.startswith(("model name", "flags"))})])
