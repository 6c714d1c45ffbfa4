"""Checkpoints of tensors and JSON, without executable content, written atomically.

A checkpoint is a folder `step_00000200/` with `state.safetensors`, `meta.json` and `manifest.json`. The manifest holds
the run's id and the lengths and SHA-256 digests of the other two files, has a checksum like run.json, and is written
last. The folder has a temporary name until all its files are synced to the disk.

A kill needs no sync: what a process wrote, the system still has. Against a power cut, the record is synced before the
checkpoint that counts its bytes, each file before the folder gets its name, and the folder of all checkpoints before
older ones are deleted.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.ctypeslib  # safetensors uses it in several threads, where numpy's import at the first use may fail
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normlab.base.errors import StoreError
from normlab.base.parsing import from_json, open_to_read, read_at_most
from normlab.store.files import io_error, sync
from normlab.store.format import decode, to_json, with_checksum
from normlab.store.hidden import delete_folder, finish_deletions
from normlab.store.reading import LARGEST_RECORD, check_run_id, parse_record

FOLDER = "checkpoints"
"""The name of the checkpoints folder in a run's folder."""
WEIGHTS_FOLDER = "weights"
"""The name of the folder of checkpoints that hold the weights only, from which no run resumes."""
_NAME = re.compile(r"step_(\d{8,})")


class DamagedCheckpoint(StoreError):
    """A checkpoint with missing or changed content. A failure to read a file is a different error."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with verified digests."""

    step: int
    """Number of completed updates."""
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def _digest(path: Path) -> dict[str, Any]:
    with open_to_read(path) as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _system_error(error: OSError | SafetensorError) -> OSError:
    """Return the system's error, whose number a SafetensorError has only in its message."""
    if isinstance(error, OSError):
        return error
    match = re.search(r"os error (\d+)", str(error))
    if match is None:
        return OSError(str(error))
    number = int(match[1])
    return OSError(number, os.strerror(number))


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has the order of its elements."""
    if tensor.is_contiguous() or tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        return tensor.contiguous()
    # Not by torch, whose copy would start a team of OpenMP threads for each thread that writes checkpoints.
    return torch.from_numpy(np.ascontiguousarray(tensor.numpy()))


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: Collection[int] = (),
) -> None:
    """Write the checkpoint of `step`, then delete the older checkpoints that are not in `keep`.

    Raises:
        StoreError: The write failed; older checkpoints are unchanged.
    """
    final = folder / f"step_{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        for unfinished in folder.glob(".step_*.tmp"):  # left by killed processes
            shutil.rmtree(unfinished, ignore_errors=True)
        folder.mkdir(exist_ok=True)  # no parents: a run's folder that was moved is not made again
        temporary.mkdir()
        contiguous = {name: _contiguous(tensor.detach()) for name, tensor in tensors.items()}
        save_file(contiguous, temporary / "state.safetensors")
        (temporary / "meta.json").write_bytes(to_json(meta))
        # safetensors ignores the umask and makes a file that only its owner can read.
        shutil.copymode(temporary / "meta.json", temporary / "state.safetensors")

        # Against a power cut, each file is on the disk before the manifest, and the manifest before the final name.
        parts = {name: _digest(temporary / name) for name in ("state.safetensors", "meta.json")}
        for name in parts:
            sync(temporary / name)
        (temporary / "manifest.json").write_bytes(
            with_checksum({"run_id": folder.parent.name, "step": step, "files": parts})
        )
        sync(temporary / "manifest.json")

        # An existing checkpoint of this step is damaged, because an intact one would have been resumed from.
        if final.is_dir():
            shutil.rmtree(final)
        temporary.rename(final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        note = "older checkpoints are intact" if steps(folder) else ""
        raise io_error(final, "written", _system_error(error), note) from error
    # Checkpoints of later steps are damaged, because the run resumed from an older one; they are kept for inspection.
    for old in steps(folder):
        if old < step and old not in keep:
            shutil.rmtree(folder / f"step_{old:08d}", ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, intact or damaged, oldest first."""
    if not folder.is_dir():
        return []
    saved: list[int] = []
    for entry in folder.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            saved.append(int(match[1]))
    return sorted(saved)


def read(folder: Path, step: int) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        DamagedCheckpoint: A file is missing or damaged.
        StoreError: The checkpoint has another format, or a file cannot be read.
    """
    path = folder / f"step_{step:08d}"
    file = path / "manifest.json"
    try:
        try:
            manifest = parse_record(file, read_at_most(file, LARGEST_RECORD))
        except ValueError as error:
            raise DamagedCheckpoint(f"{file}: damaged ({error})") from error
        check_run_id(file, manifest["run_id"], folder.parent)
        if manifest["step"] != step:
            raise DamagedCheckpoint(f"{path}: holds the checkpoint of step {manifest['step']}")
        for name in ("state.safetensors", "meta.json"):
            # Compare lengths first, because hashing a sparse file of terabytes takes hours.
            length = (path / name).stat().st_size
            if length != manifest["files"][name]["bytes"] or _digest(path / name) != manifest["files"][name]:
                raise DamagedCheckpoint(f"{path / name}: damaged (its size or SHA-256 differs from the manifest)")
        meta = decode(from_json(read_at_most(path / "meta.json", LARGEST_RECORD)))
        return Checkpoint(step, load_file(path / "state.safetensors"), meta)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpoint(f"{path}: damaged or incomplete ({error.filename}: {error.strerror})") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        # An error with a number is the system's, of a file that cannot be read; any other is of its content.
        cause = OSError()
        if isinstance(error, OSError | SafetensorError):
            cause = _system_error(error)
        if cause.errno is None:
            raise DamagedCheckpoint(f"{path}: damaged (its files hold no checkpoint)") from error
        raise io_error(Path(cause.filename or path), "read", cause) from error


def read_newest(folder: Path, at_most: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint up to `at_most`, and the problems of newer ones.

    The checkpoint is None if there is none.

    Raises:
        StoreError: All checkpoints up to `at_most` are damaged, or an intact one cannot be read.
    """
    problems: list[str] = []
    for step in reversed(steps(folder)):
        if at_most is not None and step > at_most:
            continue
        try:
            return read(folder, step), problems
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if problems:
        up_to = "" if at_most is None else f" up to step {at_most}"
        raise StoreError(
            f"every checkpoint of this run{up_to} is damaged: " + "; ".join(problems) + "; restore a copy, or start "
            "another run beside it with run.fresh=true"
        )
    return None, problems


def drop_optimizer(run: Path) -> None:
    """Keep the weights of a run's newest intact checkpoint, and delete all its checkpoints.

    Raises:
        StoreError: Every checkpoint is damaged, or a file cannot be read or written.
    """
    finish_deletions(run)  # of a killed command
    saved, _ = read_newest(run / FOLDER)
    if saved is not None:
        kept = ("param/", "buffer/", "average/")
        weights = {name: tensor for name, tensor in saved.tensors.items() if name.startswith(kept)}
        save(run / WEIGHTS_FOLDER, saved.step, weights, saved.meta, keep=range(saved.step))
        delete_folder(run / FOLDER)
