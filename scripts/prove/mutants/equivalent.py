"""The mutants that compute the same as their entry, with the reason."""

from normlab.catalogue.placements import table

NO_SCALE = "there is no scale to share"
SHARED_SCALE = "attention's scale, which both share, replaces the MLP's"
ONE_AXIS = "the only axis of a vector is its last"
ONE_NUMBER = "there is one number, or one for each run"
SWAP = "two neighbouring axes are swapped in either order"
COUNTS = (
    "weights_TT = x_TD.new_ones(steps, steps).tril() / torch.arange(1, steps + 1, device=x_TD.device)",
    "count_T1 = torch.arange(2, len(position_TD) + 1, device=x_TND.device, dtype=x_TND.dtype)",
)
"""Lines of batchnorm_past; so is JOINED."""
BY_POSITION = "batchnorm_past/batchnorm_position"
TWO_STREAMS = "resi_dual/siamese/x0_lambdas"
ONE_STREAM = "b2t/gpas/norm_preserving/parallel/parallel_two_norms"
STREAMS_FILE, HYPER, MHC = "streams", "hyper_connections", "identity_hc"
GATED, ATTN_RES = "gated_residual", "attn_res"
REPLACES = (
    "early = {}(self.early{})", ", blocks=lambda depth: blocks, condition=condition",
    "return {}(row{})", ", formula=row.formula.replace(self.early.condition, condition), early=early",
    "return {}(row{})", ", formula=variant.formula, early=variant.early",
    "return {}(row{})", ", attn=_scaled_start(row.attn, self.c_attn), mlp=_scaled_start(row.mlp, self.c_mlp)",
    "return {}(sub{})", ", out_gain=lambda layer, depth: c * start(layer, depth)",
    "return {}(sub{})", ", branch=_Multiple(sub.branch, self.branch_factor)",
)  # fmt: skip
"""Lines of algebra, each with the fields that it replaces."""
START = "replace(self, start=self.initial_scale)"
PAIRS = "for sub, sub_layer in zip(self.sub_layers(layer + 1, depth), ('attn', 'mlp')"
JOINED = "return y_TND.unflatten(1, (len(like), *like.shape[2:-1]))"
SCALED = "branch_BTD if self.factor == 1 else branch_BTD * self.factor"
INSTRUMENTATION = "records a sub-layer's update for the statistics, which tests/statistics checks"
KEPT_ATTN = "x_BTD = kept * x_BTD + {}added * attn(self.attn_norm(x_BTD)){}"
KEPT_MLP = "return kept * x_BTD + {}added * mlp(self.mlp_norm(x_BTD)){}"
NOTES = (
    ("ngpt", "return unit(unit_BTD + {}rate_D * (unit(sublayer(x_BTD)) - unit_BTD){})", "sublayer.mark_update(", ")"),
    (TWO_STREAMS, "return (x_BTD + {}branch_BTD / self.root{}, y_BTD + branch_BTD)", "sublayer.mark_update(", ")"),
    ("wiring", f"return {{}}{SCALED}{{}}", "self.mark_update(", ")"),
    (STREAMS_FILE, "return kept_BTnD + {}b[..., None] * branch_BTD[..., None, :]{}", "sublayer.mark_update(", ")"),
    (GATED, "return x_BTnD + {}b_BTn[..., None] * branch_BTD[..., None, :]{}", "sublayer.mark_update(", ")"),
    (ONE_STREAM, KEPT_ATTN, "attn.mark_update(", ")"),
    (ONE_STREAM, KEPT_MLP, "mlp.mark_update(", ")"),
)
"""Lines with instrumentation, with the code before and after the instrumented expression."""
COUNT = "self.update_running_statistics(mean_D, var_D, x_D.numel() // x_D.shape[-1]"
MOMENTS = "torch.stack([(normed_D * linear_D).mean(), linear_D.square().mean()])"
ONE_RANK = "`verify` runs on one rank; tests/train/test_devices.py compares several"

