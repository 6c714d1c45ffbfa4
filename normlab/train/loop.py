"""The loop of one run, or of a pack: batches to the step, what it saw to the record, and a checkpoint now and then.

At each boundary between two steps things happen in one order: the record is brought up to date, then the
evaluation that is due, then the checkpoint that is due, then a request to stop is looked at. A checkpoint
therefore knows exactly how long the record was, and going on from it repeats nothing.

The runs of a pack are one stacked computation and take every step together; each has its own record. One that
diverges is frozen where it stands, and stays in the stack, so that the others' numbers are what they would have been.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normlab.config import RunConfig
from normlab.data.batches import Batches, StackedBatches, validation_windows
from normlab.data.corpus import Corpus
from normlab.model.init import build_model, derive_seed
from normlab.placements.base import projects
from normlab.stats.profiles import Profiles
from normlab.stats.statistic import CORE
from normlab.store.runs import RunFolder
from normlab.store.schema import DIVERGED
from normlab.train import checkpoint
from normlab.train.bound import Alone, Bound, Pack
from normlab.train.evaluate import Validation
from normlab.train.looks import Looks
from normlab.train.member import Member
from normlab.train.optim import Hyper, branch_step, build_optimizer, hyper_of, is_decayed
from normlab.train.resolve import Resolved
from normlab.train.signals import StopRequest
from normlab.train.step import Step, StepOutput


@dataclass(slots=True)
class Loop:
    """Runs that train together, from where they stand to their end: one alone, or those of a pack."""

    members: Sequence[Member]
    resolved: Resolved
    corpus: Corpus

    at: int = field(default=0, init=False)
    """Updates made, by those that have not diverged."""
    bound: Bound = field(init=False)
    step: Step = field(init=False)
    batches: Batches | StackedBatches = field(init=False)
    validation: Validation = field(init=False)
    looks: Looks = field(init=False)
    _pending: list[StepOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Build the models, their optimiser and their data."""
        config, device = self.config, self.resolved.torch_device
        micro = config.train.batch_size // config.train.accumulation
        # The data first: a corpus that is too short is refused before anything large is made.
        of_seeds = {
            seed: Batches(self.corpus.train, config.model.context, config.train.batch_size, seed, device)
            for seed in dict.fromkeys(member.config.data_seed for member in self.members)
        }
        batches = [of_seeds[member.config.data_seed] for member in self.members]
        self.batches = batches[0] if self.is_alone else StackedBatches(batches)
        tokens, targets = validation_windows(self.corpus.val, config.model.context, config.eval.sequences)
        self.validation = Validation(
            tokens_NT=tokens.to(device),
            targets_NT=targets.to(device),
            batch_size=micro,
            autocast=self.resolved.autocast(),
            batch_statistics=config.norm.batch_statistics,
        )
        vocab_size, compiled = self.corpus.tokenizer.vocab_size, self.resolved.compile == "on"
        models = [build_model(member.config, vocab_size).to(device) for member in self.members]
        self.bound = Alone(models[0], compiled=compiled) if self.is_alone else Pack(models, compiled=compiled)
        # Of the model's own: a pack's have an axis more.
        decayed = [name for name, p in self.bound.model.named_parameters() if is_decayed(config.optim, p)]
        optimizer = build_optimizer(config.optim, self.bound.params, decayed)
        self.looks = Looks(config, self.bound, optimizer, self.validation, self.members[0].tell)
        self.step = Step(
            self.bound,
            optimizer,
            accumulation=config.train.accumulation,
            clip=self._clip(),
            autocast=self.resolved.autocast(),
            project=config.placement.project if projects(config.placement) else None,
            measure=self.looks.measure,
        )

    @property
    def config(self) -> RunConfig:
        """What the runs have in common is the same in each; this is the first one's."""
        return self.members[0].config

    @property
    def is_alone(self) -> bool:
        """Whether it is one run, which has no axis of runs."""
        return len(self.members) == 1

    def _clip(self) -> float | Tensor | None:
        limits = [member.config.optim.clip for member in self.members]
        if self.is_alone or limits[0] is None:
            return limits[0]
        return torch.tensor(limits, dtype=torch.float32, device=self.resolved.torch_device)

    def _hyper(self, step: int) -> Hyper | list[Hyper]:
        hypers = [hyper_of(member.config.optim, self.config.train.steps, step) for member in self.members]
        return hypers[0] if self.is_alone else hypers

    # The state, whole.

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The state of one run as a flat dictionary: what its checkpoint holds. In a pack, views of the stacks."""
        optimizer = self.step.optimizer
        state = {f"param/{name}": tensor for name, tensor in self.bound.params.items()}
        state |= {f"buffer/{name}": tensor for name, tensor in self.bound.buffers.items()}
        for kind, moments in optimizer.moments.items():
            state |= {f"{kind}/{name}": tensor for name, tensor in moments.items()}
        assert self.step.alive is not None
        state["alive"] = self.step.alive
        if self.is_alone:
            return state | {"count": optimizer.count}
        # One that is frozen has made fewer updates than the stack.
        made = torch.full_like(optimizer.count, self.members[index].progress.step)
        return {name: tensor[index] for name, tensor in state.items()} | {"count": made}

    @torch.no_grad()
    def restore(self, saved: Sequence[checkpoint.Checkpoint]) -> None:
        """Take each run's state and progress from a checkpoint of it: all of one step, but for those that diverged.

        Raises:
            StoreError: It is another run's.
        """
        for index, (member, own) in enumerate(zip(self.members, saved, strict=True)):
            member.take(own, self.tensors(index))
        going_on = [member.progress.step for member in self.members if member.diverged is None]
        self.at = max(going_on, default=self.members[0].progress.step)
        if not self.is_alone:
            self.step.optimizer.count.fill_(self.at)

    def save(self) -> None:
        """Write a checkpoint of each run that has not ended before, as it stands."""
        for index, member in enumerate(self.members):
            if member.saved_step != member.progress.step:
                member.save(self.tensors(index))

    # The loop.

    def run(self, stop: StopRequest) -> str:
        """Train to the last step, a stop request, or until every run has diverged; say which.

        Returns:
            finished, diverged (all have) or interrupted; of a run that has diverged, `Member.diverged` tells.
        """
        steps = self.config.train.steps
        if not self._going_on():  # killed between that checkpoint and the status
            return "diverged"
        if any(member.progress.val_loss is None for member in self._going_on()):
            self._evaluate()
        self._write_status()
        since = time.perf_counter()
        while self.at < steps and stop.received is None:
            since += self.looks.before(self.at)
            self._pending.append(self.one_step(self.at))
            self.at += 1
            due_eval, due_checkpoint = self._due(self.at)
            if not (due_eval or due_checkpoint or stop.received or len(self._pending) == self.config.train.log_every):
                continue
            going_on = self._going_on()
            self._drain(time.perf_counter() - since)
            if len(self._going_on()) < len(going_on):
                self.save()  # all of them: from where one was frozen the others can go on
                if not self._going_on():
                    return "diverged"
                self._write_status()
            if due_eval:
                self._evaluate()
            if self.at == steps:
                self.looks.at_end(steps)
            if due_checkpoint:
                self.save()
            if due_eval or due_checkpoint:
                self._write_status()
            since = time.perf_counter()
        self.save()
        return "finished" if self.at == steps else "interrupted"

    def _going_on(self) -> list[Member]:
        return [member for member in self.members if member.diverged is None]

    def one_step(self, step: int) -> StepOutput:
        """Take the step after `step` updates; what it saw is still on the device."""
        # A norm that draws numbers in its forward draws the same ones after a resume.
        torch.manual_seed(derive_seed(self.config.seed, f"step/{step}") % 2**63)
        tokens, targets = self.batches.batch(step)
        return self.step(tokens, targets, self._hyper(step), measured=self.looks.is_measured(step))

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether an evaluation and a checkpoint are due after `step` updates."""
        config, last = self.config, step == self.config.train.steps
        evaluation = last or (config.eval.every > 0 and step % config.eval.every == 0)
        every = config.train.checkpoint_every
        return evaluation, last or step in self._branches() or (every > 0 and step % every == 0)

    def _branches(self) -> set[int | None]:
        return {branch_step(member.config.optim, self.config.train.steps) for member in self.members}

    def _drain(self, seconds: float) -> None:
        """Bring the numbers of the pending steps from the device, in one copy, into the record."""
        first, runs = self.at - len(self._pending), len(self.members)
        told = [
            torch.stack([out.loss, out.grad_norm, out.clip, out.alive.to(out.loss.dtype)]).flatten()
            for out in self._pending
        ]
        measured = {step: out.measured for step, out in enumerate(self._pending, first) if out.measured is not None}
        seen = torch.cat([*told, *(one.values.flatten() for one in measured.values())]).cpu()
        scalars_SKR = seen[: 4 * runs * len(told)].view(-1, 4, runs)
        inside = seen[scalars_SKR.numel() :].numpy().reshape(-1, runs)
        tokens = len(self._pending) * self.config.train.batch_size * self.config.model.context
        for index, member in enumerate(self.members):
            if member.diverged is not None:
                continue
            rows = member.drain(first, scalars_SKR[..., index].tolist())
            member.progress.seconds += seconds
            pace = {"kind": "pace", "step": member.progress.step, "seconds": member.progress.seconds}
            member.record([*rows, {**pace, "tokens_per_s": tokens / max(seconds, 1e-9)}])
            for look in self._looks(member, measured, inside[:, index]):
                member.tell(CORE, look)
        self._pending.clear()

    def _looks(self, member: Member, measured: Mapping[int, Any], values: Any) -> Iterator[Profiles]:
        """What was seen inside the steps of a run, up to where it diverged."""
        for step, one in measured.items():
            if member.diverged is None or step <= member.diverged["step"]:
                yield self.looks.profiles(step, one, values[: len(one.columns)])
            values = values[len(one.columns) :]

    def _evaluate(self) -> None:
        losses = self.validation(self.bound)
        for index, member in enumerate(self.members):
            if member.diverged is None:
                member.evaluated({name: of_runs[index] for name, of_runs in losses.items()})

    def _write_status(self) -> None:
        for member in self.members:
            member.settled = member.diverged is not None
            member.folder.write_status(self.status(member, "running"))

    def status(self, member: Member, state: str) -> dict[str, Any]:
        """The content of a run's status.json; one whose status has said that it diverged stays so."""
        return member.status(DIVERGED if member.settled else state, peak_memory(self.resolved.device))


def peak_memory(device: str) -> int | None:
    """Most bytes that torch held on a GPU; on a CPU, the process's largest resident size."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return None
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def copied_rows(folder: RunFolder) -> Sequence[Mapping[str, Any]]:
    """The rows that are in a record before its loop begins."""
    return folder.rows().rows
