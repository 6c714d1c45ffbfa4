"""The registry of statistics, the `stats.` options, missing statistics, and derived ones."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from normlab.base.errors import ConfigError, StatisticsError
from normlab.catalogue.statistics.profiles import Layout, Profiles, StatisticColumn
from normlab.catalogue.statistics.registry import ENTRIES, STATISTICS, values_of
from normlab.catalogue.statistics.statistic import CORE, EXTENDED, MERGES, OF, TIERS
from normlab.config.compose import compose_run
from normlab.training.start import train

Command = Callable[..., tuple[int, str, str]]
CORPUS = Path(__file__).parents[1] / "corpus.txt"


@pytest.mark.parametrize("name", STATISTICS)
def test_statistic_has_all_descriptions(name: str) -> None:
    entry = STATISTICS[name]
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)  # what W&B sorts and filters by
    assert entry.tier in TIERS
    assert entry.of in OF
    assert entry.merge in MERGES
    for text in (entry.formula, entry.unit, entry.question, entry.source):
        assert text == " ".join(text.split()) != ""
    assert entry.question[-1] in "?.:"
    assert (entry.merge == "derived") == (entry.derive is not None) == bool(entry.needs)
    assert all(STATISTICS[need].derive is None for need in entry.needs)
    assert not (entry.derive and entry.value)


def test_statistics_have_names_of_their_own_and_are_in_the_order_of_their_tensors() -> None:
    assert len(STATISTICS) == len(ENTRIES)
    kinds = [entry.of for entry in ENTRIES]
    assert kinds == sorted(kinds, key=list(OF).index)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stats.also=[resid_rm]"], "stats.also=resid_rm: unknown statistic .*did you mean 'resid_rms'"),
        (["stats.also=[resid_rms]"], "has no effect, since it is measured already"),
        (["stats.also=[gns]", "norm=batchnorm"], "stats.also=gns: has no effect with norm=batchnorm"),
        (["stats.also=[gns]", "eval.sequences=1"], "stats.also=gns: has no effect with eval.sequences=1"),
        (["stats=full", "stats.also=[gns]"], "stats.also=gns: has no effect, since it is measured already"),
        (["stats=off", "stats.every=5"], "has no effect, since no core statistic is measured; set stats=core"),
        (["stats.tiers=[cores]"], "did you mean 'core'"),
        (["stats.every=0"], "must be at least 1"),
        (["stats.extended_every=5"], "has no effect, since no .* statistic is measured; set stats=full"),
    ],
)
def test_options_without_effect_fail(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_run(overrides)


def test_unknown_preset_fails(run_command: Command) -> None:
    assert run_command("train", "stats=of") == (
        2, "", "error: stats=of: unknown stats 'of' (did you mean 'off'?): choose one of core, full, off\n"
    )  # fmt: skip


def test_options_select_statistics() -> None:
    core = {name for name, entry in STATISTICS.items() if entry.tier == CORE and entry.derive is None}
    assert compose_run([]).stats.names(CORE) == core
    assert compose_run([]).stats.every == 10
    assert compose_run(["stats=off"]).stats.names(CORE) == set()
    assert compose_run(["stats=off"]).stats.every is None
    chosen = compose_run(["stats=off", "stats.also=[adj_cos,logz]", "stats.every=3"]).stats
    assert (chosen.names(CORE), chosen.every) == ({"adj_cos", "logz"}, 3)
    chosen = compose_run(["stats=off", "stats.also=[resid_crest]"]).stats
    assert chosen.names(CORE) == {"resid_absmax", "resid_rms"}
    assert compose_run(["stats.also=[gns]"]).stats.names(EXTENDED) == {"gns_trace", "gns_square"}


def test_statistics_options_do_not_change_the_config_hash() -> None:
    plain = compose_run([])
    for overrides in (["stats=off"], ["stats.every=1"], ["stats.also=[gns]"]):
        assert compose_run(overrides).config_hash == plain.config_hash


# Missing statistics.

TWICE = '''
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normlab.catalogue.placements.base import Placement, register_placement


@dataclass(kw_only=True, slots=True)
class Twice(Placement):
    """A norm that runs twice."""

    formula: ClassVar[str] = "x = x + A(N(x))"
    source: ClassVar[str] = "the test"
    init: ClassVar[str] = "gpt2"
    name: str = "twice"

    def wire(self, layer, depth, width, make_norm):
        return Wiring(make_norm(width, "input_attn"), make_norm(width, "input_mlp"))


class Wiring(nn.Module):
    def __init__(self, norm, other):
        super().__init__()
        self.norm, self.other = norm, other

    def forward(self, x, attn, mlp):
        x = x + attn(self.norm(x))
        return x + mlp(self.other(self.norm(x)))


register_placement(Twice())
'''
OVERRIDES = [
    "data=files", f"data.path=[{CORPUS}]", "tracking.wandb=off", "model=gpt2_nano", "train.steps=2",
    "train.batch_size=2", "eval.sequences=2", "device=cpu",
]  # fmt: skip


def test_norm_that_runs_twice_has_two_sites(tmp_path: Path) -> None:
    plugin = tmp_path / "twice.py"
    plugin.write_text(TWICE)
    overrides = [*OVERRIDES, f"plugins=[{plugin}]", "placement=twice", f"results_dir={tmp_path / 'results'}"]
    (profiles,), _ = train(compose_run(overrides), trackers=[]).folder.statistics.read(CORE)
    assert set(profiles.get("norm_in_rms")) == {"norm", "norm#2", "other"}


# Derived statistics.


def profiles_of(values: dict[tuple[str, str], list[float]], families: dict[str, str] | None = None) -> Profiles:
    """Return one step of a model of three blocks, from values of each statistic and site at layers 1, 2, ..."""
    columns = [
        StatisticColumn(*key, layer) for key, by_layer in values.items() for layer in range(1, len(by_layer) + 1)
    ]
    layout, order = Layout.of(columns, 3, families or {})
    row = np.array([number for by_layer in values.values() for number in by_layer], dtype=np.float32)
    return Profiles(layout, np.array([0]), row[None, order])


def test_derived_statistics_equal_their_formulas() -> None:
    measured = profiles_of(
        {
            ("resid_rms", ""): [1, 2, 4, 8], ("resid_absmax", ""): [5, 8, 8, 80], ("attn_rms", ""): [0.5, 3, 1],
            ("attn_absmax", ""): [1, 3, 4], ("mlp_rms", ""): [2, 1, 0], ("mlp_absmax", ""): [2, 3, 0],
            ("norm_in_rms", "attn.in"): [2, 4, 5], ("norm_out_rms", "attn.in"): [1, 1, 1],
            ("dresid_rms", ""): [np.exp(1), np.exp(3), np.exp(5), np.exp(7)],
            ("grad_norm", "q"): [3, 0, 0], ("grad_norm", "up"): [0, 4, 0], ("grad_norm", "g"): [0, 0, 5],
            ("param_norm", "q"): [1, 2, 0], ("update_norm", "q"): [1e-3, 1e-3, 1e-3],
            ("gns_trace", "q"): [6, 1, 4], ("gns_square", "q"): [3, -1, 0],
        },
        {"q": "attn", "up": "mlp", "g": "norm"},
    )  # fmt: skip
    nan = np.nan
    expected = {
        "resid_crest": {"": [nan, 5, 4, 2, 10]},
        "attn_crest": {"": [nan, 2, 1, 4, nan]},
        "mlp_crest": {"": [nan, 1, 3, nan, nan]},
        "attn_ratio": {"": [nan, 0.5, 1.5, 0.25, nan]},
        "mlp_ratio": {"": [nan, 2, 0.5, 0, nan]},
        "norm_gain": {"attn.in": [nan, 0.5, 0.25, 0.2, nan]},
        "resid_growth": {"": np.log(8) / 3},
        "dresid_growth": {"": 2.0},
        "grad_share": {"attn": 9 / 50, "mlp": 16 / 50, "norm": 25 / 50},
        "update_ratio": {"q": [nan, 1e-3, 5e-4, np.inf, nan]},
        "gns": {"q": [nan, 2, nan, nan, nan], "all": 11 / 2},
    }
    assert expected.keys() == {name for name, entry in STATISTICS.items() if entry.derive is not None}
    for name, sites in expected.items():
        found = values_of(measured, name)
        assert found.keys() == sites.keys()
        for site, values in sites.items():
            np.testing.assert_allclose(found[site][0], values, rtol=1e-6, err_msg=name)


def test_nan_gradient_makes_all_shares_nan() -> None:
    measured = profiles_of(
        {("grad_norm", "q"): [1, np.nan], ("grad_norm", "up"): [2, 3]}, {"q": "attn", "up": "mlp"}
    )  # fmt: skip
    assert all(np.isnan(share[0]) for share in values_of(measured, "grad_share").values())


def test_derived_statistic_names_its_missing_input() -> None:
    with pytest.raises(StatisticsError, match="resid_crest: is derived from resid_absmax, which was not measured"):
        values_of(profiles_of({("resid_rms", ""): [1, 2]}), "resid_crest")
    with pytest.raises(StatisticsError, match="logz: was not measured"):
        values_of(profiles_of({("resid_rms", ""): [1, 2]}), "logz")
