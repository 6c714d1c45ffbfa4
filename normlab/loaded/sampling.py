"""What a trained model does with text: its loss on texts, and its continuation of a prompt.

`device` is that of the model. Shapes: B windows, N tokens of a text, T time, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.data.tokenizers import Tokenizer, changed_characters
from normlab.model.gpt import GPT

WINDOWS = {"cpu": 16, "cuda": 4}
"""Windows of a text that are evaluated at once, by device: a GPU has less memory for their logits in float64."""
MOST_TOKENS = 1_000_000
"""Limit on the tokens of a sample: each one is a pass over the context, so that more would take hours or days."""


class LogitsNotFiniteError(ArithmeticError):
    """The logits of a model are not finite: the training of the model diverged."""


@dataclass(frozen=True, slots=True)
class TextLoss:
    """The loss of a model on some texts."""

    nats: float
    """Sum over the tokens."""
    tokens: int
    bytes: int
    """In UTF-8."""
    characters: int
    changed: int
    """Characters, at least, that the text loses or gains as the tokenizer decodes it."""

    @property
    def loss(self) -> float:
        """In nats/token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers that do not change the text; else the loss is that of another text."""
        return self.nats / math.log(2) / self.bytes

    @property
    def changed_share(self) -> float:
        """Share of the characters, at least, that the tokenizer changes, from 0 to 1."""
        return self.changed / self.characters


@torch.no_grad()
def text_loss(model: GPT, tokenizer: Tokenizer, device: torch.device, texts: Sequence[str]) -> TextLoss:
    """Return the loss of a model in evaluation mode on some texts, each a document of its own.

    A document is read in successive windows of the model's context, after the token that separates documents in
    training: every token is predicted once, from those before it in its window.

    Raises:
        ConfigError: The texts have no token.
        LogitsNotFiniteError: The model's logits are not finite.
    """
    nats, count, changed = 0.0, 0, 0
    for text in texts:
        tokens = tokenizer.encode(text)
        count += len(tokens)
        changed += changed_characters(text, tokenizer.decode(tokens))
        tokens_N = torch.as_tensor(tokens.astype("int64"))
        # A document starts with its separator in training, so its first token is predicted from this one.
        inputs_N = torch.cat([torch.tensor([tokenizer.end_of_document]), tokens_N[:-1]])[: len(tokens_N)]
        for windows_BT in _windows(inputs_N, tokens_N, model.context, WINDOWS[device.type]):
            inputs_BT, targets_BT = (tokens_BT.to(device) for tokens_BT in windows_BT)
            logits_NV = model(inputs_BT).flatten(0, 1).double()
            nats += float(torch.nn.functional.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum"))
    if count == 0:
        raise ConfigError("the text is empty; give one with at least one character")
    if not math.isfinite(nats):
        raise LogitsNotFiniteError
    return TextLoss(nats, count, sum(len(text.encode()) for text in texts), sum(map(len, texts)), changed)


def _windows(inputs_N: Tensor, targets_N: Tensor, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of a document in batches of windows, (B, T) each; the last may be shorter."""
    # Windows of one length form a batch; the last, shorter one is a batch of its own.
    complete = len(targets_N) // context * context
    for part in (slice(complete), slice(complete, None)):
        remaining = len(targets_N[part])
        if remaining == 0:
            continue
        length = min(context, remaining)
        inputs_BT, targets_BT = inputs_N[part].view(-1, length), targets_N[part].view(-1, length)
        yield from zip(inputs_BT.split(batch), targets_BT.split(batch), strict=True)


@torch.no_grad()
def continue_prompt(
    model: GPT,
    tokenizer: Tokenizer,
    device: torch.device,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation by a model.

    The model is in evaluation mode; `LoadedRun.sample` explains the numbers.

    Raises:
        ConfigError: An argument is out of range.
        LogitsNotFiniteError: The model's logits are not finite.
    """
    if not 0 <= tokens <= MOST_TOKENS:
        raise ConfigError(f"tokens={tokens}: must be at least 0 and at most {MOST_TOKENS}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature}: must be a finite number, at least 0")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed}: must be at least 0 and at most {2**63 - 1}")
    generator = torch.Generator().manual_seed(seed)
    start = [int(token) for token in tokenizer.encode(prompt)]
    context_BT = torch.tensor([[tokenizer.end_of_document, *start]])
    for _ in range(tokens):
        logits_BTV = model(context_BT[:, -model.context :].to(device))
        # The generator is the CPU's on every device, so that a seed draws the same numbers on each.
        logits_V = logits_BTV[0, -1].cpu().double()
        if not logits_V.isfinite().all():
            raise LogitsNotFiniteError
        if temperature == 0:
            token = logits_V.argmax()
        else:
            # The largest logit becomes 0, so that a small temperature cannot overflow.
            weights_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)
            token = torch.multinomial(weights_V, 1, generator=generator)[0]
        context_BT = torch.cat([context_BT, token.view(1, 1)], dim=1)
    # Some tokenizers mark the starts of words and drop a blank when they decode from the middle of a text.
    text, decoded_prompt = tokenizer.decode(context_BT[0, 1:].tolist()), tokenizer.decode(start)
    if text.startswith(decoded_prompt):
        return prompt + text[len(decoded_prompt) :]
    return prompt + tokenizer.decode(context_BT[0, 1 + len(start) :].tolist())
