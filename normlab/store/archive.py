"""Sweeps and runs as a zip file. The file that is unpacked may be a stranger's.

Its files have the paths that they have in a results folder, `runs/ID/run.json`; another path is an error. Pages are not
among them: a stranger's page may have any script, and `normlab compare` writes one from the records.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from normlab.base.errors import ConfigError, StoreError, counted
from normlab.store.files import check_links, io_error, is_file_name, make_folder, sync
from normlab.store.format import RUN_FILE, RUNS_FOLDER, STATISTICS_FOLDER, SWEEPS_FOLDER, TOKENIZER_FILE
from normlab.store.hidden import new_file, new_folder
from normlab.store.plans import has_plan
from normlab.store.reading import read_bytes
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder

_RECORD = re.compile(
    rf"{RUNS_FOLDER}/[^/]+/((run|status|tokenizer)\.json|metrics\.jsonl|stats/[^/]+\.(json|bin)|"
    rf"plugins/[^/]+\.py)|{SWEEPS_FOLDER}/[^/]+/(plan|verify)\.json"
)
_PAGE = re.compile(rf"{SWEEPS_FOLDER}/[^/]+/compare\.html")
"""The page of a sweep, which older files have; it is not unpacked."""
_NAMED_PATH = re.compile(rb'["\s=\'\[(,:](~?/[^\s"\'\]),:;/][^\s"\'\]),:;]*)')
"""An absolute path in the text of a JSON file: after a quote, a space or a sign, and up to the next one."""
_CHECKPOINT = re.compile(rf"{RUNS_FOLDER}/[^/]+/(checkpoints|weights)/step_\d+/[^/]+\.(json|safetensors)")
MOST_FILES = 10**6
LARGEST, LARGEST_RATIO = 2**28, 40
"""A file may unpack to the first number of bytes, or to more if that is at most the ratio times its own size.

Metrics of a run compress to a third. Those of a run that diverged at once, whose rows differ only in the step, compress
to a thirtieth.
"""


def write_archive(
    output: Path, runs_of_sweeps: Iterable[tuple[Path | None, Sequence[RunFolder]]], *, checkpoints: bool = False
) -> None:
    """Write the records of runs, and the plans of their sweeps, to a new zip file.

    Raises:
        ConfigError: The file exists.
        StoreError: No run has started, a link leads out of a folder, or a file cannot be read or written.
    """
    if os.path.lexists(output):
        raise ConfigError(f"-o {output}: exists; give the name of a new file")
    folders: dict[str, Path] = {}
    for sweep, runs in runs_of_sweeps:
        for run in runs:
            folders[f"{RUNS_FOLDER}/{run.run_id}"] = run.path
        if sweep is not None:
            folders[f"{SWEEPS_FOLDER}/{sweep.name}"] = sweep
    files: dict[str, Path] = {}
    for name, folder in folders.items():
        check_links(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[f"{name}/{path.relative_to(folder).as_posix()}"] = path
    if not any(name.endswith(f"/{RUN_FILE}") for name in files):
        raise StoreError(f"-o {output}: there is nothing to share, because no run has started; train the sweep first")
    make_folder(output.parent)
    try:
        with new_file(output) as temporary_file:
            with ZipFile(temporary_file, "w", strict_timestamps=False) as archive:
                for name, path in files.items():
                    is_checkpoint = _CHECKPOINT.fullmatch(name) is not None
                    # Weights are as good as random numbers: compressing them takes long and saves nothing.
                    if _is_record(name) and (checkpoints or not is_checkpoint):
                        archive.write(path, name, ZIP_STORED if is_checkpoint else ZIP_DEFLATED)
            sync(temporary_file)
    except OSError as error:
        raise io_error(output, "written", error, setting="-o") from error


def damage_of(folder: RunFolder) -> list[str]:
    """Return what a reader of a run's record will find damaged, one line each."""
    entry = RunRecord.read(folder)
    if not isinstance(entry, RunRecord):
        return [entry.problem]
    problems = [folder.metrics_problem(), folder.statistics_problem()]
    tokenizer, expected = folder.path / TOKENIZER_FILE, entry.corpus.tokenizer_sha256
    if expected and hashlib.sha256(read_bytes(tokenizer)).hexdigest() != expected:
        problems.append(f"{tokenizer}: is missing or damaged; restore a copy from a run on the same corpus")
    return [problem for problem in problems if problem]


