"""Tokenizers that were trained elsewhere: of the Hugging Face hub, or a file here."""

from __future__ import annotations

import os
from pathlib import Path

from normlab.data.hub_access import NoAnswer, answer, import_hub
from normlab.data.subwords import SubwordTokenizer
from normlab.errors import DataError


def pretrained_tokenizer(name: str) -> SubwordTokenizer:
    """A tokenizer by its name on the hub, or by its file: only a tokenizer.json is read, and nothing is run.

    From the hub's own cache, whatever the hub has by now; else from the hub.

    Args:
        name: gpt2, org/name; or a tokenizer.json, or a folder with one.

    Raises:
        DataError: There is none of that name, it has no tokenizer.json, or neither hub nor cache.
    """
    if _is_path(name) and not local_tokenizer(name):
        raise DataError(
            f"data.tokenizer={name}: {_not_here(name)}; name a tokenizer.json that there is, a folder with one, or a "
            "model of the hub as org/name"
        )
    path = local_tokenizer(name) or _downloaded(name)
    try:
        return SubwordTokenizer(name, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer={name}: {path} cannot be read ({error}); choose another") from error


def _is_path(name: str) -> bool:
    """Whether a tokenizer's name can be a path only: no name on the hub looks like it."""
    return name.startswith(("/", ".", "~")) or name.endswith((".json", "/"))


def _not_here(name: str) -> str:
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return "the folder of that name has no tokenizer.json"
    return "what has that name is no regular file" if os.path.exists(path) else "there is no such file here"


def local_tokenizer(name: str) -> Path | None:
    """The file of a tokenizer that is named by its path, or None where there is none."""
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, leaves a user that there is not as it stands
    if path.is_dir():
        path = path / "tokenizer.json"
    return path if path.is_file() else None


def _downloaded(name: str) -> Path:
    import_hub(f"data.tokenizer={name}")
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    said, ours = f"data.tokenizer={name}", "data.tokenizer=bytes, chars or bpe needs no download"
    try:
        if isinstance(cached := try_to_load_from_cache(name, "tokenizer.json"), str):
            return Path(cached)
        from huggingface_hub import HfApi

        answer(lambda seconds: HfApi().model_info(name, timeout=seconds, expand=["sha"]))
        disable_progress_bars()
        return Path(hf_hub_download(name, "tokenizer.json"))
    except NoAnswer as error:
        raise DataError(f"{said}: {error}, it is in no cache, and {_not_here(name)}; {ours}") from error
    except GatedRepoError as error:
        raise DataError(
            f"{said}: {constants.ENDPOINT} gives it only to those who may read it; log in (hf auth login, or HF_TOKEN)"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DataError(
            f"{said}: no such model at {constants.ENDPOINT}/{name}, and {_not_here(name)}; give its name as "
            f"org/name, or log in if it is private; {ours}"
        ) from error
    except EntryNotFoundError as error:
        raise DataError(f"{said}: {constants.ENDPOINT}/{name} has no tokenizer.json; choose another model") from error
    except (HfHubHTTPError, OSError) as error:
        raise DataError(f"{said}: {constants.ENDPOINT} failed ({type(error).__name__}); try again; {ours}") from error
