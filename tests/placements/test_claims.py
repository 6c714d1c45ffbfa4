"""The parameter counts and equalities that a placement declares in the catalogue hold in models."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from normlab.catalogue import entries as catalogue
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.placements.base import PLACEMENTS, load_all
from normlab.catalogue.placements.one_stream import NormPreservingWiring
from normlab.catalogue.placements.wiring import Branch
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from support.reference_blocks import DEPTH, VOCAB, WIDTH, composed, config_of

load_all()
OURS = {entry["name"]: entry for entry in catalogue.placements()}


@pytest.mark.parametrize("name", OURS)
def test_number_of_parameters_equals_the_declared_one(name: str) -> None:
    placement = PLACEMENTS[name]
    model = build_model(config_of(placement), VOCAB)
    counted_apart = (nn.Linear, nn.Embedding, type(config_of(placement).norm.build(WIDTH)))
    elsewhere = {id(p) for module in model.modules() if isinstance(module, counted_apart) for p in module.parameters()}
    elsewhere.add(id(model.head.weight))
    count = sum(p.numel() for p in model.parameters() if id(p) not in elsewhere)
    sizes = model_sizes(config_of(placement))
    assert count == eval(OURS[name]["parameters"], {"__builtins__": {}}, sizes)  # noqa: S307  (an expression from the package)


def model_sizes(config: RunConfig) -> dict[str, int]:
    model = config.model
    assert model.mlp == "swiglu"
    assert model.mlp_width is not None
    return {"L": model.depth, "D": model.width, "H": model.heads, "M": model.mlp_width, "V": VOCAB}


Values = Mapping[str, float]
"""Values of learned factors, by the ends of their names."""


def is_one_of(name: str, values: Values) -> bool:
    return name.endswith(tuple(values))


def assert_equal(ours: RunConfig, theirs: RunConfig, values: Values | None = None) -> None:
    """Assert that logits are equal if weights are copied from `theirs` and factors set to `values`, and only then."""
    values = values or {}
    mine, other = build_random_model(ours), build_random_model(theirs)
    with torch.no_grad():
        shared_parameters = {name: p for name, p in mine.named_parameters() if not is_one_of(name, values)}
        for p, q in zip(shared_parameters.values(), other.parameters(), strict=True):
            assert p.shape == q.shape
            p.copy_(q)
        for name, p in mine.named_parameters():
            for end, value in values.items():
                if name.endswith(end):
                    p.fill_(value)
        tokens = torch.arange(5)[None]
        torch.testing.assert_close(mine(tokens), other(tokens), rtol=1e-12, atol=1e-12)
        for name, p in mine.named_parameters():
            if is_one_of(name, values):
                p.add_(0.5)
        if values:
            assert (mine(tokens) - other(tokens)).abs().max() > 1e-3


def build_random_model(config: RunConfig) -> GPT:
    """Return a model in float64 with random parameters."""
    model = build_model(config, VOCAB).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise / math.sqrt(p.shape[-1])) if p.dim() == 2 else p.add_(0.3 * noise)
    return model


def config_with(name: str, depth: int = DEPTH, norm: str = "layernorm", **options: object) -> RunConfig:
    config = dataclasses.replace(composed(), placement=dataclasses.replace(PLACEMENTS[name], **options))
    kind = NORMS[norm]
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, depth=depth),
        norm=kind(),  # pyright: ignore[reportCallIssue]
    )


def parallel_equals() -> None:
    one, two = (build_random_model(config_with(name)) for name in ("parallel", "parallel_two_norms"))
    matrices = {name: p for name, p in one.state_dict().items() if ".wiring." not in name}
    state = two.state_dict() | matrices
    for name, p in one.state_dict().items():
        if ".wiring.norm." in name:
            for site in ("attn_norm", "mlp_norm"):
                state[name.replace(".wiring.norm.", f".wiring.{site}.")] = p
    two.load_state_dict(state)
    tokens = torch.arange(5)[None]
    torch.testing.assert_close(one(tokens), two(tokens), rtol=1e-12, atol=1e-12)


def mix_ln_equals() -> None:
    assert_equal(config_with("mix_ln", 3), config_with("pre", 3))
    assert_equal(config_with("mix_ln", 5, early_blocks=0), config_with("pre", 5))
    assert_equal(config_with("mix_ln", 5, early_blocks=5), config_with("post", 5, final_norm=True))


def rezero_equals() -> None:
    rezero, skipinit = config_with("rezero", norm="none"), config_with("skipinit", norm="none")
    one, two = build_random_model(rezero), build_random_model(skipinit)
    state = two.state_dict()
    for name, p in one.state_dict().items():
        state[name] = p  # the state has the shared factor of rezero under both of its names
    two.load_state_dict(state)
    tokens = torch.arange(5)[None]
    torch.testing.assert_close(one(tokens), two(tokens), rtol=1e-12, atol=1e-12)


def peri_raw_attn_equals() -> None:
    """Equal with norms on each head's queries, keys and values, while gains are 1; not without that on values."""

    def logits(name: str, *, v_norm: bool) -> torch.Tensor:
        config = config_with(name, norm="rmsnorm")
        model = dataclasses.replace(config.model, bias=False, qk_norm="head", v_norm=v_norm)
        norm = dataclasses.replace(config.norm, eps=1e-24)  # pyright: ignore[reportCallIssue]
        return build_model(dataclasses.replace(config, model=model, norm=norm), VOCAB).double()(torch.arange(5)[None])

    with torch.no_grad():
        raw, peri = (logits(name, v_norm=True) for name in ("peri_raw_attn", "peri"))
        torch.testing.assert_close(raw, peri, rtol=1e-9, atol=1e-14)
        raw, peri = (logits(name, v_norm=False) for name in ("peri_raw_attn", "peri"))
        assert (raw - peri).abs().max() > 1e-3