FACTORS = "the factors of a product in the other order"
FROM_THE_FRONT = "the same axis, counted from the front"
NO_STATE = "states_BTND = torch.zeros_like(x_BTD)[..., None, :]"
COUNTER = "self.register_buffer(UPDATES, torch.zeros((), dtype=torch.float64))"
LENGTHS = "the lists have equal lengths"
TURNED = "a matrix and its transpose have the same orthogonal factor; one of the two products is cheaper"
ON_GPU = "bfloat16 is for GPUs; tests/gpu counts its launches"
SMALL = "only a norm smaller than any that is tested has another divisor; that of zeros is the same"
UNUSED = "Lion does not read it"
STEP = "step = torch.mul(square, correction, out=grads).sqrt_().add_(options.eps)"
APPLY = "group.set(params, torch.addcmul(params, step, rate, value=-1, out=step))"
MOMENTUM = "torch.addcmul(group.grads, velocity, momentum)"
LION = "stacked_lion(options, StackedGroup(params, grads, [mean], decayed, coefficients, group.alive, group.names, []))"
COPY = "torch._foreach_copy_(state, [piece.view_as(tensor) for piece, tensor in zip(pieces, state, strict=True)])"
TALL = "is_tall = x_NM.shape[-2] > x_NM.shape[-1]"
FLAT = "x = _unit(x.flatten(0, -3))"
POWER = "largest = x_NM.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(x_NM.dtype).smallest_normal)"
NUMBERS = "numbers.append(number.view(*number.shape, 1, 1) if isinstance(number, Tensor) else number)"
ALIVE = "alive = group.alive.view(*group.alive.shape, 1, 1)"
BALL = "new = radius * _unit(decay_factor * params - lr * radius * _unit(update))"
WRITE = "for state, value, old in zip(states, values, (params, momenta, *rows), strict=True):"
UNIT = "return x_NM / norm.clamp(min=torch.finfo(x_NM.dtype).smallest_normal)"
SHAPE = "shape = (params[unit[0]].shape[-2:], len(unit), heads[name])"
STACK = "return matrices.unflatten(0, (-1, parts)).movedim(1, -3).flatten(-3, -2)"
PIECES = "for value, unit in zip(values, units, strict=True):"
CAUTIOUS = "params.sub_(((old - params) * old >= 0) * old * (alive.to(old.dtype) * rate))"
UPDATES: tuple[tuple[str, str, str, str, str], ...] = (
    ("adamw", FACTORS, STEP, "square, correction", "correction, square"),
    ("adamw", FACTORS, APPLY, "step, rate", "rate, step"),
    ("sgd", FACTORS, "group.grads[:, :decayed].addcmul_(group.params[:, :decayed], decay)",
     "group.params[:, :decayed], decay", "decay, group.params[:, :decayed]"),
    ("sgd", FACTORS, f"group.set(velocity, {MOMENTUM})", "velocity, momentum", "momentum, velocity"),
    ("sgd", FACTORS, f"direction = {MOMENTUM} if options.nesterov else velocity",
     "velocity, momentum", "momentum, velocity"),
    ("sgd", FACTORS, "group.set(group.params, torch.addcmul(group.params, direction, lr, value=-1))",
     "direction, lr", "lr, direction"),
    ("adamw", "the result is the same in a buffer of its own", STEP, ", out=grads", ""),
    ("adamw", "the result is the same in a buffer of its own", APPLY, ", out=step", ""),
    ("adamw", "there are two corrections",
     "return (1 - options.beta1, 1 - options.beta2, lr / corrections[0], 1 / corrections[1], decay_factor)",
     "corrections[1]", "corrections[-1]"),
    ("lion", "it is flat already", "params, grads, mean = (flat(state)[None] for state in (group.params, group.grads, "
     "*group.moments))", "flat(state)", "flat(flat(state))"),
    ("updates", "a unit has one matrix, or the three of q, k and v", "if parts > 1:", "1", "2"),
    ("lion", "there are two axes", "decayed = params.shape[1] if group.weight_decay else 0", "[1]", "[-1]"),
    ("lion", UNUSED, "coefficients = (*lion_coefficients(options, group.lr, 0), 0)", "lr, 0)", "lr, 1)"),
    ("lion", UNUSED, "coefficients = (*lion_coefficients(options, group.lr, 0), 0)", "), 0)", "), 1)"),
    ("lion", UNUSED, LION, "group.names, []", "[], group.names"),
    *(("updates", LENGTHS, line, "zip(" + lists + ", strict=True)", "zip(" + lists + end)
      for line, lists in ((COPY, "pieces, state"), (WRITE, "states, values, (params, momenta, *rows)"),
                          (PIECES, "values, units"))
      for end in (")", ", strict=False)")),
    *(("updates", TURNED, TALL, "shape[-2] >", f"shape[{axis}] >") for axis in ("2", "-3")),
    *(("updates", TURNED, TALL, ">", sign) for sign in ("<=", ">=")),
    *(("updates", TURNED, TALL, "shape[-1]", f"shape[{axis}]") for axis in ("1", "-2")),
    ("updates", ON_GPU, "if x.is_cuda:", "x.is_cuda", "False"),
    ("updates", ON_GPU, "x = x.bfloat16()", "x = x.bfloat16()", "pass"),
    ("updates", ON_GPU, "x = x.bfloat16()", "x.bfloat16()", "x"),
    ("updates", ON_GPU, "return x.unflatten(0, lead).to(x_NM.dtype)", ".to(x_NM.dtype)", ""),
    ("updates", "a scaled matrix is scaled by 1", "x = scale_by_power_of_two(x)", "(x)", "(scale_by_power_of_two(x))"),
    ("updates", "a unit matrix has the norm 1", FLAT, "_unit(x.flatten(0, -3))", "_unit(_unit(x.flatten(0, -3)))"),
    ("updates", "only a zero matrix has no larger element", POWER,
     ".clamp(min=torch.finfo(x_NM.dtype).smallest_normal)", " + torch.finfo(x_NM.dtype).smallest_normal"),
    ("updates", SMALL, UNIT, "norm.clamp(min=torch.finfo(x_NM.dtype).smallest_normal)",
     "(norm + torch.finfo(x_NM.dtype).smallest_normal)"),
    *(("updates", ONE_NUMBER, line, "1, 1)", text) for line in (NUMBERS, ALIVE) for text in ("-1, 1)", "1, -1)")),
    ("updates", "a unit matrix has the norm 1", BALL, "_unit(decay_factor * params - lr * radius * _unit(update))",
     "_unit(_unit(decay_factor * params - lr * radius * _unit(update)))"),
    ("updates", "a unit matrix has the norm 1", BALL, "_unit(update)", "_unit(_unit(update))"),
    ("updates", "matrices have two axes, and those of stacked runs an equal first one", SHAPE, "[-2:]", "[-3:]"),
    ("updates", "a list of the same numbers", "by_shape.setdefault(shape, []).append(tuple(unit))",
     "tuple(unit)", "unit"),
    ("updates", SWAP, "return matrices.unflatten(-2, (heads, -1)).movedim(-3, 1).flatten(0, 1)", "-3, 1", "1, -3"),
    ("updates", SWAP, STACK, "1, -3", "-3, 1"),
    ("updates", SWAP, "values = values.unflatten(0, (-1, heads)).movedim(1, -3).flatten(-3, -2)", "1, -3", "-3, 1"),
    *(("updates", "with one part nothing is joined", "if parts > 1:", "parts > 1", text)
      for text in ("True", "parts >= 1", "parts > -1")),
    ("updates", "where the old number is 0, so is the decay", CAUTIOUS, "(old - params) * old", "(old - params) / old"),
)  # fmt: skip
"""Lines of the updates by entry, with the part that a mutant replaces."""

