"""Is the norm before attention redundant in the blocks of Gemma 3 and Gemma 4?"""

from normlab.studies.base import AtLeast, AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Share, difference

MODEL = "model=llama_nano model.depth=8 model.qk_norm=head norm=rmsnorm placement=peri,peri_raw_attn"
# Two other seeds showed that the best learning rate lies between these.
GRID = f"{MODEL} train.steps=300 eval.every=100 stats=off sweep.pack=16 optim.lr=1e-2,3e-2,1e-1,3e-1,1"
FLASH = "Graef et al. 2024, arXiv:2407.09577 (FlashNorm)"


def pair(v_norm: str, eps: float) -> tuple[str, str]:
    """Return the arms without and with the norm before attention."""
    raw, peri = (
        f"placement={placement},model.v_norm={v_norm},norm.eps={eps:g}" for placement in ("peri_raw_attn", "peri")
    )
    return raw, peri


register_study(
    Study(
        name="gemma_norms",
        question="Is the norm before attention redundant in the blocks of Gemma 3 and Gemma 4?",
        background=(
            "Both models have Peri-LN with a norm on each head's queries and keys, Gemma 4 one on the values too. "
            "RMSNorm multiplies a token by a number, and linear layers without biases keep it, so that the norms on "
            "queries, keys and values undo a norm before attention, but for eps. `normlab verify` finds by algebra "
            "that it changes nothing in Gemma 4's block, and that it does in Gemma 3's. Here it is left out in "
            "training."
        ),
        limits=(
            "The source shows that the norm is redundant in a trained model; here models train without it. Depth 8, "
            "width 32, 300 steps (77 thousand tokens), five learning rates from 0.01 to 1: two other seeds showed that "
            "the best one lies between them. The queries and keys are divided by the root of the head's width as well, "
            "which in Gemma 4 they are not: a factor that the gains of their norms can undo. With the norm left out "
            "its gain is gone too. Values of the raw stream are small at the start, so that eps is not negligible "
            "there: the claim with eps 1e-12 leaves that out."
        ),
        grids=[
            # The raw stream is small at the start: an eps of 1e-12 is negligible beside it, one of 1e-5 is not.
            Grid("values", f"{GRID} model.v_norm=true norm.eps=1e-5,1e-12"),
            Grid("no_values", f"{GRID} model.v_norm=false norm.eps=1e-5"),
        ],
        claims=[
            Claim(
                "redundant",
                "With a norm on values too (Gemma 4), the loss without the norm before attention is within 0.05 "
                "nats/token of that with it.",
                difference(*pair("true", 1e-5)), Within(-0.05, 0.05), FLASH, effect=0.0,
            ),
            Claim(
                "redundant_but_for_eps",
                "With eps 1e-12 and a norm on values too, the loss without the norm before attention is within 0.05 "
                "nats/token of that with it.",
                difference(*pair("true", 1e-12)), Within(-0.05, 0.05), FLASH, effect=0.0,
            ),
            Claim(
                "needed",
                "Without a norm on values (Gemma 3), the loss without the norm before attention is 0.05 nats/token or "
                "more above that with it.",
                difference(*pair("false", 1e-5)), AtLeast(0.05), "this project",
            ),
        ],
        controls=[Claim("trains", "Peri-LN learns.", Share(pair("true", 1e-5)[1], lr="every"), AtMost(0.5))],
        pictures=[
            Picture(
                "lr",
                {"color": "placement", "panel": ["model.v_norm", "norm.eps"]},
                by=["placement", "model.v_norm", "norm.eps"],
            )
        ],
    )
)  # fmt: skip
