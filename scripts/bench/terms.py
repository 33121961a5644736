"""What methods do in each step, as plain torch in the floor's loop on W1. The equations are
fedhet.maths'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from floor import Extra, Loss, trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from workloads import CLASSES, COHORT, LR, WORKLOADS, Data, TwoNN

from fedhet.maths import fedala, fedpcl
from fedhet.maths.fedntd import not_true_distillation
from fedhet.maths.fedprox import add_proximal
from fedhet.maths.fedrod import balanced_softmax
from fedhet.maths.moon import contrastive
from fedhet.methods.fedgen import Generator
from fedhet.optimizers import clip_norm

W1, WIDTH = WORKLOADS["W1"], 200
BODY, HEAD = slice(4), slice(4, None)  # of the 2NN's tensors


def generator() -> Generator:
    """FedGen's, with its default widths."""
    return Generator(512, CLASSES, 512, WIDTH)


def gradients(x: list[Tensor]) -> dict[str, Extra]:
    """What changes the gradient; operands of their own push the model out of the caches."""
    d = [t.clone() for t in x]
    weights, losses, index = torch.ones(600), torch.ones(W1.batch), torch.arange(W1.batch)

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
    """Losses in place of the cross entropy."""
    received, previous = TwoNN(), TwoNN()
    made, law = generator().eval().requires_grad_(False), torch.ones(CLASSES)
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
        z = made(torch.randn(len(y), made.noise_dim), drawn)
        return cross_entropy(model(x), y) + cross_entropy(model.head(z), drawn)

    return {"moon": moon, "fedntd": fedntd, "fedrod": fedrod, "fedgen": fedgen}


def loops(samples: Data) -> dict[str, Callable[[int], object]]:
    """A client's local steps, by method; "fedala" is what precedes them. "floor" adds nothing."""
    x, total = ([p.detach().clone() for p in TwoNN().parameters()] for _ in range(2))
    trainers = {
        "floor": trainer(W1, samples),
        **{name: trainer(W1, samples, extra) for name, extra in gradients(x).items()},
        **{name: trainer(W1, samples, loss=loss) for name, loss in objectives().items()},
    }
    body, local = TwoNN().body, [t.clone() for t in x[HEAD]]
    weights = [torch.ones_like(t) for t in local]
    means, known = (
        normalize(torch.randn(COHORT + 1, CLASSES, WIDTH), dim=-1),
        torch.ones(CLASSES, dtype=torch.bool),
    )

    def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return fedpcl.losses(normalize(model(x)), y, means[0], means[1:], known, 0.07, "all").mean()

    def top(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = body(x)
        return cross_entropy(head(z), y)

    def mix(params: list[Tensor], grads: list[Tensor]) -> None:
        weights[:] = fedala.step(weights, grads, local, x[HEAD], 1.0)
        torch._foreach_copy_(params, fedala.start(local, x[HEAD], weights))

    # FedALA's s is 80 %
    drawn = [(inputs[: len(y) * 8 // 10], y[: len(y) * 8 // 10]) for inputs, y in samples]

    def clip(params: list[Tensor], grads: list[Tensor]) -> None:
        clip_norm(grads, 10.0)

    parts = {
        "fedpcl": (BODY, trainer(replace(W1, model=lambda: TwoNN().body), samples, clip, contrast)),
        "fedala": (HEAD, trainer(replace(W1, model=lambda: TwoNN().head), drawn, mix, top)),
    }
    parts |= {name: (slice(None), train) for name, train in trainers.items()}
    return {
        name: lambda k, part=part, train=train: train(x[part], [k], total[part], 0.1)  # type: ignore[misc]
        for name, (part, train) in parts.items()
    }
