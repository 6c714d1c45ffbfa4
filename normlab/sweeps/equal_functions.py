"""Warnings about the runs of a sweep that compare less than their names promise: equal functions, other init rules."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from normlab.catalogue.norms.base import NormConfig
from normlab.config.schema import RunConfig
from normlab.model.fingerprint import fingerprint
from normlab.model.redundancy import are_equal, redundancy_text, without_redundant_norms
from normlab.store.plans import PlannedRun

ConfiguredRun = tuple[PlannedRun, RunConfig]

_MOST_BLOCKS = 100
"""With more blocks in all models that differ, equal ones are not searched for: it would take more than some seconds."""


def other_init_rules(runs: Iterable[ConfiguredRun]) -> Iterator[str]:
    """Yield a warning if the arms, or the placements, differ in the init rules that `init=auto` chooses."""
    rules_of: dict[str, dict[str, None]] = {}
    kind = "placements"
    for planned, config in runs:
        rules_of.setdefault(planned.arm or config.placement.name, {})[config.init_rule] = None
        if planned.arm:
            kind = "arms"
    names_by_rules: dict[str, list[str]] = {}
    for name, init_rules in rules_of.items():
        names_by_rules.setdefault(", ".join(init_rules), []).append(name)
    if len(names_by_rules) > 1:
        texts = "; ".join(f"{init_rules} ({', '.join(names)})" for init_rules, names in names_by_rules.items())
        yield (
            f"the {kind} also differ in their init rules: {texts}; init=NAME gives all of them the same one "
            "(normlab list init)"
        )


def equal_functions(runs: Iterable[ConfiguredRun]) -> Iterator[str]:
    """Yield a warning for each norm and placement that computes what an earlier one does, redundant norms aside."""
    by_model: dict[str, dict[str, ConfiguredRun]] = {}
    for planned, config in runs:
        block = repr((config.norm, config.placement))
        by_model.setdefault(repr(config.model), {}).setdefault(block, (planned, config))
    # A model with one kind of block has nothing to be equal to.
    models = [runs_by_block.values() for runs_by_block in by_model.values() if len(runs_by_block) > 1]
    blocks = 0
    for runs_of_model in models:
        blocks += sum(config.model.depth for _, config in runs_of_model)
    if blocks > _MOST_BLOCKS:
        yield f"equal functions were not searched for: the models have {blocks} blocks, more than {_MOST_BLOCKS}"
        return
    for runs_of_model in models:
        yield from _equal_functions_of_model(runs_of_model)


def _equal_functions_of_model(runs: Iterable[ConfiguredRun]) -> Iterator[str]:
    """Yield the warnings of `equal_functions` for runs that differ in nothing else of the model."""
    name_of: dict[str, str] = {}
    """The first run with each fingerprint."""
    reduced: list[tuple[str, NormConfig, list[str], Tensor]] = []
    """Of each function its name, its norm, its redundant norms, and logits without them."""
    for planned, config in runs:
        varied = [text for text in planned.overrides if text.startswith(("arm=", "norm", "placement"))]
        name, depth = " ".join(varied or planned.overrides), config.model.depth
        block = fingerprint(config)
        # Without a small model that is valid, there is no fingerprint.
        if not block:
            continue
        if block in name_of:
            yield f"{name}: is the function of {name_of[block]} at depth {depth}; the runs differ at most in the init"
            continue
        name_of[block] = name
        norm = config.norm
        sites, logits = without_redundant_norms(config)
        for earlier_name, earlier_norm, earlier_sites, earlier_logits in reduced:
            if norm == earlier_norm and sites != earlier_sites and are_equal(earlier_logits, logits):
                redundant = redundancy_text(sorted({*earlier_sites, *sites}))
                yield f"{name}: is the function of {earlier_name} at depth {depth} without redundant norms; {redundant}"
                break
        reduced.append((name, norm, sites, logits))
