"""A name from other code is answered with normlab's name of the option, wherever options are typed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_runs import Record

from normlab.config.option_names import ALIASES
from normlab.config.override_errors import all_options
from support.fake_workers import FINISHED_STATUS

Command = Callable[..., tuple[int, str, str]]

NEAR = {
    "lr=0.1": "optim.lr",
    "train.lr=0.1": "optim.lr",
    "depth=3": "model.depth",
    "model.n_layer=3": "model.depth",
    "+lr=0.1": "optim.lr",
    "eps=1": "norm.eps' or 'optim.eps",
    "contxt=128": "model.context",
    "precison=bf16": "precision",
    "experiment=mine": "+experiment",
}


def test_every_alias_resolves_to_an_option() -> None:
    assert set(ALIASES.values()) <= all_options()
    assert not set(ALIASES) & all_options()


@pytest.mark.parametrize("override", NEAR)
def test_an_unknown_option_gets_the_right_hint(override: str, run_command: Command) -> None:
    code, out, err = run_command("train", override)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"did you mean '{NEAR[override]}'" in err


def test_an_option_like_no_other_gets_the_list(run_command: Command) -> None:
    code, out, err = run_command("train", "dropout=0.1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "dropout=0.1: no such option; normlab list options" in err


def test_an_option_of_sweep_gets_a_hint(run_command: Command) -> None:
    assert "did you mean 'sweep.pack'" in run_command("sweep", "pack=4")[2]


@pytest.mark.parametrize(
    ("name", "option"), [("train.lr", "optim.lr"), ("model.n_layer", "model.depth"), ("dpeth", "model.depth")]
)
def test_by_and_where_give_the_same_hints(
    name: str, option: str, make_run_at: Callable[..., Path], run_command: Command
) -> None:
    results = make_run_at("one")
    for arguments in (["--by", name], ["--where", f"{name}=3"], ["--by", "norm", "--where", f"{name}>3"]):
        code, _, err = run_command("summarize", str(results), *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{name}: no run has this option (did you mean '{option}'?)" in err


@pytest.fixture
def make_run_at(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes records of runs into a results folder and returns the folder."""
    from normlab.store.runs import RunFolder

    def make(*run_ids: str, **run: object) -> Path:
        for run_id in run_ids:
            record = Record(steps=9).run() | {"run_id": run_id, "name": f"name of {run_id}", **run}
            folder = RunFolder.create(tmp_path / "kept" / "runs" / run_id, record)
            folder.write_status(FINISHED_STATUS | {"step": 9, "steps": 9})
        return tmp_path / "kept"

    return make
