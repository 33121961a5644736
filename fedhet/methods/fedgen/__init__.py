"""FedGen: data-free knowledge distillation by a feature generator (Zhu, Hong and Zhou 2021).

The server trains a generator of features against the clients' heads; the clients train their heads
on what it generates, and so learn of labels that they do not have.

    generator: G(eps, y) -> features, the input of the head;  eps ~ N(0, I)
    server:    min_G  CE(sum_k a_k^y h_k(z), y) + eta exp(-mean_ij |z_i - z_j|_1 |eps_i - eps_j|^2)
               z = G(eps, y),  y ~ the labels of all clients
               a_k^y = n_k^y / sum_j n_j^y
    client:    CE(h(f(x)), y) + lam CE(h(G(eps, y')), y') + kl KL([h(G(eps, y))] || h(f(x)))
    weights:   x <- sum_k p_k w_k

Here h_k are the clients' heads, frozen; y' are as many labels as the batch has samples, drawn anew
for each batch; and no gradient flows through [].

    down:          x; from round 2 on also `fedgen.generator`, `fedgen.law`, `fedgen.noise`,
                   `fedgen.lam` and `fedgen.kl`
    up:            w_k, n_k, `fedgen.counts` (classes)
    client keeps:  nothing
    server keeps:  x, G (slot `generator`), its Adam's moments, each client's last label counts

Privacy: the label counts of each client leave it, and their sum, the law, is sent to all. A client
sends 0 in place of a count below `privacy.min_count` (0 is the paper's method). The server does not
draw labels that no participant of the round has reported; labels that no client has reported so far
are never drawn.

Deviations and choices: each distance of the diversity term is a mean over coordinates, as in the
authors' program. The generator's first linear layer, which batch norm follows, has no bias (the
authors' program and PFLlib have one): batch norm subtracts it again, so its gradient is zero, and
Adam would move it by rounding errors.

Defaults: normal noise (the authors' program and PFLlib: uniform); lam = 1, constant, and kl = 0
(the authors' program: 10 each, with `decay = .98`); noise_dim, hidden and server_lr as in the FedSA
paper; server_steps as in PFLlib.

The paper is "Data-free knowledge distillation for heterogeneous federated learning".

generator.py has the generator and the draws of its inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fedhet.core import check, streams
from fedhet.core.client import FedClient
from fedhet.core.counts import suppressed
from fedhet.core.errors import RunFailed
from fedhet.core.functional import Frozen
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.methods.fedgen.generator import Generator, NoiseSource
from fedhet.models.base import feature_head

log = logging.getLogger("fedhet")

SLOT = "generator"
GENERATOR = "fedgen.generator"
LAW = "fedgen.law"
NOISE = "fedgen.noise"
LAM = "fedgen.lam"
KL = "fedgen.kl"
COUNTS = "fedgen.counts"
HEAD = ("head.weight", "head.bias")


# Suffixes of names give shapes: K clients, B samples, C classes, d features, m noise coordinates.
def label_shares(counts: Tensor) -> Tensor:
    """Return the clients' shares of each label, a_k^y = n_k^y / sum_j n_j^y, shape (K, C).

    Args:
        counts: (K, C) the numbers n_k^y of each client's samples by label. The shares of a label
            that no client has are 0.
    """
    return counts / counts.sum(0).clamp(min=1)


def ensemble(logits_KBC: Tensor, shares_KC: Tensor, y_B: Tensor) -> Tensor:
    """Return the ensemble's logits, sum_k a_k^y h_k(z), shape (B, C).

    The heads h_k are weighted for each sample by the shares a_k^y of that sample's own label y.
    """
    return torch.einsum("kb,kbc->bc", shares_KC[:, y_B], logits_KBC)


def diversity(z_Bd: Tensor, noise_Bm: Tensor) -> Tensor:
    """Return the diversity term exp(-mean_ij |z_i - z_j|_1 |eps_i - eps_j|^2), a scalar in (0, 1].

    It is 1 where all generated features z are equal. As in the authors' program, both distances
    are means over coordinates: with sums, the exponential would underflow to 0 at every width
    that is used in practice.
    """
    feature_distances = torch.cdist(z_Bd, z_Bd, p=1) / z_Bd.shape[1]
    noise_distances = torch.cdist(noise_Bm, noise_Bm).square() / noise_Bm.shape[1]
    return (-(feature_distances * noise_distances).mean()).exp()


def _head(params: AnyTree, own: Prepared, z: Tensor) -> Tensor:
    """The logits of the model's head, which may be trained or have its initial values."""
    values = {**own["initial"], **params}
    return functional.linear(z, values["head.weight"], values.get("head.bias"))


