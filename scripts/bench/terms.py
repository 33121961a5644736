"""What methods do in each step, as plain torch in the floor's loop on W1.

The equations are those of the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from floor import Extra, Loss, Train, trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from workloads import CLASSES, COHORT, LR, WORKLOADS, Data, TwoNN

from fedhet.core.optimizers import clip_norm
from fedhet.maths import fedpcl
from fedhet.methods import fedala
from fedhet.methods.fedgen.generator import Generator
from fedhet.methods.fedntd import not_true_distillation
from fedhet.methods.fedprox import add_proximal
from fedhet.methods.fedrod import balanced_softmax
from fedhet.methods.moon import contrastive

W1 = WORKLOADS["W1"]
WIDTH = 200  # of the 2NN's features
BODY = slice(4)  # of the 2NN's tensors
HEAD = slice(4, None)


def generator() -> Generator:
    """FedGen's generator with its default widths."""
    return Generator(512, CLASSES, 512, WIDTH)


def gradients(x: list[Tensor]) -> dict[str, Extra]:
    """What changes the gradient.

    The operands are separate tensors, so that they push the model out of the caches.
    """
    d = [t.clone() for t in x]
    weights = torch.ones(600)
    losses = torch.ones(W1.batch)
    index = torch.arange(W1.batch)

    def momentum(params: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_mul_(d, 0.9)
        torch._foreach_add_(d, grads)

    return {
        "sgdm": momentum,
        "fedprox": lambda params, grads: add_proximal(grads, params, x, 0.01),
        "fedlex": lambda params, grads: torch._foreach_mul_(grads, d),
        "scaffold": lambda params, grads: torch._foreach_add_(grads, d),
        "feddisk": lambda params, grads: losses * weights[index],
    }


def objectives() -> dict[str, Loss]:
    """Losses that replace the cross entropy."""
    received = TwoNN()
    previous = TwoNN()
    network = generator().eval().requires_grad_(False)
    law = torch.ones(CLASSES)
    personal = nn.Linear(WIDTH, CLASSES)
    own: list[Tensor] = list(personal.parameters())

    def moon(model: TwoNN, x: Tensor, y: Tensor) -> Tensor:
        z = model.features(x)
        with torch.no_grad():
            others = received.features(x), previous.features(x)
        return cross_entropy(model.head(z), y) + contrastive(z, *others, 0.5).mean()

    def fedntd(model: TwoNN, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        with torch.no_grad():
            teacher = received(x)
        return cross_entropy(logits, y) + not_true_distillation(logits, teacher, y, 1.0).mean()

    def fedrod(model: TwoNN, x: Tensor, y: Tensor) -> Tensor:
        z = model.features(x)
        logits = model.head(z)
        grads = torch.autograd.grad(cross_entropy(logits.detach() + personal(z.detach()), y), own)
        with torch.no_grad():
            torch._foreach_add_(own, grads, alpha=-LR)
        return balanced_softmax(logits, y, law, 1.0).mean()

    def fedgen(model: TwoNN, x: Tensor, y: Tensor) -> Tensor:
        drawn = torch.multinomial(law, len(y), replacement=True)
        z = network(torch.randn(len(y), network.noise_dim), drawn)
        return cross_entropy(model(x), y) + cross_entropy(model.head(z), drawn)

    return {"moon": moon, "fedntd": fedntd, "fedrod": fedrod, "fedgen": fedgen}


def _fedpcl(samples: Data) -> Train:
    """FedPCL's local steps, which train the body only."""
    prototypes = normalize(torch.randn(COHORT + 1, CLASSES, WIDTH), dim=-1)
    known = torch.ones(CLASSES, dtype=torch.bool)

    def loss(body: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = normalize(body(x))
        return fedpcl.losses(z, y, prototypes[0], prototypes[1:], known, 0.07, "all").mean()

    def clip(params: list[Tensor], grads: list[Tensor]) -> None:
        clip_norm(grads, 10.0)

    return trainer(replace(W1, model=lambda: TwoNN().body), samples, clip, loss)


def _fedala(samples: Data, received: list[Tensor]) -> Train:
    """FedALA's learning of the mixing weights of the head, on 80 % of the samples."""
    body = TwoNN().body
    local = [t.clone() for t in received]
    weights = [torch.ones_like(t) for t in local]

    def loss(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = body(x)
        return cross_entropy(head(z), y)

    def mix(params: list[Tensor], grads: list[Tensor]) -> None:
        weights[:] = fedala.step(weights, grads, local, received, 1.0)
        torch._foreach_copy_(params, fedala.start(local, received, weights))

    drawn = [(x[: len(y) * 8 // 10], y[: len(y) * 8 // 10]) for x, y in samples]
    return trainer(replace(W1, model=lambda: TwoNN().head), drawn, mix, loss)


def loops(samples: Data) -> dict[str, Callable[[int], object]]:
    """Method -> a function that does a client's local steps.

    "floor" adds nothing; "fedala" is what precedes the local steps.
    """
    x = [p.detach().clone() for p in TwoNN().parameters()]
    total = [p.detach().clone() for p in TwoNN().parameters()]
    every = slice(None)
    trainers: dict[str, tuple[slice, Train]] = {
        "fedpcl": (BODY, _fedpcl(samples)),
        "fedala": (HEAD, _fedala(samples, x[HEAD])),
        "floor": (every, trainer(W1, samples)),
    }
    for name, extra in gradients(x).items():
        trainers[name] = every, trainer(W1, samples, extra)
    for name, loss in objectives().items():
        trainers[name] = every, trainer(W1, samples, loss=loss)

    def local_steps(part: slice, train: Train) -> Callable[[int], object]:
        return lambda k: train(x[part], [k], total[part], 0.1)

    return {name: local_steps(part, train) for name, (part, train) in trainers.items()}
