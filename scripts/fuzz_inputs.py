#!/usr/bin/env python3
"""Mutate every input of normlab, and test that it is rejected or used as written.

    .venv/bin/python scripts/fuzz_inputs.py [--count 1000] [--seed 0] [--kind overrides,texts] [--only records/17]

A case is one or more calls of the command line, in this process and in a folder of its own; every 50th also runs in a
process of its own. Kinds: `overrides` (the command line), `configs` (YAML files of --config-dir), `texts` (text,
JSONL, Parquet), `checkpoints`, `records` (run.json, status.json, metrics.jsonl, tokenizer.json, a plugin's copy), and
`forged` (the same files with absurd sizes with a valid checksum, or as a sparse terabyte). Each call must satisfy:

- it exits with 0 or 2, and never with a traceback;
- an error is one line, names the input, ends with a remedy, and changes no file;
- an accepted override or config file is in the run's record;
- every document and every token of an accepted text is counted;
- a run with damaged checkpoints is rejected, or prints a warning and ends bit for bit like the undamaged run;
- a damaged record is shown as damaged, or shows only values of the undamaged record.

Prints a table, and each failure with the options that repeat it; exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

SHARES = {"overrides": 40, "configs": 15, "texts": 15, "checkpoints": 15, "records": 12, "forged": 3}
"""Cases of each kind in a hundred."""
IN_A_PROCESS = 50
"""One in this many cases of a kind also runs in a process of its own."""
STEPS, STOPPED = 6, 4
"""Steps of the finished run, and the step at which the other run was stopped."""

SMALL = [
    "model=gpt2_nano", "model.depth=1", "model.width=16", "model.context=16", "train.batch_size=2",
    "eval.sequences=2", "data=files", "tracking.wandb=off", "device=cpu",
]  # fmt: skip

LEAKS = re.compile(
    r"Traceback|\b(Key|Type|Value|Attribute|Index|Runtime|Assertion|Recursion|Overflow|Memory|Name|JSONDecode|"
    r"Unicode(De|En)code|FileNotFound|Validation|Safetensor|Arrow\w*|Config\w+)Error\b|<class '|object at 0x|\x1b"
)
"""Python's own terms, which a message must not contain."""
ADVICE = re.compile(
    r"choose|let |give|set |sets |leave|use |put |delete|fix|pass |update|did you mean|must (be|not)|make |free |"
    r"quote|name |try|start|wait|lower|raise|convert|lists|write|add|exclude|unpack|needs|trains|keep|sweep|find|run "
)
"""The end of every error message contains one of these words."""


# Calling.


@dataclass(frozen=True, slots=True)
class Result:
    """The exit code and output of a call."""

    code: int
    out: str
    err: str
    raised: str = ""
    """The traceback, if there is one."""
    configs: tuple[dict[str, Any], ...] = ()
    """The config of each run to train."""


@dataclass(slots=True)
class Lab:
    """The corpus and the undamaged runs that all cases share."""

    scratch: Path
    corpus: Path
    finished: Path = Path()
    """A results folder with a finished run of `STEPS` steps."""
    stopped: Path = Path()
    """The same run, interrupted after `STOPPED` steps."""
    overrides: list[str] = field(default_factory=list)
    """The overrides of both runs."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The undamaged row of `summarize`, by folder."""
    samples: set[str] = field(default_factory=set)
    """Texts that the undamaged checkpoints generate."""


def small_enough(config: Any) -> bool:
    """Return whether a run is fast enough to train; larger runs are only composed and validated."""
    model, train = config.model, config.train
    size = model.depth * model.width * (4 * model.width + 3 * model.mlp_width) + model.width * model.context
    return (
        size <= 200_000
        and train.steps <= 20
        and train.batch_size * model.context * model.depth * model.width <= 100_000
        and config.tracking.wandb == "off"
        and config.compile != "on"
        and config.data.name == "files"
        and config.eval.sequences <= 100
    )


def call(*arguments: str) -> Result:
    """Call the command line in this process."""
    from normlab import cli
    from normlab.cli import train as command
    from normlab.options import plain_tree

    configs: list[dict[str, Any]] = []
    real = command.train_one

    def train(config: Any) -> None:
        configs.append(plain_tree(config))
        if small_enough(config):
            real(config)

    out, err, code, raised = io.StringIO(), io.StringIO(), 0, ""
    command.train_one = train
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except Exception:
        code, raised = 1, traceback.format_exc()
    finally:
        command.train_one = real
    return Result(code, out.getvalue(), err.getvalue(), raised, tuple(configs))


def call_process(*arguments: str) -> Result:
    """Call the command line in a process of its own."""
    command = [sys.executable, "-m", "normlab", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, errors="backslashreplace")
    raised = done.stderr if "Traceback" in done.stderr else ""
    return Result(done.returncode, done.stdout, done.stderr, raised)


