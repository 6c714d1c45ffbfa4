"""`normlab sweep --effect`: the seeds that a difference needs, by the noise of runs on record."""

import numpy as np
import pytest
from scipy import stats

from normlab.store.record import RunRecord
from normlab.sweeps.needed_seeds import needed_seeds, needed_seeds_lines, noise_lines
from support.small_run import small_run


@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0])
def test_the_power_is_that_of_a_paired_t_test(ratio, power):
    """By scipy's non-central t, for a difference of independent losses; with one seed less it is too small."""
    deviation = 0.02
    n = needed_seeds(ratio * deviation, deviation, power)
    assert n is not None

    def power_at(n):
        return stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, ratio * np.sqrt(n / 2))

    assert power_at(n) >= power - 1e-9
    assert n == 2 or power_at(n - 1) < power


def test_the_number_of_seeds_finds_the_difference_as_often_as_it_says():
    rng, n = np.random.default_rng(0), needed_seeds(0.02, 0.015, 0.8)
    assert n is not None
    differences = 0.02 + rng.normal(0, 0.015, (4000, n)) - rng.normal(0, 0.015, (4000, n))
    _, p_values = stats.ttest_1samp(differences, 0, axis=1)
    found = (np.asarray(p_values) < 0.05).mean()
    assert 0.78 < found < 0.86  # one seed less has 0.76


def test_the_noise_is_pooled_over_cells_at_their_best_learning_rate(make_run, tmp_path):
    """A size of which no run has a second seed is not known."""
    rng = np.random.default_rng(1)
    squares, folders = 0.0, []
    for norm in ("layernorm", "rmsnorm"):
        losses = 2 + 0.02 * rng.standard_normal(5)
        squares += losses.var(ddof=1) * 4
        for seed, loss in enumerate(losses.tolist()):
            for lr, worse in ((1e-3, 0.0), (3e-2, 0.1 + 0.02 * seed)):
                status = {"val_loss": loss + worse, "best_val_loss": loss + worse}
                folders.append(make_run(f"{norm}{seed}{lr}", norm=norm, seed=seed, lr=lr, width=32, status=status))
    other = make_run("other", norm="rmsnorm", seed=0, width=64, status={"val_loss": 1.9, "best_val_loss": 1.9})
    identities = [RunRecord.load(folder).run.identity.config for folder in (folders[0], other)]
    head, known, unknown = needed_seeds_lines(identities, tmp_path, 0.03, 0.8)
    assert head.startswith("seeds   to find a difference of 0.03 nats/token with a probability of 80% (paired t test")
    noise = float(np.sqrt(squares / 8))
    low, high = (np.sqrt(squares / stats.chi2.ppf(q, 8)) for q in (0.9, 0.1))
    numbers = [needed_seeds(0.03, float(deviation), 0.8) for deviation in (noise, low, high)]
    assert known == (
        f"        width 32: {numbers[0]} seeds ({numbers[1]} to {numbers[2]}), by a noise of {noise:.3g} in 10 runs on "
        "record"
    )
    assert unknown == "        width 64: not known, since no run of this size is on record with two seeds"
    interval = f"{low:.2g} to {high:.2g}"
    assert list(noise_lines(identities, tmp_path)) == [
        f"noise of width 32: {noise:.2g} ({interval}) nats/token over seeds, in 10 runs on record",
        "noise of width 64: not known, since no run of this size is on record with two seeds",
    ]


def test_the_command(run_command, tmp_path):
    command = ["sweep", *small_run(tmp_path), "norm=layernorm,dyt", "seed=0,1", "--effect"]
    code, out, _ = run_command(*command, "0.02", "--power", "0.9")
    assert code == 0
    assert "seeds   to find a difference of 0.02 nats/token with a probability of 90% (paired t test at 5%)\n" in out
    assert out.endswith("        all runs: not known, since no run of this size is on record with two seeds\n")
    assert not any(tmp_path.iterdir())
    for arguments, message in (
        (["0"], "--effect 0: must be a difference of losses above 0, in nats/token"),
        (["0.1", "--power", "1"], "--power 1: must be between 0.05 and 1"),
    ):
        code, _, err = run_command(*command, *arguments)
        assert (code, err) == (2, f"error: {message}\n")
    without_effect = [*command[:-1], "--dry-run", "--power", "0.9"]
    without = "error: --power 0.9: has no effect without --effect; add --effect 0.02\n"
    assert run_command(*without_effect) == (2, "", without)
