"""The catalogue for `normlab list` and tab completion, without torch.

Rows of the algebra and init rules are read from their tables. Classes are parsed from the source, because norms and
other placements need torch, and because the documentation of an option is in the source only: it is the string below
the field. A preset is a YAML file in `conf/` whose first line is a comment that describes it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.paths import config_dir

if TYPE_CHECKING:
    from normlab.placements.algebra import Row

_PACKAGE = Path(__file__).resolve().parent
_CONFIGS = ("config/schema.py", "config/optim.py", "config/corpora.py")

Entry = dict[str, Any]

CAUSAL = "if the norm is"
"""Whether a placement is causal: a placement never mixes tokens, as `normlab verify` checks."""


def options_of(source: str, name: str) -> dict[str, str]:
    """Return the docstring of each option of class `name` in the source of a module."""
    classes = _classes("norms/*.py", "placements/*.py")
    classes |= {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    options = _entry(classes[name], classes)["options"] if name in classes else []
    return {option["option"]: option["about"] for option in options}


def norms() -> list[Entry]:
    """Return every norm, each followed by its presets."""
    classes = _classes("norms/*.py")
    presets = _presets("norm")
    entries: list[Entry] = []
    registered = [node for node in classes.values() if "register_norm" in map(ast.unparse, node.decorator_list)]
    for norm in sorted((_entry(node, classes) for node in registered), key=lambda norm: norm["name"]):
        of_norm = [preset for preset in presets if preset.get("preset_of") == norm["name"]]
        entries += [norm, *(preset | _properties_of_preset(norm, preset["sets"]) for preset in of_norm)]
        norm["initial_values"] = existing_values(norm.get("initial_values", {}), default_options(norm))
    return entries


def default_options(entry: Entry) -> dict[str, Any]:
    """Return the default of each option of an entry."""
    return {option["option"]: option["default"] for option in entry["options"]}


def existing_values(initial_values: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return the initial values of the parameters and buffers that a norm with these options has.

    A norm has no parameter `p` where its option `p` or `learn_p` is false.
    """
    return {
        name: value
        for name, value in initial_values.items()
        for last in [name.rpartition(".")[2]]
        if options.get(last) is not False and options.get(f"learn_{last}") is not False
    }


def placements() -> list[Entry]:
    """Return every placement: the rows of the algebra, then those with their own wiring."""
    from normlab.placements.base import PLACEMENTS
    from normlab.placements.table import ROWS

    classes = _classes("placements/*.py")
    rows = [_row(row, _entry(classes[type(PLACEMENTS[row.name]).__name__], classes)) for row in ROWS]
    # Only the class of a placement with its own wiring has a name and a formula; the other classes are its helpers.
    others = [
        _without_switches(entry)
        for node in classes.values()
        if (entry := _entry(node, classes))["name"] and entry.get("formula")
    ]
    return [entry | {"causal": CAUSAL} for entry in rows + sorted(others, key=lambda other: other["name"])]


def models() -> list[Entry]:
    """Return every preset of the model, with the options that it sets."""
    return _presets("model")


def data() -> list[Entry]:
    """Return every corpus."""
    return _named_subclasses("DataConfig")


def optim() -> list[Entry]:
    """Return every optimiser."""
    return _named_subclasses("OptimConfig")


def init() -> list[Entry]:
    """Return every init rule, with the placements that use it and those that it does not fit."""
    from normlab.placements.init_rules import INIT_RULES

    known = placements()
    return [_rule(name, inspect.getdoc(rule) or "", known) for name, rule in INIT_RULES.items()]


def stats() -> list[Entry]:
    """Return every preset of statistics, with the options that it sets."""
    return _presets("stats")


def _trees(pattern: str) -> Iterator[ast.Module]:
    for path in sorted(_PACKAGE.glob(pattern)):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _classes(*patterns: str) -> dict[str, ast.ClassDef]:
    trees = (tree for pattern in patterns for tree in _trees(pattern))
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _named_subclasses(base: str) -> list[Entry]:
    classes = _classes(*_CONFIGS)
    entries = [_entry(node, classes) for node in classes.values() if base in _ancestors(node, classes)]
    return [entry for entry in entries if entry["name"]]