def files_of(folder: Path) -> dict[str, str]:
    """Return every file below with its SHA-256, or its size if it is huge, and every folder; locks are left out."""

    def content(path: Path) -> str:
        size = path.stat().st_size
        return hashlib.sha256(path.read_bytes()).hexdigest() if size < 2**30 else f"{size} bytes"

    return {
        str(path.relative_to(folder)): content(path) if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if path.name != "lock" and not (path.is_dir() and path.name in ("runs", "results"))
    }


# Conditions of every call.


def exit_problem(result: Result, names: Sequence[str] = ()) -> str:
    """Return the problem with a call's exit code or output, or an empty text.

    An error message must contain one of `names`.
    """
    if result.raised:
        return "traceback: " + result.raised.strip().splitlines()[-1][:300]
    if result.code not in (0, 2):
        return f"exit {result.code}: {result.err[-300:]}"
    # A message about a plugin may contain the exception that the plugin's code raised.
    if (leak := LEAKS.search(result.err)) and "plugins: " not in result.err:
        line = next(line for line in result.err.splitlines() if leak[0] in line)
        return f"leaks {leak[0]!r}: {line[:300]}"
    if result.code == 0:
        return ""
    lines = [line for line in result.err.splitlines() if not line.startswith("normlab: ")]
    if len(lines) != 1 or not lines[0].startswith("error: "):
        return f"an error of {len(lines)} lines: {result.err[:400]}"
    if result.out:
        return f"an error with output: {result.out[:200]}"
    if not ADVICE.search(lines[0].rpartition("; ")[2].lower()):
        return f"no advice: {lines[0]}"
    # A message shows control characters as escapes, and white space as a single blank.
    shown = [" ".join(name.encode(errors="backslashreplace").decode().split()) for name in names]
    if names and not any(name in lines[0] for name in shown):
        return f"does not name {' or '.join(names)[:100]}: {lines[0]}"
    return ""


@dataclass(slots=True)
class Case:
    """Calls in a folder, and the condition on each."""

    description: str
    """The mutation."""
    calls: list[list[str]]
    prepare: Callable[[Path], Any] = lambda folder: None
    names: list[str] = field(default_factory=list)
    judge: Callable[[Path, Result, list[str]], str] = lambda folder, result, arguments: ""
    """Returns the problem with an accepted call, or an empty text."""


# Mutated bytes and values.

ODD = (
    "", " ", "null", "None", "true", "yes", "0", "-1", "1", "2", "3", "1.5", "1e3", "1e400", "nan", "inf", "-inf",
    "99999999999999999999", "1" * 5000, "0x10", "1_000", "[]", "[1,2]", "{}", "{a:1}", "a,b", "a b", "é", "日本", "\n",
    "\x00x", "\x1b[31m", "'", '"', "\\", "${seed}", "${foo}", "${oc.env:HOME}", "???", "~", "=", "a=b", "(", "x" * 300,
    "../x", "/dev/null", "/dev/zero", ".", "range(3)", "choice(1,2)", "int(3)", "glob(*)", "\udcff", "%s", "{0}", "&",
    "$(x)", "-", "--", "#", "1e-320", "on", "off", "auto",
)  # fmt: skip


ODD_YAML = (
    "!!python/object:os.system x", "&a [*a]", "[", "{", "|", "!x y", "0b1", "2024-01-01", "1:30", "*b", "'", "@",
)  # fmt: skip
ODD_LINES = (
    "", "foo: 1", "\tbar: 2", "name: post", "_target_: os.system", "<<: 3", "- a", "? x", "# @package _global_",
    "width: {a: 1}", "defaults: 3",
)  # fmt: skip
ODD_ROWS = (
    b"{}", b"3", b"null", b'{"text": 3}', b'{"text": null}', b'{"text": "\\ud800"}', b"[]", b'{"text":', b"",
    b'{"txt": "a"}', b'{"text": "a", "text": "b"}', b'{"text": ["a"]}', b"NaN", b'{"text": "\\u0000"}',
)  # fmt: skip


def mutate_text(draw: random.Random, text: str) -> str:
    """Return the text after one to three edits of characters."""
    letters = list(text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(letters) + 1)
        edit = draw.choice(["insert", "delete", "double", "swap", "replace"])
        if edit == "insert" or not letters or at == len(letters):
            letters.insert(at, draw.choice("abz019.=_-+~@[]{}(),:;'\"\\/ $é\t"))
        elif edit == "delete":
            del letters[at]
        elif edit == "double":
            letters.insert(at, letters[at])
        elif edit == "swap" and at + 1 < len(letters):
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
        else:
            letters[at] = draw.choice("abz019.=_-é")
    return "".join(letters)