class FedGenClient(FedClient):
    """FedAvg, with generated features in each batch once there is a generator."""

    _generator: Frozen
    _source: NoiseSource | None = None  # None in round 1 and in a plug-in's own phase

    def train(self, msg: Broadcast) -> Update:
        classes = self.workspace.task.classes
        update = super().train(msg)
        counts = self.workspace.task.clients[self.pid].train.y.bincount(minlength=classes).cpu()
        update.extras[COUNTS] = suppressed(counts, self.workspace.min_count)
        return update

    def prepare(self, msg: Broadcast) -> Prepared | None:
        if GENERATOR not in msg.extras:
            return None
        tree = msg.tree(GENERATOR)
        hidden, inputs = tree["layers.0.weight"].shape
        rows, limits = min(self.local.batch_size, len(self.data)), self.workspace.limits
        limits.check_array(f"method.hidden={hidden}", max(rows, inputs), hidden)
        limits.check_array("method.noise_dim", rows, inputs)
        generator = Generator.from_tree(tree, self.workspace.task.classes)
        draws, law = self.generator("fedgen"), msg.tensor(LAW)
        self._source = NoiseSource(generator, draws, law=law, noise=msg.text(NOISE))
        self._generator = Frozen(generator)
        values = self.workspace.initial
        fixed = {name: values[name] for name in HEAD if name in values}
        return {"generator": tree, "initial": fixed}

    def draws(self, n: int) -> Prepared:
        if self._source is None:
            return {}
        drawn = {}
        if self.msg.scalar(KL):
            drawn["noise of batch"] = self._source.noise(n)
        if self.msg.scalar(LAM):
            drawn["labels"] = self._source.labels(n)
            drawn["noise"] = self._source.noise(n)
        return drawn

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        losses = self.workspace.task.criterion(batch.logits, batch.y)
        if "noise of batch" not in own:
            return losses
        with torch.no_grad():
            z = self._generator(own["generator"])(own["noise of batch"], batch.y)
            target = _head(params, own, z).softmax(1)
        log_softmax = batch.logits.log_softmax(1)
        divergence = (torch.xlogy(target, target) - target * log_softmax).sum(1)  # as kl_div
        return losses + self.msg.scalar(KL) * divergence

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        if "labels" not in own:
            return batch.logits.new_zeros(())
        z = self._generator(own["generator"])(own["noise"], own["labels"])
        logits = _head(params, own, z)
        return self.msg.scalar(LAM) * self.workspace.task.criterion(logits, own["labels"]).mean()


