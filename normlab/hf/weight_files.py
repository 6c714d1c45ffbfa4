"""The files in which transformers stores the weights of a model, and the tensors in them."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normlab.base.errors import StoreError
from normlab.base.parsing import check_link, from_json, open_to_read, read_at_most

WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
LARGEST_HEADER = 10**8
"""Most bytes of the header of a file of weights, as in the library."""
LARGEST_INDEX = 2**25
"""Most bytes of an index; one of 2^17 tensors has 2^24."""
SAVE = "save the model with save_pretrained(safe_serialization=True)"


def weight_files(folder: Path) -> list[Path]:
    """Return the file of the weights, or the several that the index names, which transformers reads too.

    Raises:
        StoreError: There is none, one that the index names is missing, or transformers would change the weights. Or
            one has another length than its header declares, or is a link that leads out of the folder.
    """
    if os.path.lexists(folder / ADAPTER):
        raise StoreError(
            f"{folder / ADAPTER}: normlab does not add an adapter to the weights, as transformers does; merge it "
            "(merge_and_unload of peft), save the model, and name that folder"
        )
    files = [folder / WEIGHTS]
    if not os.path.lexists(files[0]):
        index = folder / INDEX
        if not os.path.lexists(index):
            raise StoreError(f"{folder}: has no {WEIGHTS}; {SAVE}")
        files = [folder / name for name in _names_in_index(index)]
        for file in files:
            if not os.path.lexists(file):
                raise StoreError(f"{index}: names {file.name}, which is missing; restore a copy")
    for file in files:
        try:
            check_link(file, folder)
            _check_length(file)
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read ({error}); restore a copy") from error
    return files


def _check_length(file: Path) -> None:
    """Check the length of a file of weights, before all of it is hashed: its header declares the last byte.

    Raises:
        ValueError: It has another length.
        OSError: It cannot be read.
    """
    with open_to_read(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise ValueError("has no header of safetensors")
        header = from_json(opened.read(length))
    # The place of a tensor is its first byte and its end, counted from the end of the header.
    ends = [0]
    for name, tensor in header.items():
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if name == "__metadata__":
            continue
        if not isinstance(offsets, list) or not offsets or type(offsets[-1]) is not int:
            raise ValueError(f"its header has no place of the tensor {name:.60}")
        ends.append(offsets[-1])
    # Eight bytes with the length of the header, the header, and the tensors.
    declared = 8 + length + max(ends)
    if size != declared:
        raise ValueError(f"has {size} bytes, and its header declares {declared}")


def _names_in_index(index: Path) -> list[str]:
    """Return the names of the files in an index, in alphabetical order.

    Raises:
        StoreError: It cannot be read, or has another name than that of a file of weights beside it.
    """
    try:
        check_link(index, index.parent)
        names = from_json(read_at_most(index, LARGEST_INDEX)).get("weight_map")
    except (OSError, ValueError) as error:
        raise StoreError(f"{index}: cannot be read ({error}); restore a copy") from error
    if not isinstance(names, dict) or not names:
        raise StoreError(f"{index}: has no weight_map; {SAVE}")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"model[\w.-]*\.safetensors", name):
            raise StoreError(f"{index}: names {name!r:.60}, which is no file of weights beside it; restore a copy")
    return sorted(set(names.values()))


class StoredTensors(Mapping[str, Tensor]):
    """The tensors in a folder, by their names without the prefix of the class; each is read from its file on access.

    A file of a model without its head has names without the prefix.

    Raises:
        StoreError: A file cannot be read, or two tensors of one name differ.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.paths = weight_files(folder)
        try:
            files: list[Any] = [safe_open(path, "pt") for path in self.paths]
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{self.paths[0]}: cannot be read ({error}); restore a copy") from error
        self._places: dict[str, tuple[Any, str]] = {}
        for path, file in zip(self.paths, files, strict=True):
            for stored_name in file.keys():  # noqa: SIM118
                name, place = stored_name.removeprefix(prefix), (file, stored_name)
                if name in self._places and not _is_equal(place, self._places[name]):
                    raise StoreError(
                        f"{path}: its tensor {stored_name} is in the folder twice, with two values; {SAVE}"
                    )
                self._places[name] = place

    def __getitem__(self, name: str) -> Tensor:
        file, stored_name = self._places[name]
        return file.get_tensor(stored_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> list[int]:
        return _header(self._places[name]).get_shape()

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors writes it, such as `BF16`."""
        return _header(self._places[name]).get_dtype()


def _header(place: tuple[Any, str]) -> Any:
    file, stored_name = place
    return file.get_slice(stored_name)


def _is_equal(place: tuple[Any, str], other: tuple[Any, str]) -> bool:
    """Return whether two tensors are equal; only those of one shape and dtype are read."""
    headers = _header(place), _header(other)
    if headers[0].get_shape() != headers[1].get_shape() or headers[0].get_dtype() != headers[1].get_dtype():
        return False
    return torch.equal(headers[0][:], headers[1][:])
