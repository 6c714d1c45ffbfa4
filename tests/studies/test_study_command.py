"""`normlab study`: a study of a plugin from its plan to its report, and everything that may go wrong on the way."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from normlab.base.errors import StoreError
from normlab.store.plans import Plan, read_plan
from normlab.studies.base import AtLeast, Claim, Grid, Study
from normlab.studies.estimators import difference
from normlab.studies.run import Attempt
from normlab.sweeps.files import write_plan

STUDY = """
from dataclasses import dataclass

from normlab.studies.base import AtMost, AtLeast, Claim, Grid, Study, Within, register_study
from normlab.studies.estimators import Share, difference
from normlab.studies.measures import Measure

@dataclass(frozen=True)
class Loss(Measure):
    text = "final loss"

    def value(self, run):
        return run.loss

LOSS = Loss()
RMSNORM, LAYERNORM = "norm=rmsnorm,train.steps=20", "norm=layernorm,train.steps=20"
SHORT = "norm=rmsnorm,train.steps=3"

register_study(
    Study(
        name="tiny",
        question="Does a tiny model with RMSNorm differ from one with LayerNorm?",
        grids=[Grid("norms", "model=gpt2_nano model.depth=1 model.width=8 model.context=8 data=files "
            "data.path=text.txt data.tokenizer=chars norm=rmsnorm,layernorm optim.lr=1e-2 train.steps=3,20 "
            "optim.warmup_steps=1 eval.sequences=2 stats=off sweep.pack=2")],
        claims=[
            Claim("close", "The losses are within 1 nat/token.", difference(RMSNORM, LAYERNORM, LOSS),
                  Within(-1.0, 1.0), "nobody", effect=0.0),
            Claim("far", "LayerNorm is worse by 1 nat/token.", difference(LAYERNORM, RMSNORM, LOSS), AtLeast(1.0)),
            Claim("steps", "More steps lower the loss.", difference(RMSNORM, SHORT, LOSS), AtMost(0.0)),
            Claim("swapped", "More steps raise the loss.", difference(SHORT, RMSNORM, LOSS), AtMost(0.0)),
            Claim("no_margin", "More steps change nothing at all.", difference(SHORT, RMSNORM, LOSS), Within(0.0, 0.0)),
        ],
        controls=[Claim("runs", "No run diverges.", Share(RMSNORM, states=("diverged",)), CONTROL)],
    )
)
"""


LOOKS_STUDY = """
from normlab.studies.base import AtMost, Claim, Grid, Study, register_study
from normlab.studies.estimators import Share, difference

