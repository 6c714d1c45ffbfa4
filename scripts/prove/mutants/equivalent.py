"""The mutants that compute the same as their entry, with the reason."""

from normlab.placements import table

NO_SCALE = "there is no scale to share"
SHARED_SCALE = "attention's scale, which both share, replaces the MLP's"
ONE_AXIS = "the only axis of a vector is its last"
SWAP = "two neighbouring axes are swapped in either order"
COUNTS = (
    "weights_TT = x_TD.new_ones(steps, steps).tril() / torch.arange(1, steps + 1, device=x_TD.device)",
    "count_T1 = torch.arange(2, len(position_TD) + 1, device=x_TND.device, dtype=x_TND.dtype)",
)
"""Lines of batchnorm_past; so is JOINED."""
BY_POSITION = "batchnorm_past/batchnorm_position"
TWO_STREAMS = "resi_dual/siamese/x0_lambdas"
REPLACES = (
    "early = {}(self.early{})", ", blocks=lambda depth: blocks, condition=condition",
    "return {}(row{})", ", formula=row.formula.replace(self.early.condition, condition), early=early",
    "return row if variant is None else {}(row{})", ", formula=variant.formula, early=variant.early",
    "return {}(row{})", ", attn=_scaled_start(row.attn, self.c_attn), mlp=_scaled_start(row.mlp, self.c_mlp)",
    "return {}(sub{})", ", out_gain=lambda layer, depth: c * start(layer, depth)",
)  # fmt: skip
"""Lines of algebra, each with the fields that it replaces."""
JOINED = "return y_TND.unflatten(1, (len(like), *like.shape[2:-1]))"
SCALED = "branch_BTD if self.factor == 1 else branch_BTD * self.factor"
INSTRUMENTATION = "records a sub-layer's update for the statistics, which tests/stats checks"
NOTES = (
    ("ngpt", "return unit(unit_BTD + {}rate_D * (unit(sublayer(x_BTD)) - unit_BTD){})", "sublayer.mark_update(", ")"),
    (TWO_STREAMS, "return (x_BTD + {}branch_BTD / self.root{}, y_BTD + branch_BTD)", "sublayer.mark_update(", ")"),
    ("wiring", f"return {{}}{SCALED}{{}}", "self.mark_update(", ")"),
)
"""Lines with instrumentation, with the code before and after the instrumented expression."""
COUNT = "self.update_running_statistics(mean_D, var_D, x_D.numel() // x_D.shape[-1]"
ONE_RANK = "`verify` runs on one rank; tests/train/test_devices.py compares several"