def _ancestors(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    bases = _bases(node)
    return set(bases).union(*(_ancestors(classes[base], classes) for base in bases if base in classes))


def _called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _entry(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Entry:
    """Return the name, ClassVars, options (with inherited options) and docstring of a class."""
    entry: Entry = {}
    options: dict[str, Entry] = {}
    initial_values: dict[str, str] = {}
    for base in _bases(node):
        if base in classes:
            entry |= _entry(classes[base], classes)
            options |= {option["option"]: option for option in entry["options"]}
            initial_values |= entry.get("initial_values", {})
    documentation = ast.get_docstring(node) or ""
    entry |= {"name": "", "about": documentation.split("\n")[0]}
    options.pop("name", None)
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, value, text = field.target.id, _value(field.value), _docstring(after)
        if name == "name" and ast.unparse(field.annotation) == "str":
            entry["name"] = value or ""
            if not text:
                continue  # a name without a docstring is chosen by its group, and is no option
        if "ClassVar" in ast.unparse(field.annotation):
            if field.value is not None:
                entry[name] = value
        elif name != "preset":
            about = text or options.get(name, {}).get("about", "")
            options[name] = {"option": name, "default": value, "about": about, **_limits(field.value)}
    if declared := initial_values | (entry.get("initial_values") or {}):
        entry["initial_values"] = declared
    return entry | {"options": list(options.values()), "documentation": documentation}


def _without_switches(placement: Entry) -> Entry:
    """Drop the norm switches of a placement that has none (`Placement.has_switches`)."""
    from normlab.placements.base import NORM_UPDATE, SWITCHES

    if {placement["embedding_formula"], placement["head_formula"]} <= {"", NORM_UPDATE}:
        return placement
    return placement | {"options": [option for option in placement["options"] if option["option"] not in SWITCHES]}


def _row(row: Row, kind: Entry) -> Entry:
    """Return the entry of a row of the algebra; `kind` is the entry of its placement's class."""
    entry: Entry = {
        name: getattr(row, name)
        for name in (
            "name", "formula", "source", "init", "note", "parameters", "equals", "pitfalls", "incompatible_inits",
            "initial_values", "embedding_norm", "final_norm",
        )
    }  # fmt: skip
    entry["norms"] = {"attn": row.attn.norms, "mlp": row.mlp.norms}
    if row.early is not None:
        entry["early"] = {"attn": row.early.attn.norms, "mlp": row.early.mlp.norms}
    return entry | {"options": kind["options"]}


def _rule(name: str, documentation: str, known: list[Entry]) -> Entry:
    """Return the entry of an init rule.

    Its docstring is the formula, then `Source:` and the source.
    """
    formula, _, source = " ".join(documentation.split()).partition(" Source: ")
    defaults = [placement["name"] for placement in known if placement["init"] == name]
    wrong_for = [
        placement["name"]
        for placement in known
        if {name, "other"} & set(placement.get("incompatible_inits") or ()) and placement["name"] not in defaults
    ]
    return {
        "name": name, "formula": formula.rstrip("."), "source": source.rstrip("."), "placements": defaults,
        "wrong_for": wrong_for,
    }  # fmt: skip


def _value(node: ast.expr | None) -> Any:
    """Return a literal, the default in `option(...)`, a constant's value, or the source text."""
    if node is None:
        return None
    if isinstance(node, ast.Call) and _called_name(node) == "option":
        return _value(node.args[0]) if node.args else None
    if isinstance(node, ast.Name) and node.id in _constants():
        node = _constants()[node.id]
    if isinstance(node, ast.Call) and _called_name(node) == "tuple" and isinstance(node.args[0], ast.Name):
        table = _constants().get(node.args[0].id)
        if isinstance(table, ast.Dict):
            return [_value(key) for key in table.keys]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


@cache
def _constants() -> dict[str, ast.expr]:
    """Return the expressions of the constants in the files of norms and placements."""
    constants: dict[str, ast.expr] = {}
    for tree in [*_trees("norms/*.py"), *_trees("placements/*.py")]:
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id.isupper() and (value := getattr(node, "value", None)):
                constants[target.id] = value
    return constants


def _limits(node: ast.expr | None) -> Entry:
    """Return the limits given to `option(...)`."""
    if not isinstance(node, ast.Call) or _called_name(node) != "option":
        return {}
    return {keyword.arg or "": _value(keyword.value) for keyword in node.keywords if keyword.arg != "identity"}


def _docstring(node: ast.stmt | None) -> str:
    """Return the text of a string used as a statement, or an empty text."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _presets(group: str) -> list[Entry]:
    return [_preset(path) for path in sorted((config_dir() / group).glob("*.yaml"))]


def _preset(path: Path) -> Entry:
    """Return a preset's name, first comment, options and the class that it extends."""
    lines = path.read_text(encoding="utf-8").splitlines()
    about = lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""
    entry: Entry = {"name": path.stem, "about": about, "sets": {}}
    for line in lines:
        if line.startswith("  - ") and line.strip() != "- _self_":
            entry["preset_of"] = line.strip()[2:]
        name, colon, value = line.partition(": ")
        if colon and not line.startswith(("#", " ")) and name != "preset":
            entry["sets"][name] = value
    return entry


def _properties_of_preset(norm: Entry, sets: dict[str, str]) -> Entry:
    """Return the formula, parameter count and properties of a preset with the options `sets`."""
    defaults = default_options(norm)
    overrides = [f"{name}={value}" for name, value in sets.items()]
    formula = next((other for override, other in norm["formulas"].items() if override in overrides), norm["formula"])
    added = 0
    for name, term in (("gain", " * gain"), ("bias", " + bias")):
        if name in sets:
            added += (sets[name] == "true") - defaults[name]
            formula = formula.replace(term, "") + term * (sets[name] == "true")
    if sets.get("unit_offset") == "true":
        formula = formula.replace(" * gain", " * (1 + gain)")
    inherited = {key: norm[key] for key in ("causal", "pitfalls") if key in norm}
    options = defaults | {name: value == "true" for name, value in sets.items() if value in ("true", "false")}
    return inherited | {
        "formula": formula,
        "parameters": _add_vectors(norm["parameters"], added),
        "initial_values": existing_values(norm.get("initial_values", {}), options),
    }


def _add_vectors(parameters: str, added: int) -> str:
    """Return a parameter count such as `2 * D + 1` with `added` more vectors of D numbers."""
    if not added:
        return parameters
    vectors, _, rest = parameters.partition("D")
    count = added + (int(vectors.removesuffix(" * ") or 1) if "D" in parameters else 0)
    terms = [{0: "", 1: "D"}.get(count, f"{count} * D"), rest.removeprefix(" + ")]
    return " + ".join(term for term in terms if term) or "0"