STREAMS: tuple[tuple[str, str, str, str, str], ...] = (
    *((STREAMS_FILE, FROM_THE_FRONT, line, f"{before}-2", f"{before}2") for before, line in (
        (".sum(", "return (a[..., None] * x_BTnD).sum(-2)"),
        ("- 1], ", "read_BT1D, mixed_BTnD = product_BTmD.split_with_sizes([1, mixing.shape[-1] - 1], -2)"),
        (".shape[", "kept_BTnD = mixed_BTnD if mixed_BTnD.shape[-2] else x_BTnD"),
        (".squeeze(", "branch_BTD = sublayer(self.norm(read_BT1D.squeeze(-2)))"),
        ("self.streams, ", "return x_BTD[..., None, :].repeat_interleave(self.streams, -2)"))),
    (HYPER, FROM_THE_FRONT, "return self.norm(x_BTnD.sum(-2))", ".sum(-2", ".sum(2"),
    *((MHC, FROM_THE_FRONT, line, f"{before}-2", f"{before}2") for before, line in (
        (".flatten(", "numbers_BTm = self.fn(self.normed(x_BTnD.flatten(-2)))"),
        (".flatten(", "numbers_BTn = self.fn(rms_normed(x_BTnD.flatten(-2), eps=self.eps))"),)),
    ("sinkhorn", "no capability is (7,)", "return not missing_compiler('cuda') and "
     "torch.cuda.get_device_capability(device) >= (7, 0)", "(7, 0)", "(7,)"),
    (HYPER, FROM_THE_FRONT, "self.mixing = parameter(torch.cat([first_n1, torch.eye(n)], -1), role='scalar')",
     "-1", "1"),
    *((MHC, LENGTHS, "scale_m = torch.cat([scale.expand(size) for scale, size in zip(self.scale, self.parts, "
       "strict=True)])", ", strict=True", text) for text in ("", ", strict=False")),
    (MHC, FACTORS, "a, b, *c = torch.addcmul(self.base, scale_m, numbers_BTm).split(self.parts, -1)",
     "scale_m, numbers_BTm", "numbers_BTm, scale_m"),
    *((GATED, FROM_THE_FRONT, line, f"{before}-2", f"{before}2") for before, line in (
        ("unbind(", "streams = [norm(x_BTD) for norm, x_BTD in zip(self.stream_norms, x_BTnD.unbind(-2), "
         "strict=True)]"),
        ("streams, ", "return torch.stack(streams, -2)"),
        (".flatten(", "numbers_BTR = self.down(h_BTnD.flatten(-2)) / len(self.stream_norms)"),
        (".shape[", "gate_BTnD = torch.sigmoid(self.up(F.silu(numbers_BTR))).unflatten(-1, h_BTnD.shape[-2:])"),
        (".mean(", "return (gate_BTnD * h_BTnD).mean(-2)"),
        (".flatten(", "b_BTn = 2 * torch.sigmoid(self.inject(h_BTnD.flatten(-2)) / len(self.stream_norms))"))),
    *((GATED, LENGTHS, "streams = [norm(x_BTD) for norm, x_BTD in zip(self.stream_norms, x_BTnD.unbind(-2), "
       "strict=True)]", ", strict=True", text) for text in ("", ", strict=False")),
    *((ATTN_RES, FROM_THE_FRONT, line, f"{before}-2", f"{before}2") for before, line in (
        ("], ", "v_BTMD = torch.cat([states_BTND, x_BTD[..., None, :]], -2)"),
        ("[", "if not states_BTND.shape[-2]:"),
        ("(self.is_new), ", f"{NO_STATE}.repeat_interleave(len(self.is_new), -2)"))),
    (ATTN_RES, "a state that is not stored has no weight", f"{NO_STATE}.repeat_interleave(len(self.is_new), -2)",
     "torch.zeros_like(x_BTD)", "x_BTD"),
    (ATTN_RES, "any number below that of the first block", "stored_in_M = torch.cat([stored_in_N, torch.tensor([-1])])",
     "-1", "-2"),
    (ONE_STREAM, INSTRUMENTATION, KEPT_ATTN.format("attn.mark_update(", ")"), "attn.mark", "mlp.mark"),
    (ONE_STREAM, INSTRUMENTATION, KEPT_MLP.format("mlp.mark_update(", ")"), "mlp.mark", "attn.mark"),
    (ONE_STREAM, "only a large theta reaches it, as in tests/placements/test_claims.py",
     "share = (F.softplus(self.theta) / self.depth).clamp(max=LARGEST_SHARE)",
     "(F.softplus(self.theta) / self.depth).clamp(max=LARGEST_SHARE)", "F.softplus(self.theta) / self.depth"),
    ("formula_rewriting", "written as text, an argument is the same in either list",
     "return ast.Call(node.func, [self._with_sum(node.args[0])], [])",
     "[self._with_sum(node.args[0])], []", "[], [self._with_sum(node.args[0])]"),
    *(("formula_rewriting", "a product that holds a sub-layer always has a branch",
       f"return (skip and ast.BinOp({skip}), branch and ast.BinOp({branch}))", f"branch and ast.BinOp({branch})",
       f"ast.BinOp({branch})")
      for skip, branch in (("skip, op, right", "branch, op, right"), ("left, op, skip", "left, op, branch"))),
    ("formula_rewriting", "a product that holds a sub-layer always has a branch",
     "return (skip and ast.UnaryOp(op, skip), branch and ast.UnaryOp(op, branch))",
     "branch and ast.UnaryOp(op, branch)", "ast.UnaryOp(op, branch)"),
    ("taper", "a count is exact in either dtype", COUNTER, "(), dtype=torch.float64", "()"),
    *(("taper", "only before the first forward pass in training, when its factor is 0",
       "ratio = torch.where(squares > 0, products / squares, 1.0)", "1.0", text) for text in ("2.0", "-1.0")),
    *(("taper", "both are None, or neither", "if gain_D is not None and self.gain is not None:", *change)
      for change in (("gain_D is not None and self", "self"), (" and self.gain is not None", ""), (" and ", " or "))),
    ("wiring", "`verify` sets it; tests/train/test_placements.py trains with it", COUNTER, "zeros", "ones"),
    ("wiring", "a count is exact in either dtype", COUNTER, "(), dtype=torch.float64", "()"),
)  # fmt: skip
"""Lines of placements by entry, with the part that a mutant replaces."""