EQUIVALENT: dict[tuple[str, str], str] = {
    **{
        (row.name, "row: shared_scale=True"): NO_SCALE
        for row in table.ROWS
        if row.attn.scale is None and row.mlp.scale is None
    },
    **{
        ("rezero", f"row: mlp {text}"): SHARED_SCALE
        for text in ("scale=none", "scale=1", "scale=0.1", "has the other kind of scale")
    },
    (
        TWO_STREAMS,
        "return (x_BTD, x_BTD.clone())  ->  return (x_BTD, x_BTD)",
    ): "the copy is for the compiler; neither stream is written in place",
    ("sub_ln", "row: attn and mlp are exchanged"): "a block's inner sites are the union of both, and the rest is equal",
    (
        "quarter",
        "return depth // 4  ->  return depth / 4",
    ): "a block's number is an integer, which is at most L / 4 exactly if it is at most its floor",
    (
        "algebra",
        "return frozenset(attn.norms + mlp.norms) & set(INNER_SITES)  ->  return frozenset(attn.norms + mlp.norms)",
    ): "a block looks its inner sites up by name",
    (
        "prmsnorm",
        "self.channels = max(1, rounded(options.fraction * width))  ->  "
        "self.channels = max(1, rounded(rounded(options.fraction * width)))",
    ): "rounding a rounded number changes nothing",
    (
        "seednorm",
        "alpha_D, beta_D, gamma_D = (vector.to(x_D.dtype) for vector in (self.alpha, self.beta, self.gamma))  ->  "
        "alpha_D, beta_D, gamma_D = (vector for vector in (self.alpha, self.beta, self.gamma))",
    ): "torch computes in the wider of two dtypes, which is never a parameter's",
    (
        "affine",
        "self.eps = getattr(options, 'eps', 0.0)  ->  self.eps = getattr(options, 'eps', 1.0)",
    ): "a norm without the option does not read it",
    (
        "batchnorm",
        f"{COUNT} * ranks_of_statistics())  ->  {COUNT.replace('//', '/')} * ranks_of_statistics())",
    ): "the count of numbers is a multiple of the width",
    ("batchnorm", f"{COUNT} * ranks_of_statistics())  ->  {COUNT})"): ONE_RANK,
    ("batchnorm", f"{COUNT} * ranks_of_statistics())  ->  {COUNT} / ranks_of_statistics())"): ONE_RANK,
    **{(BY_POSITION, f"{line}.unsqueeze(1)  ->  {line}.unsqueeze(-1)"): ONE_AXIS for line in COUNTS},
    (
        BY_POSITION,
        "x_TD = x_D.movedim(1, 0) if x_D.dim() > 2 else x_D  ->  x_TD = x_D.movedim(0, 1) if x_D.dim() > 2 else x_D",
    ): SWAP,
    (BY_POSITION, f"{JOINED}.movedim(0, 1)  ->  {JOINED}.movedim(1, 0)"): SWAP,
    (
        BY_POSITION,
        "between_TD = (position_TD[1:] - mean_TD[:-1]).square() * ((count_T1 - 1) / count_T1)  ->  "
        "between_TD = (mean_TD[:-1] - position_TD[1:]).square() * ((count_T1 - 1) / count_T1)",
    ): "the square of a difference and of its negative",
    (
        "pointwise/dyt/derf",
        "return torch.where(x >= 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))  ->  "
        "return torch.where(x > 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))",
    ): "at 0 both halves and their slopes are 0",
    **{
        (
            "algebra",
            f"{line.format('replace', fields)}  ->  " + line.format("replace(replace", f"{fields}){fields}"),
        ): "the same fields are replaced by the same values twice"
        for line, fields in zip(REPLACES[::2], REPLACES[1::2], strict=True)
    },
    (
        "algebra",
        "early = replace(self.early, blocks=lambda depth: blocks, condition=condition)  ->  "
        "early = replace(self.early, blocks=lambda depth: blocks)",
    ): "the condition selects a part of the formula, which is replaced beside it",
    (
        "algebra",
        "return replace(sub, out_gain=lambda layer, depth: c * start(layer, depth))  ->  "
        "return replace(sub, out_gain=lambda layer, depth: c * start(depth, depth))",
    ): "the only gain that is scaled does not depend on the block",
    **{
        (entry, f"{line.format(before, after)}  ->  {line.format('', '')}"): INSTRUMENTATION
        for entry, line, before, after in NOTES
    },
    (
        "wiring",
        f"return self.mark_update({SCALED})  ->  return self.mark_update(self.mark_update({SCALED}))",
    ): INSTRUMENTATION,
    **{
        ("wiring", f"return self.mark_update({SCALED})  ->  return self.mark_update({text})"): "a product with 1"
        for text in ("branch_BTD * self.factor", SCALED.replace("== 1", "== 2"), SCALED.replace("== 1", "== -1"))
    },
    ("wiring", "self.last_update = branch_BTD  ->  pass"): INSTRUMENTATION,
    **{
        ("wiring", f"branch_BTD = sublayer.mark_update(branch_BTD)  ->  {text}"): INSTRUMENTATION
        for text in ("pass", "branch_BTD = branch_BTD")
    },
}
"""Reasons by entry and the mutant's text."""
