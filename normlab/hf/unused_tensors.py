"""Tensors in a folder that the model of its config.json does not take.

Such a tensor is ignored if the model computes with the same values, and refused by name if not: the file then belongs
to a different model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.config.schema import RunConfig
from normlab.hf.classes import StoredTensor
from normlab.hf.weight_files import StoredTensors

HEAD = "lm_head.weight"
MASK = re.compile(r".*\.attn\.bias")
"""In files of older versions: which positions each one sees, (1, 1, T, T)."""
MASKED_SCORE = re.compile(r".*\.attn\.masked_bias")
"""In files of older versions: the score of the others, whose exponential is 0."""
ROTATION = re.compile(r".*\.rotary_emb\.inv_freq")
"""In files of older versions: the angles of the rotation for each position, (K / 2,), K the width of a head."""
DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "BOOL": torch.bool, "U8": torch.uint8,
}  # fmt: skip
CHOOSE = "choose another model"
NO_BIAS = "no bias"


@dataclass(frozen=True, slots=True)
class Substitute:
    """What a model computes with in place of a tensor that it does not take."""

    values: Tensor
    text: str
    """What the values are."""
    remedy: str = CHOOSE
    is_computed: bool = False
    """Whether the file has these values rounded, to its dtype and by other formulas."""
    source: str = ""
    """The tensor of the file that has the values; empty if the model computes them."""

    def is_equal(self, stored: Tensor) -> bool:
        if not self.is_computed or not stored.is_floating_point():
            return torch.equal(stored.float(), self.values)
        precision = torch.finfo(stored.dtype)
        smallest = precision.smallest_normal * precision.eps
        return torch.allclose(stored.float(), self.values, rtol=precision.eps + 1e-5, atol=smallest)


def problem_of_unused(
    name: str, tensors: StoredTensors, expected: Mapping[str, StoredTensor], config: RunConfig
) -> str:
    """Return why a folder with this tensor is refused, and what to do; empty if the model computes the same without it.

    Args:
        name: A name in `tensors` that is not in `expected`, the tensors of the model.
    """
    substitute = _substitute(name, tensors, expected, config)
    if substitute is None:
        return f"its tensor {name} is not one of the model in config.json; {CHOOSE}"
    shape, dtype = [*substitute.values.shape], tensors.dtype(name)
    if tensors.shape(name) != shape or dtype not in DTYPES:
        stored = f"{dtype} {tensors.shape(name)}"
        expected_tensor = f"{substitute.text} {shape}"
        return f"its tensor {name} is {stored}, and the model in config.json has {expected_tensor}; {substitute.remedy}"
    stored = tensors[name]
    # NaN equals nothing, not even itself: it may be in both tensors.
    for tensor, values in ((name, stored), (substitute.source, substitute.values)):
        if values.isnan().any():
            return f"its tensor {tensor} has NaN (not a number); {CHOOSE}"
    if substitute.is_equal(stored):
        return ""
    if substitute.text == NO_BIAS:
        largest = float(stored.float().abs().max())
        return (
            f"its tensor {name}: config.json describes a model without this bias, so it must be 0; it is up to "
            f"{largest:.3g}; {substitute.remedy}"
        )
    largest = float((stored.float() - substitute.values).abs().max())
    return (
        f"its tensor {name} differs by up to {largest:.3g} from what the model in config.json has, {substitute.text}; "
        f"{substitute.remedy}"
    )


def _substitute(
    name: str, tensors: StoredTensors, expected: Mapping[str, StoredTensor], config: RunConfig
) -> Substitute | None:
    """Return what the model computes with in place of a tensor; None if it has nothing in its place."""
    model = config.model
    if name == HEAD:
        # The model has tied embeddings: otherwise the head would be one of the expected tensors.
        (embedding,) = (name for name in expected if expected[name].parameters == ("embed.tokens.weight",))
        remedy = f"set tie_word_embeddings=false in config.json, or delete {HEAD} if it is a leftover"
        text = f"{embedding} (tie_word_embeddings=true)"
        return Substitute(tensors[embedding].float(), text, remedy, source=embedding)
    if MASK.fullmatch(name):
        return Substitute(torch.ones(1, 1, model.context, model.context).tril(), "the causal mask")
    if MASKED_SCORE.fullmatch(name):
        return Substitute(torch.tensor(-1e4), "-1e4", is_computed=True)
    if ROTATION.fullmatch(name) and model.rope_theta is not None:
        width = model.width // model.heads
        angles = model.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        return Substitute(angles.float(), f"rope_theta={model.rope_theta:g}", is_computed=True)
    weight = expected.get(f"{name.removesuffix('bias')}weight")
    if name.endswith(".bias") and weight is not None:
        return Substitute(torch.zeros(weight.shape[:1]), NO_BIAS)
    return None
