"""What a study is: a question, grids of runs, and claims, each with an estimator and a criterion.

A study is one file in `claims/`, or in a plugin, that calls `register_study`. Everything that decides a verdict is
data: the grids, the estimators, the criteria and the controls have a text, which `normlab study show` prints, and a
hash, which the sweep's plan keeps.
"""

import hashlib
import importlib
import inspect
import math
import pkgutil
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from normlab.analysis.arms import CHOOSING_SEEDS
from normlab.base.errors import ConfigError
from normlab.base.plugins import claim_name, plugin_file
from normlab.studies.estimate import Bounds, Estimate, Estimator
from normlab.studies.measures import Measure

PROTOCOL = 5
"""Version of the rules that turn runs into estimates and verdicts; it rises when they change."""
EARLIER_PROTOCOLS = {
    4: "Judged by protocol 4: estimates are means over seeds, and their confidence sequences assume normal values.",
}
"""The versions of which reports keep verdicts, and how they differ from the present one."""
LEVEL = 0.05
"""Significance level of a study: by Holm's method, the probability of any wrong verdict is at most this."""
NANO = "model=gpt2_nano train.steps=300 eval.every=100 stats.every=100 sweep.pack=16"
"""The model and training of most small grids: width 32, context 32, 8 sequences a step."""
RATES = "optim.lr=3e-4,1e-3,3e-3,1e-2,3e-2"
LOOKS = (4, 8, 12, 16, 20, 24)
"""Numbers of judged seeds at which a study is judged; it ends when every claim is decided or cannot be decided."""
SETTINGS = {
    "small": "",
    "wide": "model.width=128 model.heads=4",
    "prose": "data=reference",
    # The largest has 2.2 million weights in attention and MLPs, whose 45 million tokens are four epochs of the text.
    "gpu": "model.width=64,96,128,176 model.depth=6 model.heads=4 model.context=128 train.batch_size=32",
}
"""The overrides of each setting in which a study can be run."""
COMMON_SETTINGS = ("small", "wide", "prose")
"""The settings of a study that names no others; a verdict that holds in all of them is marked."""
MEAN_OVER_RATES = (
    "protocol 4: six seeds choose, not four, and an arm is judged by its mean over the learning rates that they cannot "
    "tell from the best. Protocol 3 took the union of the intervals at these rates, so that the noisiest one decided: "
    "of the first six studies 6 of 26 claims stayed undecided. The rule was changed by simulation, but after their "
    "first seeds had been seen; the replications have other seeds."
)
"""The amendment of the studies that have runs of protocol 3."""
SUPPORTED, REFUTED, UNDECIDED, VOID = "supported", "refuted", "undecided", "void"
"""The verdicts. undecided: the interval holds values that meet the criterion, and others. void: a control failed, or
the runs cannot answer."""
AT_BEST = "at the best learning rates alone"
"""How an estimate is named for which each arm has its best learning rate only, not the mean over the chosen ones."""


class Criterion:
    """What an estimate must be for a claim to hold: supported if its interval is inside limits, refuted if outside."""

    sides = 1
    """How many one-sided tests must hold for support: its interval has `sides` times the significance level."""

    @property
    def limits(self) -> tuple[float, float]:
        raise NotImplementedError

    @property
    def text(self) -> str:
        least, most = self.limits
        if math.isinf(most):
            return f"at least {least:g}"
        if math.isinf(least):
            return f"at most {most:g}"
        return f"between {least:g} and {most:g} (two one-sided tests)"

    def verdict(self, interval: Callable[[float], Bounds], alpha: float = LEVEL) -> str:
        """Return the verdict at a significance level, from the interval of an estimate at each level."""
        least, most = self.limits
        low, high = interval(alpha)
        if low > most or high < least:
            return REFUTED
        # Of two one-sided tests both must hold, so that each may have the whole level: the interval is narrower.
        low, high = interval(min(1.0, alpha * self.sides))
        if least <= low and high <= most:
            return SUPPORTED
        return UNDECIDED

    def p_value(self, estimate: Estimate) -> float:
        """Return the smallest significance level at which the estimate is judged, at most 1."""
        # Bisection of the logarithm of the level: intervals narrow as the level rises, so that a claim that is decided
        # at one level is decided at all higher ones.
        low, high = -12.0, 0.0
        if self.verdict(estimate.interval, 10.0**high) == UNDECIDED:
            return 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            if self.verdict(estimate.interval, 10.0**middle) == UNDECIDED:
                low = middle
            else:
                high = middle
        return 10.0**high


@dataclass(frozen=True)
class AtLeast(Criterion):
    bound: float

    @property
    def limits(self) -> tuple[float, float]:
        return self.bound, math.inf


@dataclass(frozen=True)
class AtMost(Criterion):
    bound: float

    @property
    def limits(self) -> tuple[float, float]:
        return -math.inf, self.bound