class FedGen(FedStrategy):
    """FedAvg, and the training of the generator."""

    name = "fedgen"
    client_cls = FedGenClient
    needs_all = True
    only_weights = True
    enters = "the heads of single clients"  # against which the generator is trained
    memory = ("_generator", "_adam", "_counts")
    refuses_noise = "its clients send exact label counts"

    def __init__(
        self,
        setting: Setting,
        *,
        lam: float = 1.0,
        kl: float = 0.0,
        decay: float = 1.0,
        eta: float = 1.0,
        ensemble: str = "labels",
        noise: str = "normal",
        noise_dim: int = 512,
        hidden: int = 512,
        server_steps: int = 1000,
        server_lr: float = 0.005,
        server_batch_size: int = 32,
    ) -> None:
        self.lam = check.number("method.lam", lam, low=0)
        self.kl = check.number("method.kl", kl, low=0)
        self.decay = check.number("method.decay", decay, open_low=0, high=1)
        self.eta = check.number("method.eta", eta, low=0)
        self.ensemble = check.one_of("method.ensemble", ensemble, ("labels", "samples"))
        self.noise = check.one_of("method.noise", noise, ("normal", "uniform"))
        self.noise_dim = check.integer("method.noise_dim", noise_dim, low=1)
        self.hidden = check.integer("method.hidden", hidden, low=1)
        self.server_steps = check.integer("method.server_steps", server_steps, low=0)
        self.server_lr = check.number("method.server_lr", server_lr, open_low=0)
        # Batch norm cannot train on one sample.
        self.server_batch_size = check.integer("method.server_batch_size", server_batch_size, low=2)
        super().__init__(setting)

    def setup(self) -> None:
        self.workspace.task.check_classes("method=fedgen")
        classes = self.workspace.task.classes
        why = "method=fedgen generates the features that a model's last layer reads, for each class"
        head = feature_head(self.workspace.model, why)
        with self.workspace.seeded("fedgen.init"):
            generator = Generator(self.noise_dim, classes, self.hidden, head.in_features)
        self._generator = generator.to(self.workspace.device, head.weight.dtype)
        self._adam = torch.optim.Adam(self._generator.parameters(), lr=self.server_lr)
        self._counts: dict[int, Tensor] = {}  # pid -> label counts of its last participation

    def slots(self) -> dict[str, Tree]:
        return {SLOT: self._generator_weights()}

    def _generator_weights(self) -> Tree:
        return {name: t.detach().clone() for name, t in self._generator.state_dict().items()}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        if not self._counts or not self._law().any() or not (self.lam or self.kl):
            return {}
        decay = self.decay ** (step - 1)
        return {
            GENERATOR: self.weights[SLOT],
            LAW: self._law(),
            NOISE: self.noise,
            LAM: self.lam * decay,
            KL: self.kl * decay,
        }

    def _law(self) -> Tensor:
        """(classes,) the label counts of all clients that have reported theirs."""
        return torch.stack(list(self._counts.values())).sum(0).float()

    def check(self, update: Update) -> None:
        self._label_counts(update)

    def _label_counts(self, update: Update) -> Tensor:
        return update.counts(
            COUNTS, update.num_examples, self.workspace.task.classes, self.workspace.min_count
        )

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        cohort = list(updates)
        self._train_generator(cohort)
        return super().merge(iter(cohort), old)

    def _train_generator(self, updates: list[Update]) -> None:
        """Take `server_steps` steps of Adam against the heads just received.

        This is a plain torch loop: its parameters are the generator's, and no hook applies to it.
        """
        counts = torch.stack([self._label_counts(update) for update in updates])
        self._counts |= {update.pid: n for update, n in zip(updates, counts, strict=True)}
        current = self.current
        stream = streams.torch_generator(
            self.workspace.seed, "fedgen", current.entry.name, current.step
        )
        law = self._law() * (counts.sum(0) > 0)
        if not law.any():
            log.warning(
                "fedgen: round %d: every participant has fewer than privacy.min_count samples of"
                " each class; the generator stays as it is",
                current.round,
            )
            return
        source = NoiseSource(self._generator, stream, law=law, noise=self.noise)
        W_KCd = self._stacked(updates, "head.weight")
        b_KC = self._stacked(updates, "head.bias")
        if self.ensemble == "labels":
            shares_KC = label_shares(counts).to(W_KCd.dtype)
        else:
            weights = W_KCd.new_tensor([update.weight for update in updates])
            shares_KC = weights[:, None].expand(counts.shape)
        total = torch.zeros((), device=self.workspace.device)
        self._generator.train()
        for _ in range(self.server_steps):
            y = source.labels(self.server_batch_size)
            noise = source.noise(self.server_batch_size)
            z = self._generator(noise, y)
            logits_KBC = torch.einsum("bd,kcd->kbc", z, W_KCd) + b_KC[:, None]
            loss = self.workspace.task.criterion(ensemble(logits_KBC, shares_KC, y), y).mean()
            total += loss.detach()
            if self.eta:
                loss = loss + self.eta * diversity(z, noise)
            self._adam.zero_grad()
            loss.backward()
            self._adam.step()
        mean = float(total) / max(1, self.server_steps)
        self.weights[SLOT] = self._generator_weights()
        if not torch.isfinite(total):
            raise RunFailed(
                f"round {current.round}: the loss of the generator is {mean}; a smaller"
                " method.server_lr may help"
            )
        self.recorded = {"generator_loss": mean}

    def _stacked(self, updates: list[Update], name: str) -> Tensor:
        """(K, ...) this tensor of every client.

        One that is not shared has its initial value; the bias of a head without one is 0.
        """
        initial = self.workspace.initial.get(name)
        if initial is None:
            initial = self.workspace.initial["head.weight"].new_zeros(self.workspace.task.classes)
        return torch.stack([update.weights.get(name, initial) for update in updates])
