"""Pretrained tokenizers, from the Hugging Face hub or from a file."""

from __future__ import annotations

import os
from pathlib import Path

from normlab.data.hub_access import NoAnswer, import_hub, query_hub
from normlab.data.subwords import SubwordTokenizer
from normlab.errors import DataError


def pretrained_tokenizer(name: str) -> SubwordTokenizer:
    """Return a tokenizer by its name on the hub or by its path. Only tokenizer.json is read; no code runs.

    A tokenizer in the cache of the hub's library is used without a request.

    Args:
        name: gpt2, org/name, a tokenizer.json, or a folder with one.

    Raises:
        DataError: No tokenizer has that name, it has no tokenizer.json, or neither hub nor cache has it.
    """
    path = local_tokenizer(name)
    # No name on the hub looks like these.
    if path is None and (name.startswith(("/", ".", "~")) or name.endswith((".json", "/"))):
        raise DataError(
            f"data.tokenizer={name}: {_missing_path(name)}; choose a tokenizer.json, a folder with one, or a model of "
            "the hub as org/name"
        )
    path = path or _download(name)
    try:
        return SubwordTokenizer(name, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer={name}: {path} cannot be read ({error}); choose another") from error


def local_tokenizer(name: str) -> Path | None:
    """Return the file of a tokenizer that is named by its path, or None if there is none."""
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    if path.is_dir():
        path = path / "tokenizer.json"
    return path if path.is_file() else None


def _missing_path(name: str) -> str:
    """Return why `name` is not the path of a tokenizer."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return "the folder of that name has no tokenizer.json"
    return "the path is not a regular file" if os.path.exists(path) else "there is no such file here"


def _download(name: str) -> Path:
    override, alternative = f"data.tokenizer={name}", "data.tokenizer=bytes, chars or bpe needs no download"
    import_hub(override)
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    try:
        if isinstance(cached := try_to_load_from_cache(name, "tokenizer.json"), str):
            return Path(cached)
        query_hub(lambda seconds: HfApi().model_info(name, timeout=seconds, expand=["sha"]))
        disable_progress_bars()
        return Path(hf_hub_download(name, "tokenizer.json"))
    except NoAnswer as error:
        raise DataError(
            f"{override}: {error}, it is not in the local cache, and {_missing_path(name)}; {alternative}"
        ) from error
    except GatedRepoError as error:
        raise DataError(
            f"{override}: {constants.ENDPOINT} denies access; log in (hf auth login, or HF_TOKEN)"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DataError(
            f"{override}: no such model at {constants.ENDPOINT}/{name}, and {_missing_path(name)}; set it to "
            f"org/name, or log in if the model is private; {alternative}"
        ) from error
    except EntryNotFoundError as error:
        raise DataError(
            f"{override}: {constants.ENDPOINT}/{name} has no tokenizer.json; choose another model"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise DataError(
            f"{override}: {constants.ENDPOINT} failed ({type(error).__name__}); try again; {alternative}"
        ) from error