register_study(
    Study(
        name="looks",
        question="Is a resumed study the same?",
        grids=[Grid("rates", "model=gpt2_nano model.depth=1 model.width=8 model.context=8 data=files "
            "data.path=text.txt data.tokenizer=chars norm=rmsnorm,layernorm optim.lr=1e-2,1e-1 train.steps=3 "
            "optim.warmup_steps=1 eval.sequences=2 stats=off sweep.pack=16")],
        claims=[
            Claim("no_share", "At most 45 % of the seeds diverge.",
                  Share("norm=rmsnorm", lr="every", states=("diverged",)), AtMost(0.45)),
            Claim("lower", "RMSNorm has a loss that is lower by 9 nats/token.",
                  difference("norm=rmsnorm", "norm=layernorm"), AtMost(-9.0)),
        ],
    )
)
"""


def normlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normlab", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a plugin, its text, and the report that `normlab study run` wrote."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    (folder / "mine.py").write_text(STUDY.replace("CONTROL", "AtMost(0.9)"))
    done = normlab("study", "run", "tiny", "plugins=[mine.py]", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^small, seeds from 0 on: supported: The losses are within 1 nat/token\. Estimate ", done.stdout, re.MULTILINE
    )
    for text in ("More steps raise the loss", "More steps change nothing at all"):
        assert re.search(rf"^small, seeds from 0 on: refuted: {text}\. Estimate ", done.stdout, re.MULTILINE)
    (folder / "results/sweeps").rename(folder / "first")  # as with the report of somebody else
    again = normlab("study", "replicate", "tiny", "--seeds", "fresh", "plugins=[mine.py]", cwd=folder)
    assert again.returncode == 0, again.stderr
    for first in (0, 1000):
        assert f"small, seeds from {first} on: supported: The losses are within" in again.stdout
    shutil.copytree(folder / "first", folder / "results/sweeps", dirs_exist_ok=True)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "results/studies/tiny").iterdir()}


@pytest.mark.process
def test_report_from_the_records_equals_that_of_the_run(folder: Path) -> None:
    before = files_of(folder)
    assert set(before) == {"README.md", "report.json", "verdicts.svg", "verdicts.pdf"}
    for path in (folder / "results/studies/tiny").iterdir():
        path.unlink()
    done = normlab("study", "report", "tiny", "plugins=[mine.py]", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert files_of(folder) == before
    report = json.loads(before["report.json"])
    assert [(each["setting"], each["first_seed"]) for each in report["attempts"]] == [("small", 0), ("small", 1000)]
    for attempt in report["attempts"]:
        assert [claim["verdict"] for claim in attempt["claims"]] == [
            "supported", "refuted", "supported", "refuted", "refuted"
        ]  # fmt: skip
        assert attempt["notes"] == []
        assert {seed for claim in attempt["claims"] for seed in claim["seeds"]} >= {str(attempt["first_seed"])}
    table = (folder / "results/studies/README.md").read_text()
    assert "5 of 5 decided claims were decided in the same way on fresh seeds" in table
    assert "| **supported** |" in table
    text = before["README.md"].decode()
    assert text.startswith("# Does a tiny model with RMSNorm differ from one with LayerNorm?\n")
    assert "normlab study run tiny 'plugins=[mine.py]'" in text
    assert "`normlab study run tiny 'plugins=[mine.py]'`" in table
    assert "`normlab study replicate tiny --seeds fresh 'plugins=[mine.py]'`" in table
    (folder / "results/sweeps").rename(folder / "elsewhere")
    again = normlab("study", "report", "tiny", "plugins=[mine.py]", cwd=folder)
    (folder / "elsewhere").rename(folder / "results/sweeps")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert files_of(folder) == before


@pytest.mark.process
def test_an_interrupted_replication_is_resumed(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    records = copied.glob("results/runs/*/run.json")
    fresh = [record.parent for record in records if json.loads(record.read_text())["config"]["seed"] >= 1000]
    for run in fresh:
        shutil.rmtree(run)
    done = normlab("study", "replicate", "tiny", "--seeds", "fresh", "plugins=[mine.py]", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resuming the replication on the seeds from 1000 on\n")
    assert fresh
    assert all(run.exists() for run in fresh)
    assert "seeds from 2000" not in done.stdout


@pytest.mark.exhaustive
@pytest.mark.process
def test_a_resumed_study_has_the_runs_of_its_looks(tmp_path: Path) -> None:
    """At each look it trains what the claims needed that were open then, though later ones have been decided since."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    (tmp_path / "looks.py").write_text(LOOKS_STUDY)
    done = normlab("study", "run", "looks", "plugins=[looks.py]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plans = {path: path.read_bytes() for path in (tmp_path / "results/sweeps").rglob("plan.json")}
    assert len(plans) > 2
    again = normlab("study", "run", "looks", "plugins=[looks.py]", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "results/sweeps").rglob("plan.json")} == plans
    assert again.stdout.count("note    study looks") == len(plans)
    assert again.stdout.splitlines()[-4:] == done.stdout.splitlines()[-4:]
    # As if killed in its last block: a pack is missing, and the checks of the blocks, which are written after the runs.
    last = max(plans, key=lambda path: int(path.parent.name.rpartition("-")[2])).parent
    (last / "verify.json").unlink()
    plan = json.loads((last / "plan.json").read_text())
    for index in plan["packs"][-1]["runs"]:
        shutil.rmtree(tmp_path / "results/runs" / plan["runs"][index]["run_id"])
    resumed = normlab("study", "run", "looks", "plugins=[looks.py]", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "results/sweeps").rglob("plan.json")} == plans
    assert resumed.stdout.splitlines()[-4:] == done.stdout.splitlines()[-4:]


