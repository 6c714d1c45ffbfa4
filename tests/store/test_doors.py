"""Files are opened in few places, which check size, kind, name, binding and sum: a new reader uses them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import normlab

PACKAGE = Path(normlab.__file__).parent
METHODS = {"open", "read_bytes", "read_text", "fromfile", "memmap"}
FUNCTIONS = {"open", "load_file", "safe_open", "np.load", "json.load", "torch.load", "pickle.load"}

OWN_METHODS = {"self.open", "ModelFolder.open"}

DOORS = {
    # Files of records, of models, of tokenizers and of configs, which may be a stranger's.
    "base/parsing.py": "a regular file of at most some bytes",
    "store/files.py": "appends to and replaces files of a record",
    "store/hidden.py": "new files under hidden names",
    "store/lock.py": "locks",
    "store/archive.py": "archives",
    "training/checkpoint.py": "checkpoints, by their manifest",
    "hf/weight_files.py": "weights of other programs, by their headers",
    "hf/folder.py": "the hash of such weights",
    # Text that a user trains on.
    "data/files.py": "files of text",
    "data/documents.py": "normlab's own copy of the text while it is tokenized",
    "data/corpus.py": "normlab's own cache of tokens",
    "data/baselines.py": "normlab's own cache of counts",
    # Files of the system, of the installation and of the user's own code.
    "catalogue/entries.py": "a file of the installation",
    "cli/app.py": "closed standard streams",
    "system/cgroup.py": "limits of the system",
    "system/processes.py": "processes of the system",
    "system/process_memory.py": "memory of the system",
    "explain/page.py": "templates of the installation",
    "report/compare/write.py": "templates of the installation",
    "report/pages/shell.py": "templates of the installation",
    "sweeps/process.py": "logs of this process's children",
    "sweeps/proposals.py": "the file of trials that optuna has written",
    "tracking/follower.py": "standard input",
    "training/launch.py": "messages of this process's children",
    "training/rank.py": "/dev/null",
    "training/resume.py": "the plugins of the user's command",
}
"""Each module that opens files, and which."""


def opened(tree: ast.AST) -> Iterator[str]:
    """Yield the text of each function that is called and opens a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        if name in FUNCTIONS or (is_method and name not in OWN_METHODS):
            yield name


def test_only_the_doors_open_files() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if names := list(opened(ast.parse(path.read_text(encoding="utf-8")))):
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert {name: names for name, names in found.items() if name not in DOORS} == {}
    assert DOORS.keys() <= found.keys()
