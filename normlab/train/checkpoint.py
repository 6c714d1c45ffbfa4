"""Checkpoints: tensors and JSON, nothing that can execute. Whole or not there at all.

A checkpoint is a folder `step_00000200/` with `state.safetensors`, `meta.json` and `manifest.json`, which
holds the length and the SHA-256 of the other two, is sealed as run.json is, and is written last. The folder is
made under a temporary name and renamed when everything in it has reached the disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normlab import memory
from normlab.errors import StoreError
from normlab.parsing import from_json, read_at_most
from normlab.store.files import io_error
from normlab.store.reading import LARGEST_RECORD
from normlab.store.schema import SEAL, decode, is_sealed, seal, to_json

FOLDER = "checkpoints"
"""Where a run keeps them, in its own folder."""
VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")


class Damaged(StoreError):
    """A checkpoint that is not what was written, and is passed over; one that cannot be read here or now is not."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it was read: whole, its hashes verified."""

    step: int
    """Updates made."""
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _of_system(error: OSError | SafetensorError) -> OSError:
    """The system's error; safetensors gives its number in words only."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: Collection[int] = (),
) -> None:
    """Write the checkpoint of `step`, then drop those before it that are not in `keep`.

    Raises:
        StoreError: The disk refused; older checkpoints are as they were.
    """
    final = folder / f"step_{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        for left_over in folder.glob(".step_*.tmp"):  # of a save that was killed, at this step or another
            shutil.rmtree(left_over, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            temporary / "state.safetensors",
        )
        (temporary / "meta.json").write_bytes(to_json(meta))
        # safetensors makes its files for their owner alone, whatever the umask says.
        shutil.copymode(temporary / "meta.json", temporary / "state.safetensors")
        parts = {name: _digest(temporary / name) for name in ("state.safetensors", "meta.json")}
        for name in parts:
            _sync(temporary / name)
        (temporary / "manifest.json").write_bytes(seal({"step": step, "files": parts}, VERSION))
        _sync(temporary / "manifest.json")
        _sync(temporary)
        if final.exists():
            # Only a damaged one can be in the way: the loop saves no step twice, and goes on from the newest whole.
            if final.is_dir():
                shutil.rmtree(final)
            else:
                final.unlink()
        temporary.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        comfort = "older checkpoints are intact" if steps(folder) else ""
        raise io_error(final, "written", _of_system(error), comfort) from error
    # A later one is damaged, or this one would not have been written after it: it is left for whoever looks.
    for old in steps(folder):
        if old < step and old not in keep:
            shutil.rmtree(folder / f"step_{old:08d}", ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """The steps that there are checkpoints of, whole or damaged, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name)))


def read(folder: Path, step: int) -> Checkpoint:
    """One checkpoint, verified.

    Raises:
        Damaged: It is damaged; the message says which part and how.
        StoreError: It is of a newer version, or the system refused to read it.
        MemoryError: This machine has not the memory for it.
    """
    path = folder / f"step_{step:08d}"
    try:
        manifest = from_json(read_at_most(path / "manifest.json", LARGEST_RECORD))
        # Manifests had no seal once; then a version that is not theirs is damage, whatever it is.
        if not is_sealed(manifest) and (SEAL in manifest or manifest["version"] != 1):
            raise Damaged(f"{path / 'manifest.json'}: damaged (its content is not what was written)")
        if type(manifest["version"]) is not int or manifest["version"] < 1:
            raise Damaged(f"{path / 'manifest.json'}: damaged (its version is {manifest['version']!r})")
        if manifest["version"] > VERSION:
            raise StoreError(
                f"{path}: is of checkpoint version {manifest['version']}, this normlab reads up to {VERSION}; update it"
            )
        if manifest["step"] != step:
            raise Damaged(f"{path}: is the checkpoint of step {manifest['step']} under another name")
        for name in ("state.safetensors", "meta.json"):
            # The length first: a sparse file of terabytes takes hours to hash.
            length = (path / name).stat().st_size
            if length != manifest["files"][name]["bytes"] or _digest(path / name) != manifest["files"][name]:
                raise Damaged(f"{path / name}: damaged (its SHA-256 is not the one in the manifest)")
            if length > memory.available_bytes():
                raise MemoryError(f"{path / name}: has {length} bytes, more than this machine's memory")
        meta = decode(from_json(read_at_most(path / "meta.json", LARGEST_RECORD)))
        return Checkpoint(step, load_file(path / "state.safetensors"), meta)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damaged(f"{path}: damaged or incomplete ({error.filename}: {error.strerror})") from error
    except (OSError, SafetensorError) as error:
        refused = _of_system(error)
        if refused.errno == errno.ENOMEM:
            raise MemoryError from error
        if refused.errno is None:
            raise Damaged(f"{path}: damaged (its files do not hold what a checkpoint's do)") from error
        raise io_error(Path(refused.filename or path), "read", refused) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: damaged (its files do not hold what a checkpoint's do)") from error


def newest(folder: Path, at_most: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (of at most a step), and what was wrong with those passed over.

    Raises:
        StoreError: There are checkpoints, and all are damaged: never a silent fresh start. Or one that is not
            damaged cannot be read.
    """
    problems: list[str] = []
    for step in reversed(steps(folder)):
        if at_most is not None and step > at_most:
            continue
        try:
            return read(folder, step), problems
        except Damaged as error:
            problems.append(str(error))
    if problems:
        raise StoreError(
            "every checkpoint of this run is damaged: " + "; ".join(problems) + "; put back a copy, or start "
            "another run beside it with run.fresh=true"
        )
    return None, problems
