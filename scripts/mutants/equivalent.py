"""The mutants that compute what their entry does, and why."""

from __future__ import annotations

from normlab.placements import algebra

NO_SCALE = "there is no scale to be shared"
SCALES_OF_ATTENTION = "the MLP's is replaced by attention's, which both share"
LAST_OF_ONE = "a vector has one axis, which is its last"
EITHER_WAY = "two neighbouring axes change places, whichever is named first"
COUNTS = (
    "weights_TT = x_TD.new_ones(steps, steps).tril() / torch.arange(1, steps + 1, device=x_TD.device)",
    "count_T1 = torch.arange(2, len(position_TD) + 1, device=x_TND.device, dtype=x_TND.dtype)",
)
"""Of batchnorm_past, as is JOINED: lines of which a mutant computes the same."""
JOINED = "return y_TND.unflatten(1, (len(like), *like.shape[2:-1]))"
LOOKED_AT = (
    "what a sub-layer adds is noted there for those who look, whom tests/stats holds; the block computes the same"
)
NOTES = (
    ("ngpt", "return unit(unit_BTD + {}rate_D * (unit(sublayer(x_BTD)) - unit_BTD){})", "sublayer.mark_update(", ")"),
    ("siamese", "return (x_BTD + {}branch_BTD / self.root{}, y_BTD + branch_BTD)", "sublayer.mark_update(", ")"),
    ("wiring", "return {}self.sublayer(x_BTD){}", "self.mark_update(", ")"),
)
"""Lines that note it, with and without the note."""
EQUIVALENT: dict[tuple[str, str], str] = {
    **{
        (row.name, "row: shared_scale=True"): NO_SCALE
        for row in algebra.ROWS
        if row.attn.scale is None and row.mlp.scale is None
    },
    **{
        ("rezero", f"row: mlp {text}"): SCALES_OF_ATTENTION
        for text in ("scale=none", "scale=1", "scale=0.1", "has its scale the other way")
    },
    (
        "streams",
        "return (x_BTD, x_BTD.clone())  ->  return (x_BTD, x_BTD)",
    ): "the copy is for the compiler; neither stream is written in place",
    ("sub_ln", "row: attn and mlp are exchanged"): "a block's inner sites are those of both, and the rest is alike",
    (
        "quarter",
        "return depth // 4  ->  return depth / 4",
    ): "a block's number is whole: it is at most L / 4 where it is at most its floor",
    (
        "algebra",
        "return frozenset(attn.norms + mlp.norms) & set(INNER_SITES)  ->  return frozenset(attn.norms + mlp.norms)",
    ): "a block asks for those inside it by their names",
    (
        "seednorm",
        "alpha_D, beta_D, gamma_D = (vector.to(work_D.dtype) for vector in (self.alpha, self.beta, self.gamma))  ->  "
        "alpha_D, beta_D, gamma_D = (vector for vector in (self.alpha, self.beta, self.gamma))",
    ): "torch computes in the wider of two dtypes, which is never a parameter's",
    (
        "batchnorm",
        "self.update_running_statistics(mean_D, var_D, x_D.numel() // x_D.shape[-1])  ->  "
        "self.update_running_statistics(mean_D, var_D, x_D.numel() / x_D.shape[-1])",
    ): "the count of numbers is a multiple of the width",
    **{("batchnorm_past", f"{line}.unsqueeze(1)  ->  {line}.unsqueeze(-1)"): LAST_OF_ONE for line in COUNTS},
    (
        "batchnorm_past",
        "x_TD = x_D.movedim(1, 0) if x_D.dim() > 2 else x_D  ->  x_TD = x_D.movedim(0, 1) if x_D.dim() > 2 else x_D",
    ): EITHER_WAY,
    ("batchnorm_past", f"{JOINED}.movedim(0, 1)  ->  {JOINED}.movedim(1, 0)"): EITHER_WAY,
    (
        "batchnorm_past",
        "between_TD = (position_TD[1:] - mean_TD[:-1]).square() * ((count_T1 - 1) / count_T1)  ->  "
        "between_TD = (mean_TD[:-1] - position_TD[1:]).square() * ((count_T1 - 1) / count_T1)",
    ): "the square of a difference and of its negative",
    (
        "pointwise",
        "return torch.where(x >= 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))  ->  "
        "return torch.where(x > 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))",
    ): "at 0 either half is 0, and so is the slope of each",
    **{
        (entry, f"{line.format(before, after)}  ->  {line.format('', '')}"): LOOKED_AT
        for entry, line, before, after in NOTES
    },
    (
        "wiring",
        "return self.mark_update(self.sublayer(x_BTD))  ->  "
        "return self.mark_update(self.mark_update(self.sublayer(x_BTD)))",
    ): LOOKED_AT,
    ("wiring", "self.last_update = branch_BTD  ->  pass"): LOOKED_AT,
    **{
        ("wiring", f"branch_BTD = sublayer.mark_update(branch_BTD)  ->  {text}"): LOOKED_AT
        for text in ("pass", "branch_BTD = branch_BTD")
    },
    **{
        ("groupnorm", f"self.check_width(width)  ->  {text}"): "the config is checked before"
        for text in ("pass", "width")
    },
}
"""Mutants that compute what the entry does, and why: by entry and the mutant's text."""
