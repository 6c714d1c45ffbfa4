"""Which checks are made: of one run's norm and placement, or of the whole catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from normlab.config import RunConfig
from normlab.errors import ConfigError
from normlab.init_rules import INIT_RULES
from normlab.norms.base import NORMS, ORACLE_KINDS, NormConfig
from normlab.placements.base import PLACEMENTS, SWITCHES, Placement
from normlab.source import plugin_file, registered_by_plugins
from normlab.verify import blocks, norms, parameters, sizes
from normlab.verify.check import Check
from normlab.verify.contract import contract_check
from normlab.verify.defaults import default_check, preset_check
from normlab.verify.fingerprint import fingerprint
from normlab.verify.identities import identities, invariance_checks
from normlab.verify.independence import independence_check
from normlab.verify.init_laws import law_checks
from normlab.verify.init_rules import belongs_check, rule_checks
from normlab.verify.sizes import size_check
from normlab.verify.small import config_of, small
from normlab.verify.variants import LARGE_EPS, called, others

DEPTH = 5
"""Blocks, where nobody says how many: enough for a placement whose layers differ."""
DEEPER = (8, 40)
"""Blocks, of other depths: what depends on the depth is tried at each."""
MODELS = (
    {},
    {"positions": "rope", "mlp": "swiglu", "qk_norm": "full", "bias": False},
    {"positions": "rope", "qk_norm": "head"},
)
"""The kinds of attention and MLP that a placement is tried with."""


def of_run(config: RunConfig, presets: Iterable[NormConfig] = ()) -> Iterator[Check]:
    """The norm, the placement and the block of one run; of norm and placement what is checked of the catalogue's.

    Args:
        config: The run's.
        presets: Those of norms, of which the run's may be one.
    """
    norm, placement, subject = config.norm, config.placement, small(config)
    yield from default_check(norm.name)
    yield from (preset_check(preset) for preset in presets if preset.preset == norm.preset)
    yield from of_norm(norm, subject.model.width)
    yield from size_check(norm, f"norm {called(norm)}", sizes.of_run(config))
    label = f"block {called(norm)}, {called(placement)}"
    yield blocks.formula_check(subject, label)
    yield blocks.causality_check(subject, label)
    yield from blocks.evaluation_check(subject, label)
    yield _fingerprint(config, label)
    plain = PLACEMENTS[placement.name]
    yield from of_placement(plain)
    if placement != plain:
        yield from _structure_checks(placement, f"placement {called(placement)}")
    yield from rule_checks(config.init_rule)


def of_plugins(files: Sequence[str]) -> Iterator[Check]:
    """Every norm, placement and init rule that the plugins register, as those of the catalogue are checked.

    Args:
        files: The plugins, which have been loaded.

    Raises:
        ConfigError: They register none.
    """
    found = registered_by_plugins()
    if not found:
        raise ConfigError(
            f"plugins=[{','.join(files)}]: no norm, placement or init rule is registered there, so there is nothing "
            "to verify; register one, or name what is to be verified: norm=..., placement=..."
        )
    for kind, name in found:
        yield from _OF_KIND[kind](name)


def of_catalogue(presets: Iterable[NormConfig] = ()) -> Iterator[Check]:
    """Every norm, every placement, each with each, and what they are to each other.

    Args:
        presets: Norms with the options of a preset, held to their references too.
    """
    pre = PLACEMENTS["pre"]
    for name in NORMS:
        yield from _of_norm_named(name)
    for norm in presets:
        yield preset_check(norm)
        yield from norms.oracle_checks(norm, f"norm {norm.label}", config_of(norm, pre).model.width, alone=True)
    for placement in PLACEMENTS.values():
        yield from of_placement(placement)
    for rule in INIT_RULES:
        yield from rule_checks(rule)
    yield from identities()


def _of_norm_named(name: str) -> Iterator[Check]:
    yield from default_check(name)
    norm = NORMS[name]()  # pyright: ignore[reportCallIssue]
    config = config_of(norm, PLACEMENTS["pre"])
    yield from of_norm(norm, config.model.width)
    yield _fingerprint(config, f"norm {name}")


def of_norm(norm: NormConfig, width: int) -> Iterator[Check]:
    """What is checked of a norm alone."""
    of = f"norm {called(norm)}"
    yield from norms.norm_checks(norm, of, width)
    yield from invariance_checks(norm, of, width)
    yield from parameters.start_check(norm, of, width)
    yield from parameters.kept_check(norm, of, width)
    yield from parameters.shape_check(norm, of, width)
    for size in sizes.of_norm(norm, width):
        yield from size_check(norm, of, size)
    yield from independence_check(norm, of, width)
    yield from contract_check(norm, of, width)


def of_placement(placement: Placement, *, thorough: bool = True) -> Iterator[Check]:
    """What is checked of a placement: with each kind of model and each option; thoroughly, each norm and laws too."""
    of = f"placement {placement.name}"
    plain = config_of(_plain(placement), placement, depth=DEPTH)
    checks: list[Check] = []
    for check in _formula_checks(placement, of, thorough):
        checks.append(check)
        if not check.passed:
            yield check
    if all(check.passed for check in checks):
        seen = f"{len(checks)} models, each of them: {checks[0].seen}"
        yield dataclasses.replace(checks[0], seen=seen)
    names = [field.name for field in dataclasses.fields(placement) if field.name != "name"]
    if options := [name for name in names if placement.has_switches or name not in SWITCHES]:
        idle = [name for name in options if not _has_effect(placement, name, plain)]
        seen = f"without: {', '.join(idle)}" if idle else ", ".join(options)
        yield Check(of=of, check="every option has an effect", passed=not idle, seen=seen)
    yield from _structure_checks(placement, of)
    yield from parameters.ends_check(placement, of)
    yield blocks.norms_check(plain, of)
    yield blocks.causality_check(plain, of)
    yield from blocks.evaluation_check(plain, of)
    yield _fingerprint(plain, of)
    if thorough:
        yield from law_checks(placement.name)


def _structure_checks(placement: Placement, of: str) -> Iterator[Check]:
    """What a placement is made of: its init rule, what it learns, its factors, what it keeps on a sphere."""
    yield from belongs_check(placement)
    yield from parameters.wiring_check(placement, of)
    yield from parameters.factor_check(placement, of)
    yield from parameters.inside_check(placement, of)
    yield from parameters.unit_check(placement, of)


def _formula_checks(placement: Placement, of: str, each_norm: bool) -> Iterator[Check]:
    """The formula, in a model of each kind."""
    rms, plain = NORMS["rmsnorm"](eps=LARGE_EPS), _plain(placement)  # pyright: ignore[reportCallIssue]
    for model in MODELS:
        yield blocks.formula_check(config_of(rms if "qk_norm" in model else plain, placement, depth=DEPTH, **model), of)
    for depth in DEEPER if each_norm else DEEPER[:1]:
        yield blocks.formula_check(config_of(plain, placement, depth=depth), of)
    for field in dataclasses.fields(placement):
        for other in others(placement, field, 1) if field.name != "name" else ():
            yield blocks.formula_check(config_of(plain, other, depth=DEPTH), f"{of} {called(other)}")
    ours = [name for name in NORMS if plugin_file("norm", name) is None]
    for name in ours if each_norm else ():
        norm = NORMS[name]()  # pyright: ignore[reportCallIssue]
        try:
            config = config_of(norm, placement, depth=2)
        except ConfigError:
            continue  # a pair that is refused
        yield blocks.formula_check(config, f"{of} with {norm.name}")


def _has_effect(placement: Placement, option: str, config: RunConfig) -> bool:
    """Whether some value of an option makes another block or another end of the stream, or starts them elsewhere."""
    field = next(field for field in dataclasses.fields(placement) if field.name == option)
    kinds = [config_of(_plain(other), other, depth=DEPTH) for other in others(placement, field, 1)]
    starts = parameters.starts_of(config)
    return any(fingerprint(kind) != fingerprint(config) or parameters.starts_of(kind) != starts for kind in kinds)


def _plain(placement: Placement) -> NormConfig:
    """RMS norm with an eps that shows; none where the placement has no place for a norm, which is refused."""
    return NORMS["rmsnorm"](eps=LARGE_EPS) if placement.has_norms(DEPTH) else NORMS["none"]()  # pyright: ignore[reportCallIssue]


def _fingerprint(config: RunConfig, of: str) -> Check:
    found = fingerprint(config)
    return Check(of=of, check="has a fingerprint", passed=bool(found), seen=found or "no small model fits")


_OF_KIND: dict[str, Callable[[str], Iterator[Check]]] = {
    "norm": _of_norm_named,
    "placement": lambda name: of_placement(PLACEMENTS[name]),
    "init rule": rule_checks,
}
"""What is checked of a thing by its name, by what it is."""


def verdict(checks: list[Check]) -> str:
    """How many hold, and how many entries rest on what."""
    failed = sum(not check.passed for check in checks)
    text = f"{len(checks)} checks: " + (f"{failed} FAILED" if failed else "all hold")
    compared: dict[str, str] = {}
    for check in checks:
        if check.kind:
            compared.setdefault(check.of, check.kind)
    counts = {kind: [of for of, found in compared.items() if found == kind] for kind in ORACLE_KINDS}
    held = f"held against code of others {len(counts['external'])}, an identity {len(counts['identity'])}"
    alone = ", ".join(of.partition(" ")[2] for of in counts["self"])
    return f"{text}; {held}, our own formula {len(counts['self'])}" + (f" ({alone})" if alone else "")