@pytest.mark.process
def test_a_killed_replication_resumes_though_a_report_has_been_written(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "all")
    [plan, *_] = sorted((tmp_path / "all/results/sweeps").glob("study-tiny-norms-small-1000/plan.json"))
    content = json.loads(plan.read_text())
    ids = [content["runs"][index]["run_id"] for index in content["packs"][-1]["runs"]]
    lost = [tmp_path / "all/results/runs" / run_id for run_id in ids]
    for run in lost:
        shutil.rmtree(run)
    before = sorted((tmp_path / "all/results/sweeps").iterdir())
    for command in (["report", "tiny"], ["replicate", "tiny", "--seeds", "fresh"]):
        done = normlab("study", *command, "plugins=[mine.py]", cwd=tmp_path / "all")
        assert done.returncode == 0, done.stderr
    assert "small, seeds from 1000 on: supported: The losses are within" in done.stdout
    assert all(run.exists() for run in lost)
    assert sorted((tmp_path / "all/results/sweeps").iterdir()) == before


@pytest.mark.process
def test_a_lost_plan_is_named_and_made_again(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    before = files_of(copied)
    (copied / "results/sweeps/study-tiny-norms-small-0/plan.json").unlink()
    done = normlab("study", "report", "tiny", "plugins=[mine.py]", cwd=copied)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    expected = (
        "error: results/sweeps/study-tiny-norms-small-0: has no plan, and its runs are part of the study; `normlab "
    )
    assert done.stderr.startswith(expected), done.stderr
    assert files_of(copied) == before
    done = normlab("study", "run", "tiny", "plugins=[mine.py]", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert files_of(copied) == before


def test_a_plan_that_is_missing_between_others_is_named(tmp_path: Path) -> None:
    """Without its runs, the verdicts would be those of other seeds."""
    grid = Grid("norms", "norm=rmsnorm")
    attempt = Attempt(Study("tiny", "Is it?", [grid], []), str(tmp_path), "small", 0)
    first, second, third = (attempt.sweep_folder(grid, block) for block in attempt.blocks[:3])
    for folder in (first, second, third):
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
    attempt.check_plans()
    shutil.rmtree(second)
    with pytest.raises(StoreError, match=f"{second.name}: has no plan, and its runs are part of the study; "):
        attempt.check_plans()
    shutil.rmtree(third)
    attempt.check_plans()


@pytest.mark.process
def test_damage_of_a_run_ends_a_study_before_more_seeds_are_trained(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    plan = json.loads((copied / "results/sweeps/study-tiny-norms-small-0/plan.json").read_text())
    one, other = (copied / "results/runs" / plan["runs"][index]["run_id"] for index in (0, 1))
    shutil.copy(one / "metrics.jsonl", other / "metrics.jsonl")
    before = sorted((copied / "results/sweeps").iterdir())
    done = normlab("study", "run", "tiny", "plugins=[mine.py]", cwd=copied)
    assert done.returncode == 2
    assert f"error: run {other.name}: " in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].endswith("; more seeds would be trained without it, so nothing more is")
    assert sorted((copied / "results/sweeps").iterdir()) == before


@pytest.mark.process
def test_files_of_another_sweep_or_study_are_named(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    first, second, *_ = sorted((copied / "results/sweeps").glob("study-tiny-norms-small-*"))
    checks = (second / "verify.json").read_bytes()
    (second / "verify.json").write_bytes((first / "verify.json").read_bytes())
    done = normlab("study", "report", "tiny", "plugins=[mine.py]", cwd=copied)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"verify.json: is of sweep {first.name}, not of {second.name}; the same `normlab study run`" in done.stderr
    (second / "verify.json").unlink()
    done = normlab("study", "report", "tiny", "plugins=[mine.py]", cwd=copied)
    assert "void (`normlab verify`" in done.stdout, done.stdout
    (second / "verify.json").write_bytes(checks)
    shutil.copytree(copied / "results/studies/tiny", copied / "results/studies/depth")
    done = normlab("study", "report", "depth", cwd=copied)
    assert (done.returncode, done.stdout) == (2, "")
    assert "report.json: is of study 'tiny', not of depth; restore a copy, or delete it" in done.stderr
    done = normlab("study", "report", "tiny", "plugins=[mine.py]", cwd=copied)
    assert done.returncode == 0
    assert "depth/README.md" not in (copied / "results/studies/README.md").read_text()


@pytest.mark.process
def test_a_sabotaged_control_is_void_and_a_changed_criterion_is_named(folder: Path) -> None:
    changed = folder / "changed.py"
    changed.write_text(STUDY.replace("CONTROL", "AtLeast(0.9)"))
    done = normlab("study", "report", "tiny", "plugins=[changed.py]", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(the control runs is refuted") == 10
    warning = r"^warning: small, seeds from 0 on: The criterion was changed .* \(\w{12}, now \w{12}\), without a reason"
    assert re.search(warning, done.stderr, re.MULTILINE)


@pytest.mark.process
def test_show_prints_claims_criteria_and_cost(folder: Path) -> None:
    done = normlab("study", "show", "tiny", "plugins=[mine.py]", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "claim close: The losses are within 1 nat/token. (nobody)" in done.stdout
    assert "supported if: between -1 and 1 (two one-sided tests)" in done.stdout
    [deviation] = re.findall(r"power: 80% at 0 with 24 seeds whose standard deviation is (\S+) or less\n", done.stdout)
    assert 0.8 < float(deviation) < 1
    assert "grid norms: 24 runs, 17,664 tokens, for the choosing seeds\n" in done.stdout


@pytest.mark.process
def test_a_dry_run_of_a_completed_study_has_nothing_left(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = normlab("study", "run", "tiny", "plugins=[mine.py]", "--dry-run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "runs    24 (24 completed already, not trained again)" in done.stdout
    assert "packs   none: nothing is left to train" in done.stdout
    assert "then more seeds" not in done.stdout
    assert sorted(folder.rglob("*")) == before


def test_the_sweep_that_show_prints_can_be_followed(run_command, tmp_path: Path) -> None:
    """The command names the plugin, which may register the norm of a grid."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    norm = "import dataclasses\nfrom normlab.catalogue.norms.base import register_norm\n"
    norm += "from normlab.catalogue.norms.rmsnorm import RMSNormConfig\n\n@register_norm\n"
    norm += "@dataclasses.dataclass(kw_only=True, slots=True)\nclass Mine(RMSNormConfig):\n    name: str = 'mine'\n"
    study = (
        STUDY.replace("CONTROL", "AtMost(0.9)").replace("norm=layernorm", "norm=mine").replace(",layernorm", ",mine")
    )
    (tmp_path / "mine.py").write_text(norm + study)
    code, out, err = run_command("study", "show", "tiny", "plugins=[mine.py]")
    assert (code, err) == (0, "")
    [command] = re.findall(r"^  normlab (sweep .*)$", out, re.MULTILINE)
    code, out, err = run_command(*shlex.split(command), "--dry-run")
    assert (code, "runs    24" in out) == (0, True), err
    code, _, err = run_command("study", "report", "tiny", "plugins=[mine.py]")
    assert (code, "`normlab study run tiny 'plugins=[mine.py]'`" in err) == (2, True)


def test_a_dry_run_prints_the_first_block_and_leaves_nothing(run_command, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    (tmp_path / "mine.py").write_text(STUDY.replace("CONTROL", "AtMost(0.9)"))
    for command, seeds in (("run", 29), ("replicate", 1029)):
        code, out, err = run_command("study", command, "tiny", "plugins=[mine.py]", "--dry-run")
        assert (code, err) == (0, "")
        assert "runs    24" in out
        assert "tokens  17,664 to train on" in out
        assert out.endswith(f"then more seeds, up to seed {seeds} at most, until every claim is decided\n")
    assert not (tmp_path / "results").exists()


def test_the_plan_of_a_grid_has_the_options_of_its_arms_and_of_its_setting(tmp_path: Path) -> None:
    """Readers of several sweeps need them to tell what the arms differ in from what the sweeps differ in."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    overrides = (
        f"model=gpt2_nano model.depth=1 model.context=8 data=files data.path={tmp_path}/text.txt data.tokenizer=chars "
        "'arm=[pre: placement=pre, post: placement=post init=gpt2]' train.steps=3 optim.warmup_steps=1 "
        "eval.sequences=2 stats=off"
    )
    study = Study("arms", "Are arms known?", [Grid("all", overrides)], [])
    attempt = Attempt(study, str(tmp_path / "results"), "wide")
    [planned] = attempt.plan(attempt.blocks[0], [], [])
    design = planned.sweep.plan.design
    assert design.arms == {"pre": ["placement"], "post": ["placement", "init"]}
    assert {"model.depth", "model.width", "model.heads"} <= {*design.shared}


def test_a_stored_plan_keeps_its_runs_and_gets_those_that_are_needed_besides(tmp_path: Path) -> None:
    """By another rule, another claim was open when the block was planned."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    overrides = (
        f"model=gpt2_nano model.depth=1 model.context=8 data=files data.path={tmp_path}/text.txt data.tokenizer=chars "
        "placement=pre,post,peri train.steps=3 optim.warmup_steps=1 eval.sequences=2 stats=off"
    )
    claims = [
        Claim(arm, "It has another loss.", difference(f"placement={arm}", "placement=pre"), AtLeast(0.0))
        for arm in ("post", "peri")
    ]
    study = Study("stored", "Which?", [Grid("all", overrides)], claims)
    attempt = Attempt(study, str(tmp_path / "results"))

    def placements(plan: Plan) -> list[str]:
        return [run.config["placement"]["name"] for run in plan.runs]

    [first] = attempt.plan(attempt.blocks[1], claims[:1], [])
    assert placements(first.sweep.plan) == ["pre", "post"] * 4
    first.sweep.folder.mkdir(parents=True)
    write_plan(first.sweep.folder, first.sweep.plan)
    [again] = attempt.plan(attempt.blocks[1], claims[:1], [])
    assert again.sweep.plan == read_plan(first.sweep.folder)
    [both] = attempt.plan(attempt.blocks[1], claims[1:], [])
    assert placements(both.sweep.plan) == ["pre", "post"] * 4 + ["peri"] * 4
    assert both.sweep.plan.packs[: len(first.sweep.plan.packs)] == first.sweep.plan.packs


@pytest.mark.parametrize("command", ["show", "run"])
@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("norm=none", "claim far: arm norm=none: no run matches; norm is layernorm, rmsnorm"),
        ("norm=layernorm", "claim far: arm norm=layernorm: its runs differ in train.steps "),
        ("norm=layernorm,model.dept=1", "claim far: arm model.dept: no run has this option"),
    ],
)
def test_an_arm_that_is_not_in_the_grid_is_an_error_before_training(
    run_command, tmp_path: Path, command: str, arm: str, message: str
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    study = STUDY.replace("CONTROL", "AtMost(0.9)").replace("difference(LAYERNORM,", f'difference("{arm}",')
    (tmp_path / "mine.py").write_text(study)
    code, out, err = run_command("study", command, "tiny", "plugins=[mine.py]")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: study tiny: {message}")
    assert not (tmp_path / "results/sweeps").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "xyz"], "unknown study 'xyz': choose one of "),
        (
            ["report", "deepnorm", "--results-dir", "none"],
            "study deepnorm: has no runs; train them with `normlab study run deepnorm`",
        ),
        (
            ["run", "deepnorm", "model.depth=2"],
            "model.depth=2: would change the study; only one value of sweep.jobs=, ",
        ),
        (["run", "deepnorm", "--setting", "huge"], "--setting: unknown setting 'huge': choose one of prose, small"),
        (["replicate", "deepnorm", "--seeds", "7"], "--seeds 7: choose fresh, or a multiple of 1000"),
        (["run", "deepnorm", "device=cpu,cuda"], "device=cpu,cuda: would change the study; "),
    ],
)
def test_errors(run_command, arguments: list[str], message: str) -> None:
    code, out, err = run_command("study", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
