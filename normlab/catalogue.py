"""What there is to choose from, read from the source without running it: `normlab list` needs no torch.

A norm is a class decorated with `@register_norm`, a placement a `Row(...)` of the algebra or an instance given
to `register_placement`, an option a field with a default and the docstring under it. Presets are the YAML
files of `conf/`, each opened by a comment that says what it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from normlab.paths import config_dir

_PACKAGE = Path(__file__).resolve().parent
_CONFIGS = ("config.py", "corpora.py", "stats/options.py")

Entry = dict[str, Any]

CAUSAL = "as its norm is"
"""Of every placement: each works on one token at a time (`normlab verify` looks)."""


def options_of(text: str, name: str) -> dict[str, str]:
    """Return what the source of a module says of each option of a class in it; base classes are the package's."""
    known = _classes("norms/*.py", "placements/*.py")
    known |= {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
    options = _entry(known[name], known)["options"] if name in known else []
    return {option["option"]: option["about"] for option in options}


def norms() -> list[Entry]:
    """Every norm, then its presets."""
    known = _classes("norms/*.py")
    marked = [node for node in known.values() if _is_marked(node, "register_norm")]
    return _with_presets([_entry(node, known) for node in marked], "norm")


def placements() -> list[Entry]:
    """Every placement: rows of the algebra, and schemes with a class of their own."""
    known = _classes("placements/*.py")
    algebra = "AlgebraPlacement"
    kinds = {kind: _entry(node, known) for kind, node in known.items() if algebra in {kind, *_ancestors(node, known)}}
    rows = [_row(node, kinds) for node in _nodes("placements/*.py", ast.Call) if _called(node) == "Row"]
    # A scheme's class is one with a name, a formula and a source of its own.
    schemes = [_entry(node, known) for node in known.values()]
    found = rows + [_scheme(entry) for entry in schemes if entry["name"] and entry.get("formula")]
    return [entry | {"causal": CAUSAL} for entry in found]


def models() -> list[Entry]:
    """Every preset of the model, with what it sets."""
    return [_preset(path) for path in sorted((config_dir() / "model").glob("*.yaml"))]


def data() -> list[Entry]:
    """Every corpus."""
    return _derived("DataConfig")


def optim() -> list[Entry]:
    """Every optimiser."""
    return _derived("OptimConfig")


def init() -> list[Entry]:
    """Every init rule, with the placements whose own it is, and those for which it is known to be wrong."""
    marked = [node for node in _nodes("init_rules.py", ast.FunctionDef) if _is_marked(node, "init_rule")]
    return [_rule(node, placements()) for node in marked]


def stats() -> list[Entry]:
    """Every choice of statistics, with what it sets."""
    return [_preset(path) for path in sorted((config_dir() / "stats").glob("*.yaml"))]


def options() -> list[Entry]:
    """Every option of a run but those of its norm, placement, corpus and optimiser, by its dotted word."""
    known = _classes(*_CONFIGS)
    run = known["RunConfig"]
    sections = {
        field.target.id: field.annotation.id
        for field in run.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(field.annotation, ast.Name)
        and field.annotation.id in known
    }
    found = [
        option for option in _entry(run, known)["options"] if option["option"] not in (*sections, "norm", "placement")
    ]
    for section, kind in sections.items():
        if section not in ("data", "optim"):
            found += [
                option | {"option": f"{section}.{option['option']}"} for option in _entry(known[kind], known)["options"]
            ]
    return found


def sweep() -> list[Entry]:
    """Every option of a sweep, by its dotted word."""
    known = _classes("sweep/options.py")
    own, of_slurm = (_entry(known[kind], known)["options"] for kind in ("SweepOptions", "SlurmOptions"))
    return [
        *(option | {"option": f"sweep.{option['option']}"} for option in own if option["option"] != "slurm"),
        *(option | {"option": f"sweep.slurm.{option['option']}"} for option in of_slurm),
    ]


def _trees(pattern: str) -> Iterator[ast.Module]:
    for path in sorted(_PACKAGE.glob(pattern)):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _nodes(pattern: str, kind: type) -> Iterator[Any]:
    for tree in _trees(pattern):
        yield from (node for node in ast.walk(tree) if isinstance(node, kind))


def _classes(*patterns: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for pattern in patterns for node in _nodes(pattern, ast.ClassDef)}


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _is_marked(node: ast.ClassDef | ast.FunctionDef, decorator: str) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == decorator for mark in node.decorator_list)


