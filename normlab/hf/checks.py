"""The checks of `normlab verify` for the model in a folder of transformers."""

import os
from collections.abc import Iterator

from normlab.base.errors import warn
from normlab.data.tokenizer_sources import pretrained_tokenizer
from normlab.hf.folder import ModelFolder
from normlab.verify.check import Check
from normlab.verify.selection import all_checks_of_run


def verify_folder(name: str) -> Iterator[Check]:
    """Yield the checks of a folder of transformers: its tensors, and the block of its model.

    Raises:
        NormlabError: The folder cannot be read, or normlab has no model that computes the same.
    """
    folder = ModelFolder.open(name)
    folder.tensors(folder.config)
    if (folder.path / "tokenizer.json").is_file():
        for warning in folder.vocabulary_warnings(pretrained_tokenizer(os.fspath(folder.path))):
            warn(warning)
    yield Check(f"model {name}", f"is a {folder.native.name}", passed=True, result=" ".join(folder.overrides))
    yield from all_checks_of_run(folder.config)