def mutate_bytes(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Return a description of the mutation and the mutated bytes, which always differ."""
    size = len(content)
    # A fraction of the length, since times in the content change the length by a few bytes.
    at = int(draw.random() * size)
    how = draw.choice(["flip", "cut", "empty", "append", "zeros", "garbage", "drop", "twice"])
    mutated = {
        "flip": content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :],
        "cut": content[:at],
        "empty": b"",
        "append": content + draw.randbytes(draw.randint(1, 40)),
        "zeros": content[:at] + bytes(min(64, size - at)) + content[at + 64 :],
        "garbage": draw.randbytes(size),
        "drop": content[:at] + content[at + draw.randint(1, 64) :],
        "twice": content + content,
    }[how]
    return (f"{how} at {at} of {size}", mutated) if mutated != content else ("append", content + b"x")


def mutate_json(draw: random.Random, tree: Any) -> tuple[str, Any]:
    """Return a description, and the tree with one node removed or replaced by another type."""
    tree = json.loads(json.dumps(tree))
    spots: list[tuple[Any, Any, str]] = []

    def walk(node: Any, where: str) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            spots.append((node, key, f"{where}.{key}"))
            walk(value, f"{where}.{key}")

    walk(tree, "")
    # The upper levels matter most: half of the mutations choose among them only.
    top = [spot for spot in spots if spot[2].count(".") <= 2]
    node, key, where = draw.choice(draw.choice([top, spots]))
    if draw.random() < 0.4:
        del node[key]
        return f"without {where}", tree
    old = node[key]
    kinds = [
        value for value in (None, 3, -1.5, "x", "nan", [], {}, True, [[]], 10**400) if type(value) is not type(old)
    ]
    node[key] = draw.choice(kinds)
    return f"{where} = {str(node[key])[:20]}", tree


# Overrides.


def options_of_run(lab: Lab) -> dict[str, Any]:
    """Return every option of the undamaged run with its value."""
    from normlab.config.compose import compose_run
    from normlab.options import flatten_options

    return flatten_options(compose_run([*SMALL, f"data.path={lab.corpus}"]))


def overrides(draw: random.Random, lab: Lab) -> Case:
    """Return a case with one or two mutated overrides of `train`, or arguments of another command."""
    known = options_of_run(lab)
    groups = {
        "norm": ["rmsnorm", "layernorm", "batchnorm", "none", "rmsnorm_gemma"], "placement": ["pre", "post"],
        "model": ["gpt2_nano", "llama_nano"], "data": ["files"], "optim": ["adamw", "sgd"],
    }  # fmt: skip

    def mutated_override() -> str:
        option = draw.choice([*known, *groups])
        value = draw.choice(groups[option]) if option in groups else str(known[option])
        how = draw.random()
        if how < 0.35:
            return f"{option}={draw.choice(ODD)}"
        if how < 0.5:
            return mutate_text(draw, f"{option}={value}")
        if how < 0.6:
            return f"{option}={mutate_text(draw, value)}"
        if how < 0.65:
            return f"{mutate_text(draw, option)}={value}"
        if how < 0.75:
            return draw.choice(["+", "++", "~", "+~", "@", "-", "--", " "]) + f"{option}={value}"
        if how < 0.8:
            return draw.choice(ODD)
        if how < 0.9:
            number = draw.choice([2, 3, 4, 7, 16, 64, 10**5, 2**20, 10**9, 2**31, 2**63, 10**11, 10**30, -1, 0])
            return f"{draw.choice([name for name in known if isinstance(known[name], int)])}={number}"
        flags = ("--cfg", "--config-name", "--config-dir", "--config-path", "-m", "-r", "-h", "--nope", "--multirun")
        flag = draw.choice(flags)
        return draw.choice([flag, f"{flag}={draw.choice(['job', 'hydra', 'x', '', 'é', '/nowhere', 'all'])}"])

    if draw.random() < 0.12:
        return other_command(draw, lab)
    mutated = [text for text in (mutated_override() for _ in range(draw.choice([1, 1, 1, 2]))) if "\0" not in text]
    mutated = mutated or ["norm"]
    base = [*SMALL, f"data.path={lab.corpus}", "train.steps=2"]
    names = [part for override in mutated for part in parts_of(override)]
    return Case(" ".join(mutated), [["train", *base, *mutated]], names=names, judge=judge_overrides)


def parts_of(override: str) -> list[str]:
    """Return the option and the value of an override; an error message must show one of them."""
    key, _, value = override.partition("=")
    key = key.strip("+~- @")
    return [part for part in (key, key.rpartition(".")[2], value[:50].strip()) if part.strip("- \n")] or [
        override.strip() or repr(override)[1:-1]
    ]


def judge_overrides(folder: Path, result: Result, arguments: list[str]) -> str:
    """Check that the config has each option that was set, and that a call without a run writes nothing."""
    if not result.configs:
        return f"wrote {files_of(folder)}" if files_of(folder) else ""
    options = {text.partition("=")[0].lstrip("+").strip(): text for text in arguments[1:] if not text.startswith("-")}
    for config in result.configs:
        for option, override in options.items():
            if option.startswith("hydra"):
                continue
            value: Any = config
            for part in option.split("."):
                if not isinstance(value, dict) or part not in value:
                    return f"accepted {override!r}, and the config has no {option}"
                value = value[part]
            if isinstance(value, dict) and "name" in value:
                value = {value["name"], value.get("preset")}
            elif isinstance(value, dict) and "preset" in value:
                value = {value["preset"]}
            if len(result.configs) == 1 and not means(override.partition("=")[2], value):
                return f"accepted {override[:80]!r}, and the config has {value!r:.80}"
    return ""


def means(text: str, value: Any) -> bool:
    """Return whether an override's text sets this value; interpolations and functions are not evaluated."""
    text = text.strip(" \t")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if "${" in text or "(" in text or text.lower() == "null":
        return True
    if isinstance(value, set):
        return text in value
    if isinstance(value, bool):
        return text.lower() in (("true", "yes", "y", "on", "1") if value else ("false", "no", "n", "off", "0"))
    if isinstance(value, int | float):
        with contextlib.suppress(ValueError):
            return float(text) == float(value)
        return False
    if isinstance(value, list):
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [item.strip(" '\"") for item in inner.split(",") if item] == [str(item) for item in value]
    return isinstance(value, dict) or text.replace("\\", "") == str(value).replace("\\", "")


def other_command(draw: random.Random, lab: Lab) -> Case:
    """Return a case with mutated arguments of summarize, list or sample on an undamaged run."""
    results = str(lab.finished / "results")
    command = draw.choice([
        ["summarize", results, "--format", "json"], ["summarize", results, "--format", "table"],
        ["list", "runs", results], ["list", "norms", "--json"], ["list", "models"],
        ["sample", "rmsnorm", "--results-dir", results, "--tokens", "3", "--seed", "1", "--temperature", "0.5"],
    ])  # fmt: skip
    at = draw.randrange(len(command))
    odd = [text for text in ODD if "\0" not in text and not text.startswith("9999")]
    command[at] = draw.choice([mutate_text(draw, command[at]), draw.choice(odd)])
    return Case(" ".join(command), [command])


# Config files.


def configs(draw: random.Random, lab: Lab) -> Case:
    """Return a case with a mutated preset of the user's in --config-dir."""
    group, text = draw.choice([
        ("norm", "defaults:\n  - rmsnorm\n  - _self_\npreset: mine\neps: 1.0e-05\ngain: true\neps_mode: inside_ms\n"),
        ("model", "preset: mine\ndepth: 1\nwidth: 16\nheads: 2\ncontext: 16\nmlp: gelu\nbias: true\n"),
        ("optim", "defaults:\n  - adamw\n  - _self_\nlr: 0.001\nschedule: cosine\nwarmup_steps: 1\nclip: 1.0\n"),
        ("data", "defaults:\n  - files\n  - _self_\ntokenizer: bytes\nval_fraction: 0.1\nseed: 1\ncolumn: text\n"),
        ("placement", "defaults:\n  - pre\n  - _self_\n"),
        ("", "defaults:\n  - train\n  - _self_\nseed: 3\ntrain:\n  steps: 2\n"),
    ])  # fmt: skip
    lines = text.splitlines()
    content, how = text.encode(), draw.choice(["value", "value", "line", "bytes", "text", "whole"])
    if how == "value":
        at = draw.choice([i for i, line in enumerate(lines) if ": " in line or line.startswith("  - ")])
        value = draw.choice([*ODD, *ODD_YAML])
        start = "  - " if lines[at].startswith("  - ") else lines[at].partition(": ")[0] + ": "
        lines[at] = start + value
        how, content = lines[at], "\n".join(lines).encode(errors="surrogateescape")
    elif how == "line":
        at = draw.randrange(len(lines))
        extra = draw.choice([*ODD_LINES, draw.choice(lines)])
        lines[at : at + draw.randint(0, 1)] = [extra]
        how, content = f"line {at}: {extra}", "\n".join(lines).encode()
    elif how == "bytes":
        how, content = mutate_bytes(draw, content)
    elif how == "text":
        content = mutate_text(draw, text).encode()
    else:
        content = draw.choice(
            [b"", b"3", b"[]", b"null", b"\xff\xfe", b"a: b: c", b"{}", b"---\n---\n", b"x" * 5000, b"- 1"]
        )

    def prepare(folder: Path) -> None:
        place = folder / "own" / group
        place.mkdir(parents=True)
        (place / "mine.yaml").write_bytes(content)

    chosen = [f"{group}=mine"] if group else ["--config-name=mine"]
    base = [
        text for text in [*SMALL, f"data.path={lab.corpus}", "train.steps=2"] if not (group and text.startswith(group))
    ]
    base = [text for text in base if group != "data" or not text.startswith("data")]
    if group == "data":
        chosen.append(f"+data.path={lab.corpus}" if b"files" not in content else f"data.path={lab.corpus}")

    def judge(folder: Path, result: Result, arguments: list[str]) -> str:
        import yaml

        tree = yaml.safe_load(content.decode())
        for config in result.configs:
            for key, value in (tree or {}).items():
                # OmegaConf keeps the earlier value of an option that is ???.
                if key in ("defaults", "preset") or isinstance(value, dict) or value == "???":
                    continue
                actual = config[group].get(key) if group else config.get(key)
                if (isinstance(value, str) and "${" in value) or value is None or actual == value:
                    continue
                if not means(str(value), actual):
                    return f"accepted {key}: {value!r}, and the config has {actual!r}"
        return ""

    description = f"{group or 'primary'}: {how}"
    return Case(description, [["train", "--config-dir", "own", *base, *chosen]], prepare, judge=judge)


# Texts.


def texts(draw: random.Random, lab: Lab) -> Case:
    """Return a case with a mutated corpus of the user's; every document of an accepted one must be counted."""
    kind = draw.choice(["txt", "jsonl", "parquet"])
    sentences = [
        " ".join(draw.choices(["the", "norm", "a", "layer", "scales", "mean", "é", "日本", "stream"], k=9))
        for _ in range(60)
    ]
    how = "unchanged"
    if kind == "txt":
        content = "\n".join(sentences).encode()
    elif kind == "jsonl":
        content = "".join(
            json.dumps({"text": line, "n": i}, ensure_ascii=False) + "\n" for i, line in enumerate(sentences)
        ).encode()
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        values: list[Any] = list(sentences)
        if draw.random() < 0.5:
            how, column = draw.choice([
                ("a null", [*values, None]), ("numbers", list(range(60))), ("lists", [[v] for v in values]),
                ("bytes", [v.encode() for v in values]), ("empty rows", ["", *values]), ("no rows", []),
            ])  # fmt: skip
            values = column
        stream = io.BytesIO()
        name = draw.choice(["text", "text", "text", "body"])
        pq.write_table(pa.table({name: pa.array(values)}), stream)
        content = stream.getvalue()
    dice = draw.random()
    if dice < 0.5:
        how, content = mutate_bytes(draw, content)
    elif dice < 0.6:
        content = draw.choice(
            [b"", b"\n", b"\xef\xbb\xbf" + content, content[:40], content.replace(b"\n", b"\r\n"), b"\x00" * 900]
        )
        how = f"{len(content)} bytes"
    elif kind == "jsonl" and dice < 0.9:
        odd = draw.choice(ODD_ROWS)
        at = draw.randrange(60)
        lines = content.split(b"\n")
        content, how = b"\n".join([*lines[:at], odd, *lines[at:]]), f"line {at}: {odd.decode()}"
    name = draw.choice(
        [f"my.{kind}"] * 6 + [f"é a.{kind}", f"a=b,c.{kind}", f"it's.{kind}", f"[x].{kind}", f"x.{kind}.gz"]
    )
    override = f"data.path={name}" if not set(name) & set(",[") else f"data.path=['{name}']" if "'" not in name else ""
    tokenizer = draw.choice(["bytes", "chars"])

    def prepare(folder: Path) -> None:
        (folder / name).write_bytes(content)

    def judge(folder: Path, result: Result, arguments: list[str]) -> str:
        documents = documents_of(kind if not name.endswith(".gz") else "txt", content)
        runs = list((folder / "results" / "runs").iterdir())
        corpus = json.loads((runs[0] / "run.json").read_bytes())["corpus"]
        if documents is None:
            return f"accepted a file that is not {kind}: {corpus}"
        size = len if tokenizer == "chars" else lambda text: len(text.encode("utf-8", "surrogatepass"))
        total, count = sum(map(size, documents)), len(documents)
        extra = corpus["train_tokens"] + corpus["val_tokens"] - total
        ends = {count} if corpus["split"] == "documents" else range(count, 2 * count + 1)
        if corpus["documents"] != count or extra not in ends:
            return f"{count} documents of {total} tokens are recorded as {corpus}"
        return ""

    train = ["train", *SMALL, "train.steps=1", override, f"data.tokenizer={tokenizer}"]
    return Case(f"{name}: {how}", [train], prepare, [name, "data"], judge)


def documents_of(kind: str, content: bytes) -> list[str] | None:
    """Return the documents of a file, read independently of normlab; None if it cannot be read."""
    try:
        if kind == "parquet":
            import pyarrow.parquet as pq

            values = pq.read_table(io.BytesIO(content))["text"].to_pylist()
        elif kind == "txt":
            values = [content.decode().replace("\r\n", "\n").replace("\r", "\n")]
        else:
            lines = [json.loads(line) for line in content.decode("utf-8-sig").splitlines() if line.strip()]
            values = [line["text"] for line in lines]
    except Exception:
        return None
    if not all(isinstance(text, str) and "\0" not in text for text in values):
        return None
    return [text for text in values if text]


# Checkpoints and records.


def only_run(folder: Path) -> Path:
    """Return the only run in a folder's results."""
    return next((folder / "results" / "runs").iterdir())


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the record's rows without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] != "pace"]


def checkpoints(draw: random.Random, lab: Lab) -> Case:
    """Return a case with damaged checkpoints of a stopped run, which is resumed and sampled from."""
    plan: list[tuple[str, str, int]] = []
    for name in draw.choice([["step_00000004"], ["step_00000002"], ["step_00000002", "step_00000004"]]):
        file = draw.choice(["state.safetensors", "state.safetensors", "meta.json", "manifest.json"])
        plan.append((name, draw.choice([file, file, file, "folder"]), draw.randrange(10**9)))
    damages: list[str] = []

    def prepare(folder: Path) -> None:
        shutil.copytree(lab.stopped, folder, dirs_exist_ok=True)
        for name, file, seed in plan:
            draw = random.Random(seed)
            saved = only_run(folder) / "checkpoints" / name
            if file != "folder":
                kinds = ["bytes", "bytes", "bytes", "missing", "folder instead"]
                how = draw.choice([*kinds, "json", "json"] if file.endswith(".json") else [*kinds, "the other's"])
                path = saved / file
                if how == "bytes":
                    how, content = mutate_bytes(draw, path.read_bytes())
                    path.write_bytes(content)
                elif how == "json":
                    how, tree = mutate_json(draw, json.loads(path.read_bytes()))
                    path.write_text(json.dumps(tree))
                elif how == "the other's":
                    other = "step_00000002" if name.endswith("4") else "step_00000004"
                    shutil.copyfile(lab_file(lab, other, file), path)
                else:
                    path.unlink()
                    if how == "folder instead":
                        path.mkdir()
            else:
                how = draw.choice(["missing", "renamed", "a file instead", "the other's"])
                if how == "renamed":
                    saved.rename(
                        saved.with_name(draw.choice(["step_00000003", "step_00000005", "step_00000009", "step_4"]))
                    )
                else:
                    shutil.rmtree(saved)
                    if how == "a file instead":
                        saved.write_text("x")
                    elif how == "the other's":
                        other = "step_00000002" if name.endswith("4") else "step_00000004"
                        shutil.copytree(lab_file(lab, other, "."), saved)
            damages.append(f"{name}/{file} {how}")

    def judge(folder: Path, result: Result, arguments: list[str]) -> str:
        if arguments[0] == "sample":
            return "" if result.out in lab.samples else f"sampled {result.out!r}"
        run = only_run(folder)
        status = json.loads((run / "status.json").read_bytes())
        if status["state"] != "finished" or rows_of(run) != lab.rows:
            return f"ended differently from the undamaged run: {status['state']} at {status['step']}"
        final = f"checkpoints/step_{STEPS:08d}/state.safetensors"
        if (run / final).read_bytes() != (only_run(lab.finished) / final).read_bytes():
            return "ended with different weights from the undamaged run"
        visible = [how for how in damages if not re.search(r"folder (missing|renamed)", how)]
        # A complete newest checkpoint is used without reading the older one.
        if any("00000004" in how for how in visible) and not re.search("damaged|incomplete|checkpoint", result.err):
            return f"resumed without a warning: {result.err[-300:]}"
        return ""

    sample = ["sample", "rmsnorm", "--trust", "--prompt", "the", "--tokens", "8", "--seed", "1"]
    case = Case("", [sample, ["train", *lab.overrides]], prepare, ["checkpoint"], judge)
    case.description = " + ".join(f"{name}/{file} #{seed}" for name, file, seed in plan)
    return case


def lab_file(lab: Lab, step: str, file: str) -> Path:
    """Return a file of an undamaged checkpoint."""
    return only_run(lab.stopped) / "checkpoints" / step / file


def records(draw: random.Random, lab: Lab, *, forged: bool = False) -> Case:
    """Return a case with a damaged file of a run, which is listed, summarised, sampled from and resumed.

    Args:
        draw: Draws the damage.
        lab: The undamaged runs.
        forged: Whether a person made the damage: an absurd size with a valid checksum, or a sparse terabyte.
    """
    source = draw.choice(["finished", "stopped"])
    file = draw.choice(
        ["run.json", "run.json", "status.json", "status.json", "metrics.jsonl", "tokenizer.json", "plugin"]
    )
    original = lab.finished if source == "finished" else lab.stopped
    path = next((only_run(original) / "plugins").iterdir()) if file == "plugin" else only_run(original) / file
    content = path.read_bytes()
    plausible = False
    sparse = 0  # bytes
    if forged and file == "run.json" and draw.random() < 0.8:
        how, made = with_absurd_size(draw, json.loads(content))
    elif forged:
        how, made, sparse = "a sparse terabyte", content, 2**40
    elif file.endswith(".json") and draw.random() < 0.6:
        how, tree = mutate_json(draw, json.loads(content))
        made = json.dumps(tree).encode()
    elif draw.random() < 0.1:
        how, made = "missing", None
    else:
        how, made = mutate_bytes(draw, content)
    if made is not None and file.endswith(".json") and not sparse:
        with contextlib.suppress(ValueError, RecursionError):
            # Mutated bytes that are still JSON have other digits; so may a tree of the same types.
            plausible = bool(re.match(r"\w+ at \d+ of", how)) or shape(json.loads(made)) == shape(json.loads(content))

    def prepare(folder: Path) -> None:
        shutil.copytree(original, folder, dirs_exist_ok=True)
        damaged = only_run(folder) / path.relative_to(only_run(original))
        damaged.unlink() if made is None else damaged.write_bytes(made)
        if sparse:
            os.truncate(damaged, sparse)

    def judge(folder: Path, result: Result, arguments: list[str]) -> str:
        if plausible:
            return ""  # another value of the same type cannot be detected
        if arguments[0] == "sample":
            return "" if result.out in lab.samples else f"sampled {result.out!r}"
        if arguments[:3] == ["summarize", "results", "--format"] and arguments[3] == "json":
            return wrong_row(json.loads(result.out), lab.summary[source])
        if arguments[0] == "train" and file in ("tokenizer.json", "plugin", "status.json") and source == "stopped":
            run = only_run(folder)
            return "" if rows_of(run) == lab.rows else "ended differently from the undamaged run"
        return ""

    calls = [
        *(["summarize", "results", "--format", name] for name in ("json", "table", "csv", "markdown")),
        ["compare", "results", "-o", "page.html"],
        ["list", "runs"],
        ["list", "runs", "results", "--json"],
        ["sample", "rmsnorm", "--trust", "--prompt", "the", "--tokens", "8", "--seed", "1"],
        ["train", *lab.overrides],
    ]
    return Case(f"{source} {file}: {how}", calls, prepare, [file, only_run(original).name, "plugins", "no run"], judge)


SIZES = ("context", "width", "mlp_width", "depth", "heads")
"""Options of a model that determine its memory."""


def with_absurd_size(draw: random.Random, record: dict[str, Any]) -> tuple[str, bytes]:
    """Return a run.json with an absurd size in its config and a valid checksum."""
    from normlab.store.format import CHECKSUM_KEY, with_checksum

    name, value = draw.choice(SIZES), draw.choice([-1, 0, 7, 2**17, 2**20, 2**40, 10**30, 1.5, "x", None])
    record["config"]["model"][name] = value
    made = with_checksum({key: value for key, value in record.items() if key not in ("version", CHECKSUM_KEY)})
    return f"model.{name} {value!r}", made


def shape(tree: Any) -> Any:
    """Return a tree's keys and the types of its leaves."""
    if isinstance(tree, dict):
        return {key: shape(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shape(value) for value in tree]
    return "number" if isinstance(tree, int | float) and not isinstance(tree, bool) else type(tree).__name__


def wrong_row(rows: list[dict[str, Any]], undamaged: dict[str, Any]) -> str:
    """Return the problem with the summary of a damaged run, or an empty text."""
    if len(rows) != 1:
        return f"{len(rows)} rows"
    row = rows[0]
    if row["state"] == "damaged":
        return "" if row["note"] else "damaged, without a note"
    # The note explains the rest; a run without a name is shown by its id.
    other = {key for key, value in row.items() if value is not None and value != undamaged[key]} - {"note", "run"}
    if row["state"] in ("killed", "running") and row["note"]:  # a run without a status
        other -= {"state"}
    blank = {key for key, value in row.items() if value is None and undamaged[key] is not None}
    if other:
        return "shows " + ", ".join(f"{key} {row[key]!r} for {undamaged[key]!r}" for key in sorted(other))
    return (
        "" if not blank or row["note"] or row["state"] != "finished" else f"finished without {sorted(blank)}, no note"
    )


# The command.

KINDS: dict[str, Callable[[random.Random, Lab], Case]] = {
    "overrides": overrides, "configs": configs, "texts": texts, "checkpoints": checkpoints, "records": records,
    "forged": partial(records, forged=True),
}  # fmt: skip


@contextlib.contextmanager
def laboratory() -> Iterator[Lab]:
    """Make a folder with a corpus, a finished run and a stopped one, and restore the environment at the end."""
    scratch = Path(tempfile.mkdtemp(prefix="normlab_fuzz_"))
    before, here = dict(os.environ), Path.cwd()
    os.environ.update(
        NORMLAB_CACHE=str(scratch / "cache"), HOME=str(scratch), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
        PYTHONPATH=str(Path(__file__).resolve().parent.parent),
    )  # fmt: skip
    try:
        yield make_lab(scratch)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(scratch, ignore_errors=True)


def make_lab(scratch: Path) -> Lab:
    """Make the corpus and the undamaged runs."""
    from normlab.training import checkpoint

    draw = random.Random(0)
    corpus = scratch / "corpus.txt"
    corpus.write_text(
        "\n".join(
            " ".join(draw.choices(["the", "norm", "a", "layer", "scales", "its", "mean"], k=9)) for _ in range(80)
        )
    )
    plugin = scratch / "own.py"
    plugin.write_text("from normlab.norms.rmsnorm import RMSNorm\n\nMINE = RMSNorm\n")
    lab = Lab(scratch, corpus, scratch / "finished", scratch / "stopped")
    lab.overrides = [
        *SMALL, f"data.path={corpus}", f"train.steps={STEPS}", "train.checkpoint_every=2", "eval.every=3",
        "train.log_every=1", f"plugins=[{plugin}]", "data.tokenizer=chars",
    ]  # fmt: skip
    real = checkpoint.save

    def save(folder: Path, step: int, *arguments: Any, **options: Any) -> None:
        real(folder, step, *arguments, **options)
        if step == STOPPED:
            raise KeyboardInterrupt

    sample = ["sample", "rmsnorm", "--trust", "--prompt", "the", "--tokens", "8", "--seed", "1"]
    for name in ("finished", "stopped"):
        (scratch / name).mkdir()
        os.chdir(scratch / name)
        if name == "stopped":
            checkpoint.save = save
        try:
            result = call("train", *lab.overrides)
        finally:
            checkpoint.save = real
        if result.code != (0 if name == "finished" else 130):
            raise RuntimeError(result.err + result.raised)
        lab.summary[name] = json.loads(call("summarize", "--format", "json").out)[0]
        lab.samples.add(call(*sample).out)
        run = only_run(scratch / name)
        # Sample from the older checkpoint too, because normlab uses it if the newest is damaged.
        newest = max((run / "checkpoints").iterdir())
        newest.rename(scratch / "aside")
        lab.samples.add(call(*sample).out)
        (scratch / "aside").rename(newest)
    lab.rows = rows_of(only_run(lab.finished))
    return lab


def run_case(
    lab: Lab, case: Case, folder: Path, caller: Callable[..., Result] = call
) -> tuple[Counter[str], list[str]]:
    """Run the calls of a case; return counts of their outcomes and the problems."""
    folder.mkdir()
    case.prepare(folder)
    os.chdir(folder)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    try:
        for arguments in case.calls:
            before = files_of(folder)
            result = caller(*arguments)
            counts["refused" if result.code == 2 else "accepted" if result.code == 0 else "broken"] += 1
            problem = exit_problem(result, case.names)
            if not problem and result.code == 2 and files_of(folder) != before:
                changed = {name for name, _ in files_of(folder).items() ^ before.items()}
                problem = f"refused, and changed {sorted(changed)}: {result.err.strip()[:200]}"
            if not problem and (lab.scratch / "cache" / ".normlab-making").exists():
                problem = "left an incomplete corpus in the cache"
            if not problem and result.code == 0 and caller is call:
                try:
                    problem = case.judge(folder, result, arguments)
                except Exception as error:
                    problem = f"the judge failed: {type(error).__name__}: {error}"
            if problem:
                shown = " ".join(text for text in arguments if text not in (*SMALL, *lab.overrides))
                problems.append(f"normlab {shown[:200]}: {problem}".replace(str(lab.scratch), "..."))
    finally:
        os.chdir(lab.scratch)
        shutil.rmtree(folder, ignore_errors=True)
    return counts, problems


def fuzz(seed: int, counts: dict[str, int], only: str = "") -> tuple[dict[str, Counter[str]], list[str]]:
    """Run cases of each kind; return counts of outcomes by kind, and the failures."""
    table: dict[str, Counter[str]] = {}
    failures: list[str] = []
    with laboratory() as lab:
        for kind, count in counts.items():
            table[kind] = Counter()
            since = time.perf_counter()
            for number in range(count):
                if only and only != f"{kind}/{number}":
                    continue
                case = KINDS[kind](random.Random(f"{seed}/{kind}/{number}"), lab)
                outcomes, problems = run_case(lab, case, lab.scratch / "case")
                if not problems and number % IN_A_PROCESS == IN_A_PROCESS - 1 and "broken" not in outcomes:
                    again, problems = run_case(lab, case, lab.scratch / "case", call_process)
                    if not problems and again != outcomes and all(arguments[0] != "train" for arguments in case.calls):
                        problems = [f"{dict(again)} in a process of its own, {dict(outcomes)} here"]
                table[kind] += Counter({"cases": 1, "failures": bool(problems)}) + outcomes
                failures += [f"{kind}/{number} [{case.description[:120]!r}] {problem}" for problem in problems]
            table[kind]["seconds"] = round(time.perf_counter() - since)
    return table, failures


def main() -> int:
    """Run the cases and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="number of cases (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default 0)")
    parser.add_argument("--kind", default=",".join(SHARES), help="kinds, separated by commas (default all)")
    parser.add_argument("--only", default="", help="one case by its name in a failure: records/17")
    options = parser.parse_args()
    # Print the stack if a library aborts: the outputs of calls are captured.
    faulthandler.enable(os.fdopen(os.dup(2), "w"))
    chosen = [options.only.partition("/")[0]] if options.only else options.kind.split(",")
    if foreign := set(chosen) - set(SHARES):
        parser.error(f"--kind {','.join(foreign)}: unknown kind; choose from {', '.join(SHARES)}")
    share = sum(SHARES[kind] for kind in chosen)
    counts = {kind: max(1, round(options.count * SHARES[kind] / share)) for kind in chosen}
    table, failures = fuzz(options.seed, counts, options.only)
    columns = ("cases", "accepted", "refused", "broken", "failures", "seconds")
    print("".join(["kind".ljust(14), *(column.rjust(10) for column in columns)]))
    total = sum(table.values(), Counter())
    for kind, counts in {**table, "all": total}.items():
        print("".join([kind.ljust(14), *(str(counts[column]).rjust(10) for column in columns)]))
    for failure in failures:
        print(f"FAILED {failure.encode(errors='backslashreplace').decode()}")
    if failures:
        print(f"repeat one with --seed {options.seed} --count {options.count} --only KIND/NUMBER")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
