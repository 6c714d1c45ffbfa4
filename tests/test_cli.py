"""The command line: output, error messages, files it leaves, modules it loads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import normlab
from support.small_run import without_replaced

Command = Callable[..., tuple[int, str, str]]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("norm=rmsnrm", "did you mean 'rmsnorm'"),
        ("norm.epps=1", "norm.epps=1: the chosen norm has no option 'epps' (did you mean 'norm.eps'?): choose one of "),
        ("Norm=rmsnorm", "did you mean 'norm'"),
        ("model=gpt2_tny", "did you mean 'gpt2_tiny'"),
        ("model.heads=5", "1, 2, 4, 8"),
        ("train.steps=-3", "at least 0"),
        ("train.steps=many", "train.steps=many: must be a whole number\n"),
        (
            "norm.momentum=0.5 norm=rmsnorm",
            "norm.momentum=0.5: is an option of norm=batchnorm, batchnorm_past, "
            "batchnorm_position; set one of these, or choose an option of the chosen norm: bias",
        ),
        ("sweep.pack=4", "sweep.pack=4: is an option of normlab sweep only"),
        ("device=gpu", "did you mean 'cuda'"),
        ("train.accumulation=3", "train.batch_size=4"),
        ("optim.lr=nan", "finite"),
        ("optim.warmup_steps=99", "train.steps=12"),
        ("init=xaver", "did you mean 'xavier'"),
        ("plugins=[no_such.py]", "no_such.py"),
        ("plugins=no_such.py", "plugins=no_such.py: not a list of files; write plugins=[my_norm.py]"),
        ("data.path=no_such.txt", "no_such.txt"),
        ("norm=rmsnorm norm.bias", "norm.bias"),
        ("--multirun seed=0,1 norm=rmsnorm,rmsnrm", "did you mean 'rmsnorm'"),
        ("--config-name=trian", "--config-name=trian: no such config"),
        ("+foo=1", "+foo=1: no such option"),
        ("++norm.epps=1", "did you mean 'norm.eps'"),
        ("--config-dir=nowhere", "--config-dir=nowhere: no such folder"),
        ("data.seed=99999999999999999999", "data.seed"),
        ("placement.name=post", "placement.name cannot be set; placement=... chooses"),
        ("model.preset=mine", "model.preset cannot be set; model=... chooses"),
        ("~model", "~model: an option cannot be removed"),
        ("run.name=", "run.name="),
        ("run.name='\x01'", "run.name='\\x01'"),
        (f"tracking.project={'a' * 129}", "1 to 128 characters"),
        ("stats.also=[[logz]]", "its elements must be texts or numbers; write stats.also=[a,b]"),
        ("train.batch_size=1e11", "train.batch_size=1e11: must be a whole number"),
        ("model.depth=9999 model.width=65536", "PiB"),
        ("train.batch_size=1048576 model.context=1024", "this machine"),
        (f"seed={'1' * 5000}", "has a whole number of thousands of digits"),
        ("--multirun seed=range(0,10000000000)", "more than 10000 runs"),
        ("=", "=: no such option"),
        ("rmsnorm", "rmsnorm: not option=value; write, for example, norm=rmsnorm"),
        ("compile=true", "did you mean 'on'"),
        ("norm=rmsnorm,none", "several values for one run; choose one, train each with normlab sweep, or quote"),
        ("seed=range(3)", "seed=range(3): several values for one run; choose one, train each with"),
        ("+norm=rmsnorm", "+norm=rmsnorm: norm is chosen already; leave + out"),
        ("results_dir=/proc/none", "/proc/none/runs"),
        (f"results_dir={__file__}", f"{__file__}/runs"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_files(
    wrong: str,
    message: str,
    overrides: list[str],
    run_command: Command,
    tmp_path: Path,
) -> None:
    code, out, err = run_command("train", *without_replaced([*overrides, *wrong.split()]))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert message in err
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["sumarize"],
        ["list", "nroms"],
        ["list", "norms", "zzz"],
        ["summarize", "--format", "xml"],
        ["summarize", "nowhere"],
        ["compare", "-o", "page.pdf"],
        ["--nonsense"],
    ],
)
def test_errors_of_other_commands_are_one_line(arguments: list[str], run_command: Command, tmp_path: Path) -> None:
    code, out, err = run_command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("summarize --target abc", "invalid value for '--target': must be a number; --help"),
        ("figure loss --columns 1.5", "invalid value for '--columns': must be a whole number; --help"),
        (f"sample x --seed {'1' * 5000}", "invalid value for '--seed': must be a whole number; --help"),
        ("sweep seed=0,1 --effect=x", "invalid value for '--effect': must be a number; --help"),
    ],
)
def test_a_text_for_a_number_is_an_error(arguments: str, message: str, run_command: Command) -> None:
    code, out, err = run_command(*arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"error: {message}")


def test_debug_raises_the_error(run_command: Command) -> None:
    with pytest.raises(normlab.base.errors.ConfigError):
        run_command("--debug", "list", "norms", "nothing")


def test_train_resume_summarize_list_and_sample_a_run(
    overrides: list[str], run_command: Command, tmp_path: Path
) -> None:
    code, out, err = run_command("train", "norm=rmsnorm", "placement=pre", *overrides)
    assert code == 0, err
    assert "uniform" in err
    assert "bigram" in err
    folder = tmp_path / out.splitlines()[-1]
    assert (folder / "run.json").is_file()
    # Neither Hydra nor anything else writes outside of the results.
    assert {path.name for path in tmp_path.iterdir()} == {"results"}

    code, out, _ = run_command("train", "norm=rmsnorm", "placement=pre", *overrides)
    assert code == 0
    assert "finished at step 12" in out
    rows = json.loads(run_command("summarize", "results", "--format", "json")[1])
    assert [row["state"] for row in rows] == ["finished"]
    assert json.loads(run_command("summarize", "results", "--runs", "--format=json")[1])[0]["norm"] == "rmsnorm"
    code, out, _ = run_command("sample", "rmsnorm", "--prompt", "The norm", "--tokens", "5", "--temperature", "0")
    assert code == 0
    assert out.startswith("The norm")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("unreadable", "arguments", "message"),
    [
        ("results/runs", "summarize", "results/runs: cannot be read (Permission denied); make it readable"),
        (
            "results/runs",
            "train",
            "run.json: cannot be opened (Permission denied); make {here}/results/runs readable and writable",
        ),
        ("own.py", "train plugins=[own.py]", "plugins: own.py cannot be read (Permission denied); give the path"),
        ("own", "train data.tokenizer=own", "data.tokenizer=own: cannot be read (Permission denied)"),
    ],
)
def test_an_unreadable_file_is_a_one_line_error(
    unreadable: str,
    arguments: str,
    message: str,
    overrides: list[str],
    tmp_path: Path,
    run_without_root_privileges: Command,
) -> None:
    path = Path(unreadable)
    path.parent.mkdir(exist_ok=True)
    if path.suffix:
        path.touch()
    else:
        path.mkdir()
    path.chmod(0)
    command, *more = arguments.split()
    code, out, err = run_without_root_privileges(command, *(overrides if command == "train" else []), *more)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert message.format(here=Path.cwd()) in err


def test_sampling_errors_are_one_line(overrides: list[str], run_command: Command) -> None:
    diverging = ["optim.lr=1e30", "optim.clip=null", "optim.warmup_steps=1", "run.name=wild"]
    assert run_command("train", *overrides, *diverging)[0] == 0
    for arguments, message in (
        (["--seed=-1"], "seed=-1: must be at least 0 and at most 9223372036854775807"),
        ([f"--tokens={10**12}"], "tokens=1000000000000: must be at least 0 and at most 1000000"),
        (["--tokens=-1"], "tokens=-1: must be at least 0 and at most 1000000"),
        (["--temperature=0"], "logits are not finite, because the run diverged"),
    ):
        code, out, err = run_command("sample", "wild", *arguments)
        assert (code, out, err.count("\n"), message in err) == (2, "", 1, True), err


@pytest.mark.process
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normlab", "list", "norms"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: the output cannot be written (No space left on device); free some space, or redirect it\n"
    )


@pytest.mark.process
def test_a_closed_pipe_does_not_fail_a_run(overrides: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "normlab", "train", *overrides, "train.steps=2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read().decode()
    assert process.returncode == 0, err
    assert "rror" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("eps: [", "norm/mine.yaml, line 1: is not valid YAML; fix the file (--debug prints the reason)"),
        ("7", "norm/mine.yaml: holds no options; fix the file"),
        ("defaults:\n  - &a [*a]\n", "norm/mine.yaml: a part of it refers to itself; write the values out"),
        (
            "defaults:\n  - rmsnorm\nepps: 1\n",
            "norm/mine.yaml: sets 'epps', which is no option here (did you mean 'norm.eps'?)",
        ),
        ("defaults:\n  - rmsnrm\n", "norm=rmsnrm: unknown norm 'rmsnrm' (did you mean 'rmsnorm'?): choose one of"),
        ("", "norm=mine: names no norm; begin the config file with a list such as defaults: [rmsnorm]"),
        ("eps: \udcff", "norm/mine.yaml: is not valid YAML in UTF-8; fix the file"),
        ("a\0b: 1", "norm/mine.yaml: is not valid YAML in UTF-8; fix the file"),
        ('eps: "${"', "norm/mine.yaml: eps is no reference; write ${model.width} for an option, or the value itself"),
        ("defaults: 3", "norm/mine.yaml: its defaults are no list; write a list such as defaults: [rmsnorm]"),
        ("defaults: [rmsnorm, _self_]\neps: x", "norm/mine.yaml: norm.eps must be a number; fix the file"),
        (
            "defaults: [rmsnorm, _self_]\nmomentum: 0.1",
            "norm/mine.yaml: sets 'momentum', which is no option here (did you mean 'norm.momentum'?)",
        ),
    ],
)
def test_an_error_in_a_config_file_is_one_line(
    content: str, message: str, overrides: list[str], run_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "own" / "norm").mkdir(parents=True)
    (tmp_path / "own" / "norm" / "mine.yaml").write_text(content, errors="surrogateescape")
    before = files_below(tmp_path)
    code, out, err = run_command("train", "--config-dir", str(tmp_path / "own"), *overrides, "norm=mine")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert files_below(tmp_path) == before
    assert message in err


@pytest.mark.parametrize(
    ("entry", "config"), [("normlab", "normlab"), ("part/mine", "part/mine"), ("{norms: rmsnorm}", "norms/rmsnorm")]
)
def test_a_config_that_a_defaults_list_names_must_exist(
    entry: str, config: str, run_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [train, {entry}, _self_]\n")
    code, out, err = run_command("train", "--config-dir", str(tmp_path), "--config-name", "mine")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"mine.yaml: its defaults list names {config}, and there is no such config; that of a run is train" in err


def test_a_terminal_is_given_no_orders(run_command: Command) -> None:
    code, _, err = run_command("train", "data=files", "data.path=\x1b[31m")
    assert (code, "\x1b" in err, "\\x1b" in err) == (2, False, True)


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments", [["--help"], ["list", "norms"], ["list", "options"], ["summarize", "."], ["compare", "."]]
)
def test_light_commands_load_no_heavy_package(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "run.json").write_text("{}")
    code = (
        "import sys\nfrom normlab.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'wandb', 'datasets', 'tokenizers', 'huggingface_hub', 'pandas', 'hydra')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_a_run_without_compile_loads_no_compiler(overrides: list[str]) -> None:
    """Loading the compiler takes as long as loading the rest of torch."""
    code = (
        "import sys\nfrom normlab.cli import main\n"
        f"try: main({['train', *overrides, 'compile=off']!r})\nexcept SystemExit: pass\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'wandb', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "finished at step 12/12" in done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_help(run_command: Command) -> None:
    assert run_command("--version")[1] == f"normlab {normlab.__version__}\n"
    code, out, _ = run_command()
    assert (code, "summarize" in out) == (0, True)


@pytest.mark.process
def test_too_little_memory_to_import_torch_is_one_line() -> None:
    """As with `ulimit -v 300000`."""
    script = f"ulimit -v 300000; {sys.executable} -P -m normlab train"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is not enough memory"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.process
@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("arguments", "code"), [("list norms", 0), ("train model.depth=x", 2)])
def test_closed_outputs_change_no_exit_code(arguments: str, code: int, redirection: str) -> None:
    script = f"{sys.executable} -P -m normlab {arguments} {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