@dataclass(frozen=True)
class Within(Criterion):
    """Supported if two one-sided tests at 5 % (TOST) put the value between the bounds: the 90 % interval is inside.

    Refuted if the 95 % interval is outside.

    Source: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657-680.
    """

    low: float
    high: float
    sides = 2

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"Within({self.low:g}, {self.high:g}): the first bound is the lower one")

    @property
    def limits(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of runs: the overrides of one `normlab sweep`."""

    name: str
    overrides: str
    """As on the command line, without seed, sweep.name and results_dir."""

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.overrides)

    @property
    def command(self) -> str:
        return shlex.join(["normlab", "sweep", *self.arguments, f"seed=range({CHOOSING_SEEDS})"])


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    text: str
    """One sentence, in the present tense."""
    estimator: Estimator
    criterion: Criterion
    source: str = ""
    """Who says it: author, year, arXiv id."""
    effect: float | None = None
    """The value that the claim expects, for the power; by default none is stated."""
    intended: Sequence[str] = ()
    """The options of compute in which its arms differ on purpose, besides those that their conditions name.

    They are not part of the criterion: the grids are, and decide which runs are compared.
    """


@dataclass(frozen=True, slots=True)
class Picture:
    """The picture that decides a study: a figure of its runs, with the options of `normlab figure`."""

    kind: str
    options: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    where: str = ""
    by: Sequence[str] | None = None
    """The factors, where they cannot be inferred; by default the options in which the runs differ."""


@dataclass(frozen=True, slots=True)
class Study:
    name: str
    question: str
    grids: Sequence[Grid]
    claims: Sequence[Claim]
    controls: Sequence[Claim] = ()
    """Claims whose outcome is known; one that is not supported makes every verdict void."""
    pictures: Sequence[Picture] = ()
    background: str = ""
    limits: str = ""
    """What would change the verdict, and what small models cannot tell."""
    settings: Sequence[str] = COMMON_SETTINGS
    """The names of the settings in which it can be run."""
    amendments: Mapping[str, str] = field(default_factory=dict)
    """The reason for a change of the criterion after runs, by the hash before the change."""

    def criterion_text(self, protocol: int = PROTOCOL) -> str:
        """Return all that decides the verdicts: the protocol, grids, claims, estimators, criteria and controls."""
        # Its hash is in the plans of trained runs and in reports: another word here makes all of them amended.
        lines = [f"protocol {protocol}, {CHOOSING_SEEDS} choosing seeds, looks {LOOKS}, level {LEVEL}"]
        lines += [f"grid {grid.name}: {' '.join(grid.arguments)}" for grid in self.grids]
        for kind, claims in (("claim", self.claims), ("control", self.controls)):
            for claim in claims:
                estimator, criterion = repr(claim.estimator), repr(claim.criterion)
                lines.append(f"{kind} {claim.name}: {claim.text} {estimator} {criterion} {claim.effect}")
        return "\n".join(lines)

    @property
    def arguments(self) -> str:
        """The study as arguments of `normlab study run`: its name, and the plugin that registers it."""
        plugin = plugin_file("study", self.name)
        return self.name if plugin is None else f"{self.name} {shlex.quote(f'plugins=[{plugin}]')}"

    def criterion_hash(self, protocol: int = PROTOCOL) -> str:
        """Return the first 12 hex digits of the SHA-256 of `criterion_text`."""
        return hashlib.sha256(self.criterion_text(protocol).encode()).hexdigest()[:12]

    def protocol_of(self, criterion: str) -> int | None:
        """Return the protocol with which the study has a criterion; None for another criterion."""
        for protocol in (PROTOCOL, *EARLIER_PROTOCOLS):
            if self.criterion_hash(protocol) == criterion:
                return protocol
        return None


STUDIES: dict[str, Study] = {}


def register_study(study: Study) -> Study:
    """Register a study.

    Raises:
        ConfigError: The name is taken or is no identifier, or two claims have the same name.
    """
    # An equal study may be registered again, as by a notebook's cell that runs twice.
    claim_name("study", study.name, known=STUDIES.get(study.name, study) != study)
    names = [claim.name for claim in (*study.claims, *study.controls)]
    if len(set(names)) < len(names):
        raise ConfigError(f"study {study.name}: two claims have the same name; rename one")
    STUDIES[study.name] = study
    return study


def load_studies() -> None:
    """Register the studies of the package: import each file of `claims/`."""
    package = importlib.import_module("normlab.studies.claims")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def estimator_rows() -> list[dict[str, str]]:
    """Return a row of `normlab list estimators` for each estimator and measure of the package."""
    package = importlib.import_module("normlab.studies")
    # Every file, so that an estimator is listed before a study uses it.
    names = sorted(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    rows: list[dict[str, str]] = []
    for kind, interface in (("estimator", Estimator), ("measure", Measure)):
        for name in names:
            for class_name, listed in inspect.getmembers(importlib.import_module(name), inspect.isclass):
                is_defined_here = listed.__module__ == name
                if is_defined_here and issubclass(listed, interface) and listed is not interface:
                    first_paragraph = (inspect.getdoc(listed) or "").split("\n\n")[0]
                    rows.append({"kind": kind, "name": class_name, "module": name, "computes": first_paragraph})
    return rows
