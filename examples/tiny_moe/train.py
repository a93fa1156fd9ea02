"""Train the tiny MoE from a seed: `python -m examples.tiny_moe.train --seed 0 --steps 1200 --out weights.safetensors`.

All schedules are in steps, so the same seed, steps and threads on the same machine give the same tensors and the same digest
(the file itself may differ in the order of the two entries of its header). On another machine the text differs (other package
versions), and so do the weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.tiny_moe.config import TinyMoeConfig, TinyMoeError
from examples.tiny_moe.muon import Muon
from examples.tiny_moe.text import KINDS, corpus, held_out
from examples.tiny_moe.trainable import TrainableTinyMoe
from examples.tiny_moe.weights import SHIPPED_WEIGHTS, write_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train; every duration is in steps or a share of them."""

    steps: int = 1200
    seed: int = 0
    sequences_per_kind: int = 4
    length: int = 256
    corpus_bytes_max: int = 8_000_000
    warm_up_steps: int = 40
    decay_from: float = 0.6
    muon_lr: float = 0.01
    adam_lr: float = 0.003
    bias_step: float = 0.02
    bias_until: float = 0.4
    bias_gone_at: float = 0.6
    starving_below: float = 0.1
    gradient_norm_max: float = 1.0
    report_every: int = 100


def lr_factor(recipe: Recipe, step: int) -> float:
    """Learning rate relative to its peak: linear warm-up, flat, then linearly down to a twentieth."""
    if step < recipe.warm_up_steps:
        return (step + 1) / recipe.warm_up_steps
    start = recipe.decay_from * recipe.steps
    if step < start:
        return 1.0
    return max(0.05, 1.0 - 0.95 * (step - start) / max(1.0, recipe.steps - start))


def update_biases(recipe: Recipe, step: int, *, selection: Tensor, router: Tensor, load: Tensor) -> None:
    """The only balancing there is: enough that no expert dies, in place.

    Until `bias_until` of the steps a selection bias evens out how often experts are chosen, so that all of them learn
    something. By `bias_gone_at` it has moved, bit by bit, into the router's own bias: it steers the choice as before, but now
    it counts in the gates and gradients may change it, and popular experts become as popular as the text wants. (In a run that
    let it fade to nothing instead, 5 of the 32 experts of the first layer ended without a token.) From `bias_until` on an
    expert that starves is helped. No loss term pulls towards balance.

    Args:
        recipe: The recipe.
        step: The step just done, from 0.
        selection: Shape (E,), float32, added to logits when experts are chosen.
        router: Shape (E,), float32, part of the logits.
        load: Shape (E,), assignments of the batch just done.
    """
    start, stop = recipe.bias_until * recipe.steps, recipe.bias_gone_at * recipe.steps
    if step < start:
        selection.add_(torch.sign(load.mean() - load), alpha=recipe.bias_step)
        return
    moved = selection / max(1.0, stop - step)
    selection.sub_(moved)
    router.add_(moved)
    router.add_((load < recipe.starving_below * load.mean()).float(), alpha=recipe.bias_step)


def train(config: TinyMoeConfig, recipe: Recipe, texts: dict[str, bytes], report: Callable[[str], None]) -> TrainableTinyMoe:
    """Train a model on one batch a step, with equally many sequences of each kind.

    Raises:
        TinyMoeError: fewer than 1 step, or a text is shorter than one sequence.
    """
    if recipe.steps < 1:
        raise TinyMoeError(f"asked for {recipe.steps} steps; train for at least 1")
    for kind, text in texts.items():
        if len(text) <= recipe.length:
            raise TinyMoeError(f"only {len(text)} bytes of {kind}, a sequence needs {recipe.length + 1}")
    model = TrainableTinyMoe(config, seed=recipe.seed)
    muon = Muon(model.matrices())
    adam = torch.optim.AdamW(model.others(), lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    arrays = [np.frombuffer(text, np.uint8) for text in texts.values()]
    choose = np.random.Generator(np.random.Philox(recipe.seed))
    since, losses = time.monotonic(), []
    for step in range(recipe.steps):
        loss = model.loss(_batch(recipe, arrays, choose))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm_max)
        factor = lr_factor(recipe, step)
        muon.step(recipe.muon_lr * factor)
        for group in adam.param_groups:
            group["lr"] = recipe.adam_lr * factor
        adam.step()
        adam.zero_grad()
        for layer in model.typed_layers():
            update_biases(recipe, step, selection=layer.selection_bias, router=layer.router_bias.data, load=layer.load)
        losses.append(float(loss.detach()))
        if (step + 1) % recipe.report_every == 0 or step + 1 == recipe.steps:
            recent = losses[-recipe.report_every :]
            hottest = [float(layer.load.max() / layer.load.mean()) for layer in model.typed_layers()]
            report(
                f"step {step + 1:5d}  loss {sum(recent) / len(recent):.4f} nats/byte  hottest/mean of the batch "
                f"{' '.join(f'{value:.2f}' for value in hottest)}  {time.monotonic() - since:.0f} s"
            )
    return model


def _batch(recipe: Recipe, arrays: list[np.ndarray[tuple[int], np.dtype[np.uint8]]], choose: np.random.Generator) -> Tensor:
    """Random windows, the same number of each kind. Shape (sequences, length + 1), int64."""
    rows = []
    for array in arrays:
        starts = choose.integers(0, len(array) - recipe.length, recipe.sequences_per_kind)
        rows += [array[start : start + recipe.length + 1] for start in starts]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@torch.no_grad()
def held_out_loss(model: TrainableTinyMoe, kind: str, *, sequences: int = 64) -> float:
    """Loss in nats per byte on held-out text of a kind."""
    length = model.config.context
    text = np.frombuffer(held_out(kind, max_bytes=2_000_000), np.uint8)
    starts = np.linspace(0, len(text) - length - 1, sequences).astype(np.int64)
    tokens = torch.from_numpy(np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64))
    return float(model.loss(tokens))


@torch.no_grad()
def quantise_in_place(model: TrainableTinyMoe) -> None:
    """Give the experts the values that the shipped int8 weights stand for, to measure what quantisation costs."""
    for layer, shipped in zip(model.typed_layers(), model.to_weights().layers, strict=True):
        for name in ("up", "down"):
            getattr(layer, name).copy_(shipped[name].float() * shipped[f"{name}_scale"][..., None])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, quantise, measure the loss before and after, and write the weights."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m examples.tiny_moe.train")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="all schedules stretch with it")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; another number rounds differently")
    parser.add_argument("--out", type=Path, default=SHIPPED_WEIGHTS, help="weights file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = Recipe(seed=options.seed, steps=options.steps)
    config = TinyMoeConfig()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        texts = {kind: corpus(kind, max_bytes=recipe.corpus_bytes_max) for kind in KINDS}
        say("training on " + ", ".join(f"{len(text) / 1e6:.1f} MB of {kind}" for kind, text in texts.items()))
        model = train(config, recipe, texts, say)
        before = {kind: held_out_loss(model, kind) for kind in KINDS}
        quantise_in_place(model)
        for kind in KINDS:
            say(f"held-out loss on {kind:<8} {before[kind]:.4f} nats/byte, as int8 {held_out_loss(model, kind):.4f}")
        write_weights(options.out, config, model.to_weights())
    except TinyMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    say(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
