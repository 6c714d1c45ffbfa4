"""Select the checks of one run, of plugins, or of the complete catalogue."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from normlab.base.errors import ConfigError, counted
from normlab.base.plugins import plugin_file, registered_by_plugins
from normlab.catalogue.norms.base import NORMS, REFERENCE_KINDS, NormConfig
from normlab.catalogue.placements.base import PLACEMENTS, SWITCHES, Placement
from normlab.catalogue.placements.init_rules import INIT_RULES
from normlab.config.schema import RunConfig
from normlab.model.fingerprint import fingerprint
from normlab.model.gpt import GPT
from normlab.model.groups import groups_of
from normlab.model.instrument import instrument
from normlab.model.modules import build_norm
from normlab.model.redundancy import redundancy_text, without_redundant_norms
from normlab.model.small import SmallModel, build_small, shrink, small_config
from normlab.training.machine import resolve
from normlab.verify import placements
from normlab.verify.check import Check, fails_on_error
from normlab.verify.compiled import compiled_check, graphs_check
from normlab.verify.init_laws import law_checks, rule_checks
from normlab.verify.norm_contract import contract_checks, options_have_effect
from normlab.verify.norms import large_sizes, oracle_checks, reference_checks, size_of_run
from normlab.verify.signed_error import signed_error_check
from normlab.verify.variants import LARGE_EPS, label_of, option_fields, other_values

DEPTH = 5
"""Default number of blocks: enough for a placement whose layers differ."""
OTHER_DEPTHS = (17, 40)
"""Further depths, for placements whose blocks depend on the depth: 17 / 8 is neither whole nor 17 / 9."""
MODELS = (
    {"positions": "rope", "mlp": "swiglu", "qk_norm": "full", "bias": False, "embed_scale": 3.0, "logit_softcap": 2.0},
    {"positions": "rope", "qk_norm": "head", "attn_gate": "channel", "attn_softcap": 0.5, "value_residual": "fixed"},
    {
        "positions": "rope",
        "rope_fraction": 0.5,
        "mlp": "relu2",
        "qk_norm": "head",
        "qk_norm_after_rope": True,
        "qk_scale": 1.2,
        "attn_gate": "head",
        "v_norm": True,
        "value_residual": "learned",
        "value_embed": True,
    },
)
"""Options of further models that every placement is checked with."""
SCALED = {"scaling": "completep", "base_width": 4, "base_depth": 2}
"""Options of a further model, for placements that accept them."""
CHECKED_PARTS = ("norm", "placement", "model", "init", "plugins")
"""The parts of a run's config that `verify` checks."""


def select_checks(config: RunConfig, overrides: Sequence[str]) -> Iterator[Check]:
    """Return the checks of a run, or those of the plugins' entries if no override has another part than plugins.

    Raises:
        ConfigError: An override has no effect on the checks.
    """
    unchecked = {field.name for field in dataclasses.fields(RunConfig)} - set(CHECKED_PARTS)
    parts: set[str] = set()
    unused: list[str] = []
    for override in dict.fromkeys(overrides):
        part = re.split(r"[.=@]", override.lstrip("+"), maxsplit=1)[0].strip()
        parts.add(part)
        if part in unchecked:
            unused.append(override)
    if unused:
        checked = ", ".join(CHECKED_PARTS)
        raise ConfigError(f"{' '.join(unused)}: has no effect, since verify checks only {checked}; leave it out")
    if config.plugins and parts <= {"plugins", "hydra"}:
        return checks_of_plugins(config.plugins)
    return all_checks_of_run(config)


def all_checks_of_run(config: RunConfig) -> Iterator[Check]:
    """Yield the checks of one run, and those of its compiled block and norm, which take seconds."""
    yield from checks_of_run(config)
    graphs = graphs_check(config, _block(config))
    yield graphs
    # A block with a graph for each layer would take minutes to compile.
    if not graphs.passed:
        return
    compiled = compiled_check(config, _block(config))
    yield compiled
    if compiled.passed and not compiled.skipped:
        device = str(resolve(config).torch_device)
        yield signed_error_check(
            config.norm, f"norm {label_of(config.norm)}, compiled", config.model.width, compiled=True, device=device
        )


