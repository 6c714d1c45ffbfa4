"""A folder of transformers that normlab has written."""

from pathlib import Path

import pytest

from normlab.hf.classes import class_of
from normlab.hf.export import write_folder
from support.transformers_folders import CHARS
from support.transformers_models import config_of, randomised


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of an exported Llama."""
    config = config_of("model=llama_nano", "norm=rmsnorm")
    write_folder(tmp_path / "model", class_of(config), config, randomised(config), CHARS, "")
    return tmp_path / "model"