PROOFS: dict[str, Callable[[], None]] = {
    "peri": lambda: assert_equal(config_with("peri"), config_with("sandwich")),
    "sandwich": lambda: assert_equal(config_with("sandwich"), config_with("peri")),
    "peri_raw_attn": peri_raw_attn_equals,
    "depth_scaled_sandwich": lambda: assert_equal(config_with("depth_scaled_sandwich"), config_with("peri")),
    "mix_ln": mix_ln_equals,
    "lns": lambda: assert_equal(config_with("lns", 1), config_with("pre", 1)),
    "skipinit": lambda: assert_equal(
        config_with("skipinit", norm="none"), config_with("pre", norm="none"), {".scale": 1.0}
    ),
    "rezero": rezero_equals,
    "layerscale": lambda: assert_equal(config_with("layerscale"), config_with("pre"), {".scale": 1.0}),
    "hybridnorm_star": lambda: assert_equal(config_with("hybridnorm_star", early_blocks=0), config_with("hybridnorm")),
    "parallel": parallel_equals,
    "parallel_two_norms": parallel_equals,
    "gpas": lambda: assert_equal(config_with("gpas"), config_with("pre"), {".gate": 0.0}),
    "x0_lambdas": lambda: assert_equal(
        config_with("x0_lambdas"), config_with("pre", embedding_norm=True), {"wiring.r": 1.0, "wiring.z": 0.0}
    ),
}


@pytest.mark.parametrize("name", [name for name, entry in OURS.items() if entry["equals"]])
def test_placement_equals_the_declared_placements(name: str) -> None:
    assert any(other in OURS[name]["equals"] for other in OURS if other != name)
    PROOFS[name]()


def test_every_proof_belongs_to_a_declaration() -> None:
    assert set(PROOFS) == {name for name, entry in OURS.items() if entry["equals"]}


@pytest.mark.parametrize(("ours", "theirs"), [("lns", "pre"), ("mix_ln", "pre")])
def test_the_proof_can_fail(ours: str, theirs: str) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(config_with(ours), config_with(theirs))


def test_pitfalls_are_sentences() -> None:
    pitfalls = [sentence for entry in OURS.values() for sentence in entry["pitfalls"]]
    assert len(pitfalls) > 20
    assert all(sentence.endswith(".") and sentence == sentence.strip() for sentence in pitfalls)


@pytest.mark.parametrize("theta", [-3.0, 0.0, 1e3])
def test_norm_preserving_keeps_the_size_of_the_stream(theta: float) -> None:
    """The sub-layers turn pairs of channels by a right angle: what they add is as large as x and orthogonal to it."""
    wiring = NormPreservingWiring(2, 8, lambda width, site: nn.Identity()).double()
    x_TD = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        wiring.theta.fill_(theta)
    turn = Branch(lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2))
    out_TD = wiring(x_TD, turn, turn)
    torch.testing.assert_close(out_TD.norm(dim=-1), x_TD.norm(dim=-1), rtol=1e-12, atol=0)
    assert not torch.allclose(out_TD, x_TD, rtol=0.1)
    out_TD.sum().backward()
    assert wiring.theta.grad is not None
    assert wiring.theta.grad.isfinite()