def checks_of_run(config: RunConfig) -> Iterator[Check]:
    """Yield the checks of one run: its norms, its placement and its block, with their options."""
    placement, small = config.placement, build_small(shrink(config))
    others = {norm.name: norm for norm in config.norms if norm.name != config.norm.name}
    for norm in (config.norm, *others.values()):
        yield from checks_of_norm(norm, small.config.model.width, config)
    subject = _block(config)
    yield placements.formula_check(small, subject)
    yield from placements.logits_checks(small, subject)
    yield _redundancy_line(config, subject)
    yield _fingerprint_line(config, subject)
    # The placement with its defaults, which other checks than that of the block cover; then the run's own options.
    plain = PLACEMENTS[placement.name]
    yield from checks_of_placement(plain)
    if placement != plain:
        yield from _structure_checks(placement, f"placement {label_of(placement)}")
    yield from rule_checks(config.init_rule)


@fails_on_error("redundant norms:")
def _redundancy_line(config: RunConfig, subject: str) -> Check:
    """Return a line with the norms of a run that have no effect."""
    return Check(subject, "redundant norms:", passed=True, result=redundancy_text(without_redundant_norms(config)[0]))


@fails_on_error("has a fingerprint")
def _fingerprint_line(config: RunConfig, subject: str) -> Check:
    """Return a line with the fingerprint of a run's block."""
    return Check(subject, "has a fingerprint", passed=True, result=fingerprint(config))


def checks_of_plugins(files: Sequence[str]) -> Iterator[Check]:
    """Yield the checks of every norm, placement and init rule that the loaded plugins register.

    Raises:
        ConfigError: The plugins register nothing.
    """
    entries = registered_by_plugins()
    if not entries:
        raise ConfigError(
            f"plugins=[{','.join(files)}]: no norm, placement or init rule is registered there, so there is nothing "
            "to verify; register one, or choose norm=... or placement=..."
        )
    for kind, name in entries:
        if kind == "norm":
            yield from checks_of_default_norm(name)
            block = small_config(NORMS[name](), PLACEMENTS["pre"])  # pyright: ignore[reportCallIssue]
            yield graphs_check(block, f"norm {name}")
        elif kind == "placement":
            yield from checks_of_placement(PLACEMENTS[name])
            block = small_config(_visible_norm(PLACEMENTS[name]), PLACEMENTS[name])
            yield graphs_check(block, f"placement {name}")
        else:
            yield from rule_checks(name)


def checks_of_catalogue(presets: Iterable[NormConfig] = ()) -> Iterator[Check]:
    for name in NORMS:
        yield from checks_of_default_norm(name)
    for norm in presets:
        width = small_config(norm, PLACEMENTS["pre"]).model.width
        yield from oracle_checks(norm, f"norm {norm.label}", [norm], width)
    for placement in PLACEMENTS.values():
        yield from checks_of_placement(placement)
    for rule in INIT_RULES:
        yield from rule_checks(rule)


def _block(config: RunConfig) -> str:
    return f"block {label_of(config.norm)}, {label_of(config.placement)}"


def checks_of_default_norm(name: str) -> Iterator[Check]:
    """Yield the checks of a registered norm with its defaults."""
    norm = NORMS[name]()  # pyright: ignore[reportCallIssue]
    yield from checks_of_norm(norm, small_config(norm, PLACEMENTS["pre"]).model.width)


def checks_of_norm(norm: NormConfig, width: int, config: RunConfig | None = None) -> Iterator[Check]:
    """Yield the checks of a norm outside a model, also at the size of a run's micro-batch."""
    subject = f"norm {label_of(norm)}"
    sizes = large_sizes(norm, width)
    if config is not None:
        sizes.append(size_of_run(config))
    yield from reference_checks(norm, subject, width, sizes)
    yield from contract_checks(norm, subject, width, sizes)
    if plugin_file("norm", norm.name) is not None:
        yield groups_of_norm(norm, subject, width)


