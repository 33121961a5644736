"""FedGen: data-free knowledge distillation by a feature generator (Zhu, Hong and Zhou 2021).

The server trains a generator of features with the clients' heads. The clients then train their
heads on generated features, too, and so learn about labels that they do not have.

    generator: G(eps, y) -> features, the input of the head;  eps ~ N(0, I)
    server:    min_G  CE(sum_k a_k^y h_k(z), y) + eta exp(-mean_ij |z_i - z_j|_1 |eps_i - eps_j|^2)
               z = G(eps, y),  y ~ the labels of all clients
               a_k^y = n_k^y / sum_j n_j^y
    client:    CE(h(f(x)), y) + lam CE(h(G(eps, y')), y') + kl KL([h(G(eps, y))] || h(f(x)))
    weights:   x <- sum_k p_k w_k

Here h_k are the clients' heads, which stay fixed. y' are labels that the client draws anew for each
batch, as many as the batch has samples. No gradient flows through [].

    down:          x; from round 2 on also `fedgen.generator` and `fedgen.law`
    up:            w_k, n_k, `fedgen.counts` (classes)
    client keeps:  nothing
    server keeps:  x, G (slot `generator`), its Adam's moments, each client's last label counts

`fedgen.law` is the label distribution of all clients, as the sum of their label counts.

Privacy: each client sends its label counts to the server, and the server sends their sum to all
clients. A client sends 0 instead of a count below `privacy.min_count` (0 is the paper's method).
The server does not draw labels that no participant of the round has reported. Nobody draws labels
that no client has reported so far.

Deviations and choices: each distance of the diversity term is a mean over coordinates, as in the
authors' program. The first linear layer of the generator has no bias; it has one in the authors'
program and in PFLlib. Batch norm follows this layer and would subtract the bias again. The gradient
of the bias would be zero, and Adam would move it by rounding errors.

Defaults: normal noise (the authors' program and PFLlib: uniform); lam = 1, constant, and kl = 0
(the authors' program: 10 each, with `decay = .98`); noise_dim, hidden and server_lr as in the FedSA
paper; server_steps as in PFLlib.

The paper is "Data-free knowledge distillation for heterogeneous federated learning".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core import streams
from fedhet.core.authors import (
    AnyTree,
    Batch,
    Client,
    ClientContext,
    Expected,
    Extras,
    Merged,
    Message,
    Method,
    Prepared,
    Result,
    RunSetup,
    State,
    Step,
    Term,
    Tree,
    Update,
    Workspace,
    log,
    serves,
    setting,
)
from fedhet.core.client import optimizers
from fedhet.core.counts import suppressed
from fedhet.core.errors import RunFailed
from fedhet.models.base import require_feature_head

SLOT = "generator"
HEAD = ("head.weight", "head.bias")
MOMENTS = ("first", "second", "t")  # the state of `optimizers.Adam`
# The generator is an nn.Sequential, which gives its tensors these names.
FIRST, NORM, LAST = "layers.0.", "layers.1.", "layers.3."
PARAMETERS = (f"{FIRST}weight", f"{NORM}weight", f"{NORM}bias", f"{LAST}weight", f"{LAST}bias")


# Suffixes of names give shapes: K clients, B samples, C classes, d features, m noise coordinates.
def label_shares(counts: Tensor) -> Tensor:
    """Return the clients' shares of each label, a_k^y = n_k^y / sum_j n_j^y, shape (K, C).

    If no client has a label, its shares are 0.

    Args:
        counts: (K, C) the numbers n_k^y of each client's samples by label.
    """
    return counts / counts.sum(0).clamp(min=1)


def ensemble(logits_KBC: Tensor, shares_KC: Tensor, y_B: Tensor) -> Tensor:
    """Return the ensemble's logits, sum_k a_k^y h_k(z), shape (B, C).

    The heads h_k are weighted for each sample by the shares a_k^y of that sample's own label y.
    """
    return torch.einsum("kb,kbc->bc", shares_KC[:, y_B], logits_KBC)


def diversity(z_Bd: Tensor, noise_Bm: Tensor) -> Tensor:
    """Return the diversity term exp(-mean_ij |z_i - z_j|_1 |eps_i - eps_j|^2), a scalar in (0, 1].

    It is 1 if all generated features z are equal. As in the authors' program, both distances are
    means over coordinates. With sums, the exponential would underflow to 0 at every usual width.
    """
    feature_distances = torch.cdist(z_Bd, z_Bd, p=1) / z_Bd.shape[1]
    noise_distances = torch.cdist(noise_Bm, noise_Bm).square() / noise_Bm.shape[1]
    return (-(feature_distances * noise_distances).mean()).exp()


# ---- the generator
def new_generator(noise_dim: int, classes: int, hidden: int, width: int) -> Tree:
    """Return a generator with initial values, drawn from torch's global random stream."""
    layers = nn.Sequential(
        nn.Linear(noise_dim + classes, hidden, bias=False),  # batch norm subtracts the mean
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )
    return {f"layers.{name}": t for name, t in layers.state_dict().items()}