def absolute_paths(path: Path) -> list[str]:
    """Return the absolute paths of the machine that the JSON files of an archive name, each once, as text.

    The user named them: a corpus by `data.path`, a plugin, or a disk in the message of a failed run.
    """
    paths: dict[str, None] = {}
    with ZipFile(path) as archive:
        for name in archive.namelist():
            # Vocabularies and formulas have slashes, and nothing that a user has named.
            is_description = name.endswith("/tokenizer.json") or f"/{STATISTICS_FOLDER}/" in name
            if not name.endswith(".json") or is_description:
                continue
            for match in _NAMED_PATH.findall(archive.read(name)):
                paths[match.decode(errors="replace")] = None
    return list(paths)


def unpack_archive(path: Path, folder: Path) -> list[str]:
    """Unpack a zip file of `write_archive` into a new results folder, and return the names of its sweeps.

    Raises:
        ConfigError: The folder exists.
        StoreError: The file is damaged, holds another file than those of records, or is too large; or it cannot be
            read, or the folder not be written. Nothing is left then.
    """
    if not path.is_file():
        raise StoreError(f"{path}: is not a file; name a zip file of `normlab share`")
    try:
        with ZipFile(path) as archive:
            _check_entries(archive, path.stat().st_size)
            # After the file: one without a suffix, which may be no zip file, has the name of its default folder.
            if os.path.lexists(folder):
                raise ConfigError(f"{folder}: exists; name a new folder with -o FOLDER")
            make_folder(folder.parent)
            # All entries are checked before the first is written; the folder has its name when the last one is there.
            with new_folder(folder) as temporary_folder:
                for entry in archive.infolist():
                    if _PAGE.fullmatch(entry.filename):
                        continue
                    target = temporary_folder / entry.filename
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(entry) as source, target.open("xb") as file:
                        shutil.copyfileobj(source, file)  # stops at the size that the entry declares
                        if file.tell() != entry.file_size:
                            raise ValueError(f"{entry.filename} has another size than it declares")
                sweeps = sorted(sweep.name for sweep in (temporary_folder / SWEEPS_FOLDER).glob("*") if has_plan(sweep))
    except (BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of an entry at an impossible position
            raise io_error(folder, "written", error, setting="-o") from error
        raise StoreError(f"{path}: is not a file of `normlab share` ({error}); ask for another copy") from error
    return sweeps


def _check_entries(archive: ZipFile, size: int) -> None:
    """Raise ValueError unless all entries are files of records, of names that differ and of a plausible size."""
    entries = archive.infolist()
    names = [entry.orig_filename for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        # A second name may be in an extra field.
        if name != entry.filename or not (_is_record(name) or _PAGE.fullmatch(name)):
            raise ValueError(f"{name!r:.80} is no file of a record")
        if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
            raise ValueError(f"{name} is a link or a device")
        if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or entry.flag_bits & 1:
            raise ValueError(f"{name} is encrypted, or compressed by another method")
    # On a disk that ignores case these would be one file, and writing the second one would fail as if by a fault of -o.
    if len({name.casefold() for name in names}) < len(names):
        raise ValueError("two files have one name")
    if not any(name.endswith(f"/{RUN_FILE}") for name in names):
        raise ValueError("it holds no run")
    # A small file may declare contents that fill the disk.
    total = sum(entry.file_size for entry in entries)
    if len(names) > MOST_FILES or total > max(LARGEST, LARGEST_RATIO * size):
        raise ValueError(f"{counted(len(names), 'file')} of {total} bytes, too large for a file of {size}")


def _is_record(name: str) -> bool:
    """Whether a name is the path of a file of a record in a results folder."""
    return bool(_RECORD.fullmatch(name) or _CHECKPOINT.fullmatch(name)) and all(map(is_file_name, name.split("/")))