@fails_on_error("groups of the optimiser:")
def groups_of_norm(norm: NormConfig, subject: str, width: int) -> Check:
    """Return a line with the group of each parameter of a norm before a branch, which follows from its role."""
    groups = groups_of(_instrumented_model(small_config(norm, PLACEMENTS["pre"], depth=1)))
    of_norm: dict[str, str] = {}
    for name, _ in build_norm(norm, width).named_parameters():
        of_norm[name] = groups[f"blocks.0.wiring.attn.norms.in.{name}"]
    return _groups_line(subject, of_norm)


def _instrumented_model(config: RunConfig) -> GPT:
    """Return a small model in which the norms are marked, as in training."""

    def make_norm(width: int, site: str, layer: int | None = None) -> nn.Module:
        return instrument(build_norm(config.norm_at(site, layer), width), site)

    with torch.device("meta"):
        return GPT(config.model, config.placement, make_norm, 1)


def _groups_line(subject: str, groups: Mapping[str, str]) -> Check:
    texts = [f"{name}: {group}" for name, group in groups.items()]
    return Check(subject, "groups of the optimiser:", passed=True, result=", ".join(texts) or "no parameter")


def checks_of_placement(placement: Placement, *, thorough: bool = True) -> Iterator[Check]:
    """Yield the checks of a placement with each kind of model and each option.

    If `thorough`, also check it with every norm, at a larger depth, and its laws at initialisation.
    """
    subject = f"placement {placement.name}"
    small = build_small(small_config(_visible_norm(placement), placement, depth=DEPTH))
    # One small model for each value of each option serves the formula checks and the checks of the option's effect.
    changed: dict[str, list[SmallModel]] = {}
    for field in option_fields(placement):
        changed[field.name] = []
        for variant in other_values(placement, field, 1):
            config = small_config(_visible_norm(variant), variant, depth=DEPTH)
            changed[field.name].append(build_small(config))
    all_changed = list(chain.from_iterable(changed.values()))
    checks = list(_formula_checks(small, all_changed, subject, thorough))
    # One line stands for the formula checks that pass, because there are a hundred of them.
    failed = [check for check in checks if not check.passed]
    yield from failed
    if not failed:
        yield dataclasses.replace(checks[0], result=f"{len(checks)} models, each of them: {checks[0].result}")
    options = [name for name in changed if placement.has_switches or name not in SWITCHES]
    if options:
        yield _options_check(subject, small, {name: changed[name] for name in options})
    if plugin_file("placement", placement.name) is not None:
        yield _groups_line(subject, _groups_of_wiring(small))
    yield from _structure_checks(placement, subject)
    yield from placements.ends_check(placement, subject)
    # An option may add norms, or leave them out.
    norms = [placements.norms_check(model, subject) for model in (small, *all_changed)]
    yield next((check for check in norms if not check.passed), norms[0])
    yield placements.autocast_check(small, subject)
    yield from placements.logits_checks(small, subject)
    if thorough:
        yield from law_checks(placement)


@fails_on_error("every option has an effect")
def _options_check(subject: str, small: SmallModel, changed: Mapping[str, list[SmallModel]]) -> Check:
    """Check that each option of a placement has an effect, with its name and the models of its other values."""
    unused = [name for name, models in changed.items() if not _has_effect(small, models)]
    return options_have_effect(subject, list(changed), unused)


def _has_effect(small: SmallModel, changed: Iterable[SmallModel]) -> bool:
    """Whether a changed model has other initial values or computes something else."""
    block = small.initial_values, fingerprint(small.config)
    return any((model.initial_values, fingerprint(model.config)) != block for model in changed)


def _groups_of_wiring(small: SmallModel) -> dict[str, str]:
    """Return the group of each parameter of the first block's placement, without those of its norms."""
    of_norms: set[int] = set()
    for norm in small.norms:
        of_norms.update(map(id, norm.parameters()))
    groups = groups_of(_instrumented_model(small.config))
    of_wiring: dict[str, str] = {}
    for name, parameter in small.gpt.named_parameters():
        if name.startswith("blocks.0.") and ".wiring." in name and id(parameter) not in of_norms:
            of_wiring[name] = groups[name]
    return of_wiring