def generate(g: AnyTree, noise_Bm: Tensor, y_B: Tensor, *, training: bool = False) -> Tensor:
    """Return the features G(noise, y), shape (B, d).

    Args:
        g: the generator.
        noise_Bm: the noise eps.
        y_B: labels.
        training: whether batch norm normalises by the batch, and changes its running statistics in
            place.
    """
    classes = g[PARAMETERS[0]].shape[1] - noise_Bm.shape[1]
    labels = functional.one_hot(y_B, classes).to(noise_Bm.dtype)
    h = functional.linear(torch.cat([noise_Bm, labels], 1), g[f"{FIRST}weight"])
    statistics = g[f"{NORM}running_mean"], g[f"{NORM}running_var"]
    h = functional.batch_norm(h, *statistics, g[f"{NORM}weight"], g[f"{NORM}bias"], training)
    return functional.linear(h.relu(), g[f"{LAST}weight"], g[f"{LAST}bias"])


class NoiseSource:
    """Draws noise ("normal" or "uniform"), and labels from a label distribution, on the CPU.

    So every device gets the same draws.

    Args:
        g: the generator.
        stream: the random stream.
        law: (C,) the label distribution, as relative frequencies.
        noise: the distribution of the noise.
    """

    def __init__(self, g: AnyTree, stream: torch.Generator, *, law: Tensor, noise: str) -> None:
        self._like = g[PARAMETERS[0]]
        self._noise_dim = self._like.shape[1] - len(law)
        self._stream = stream
        self._law = law.cpu()
        self._draw = torch.rand if noise == "uniform" else torch.randn

    def noise(self, n: int) -> Tensor:
        """Draw noise, (n, noise_dim)."""
        size = n, self._noise_dim
        return self._draw(size, generator=self._stream, dtype=self._like.dtype)

    def labels(self, n: int) -> Tensor:
        """Draw labels (n,) from the label distribution."""
        return torch.multinomial(self._law, n, replacement=True, generator=self._stream)


# ---- what clients add to the losses
def head(params: AnyTree, own: Prepared, z: Tensor) -> Tensor:
    """Return the logits of the model's head, with its initial values if it is not trained."""
    values = {**own["initial"], **params}
    return functional.linear(z, values["head.weight"], values.get("head.bias"))