EQUIVALENT: dict[tuple[str, str], str] = {
    **{
        (entry, f"{line}  ->  {line.replace(old, new, 1)}"): reason
        for entry, reason, line, old, new in (*UPDATES, *STREAMS)
    },
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
    **dict.fromkeys(
        (
            (f"init {rule}", "return float(weight.role not in ZERO)  ->  return weight.role not in ZERO")
            for rule in ("nanochat", "modded")
        ),
        "true is 1, and false 0",
    ),
    (
        "quarter",
        "return depth // 4  ->  return depth / 4",
    ): "a block's number is an integer, which is at most L / 4 exactly if it is at most its floor",
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
    (
        "layernorm",
        "if self.inside and self.taper is None:  ->  if False:",
    ): "the separate operations compute the same as the fused kernel, and take longer",
    ("taper", f"new = mean_over_ranks({MOMENTS})  ->  new = {MOMENTS}"): ONE_RANK,
    ("taper", f"new = mean_over_ranks({MOMENTS})  ->  new = mean_over_ranks(mean_over_ranks({MOMENTS}))"): ONE_RANK,
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
        "identity_hc",
        f"return {START}  ->  return {START.replace('self', START, 1)}",
    ): "the same field is replaced by the same value twice",
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
        ("algebra", f"if self.branch_factor == 1:  ->  if {condition}:"): "a product with 1"
        for condition in ("False", "self.branch_factor == 2", "self.branch_factor == -1")
    },
    **{("algebra", f"{PAIRS}, strict=True):  ->  {PAIRS}{end}):"): LENGTHS for end in ("", ", strict=False")},
    ("algebra", "return tuple(sites)  ->  return sites"): "its callers iterate",
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