def _structure_checks(placement: Placement, subject: str) -> Iterator[Check]:
    """Yield the checks of a placement's parameters, factors and projection."""
    yield from placements.wiring_check(placement, subject)
    yield from placements.factor_check(placement, subject)
    yield from placements.inside_check(placement, subject)
    yield from placements.unit_length_check(placement, subject)


def _formula_checks(small: SmallModel, changed: Sequence[SmallModel], subject: str, each_norm: bool) -> Iterator[Check]:
    """Check the formula in each kind of model, at other depths, with other options and norms."""
    placement, plain = small.config.placement, small.config.norm
    yield placements.formula_check(small, subject)
    rms = NORMS["rmsnorm"](eps=LARGE_EPS)  # pyright: ignore[reportCallIssue]
    models: list[Mapping[str, Any]] = list(MODELS)
    if placement.has_free_branches:
        models.append(SCALED)
    configs = [(subject, small_config(rms, placement, depth=DEPTH, **model)) for model in models]
    configs += [(subject, config) for config in _with_a_norm_for_each_site(placement)]
    depths = OTHER_DEPTHS if each_norm else OTHER_DEPTHS[:1]
    configs += [(subject, small_config(plain, placement, depth=depth)) for depth in depths]
    for name, kind in NORMS.items():
        if not each_norm or plugin_file("norm", name) is not None:
            continue
        norm = kind()  # pyright: ignore[reportCallIssue]
        try:
            configs.append((f"{subject} with {norm.name}", small_config(norm, placement, depth=2)))
        except ConfigError:
            continue  # the pair is not allowed
    for label, config in configs:
        yield placements.formula_check(build_small(config), label)
    for model in changed:
        yield placements.formula_check(model, f"{subject} {label_of(model.config.placement)}")


def _with_a_norm_for_each_site(placement: Placement) -> Iterator[RunConfig]:
    """Yield models in which the norms of different sites have different eps, in all blocks and in some."""
    for layers in ("", "1::2"):
        norm = _visible_norm(placement)
        plain = small_config(norm, placement, depth=DEPTH, positions="rope", qk_norm="head")
        settings: dict[str, Any] = {}
        for number, placed in enumerate(plain.placed_norms, start=1):
            settings[f"{placed.site}.eps"] = number * LARGE_EPS
            if layers and placed.layer is not None:
                settings[f"{placed.site}.layers"] = layers
        if norm.is_identity:
            return
        norm = dataclasses.replace(norm, at=settings)
        yield small_config(norm, placement, depth=DEPTH, positions="rope", qk_norm="head")


def _visible_norm(placement: Placement) -> NormConfig:
    """Return RMSNorm with a large eps, or no norm where the placement has none."""
    if placement.has_norms(DEPTH):
        return NORMS["rmsnorm"](eps=LARGE_EPS)  # pyright: ignore[reportCallIssue]
    return NORMS["none"]()  # pyright: ignore[reportCallIssue]


def verdict(checks: Sequence[Check]) -> str:
    """Return one line: the number of checks, and of entries with each kind of reference."""
    failed = sum(not check.passed for check in checks)
    skipped = sum(check.skipped for check in checks)
    text = f"{counted(len(checks), 'check')}: "
    text += f"{failed} FAILED" if failed else "all hold"
    if skipped:
        text += f", {skipped} skipped"
    # An entry counts by its first comparison.
    kinds: dict[str, str] = {}
    for check in checks:
        if check.reference_kind:
            kinds.setdefault(check.subject, check.reference_kind)
    subjects: dict[str, list[str]] = {kind: [] for kind in REFERENCE_KINDS}
    for subject, kind in kinds.items():
        subjects[kind].append(subject)
    text += (
        f"; references: {len(subjects['external'])} by external code, {len(subjects['identity'])} by identities, "
        f"{len(subjects['self'])} by a second implementation"
    )
    if subjects["self"]:
        text += f" ({', '.join(subject.partition(' ')[2] for subject in subjects['self'])})"
    return text