def divergence(params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
    """Return kl KL([h(G(eps, y))] || h(f(x))) of each sample, for its own label y, (B,)."""
    with batch.workspace.autocast():
        with torch.no_grad():
            z = generate(own["generator"], own["noise"], batch.y)
            target = head(params, own, z).softmax(1)
        log_softmax = batch.logits.log_softmax(1)
        return own["kl"] * (torch.xlogy(target, target) - target * log_softmax).sum(1)


def generated(params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
    """Return lam CE(h(G(eps, y')), y'), the mean over the generated features of a batch."""
    z = generate(own["generator"], own["noise"], own["labels"])
    logits = head(params, own, z)
    return own["lam"] * batch.workspace.task.criterion(logits, own["labels"]).mean()


# ---- the method
class FedGenClient(Client):
    """Trains as in FedAvg, and also on generated features if the message has a generator."""

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if "generator" not in msg:
            return []
        g, values = msg["generator"], ctx.workspace.initial
        hidden, inputs = g[PARAMETERS[0]].shape
        rows, limits = min(msg.local.batch_size, len(ctx.data)), ctx.workspace.limits
        limits.check_array(f"method.hidden={hidden}", max(rows, inputs), hidden)
        limits.check_array("method.noise_dim", rows, inputs)
        source = NoiseSource(g, ctx.stream("fedgen"), law=msg["law"], noise=self.options.noise)
        fixed = {name: values[name] for name in HEAD if name in values}
        like, decay = g[PARAMETERS[0]], self.options.decay ** (msg.step - 1)
        lam, kl = self.options.lam * decay, self.options.kl * decay
        factors = {"lam": like.new_tensor(lam), "kl": like.new_tensor(kl)}
        own = {"generator": g, "initial": fixed, **factors}
        terms = []
        if kl:
            terms.append(Term("loss", divergence, own, draws=lambda n: {"noise": source.noise(n)}))
        if lam:
            draws = lambda n: {"labels": source.labels(n), "noise": source.noise(n)}  # noqa: E731
            terms.append(Term("penalty", generated, own, draws=draws))
        return terms

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        fitted = ctx.fit(msg.weights, self.terms(msg, state, ctx))
        counts = ctx.own.y.bincount(minlength=ctx.workspace.task.classes)
        sent = suppressed(counts, ctx.workspace.min_count)
        return Result(fitted.params, {"counts": sent}), state


def law_of(counts: Mapping[int, Tensor]) -> Tensor:
    """Return the label distribution (C,): the sum of the label counts that clients reported."""
    return torch.stack(list(counts.values())).sum(0).float()


def stacked(workspace: Workspace, updates: Sequence[Update], name: str) -> Tensor:
    """Return the tensor with this name of every client, (K, ...).

    A tensor that clients do not share has its initial value. A head without bias has the bias 0.
    """
    initial = workspace.initial.get(name)
    if initial is None:
        initial = workspace.initial["head.weight"].new_zeros(workspace.task.classes)
    return torch.stack([update.weights.get(name, initial) for update in updates])


@dataclass(frozen=True, kw_only=True)
class FedGen(Method):
    """Averages the weights as FedAvg does, and trains the generator.

    The server's state has "counts", client -> the label counts of its last participation, and
    "adam", the state of the generator's optimiser.
    """

    name = "fedgen"
    client = FedGenClient
    needs_all = True
    breaks = {
        "means": "the heads of single clients",  # the generator is trained with them
        "noise": "its clients send exact label counts",
    }

    lam: float = setting(1.0, low=0)
    kl: float = setting(0.0, low=0)
    decay: float = setting(1.0, open_low=0, high=1)
    eta: float = setting(1.0, low=0)
    ensemble: str = setting("labels", allowed=("labels", "samples"))
    noise: str = setting("normal", allowed=("normal", "uniform"))
    noise_dim: int = setting(512, low=1)
    hidden: int = setting(512, low=1)
    server_steps: int = setting(1000, low=0)
    server_lr: float = setting(0.005, open_low=0)
    server_batch_size: int = setting(32, low=2)  # batch norm cannot train on one sample

    def setup(self, setup: RunSetup) -> State:
        require_feature_head(
            setup.workspace,
            "method=fedgen",
            "generates the features that a model's last layer reads, for each class",
        )
        return {"counts": {}, "adam": {}}

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        workspace = setup.workspace
        classes, like = workspace.task.classes, workspace.initial["head.weight"]
        with workspace.seeded("fedgen.init"):
            g = new_generator(self.noise_dim, classes, self.hidden, like.shape[1])
        return {
            SLOT: {n: t.to(like if t.is_floating_point() else like.device) for n, t in g.items()}
        }

    def broadcast(self, step: Step, state: State) -> Extras:
        if not state["counts"] or not (self.lam or self.kl):
            return {}
        law = law_of(state["counts"])
        return {"generator": step.slots[SLOT], "law": law} if law.any() else {}

    def expects(self, step: Step) -> dict[str, Expected]:
        classes, least = step.workspace.task.classes, step.workspace.min_count
        return {
            "counts": Expected(
                shape=(classes,),
                whole=True,
                check=lambda _, u: u.counts("fedgen.counts", u.num_examples, classes, least),
            )
        }

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Average the weights, and train the generator with the heads just received.

        The generator is trained in a plain torch loop, in which no plug-in takes part.
        """
        cohort = list(updates)
        counts_KC = torch.stack([update["counts"] for update in cohort])
        known = state["counts"] | {u.pid: n for u, n in zip(cohort, counts_KC, strict=True)}
        merged = super().merge(step, {**state, "counts": known}, old, iter(cohort))
        law = law_of(known) * (counts_KC.sum(0) > 0)
        if not law.any():
            log.warning(
                "fedgen: round %d: every participant has fewer than privacy.min_count samples of"
                " each class; the generator stays unchanged",
                step.round,
            )
            return merged
        g = {name: t.clone() for name, t in step.slots[SLOT].items()}
        params = [g[n].requires_grad_() for n in PARAMETERS]
        local = replace(step.local, lr=self.server_lr, weight_decay=0.0)
        adam = optimizers.Adam(params, local)
        if state["adam"]:
            vars(adam).update(deepcopy(state["adam"]))  # the steps change it in place
        stream = streams.torch_generator(step.workspace.seed, "fedgen", step.phase, step.number)
        source = NoiseSource(g, stream, law=law, noise=self.noise)
        W_KCd, b_KC = (stacked(step.workspace, cohort, name) for name in HEAD)
        if self.ensemble == "labels":
            shares_KC = label_shares(counts_KC).to(W_KCd.dtype)
        else:
            weights = W_KCd.new_tensor([update.weight for update in cohort])
            shares_KC = weights[:, None].expand(counts_KC.shape)
        size, device = self.server_batch_size, step.workspace.device
        draws = [(source.labels(size), source.noise(size)) for _ in range(self.server_steps)]
        sent = (torch.stack(each).to(device) for each in zip(*draws, strict=True))
        total = torch.zeros((), device=device)
        for y, noise in zip(*sent, strict=True):
            z = generate(g, noise, y, training=True)
            logits_KBC = torch.einsum("bd,kcd->kbc", z, W_KCd) + b_KC[:, None]
            logits = ensemble(logits_KBC, shares_KC, y)
            loss = step.workspace.task.criterion(logits, y).mean()
            total += loss.detach()
            if self.eta:
                loss = loss + self.eta * diversity(z, noise)
            grads = optimizers.gradients([loss], [torch.ones_like(loss)], params)
            with torch.no_grad():
                adam.step(grads)
        mean = float(total) / max(1, self.server_steps)
        if not torch.isfinite(total):
            raise RunFailed(
                f"round {step.round}: the loss of FedGen's generator is {mean}; a smaller"
                f" method.server_lr (now {self.server_lr:g}) may help"
            )
        g[f"{NORM}num_batches_tracked"] += self.server_steps
        return merged._replace(
            state={"counts": known, "adam": {key: vars(adam)[key] for key in MOMENTS}},
            metrics={"generator_loss": mean},
            slots={SLOT: {name: t.detach() for name, t in g.items()}},
        )