def _derived(base: str) -> list[Entry]:
    known = _classes(*_CONFIGS)
    found = [_entry(node, known) for node in known.values() if base in _ancestors(node, known)]
    return [entry for entry in found if entry["name"]]


def _ancestors(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    bases = _bases(node)
    return set(bases).union(*(_ancestors(known[base], known) for base in bases if base in known))


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _entry(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> Entry:
    """A class's name, ClassVars and options, with those that it inherits, and its documentation."""
    entry: Entry = {}
    options: dict[str, Entry] = {}
    starts: dict[str, str] = {}
    for base in _bases(node):
        if base in known:
            entry |= _entry(known[base], known)
            options |= {option["option"]: option for option in entry["options"]}
            starts |= entry.get("starts", {})
    entry |= {"name": "", "about": (ast.get_docstring(node) or "").split("\n")[0]}
    options.pop("name", None)
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, value = field.target.id, _value(field.value)
        if name == "name" and ast.unparse(field.annotation) == "str":
            entry["name"] = value or ""
            if not _text(text):
                continue  # only what chose it; where a name is to be set, it has documentation
        if "ClassVar" in ast.unparse(field.annotation):
            if field.value is not None:
                entry[name] = value
        elif name != "preset":
            about = _text(text) or options.get(name, {}).get("about", "")
            options[name] = {"option": name, "default": value, "about": about, **_limits(field.value)}
    if starts := starts | (entry.get("starts") or {}):
        entry["starts"] = starts
    return entry | {"options": list(options.values()), "documentation": ast.get_docstring(node) or ""}


def _scheme(entry: Entry) -> Entry:
    """A placement with a class of its own, without the switches that it has not (`Placement.has_switches`)."""
    if {entry["opens"], entry["closes"]} <= {"", _value(_constants()["NORM_UPDATE"])}:
        return entry
    switches = _value(_constants()["SWITCHES"])
    return entry | {"options": [option for option in entry["options"] if option["option"] not in switches]}


def _row(node: ast.Call, kinds: dict[str, Entry]) -> Entry:
    keywords = {word.arg or "": word.value for word in node.keywords}
    entry = {name: _value(keywords.get(name)) for name in ("name", "formula", "source", "init")}
    kind = _value(keywords.get("kind")) or ("EarlyPlacement" if "early" in keywords else "AlgebraPlacement")
    for name in ("note", "parameters", "equals", "pitfalls"):
        entry[name] = _value(keywords[name]) if name in keywords else kinds[kind][name]
    for name in ("incompatible_inits", "starts"):
        told = keywords.get(name)
        if isinstance(told, ast.Dict):
            entry[name] = {_value(k): _value(v) for k, v in zip(told.keys, told.values, strict=True)}
    sites = _both_sites(keywords)
    early = keywords.get("early")
    if isinstance(early, ast.Call):
        entry["early"] = _both_sites({word.arg or "": word.value for word in early.keywords})
    ends = {name: bool(_value(keywords.get(name))) for name in ("embedding_norm", "final_norm")}
    return entry | {"norms": sites} | ends | {"options": kinds[kind]["options"]}


def _rule(node: ast.FunctionDef, known: list[Entry]) -> Entry:
    """An init rule: what its docstring says before `Source:`, and after."""
    formula, _, source = " ".join((ast.get_docstring(node) or "").split()).partition(" Source: ")
    entry: Entry = {"name": node.name, "formula": formula.rstrip("."), "source": source.rstrip(".")}
    entry["placements"] = [of["name"] for of in known if of["init"] == node.name]
    entry["wrong_for"] = [
        of["name"]
        for of in known
        if {node.name, "other"} & set(of.get("incompatible_inits") or ()) and of["name"] not in entry["placements"]
    ]
    return entry


def _both_sites(keywords: dict[str, ast.expr]) -> dict[str, list[str]]:
    return {kind: _sites(keywords.get(kind)) for kind in ("attn", "mlp")}


def _sites(node: ast.expr | None) -> list[str]:
    if isinstance(node, ast.Call):
        for word in node.keywords:
            if word.arg == "norms":
                return list(_value(word.value) or ())
    return []


def _value(node: ast.expr | None) -> Any:
    """A literal, or the default inside `option(...)`; otherwise its source."""
    if node is None:
        return None
    if isinstance(node, ast.Call) and _called(node) == "option":
        return _value(node.args[0]) if node.args else None
    if isinstance(node, ast.Name) and node.id in _constants():
        node = _constants()[node.id]
    if isinstance(node, ast.Call) and _called(node) == "tuple" and isinstance(node.args[0], ast.Name):
        table = _constants().get(node.args[0].id)
        if isinstance(table, ast.Dict):
            return [_value(key) for key in table.keys]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


@cache
def _constants() -> dict[str, ast.expr]:
    """What names in capitals stand for, in the files that define norms and placements."""
    found: dict[str, ast.expr] = {}
    for tree in [*_trees("norms/*.py"), *_trees("placements/*.py")]:
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id.isupper() and (value := getattr(node, "value", None)):
                found[target.id] = value
    return found


def _limits(node: ast.expr | None) -> Entry:
    """What `option(...)` allows, where it says so."""
    if not isinstance(node, ast.Call) or _called(node) != "option":
        return {}
    return {word.arg or "": _value(word.value) for word in node.keywords if word.arg not in ("identity", "absent")}


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _with_presets(found: list[Entry], group: str) -> list[Entry]:
    presets = [_preset(path) for path in sorted((config_dir() / group).glob("*.yaml"))]
    listed: list[Entry] = []
    for entry in found:
        own = [preset for preset in presets if preset.get("preset_of") == entry["name"]]
        listed += [entry, *(preset | _as_its_norm(entry, preset["sets"]) for preset in own)]
    return listed


def _as_its_norm(norm: Entry, sets: dict[str, str]) -> Entry:
    """What is known of a preset by its norm: the formula and what it learns are those of the options that it sets."""
    defaults = {option["option"]: option["default"] for option in norm["options"]}
    asked = [f"{word}={value}" for word, value in sets.items()]
    formula = next((other for word, other in norm["formulas"].items() if word in asked), norm["formula"])
    more = 0
    for word, factor in (("gain", " * gain"), ("bias", " + bias")):
        if word in sets:
            more += (sets[word] == "true") - defaults[word]
            formula = formula.replace(factor, "") + factor * (sets[word] == "true")
    if sets.get("unit_offset") == "true":
        formula = formula.replace(" * gain", " * (1 + gain)")
    told = {key: norm[key] for key in ("causal", "starts", "pitfalls") if key in norm}
    return told | {"formula": formula, "parameters": _with_vectors(norm["parameters"], more)}


def _with_vectors(parameters: str, more: int) -> str:
    """How many numbers are learned with so many vectors more, or fewer, than `2 * D + 1`, `D` or `0`."""
    vectors, _, rest = parameters.partition("D")
    if not more:
        return parameters
    count = more + (int(vectors.removesuffix(" * ") or 1) if "D" in parameters else 0)
    terms = [{0: "", 1: "D"}.get(count, f"{count} * D"), rest.removeprefix(" + ")]
    return " + ".join(term for term in terms if term) or "0"


def _preset(path: Path) -> Entry:
    """A preset's name, its opening comment, and the options that it sets."""
    lines = path.read_text(encoding="utf-8").splitlines()
    about = lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""
    sets: Entry = {}
    base = None
    for line in lines:
        if line.startswith("  - ") and line.strip() != "- _self_":
            base = line.strip()[2:]
        word, colon, value = line.partition(": ")
        if colon and not line.startswith(("#", " ")) and word != "preset":
            sets[word] = value
    entry: Entry = {"name": path.stem, "about": about, "sets": sets}
    return entry | {"preset_of": base} if base else entry
