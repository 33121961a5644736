"""FedGen (Zhu, Hong and Zhou 2021, "Data-free knowledge distillation for heterogeneous federated
learning").

    G(eps, y): noise and a label -> features, what the head reads.  The server trains it on the
    clients' heads h_k, frozen: min_G CE(sum_k a_k^y h_k(G(eps, y)), y) + eta exp(-mean_ij |z_i -
    z_j|_1 |eps_i - eps_j|^2) a_k^y = n_k^y / sum_j n_j^y       y ~ the labels of all clients, eps ~
    N(0, I) client: CE(h(f(x)), y) + lam CE(h(G(eps, y')), y'), y' drawn for each batch, as many as
    it has samples;  x <- sum_k p_k w_k

    down: x; from round 2 on `fedgen.generator`, `fedgen.law`, `fedgen.noise`, `fedgen.lam`, `fedgen.kl`
    up: w_k, n_k, `fedgen.counts` (classes)
    client keeps: nothing      server keeps: x, G (slot `generator`) and its Adam's moments, every client's last label counts

Privacy: each client's label counts leave it, and the law, their sum, goes to all. Labels that no
participant of the round has are not drawn by the server, those that no client has shown yet by
nobody. Deviations: each distance of the diversity term is a mean over coordinates (as in the
authors' program). Defaults: normal noise (the programs: uniform) and lam 1, constant (the authors:
10, decay .98 and kl 10); noise_dim, hidden and server_lr are those of the FedSA paper, server_steps
PFLlib's. `kl` is the factor of KL(h(G(eps, y)) || h(f(x))), the first without gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet import check, streams
from fedhet.client import FedClient
from fedhet.errors import RunFailed
from fedhet.maths.fedgen import diversity, ensemble, label_shares
from fedhet.messages import Broadcast, Extras, Update
from fedhet.models.base import feature_head
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.site import Site
from fedhet.strategy import FedStrategy
from fedhet.training import Batch
from fedhet.trees import Tree

SLOT, GENERATOR, COUNTS = "generator", "fedgen.generator", "fedgen.counts"
LAW, NOISE, LAM, KL = "fedgen.law", "fedgen.noise", "fedgen.lam", "fedgen.kl"


class Generator(nn.Module):
    """noise (B, m), labels (B,) -> features (B, d)."""

    def __init__(self, noise_dim: int, classes: int, hidden: int, width: int) -> None:
        super().__init__()
        self.noise_dim, self.classes = noise_dim, classes
        self.layers = nn.Sequential(
            nn.Linear(noise_dim + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.layers(
            torch.cat([noise, functional.one_hot(y, self.classes).to(noise.dtype)], 1)
        )
        return found

    @classmethod
    def of(cls, tree: Tree, classes: int) -> Generator:
        """The received generator, in eval mode. Nothing is initialised: that would draw from the
        stream that dropout uses."""
        hidden, inputs = tree["layers.0.weight"].shape
        with torch.device("meta"):
            made = cls(inputs - classes, classes, hidden, len(tree["layers.3.weight"]))
        made.load_state_dict(tree, assign=True)
        return made.eval().requires_grad_(False)


class Source:
    """Noise and labels from a stream of their own, drawn on the CPU: every device sees the same."""

    def __init__(
        self,
        site: Site,
        phase: str,
        step: int,
        pid: int,
        *,
        law: Tensor,
        noise: str,
        like: Generator,
    ) -> None:
        self._draws = torch.Generator().manual_seed(
            streams.integer(site.seed, "fedgen", phase, step, pid)
        )
        self._law, self._uniform, self._dim, self._device = (
            law.cpu(),
            noise == "uniform",
            like.noise_dim,
            site.device,
        )
        self._dtype = next(like.parameters()).dtype

    def noise(self, n: int) -> Tensor:
        draw = torch.rand if self._uniform else torch.randn
        return draw(n, self._dim, generator=self._draws, dtype=self._dtype).to(self._device)

    def labels(self, n: int) -> Tensor:
        return torch.multinomial(self._law, n, replacement=True, generator=self._draws).to(
            self._device
        )


class FedGenClient(FedClient):
    """FedAvg, with generated features in each batch once there is a generator."""

    # none in round 1, nor where a plug-in trains in a phase of its own
    _generator: Generator | None = None

    def train(self, msg: Broadcast) -> Update:
        site, received = self.site, msg.extras.get(GENERATOR)
        if isinstance(received, dict):
            law, noise = msg.tensor(LAW), msg.text(NOISE)
            self._generator = Generator.of(received, site.task.classes)
            self._lam = msg.scalar(LAM)
            self._kl = msg.scalar(KL)
            self._source = Source(
                site, msg.phase, msg.step, self.pid, law=law, noise=noise, like=self._generator
            )
        update = super().train(msg)
        update.extras[COUNTS] = (
            site.task.clients[self.pid].train.y.bincount(minlength=site.task.classes).cpu()
        )
        return update

    def losses(self, batch: Batch) -> Tensor:
        own = super().losses(batch)
        if self._generator is None or not self._kl:
            return own
        with torch.no_grad():
            target = self.model.head(
                self._generator(self._source.noise(len(batch.y)), batch.y)
            ).softmax(1)  # type: ignore[operator]
        return own + self._kl * functional.kl_div(
            batch.logits.log_softmax(1), target, reduction="none"
        ).sum(1)

    def penalty(self, batch: Batch) -> Tensor:
        if self._generator is None or not self._lam:
            return batch.logits.new_zeros(())
        y = self._source.labels(len(batch.y))
        z = self._generator(self._source.noise(len(y)), y)
        return self._lam * self.site.task.criterion(self.model.head(z), y).mean()  # type: ignore[operator]


class FedGen(FedStrategy):
    """FedAvg, and the training of the generator."""

    name = "fedgen"
    client_cls = FedGenClient
    needs_all = True

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
        self.lam, self.kl = (
            check.number("method.lam", lam, low=0),
            check.number("method.kl", kl, low=0),
        )
        self.decay = check.number("method.decay", decay, open_low=0, high=1)
        self.eta = check.number("method.eta", eta, low=0)
        self.ensemble = check.one_of("method.ensemble", ensemble, ("labels", "samples"))
        self.noise = check.one_of("method.noise", noise, ("normal", "uniform"))
        self.noise_dim = check.integer("method.noise_dim", noise_dim, low=1)
        self.hidden = check.integer("method.hidden", hidden, low=1)
        self.server_steps = check.integer("method.server_steps", server_steps, low=0)
        self.server_lr = check.number("method.server_lr", server_lr, open_low=0)
        self.server_batch_size = check.integer(
            "method.server_batch_size", server_batch_size, low=2
        )  # for its batch norm
        self._counts: dict[int, Tensor] = {}  # by client, those of its last participation
        super().__init__(setting)

    def slots(self) -> dict[str, Tree]:
        classes = self.site.task.classes
        why = "method=fedgen generates the features that a model's last layer reads, for each class"
        head = feature_head(self.site.model, classes, why)
        with self.site.seeded("fedgen.init"):
            self._generator = Generator(self.noise_dim, classes, self.hidden, head.in_features).to(
                self.site.device, head.weight.dtype
            )
        self._adam = torch.optim.Adam(self._generator.parameters(), lr=self.server_lr)
        return {SLOT: self._snapshot()}

    def _snapshot(self) -> Tree:
        return {name: t.detach().clone() for name, t in self._generator.state_dict().items()}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        faded = self.decay ** (step - 1)
        if step == 1 or not (self.lam or self.kl):
            return {}
        return {
            GENERATOR: self.weights[SLOT],
            LAW: self._law(),
            NOISE: self.noise,
            LAM: self.lam * faded,
            KL: self.kl * faded,
        }

    def _law(self) -> Tensor:
        """(classes,): how many of each label all clients have that have shown theirs."""
        return torch.stack(list(self._counts.values())).sum(0).float()

    def check(self, update: Update) -> None:
        self._received(update)

    def _received(self, update: Update) -> Tensor:
        counts, classes = update.extras.get(COUNTS), self.site.task.classes
        if (
            not isinstance(counts, Tensor)
            or counts.is_floating_point()
            or counts.shape != (classes,)
            or (counts < 0).any()
            or int(counts.sum()) != update.num_examples
        ):
            raise ValueError(
                f"extra {COUNTS!r} is {counts}; {classes} whole numbers >= 0 with sum"
                f" {update.num_examples} are expected"
            )
        return counts

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        everyone = list(updates)
        self._train_generator(everyone)
        return super().merge(iter(everyone), old)

    def _train_generator(self, updates: list[Update]) -> None:
        """`server_steps` steps of Adam against the heads that have just been received."""
        here = torch.stack([self._received(update) for update in updates])
        self._counts |= {update.pid: counts for update, counts in zip(updates, here, strict=True)}
        source = Source(
            self.site,
            self.current.entry.name,
            self.current.step,
            -1,
            law=self._law() * (here.sum(0) > 0),
            noise=self.noise,
            like=self._generator,
        )
        W_KCd, b_KC = (self._stacked(updates, f"head.{name}") for name in ("weight", "bias"))
        weights = W_KCd.new_tensor([update.weight for update in updates])
        shares = (
            label_shares(here) if self.ensemble == "labels" else weights[:, None].expand(here.shape)
        ).to(W_KCd.dtype)
        total = torch.zeros((), device=self.site.device)
        self._generator.train()
        for _ in range(self.server_steps):
            y, noise = source.labels(self.server_batch_size), source.noise(self.server_batch_size)
            z = self._generator(noise, y)
            logits_KBC = torch.einsum("bd,kcd->kbc", z, W_KCd) + b_KC[:, None]
            loss = self.site.task.criterion(ensemble(logits_KBC, shares, y), y).mean()
            total += loss.detach()
            if self.eta:
                loss = loss + self.eta * diversity(z, noise)
            self._adam.zero_grad()
            loss.backward()
            self._adam.step()
        mean = float(total) / max(1, self.server_steps)
        self.weights[SLOT] = self._snapshot()
        if not torch.isfinite(total):
            raise RunFailed(
                f"round {self.current.round}: the loss of the generator is {mean}; a smaller"
                " method.server_lr may help"
            )
        self.report = {"generator_loss": mean}

    def _stacked(self, updates: list[Update], name: str) -> Tensor:
        """(K, ...): every client's tensor; what is not shared has its initial value, and a head
        without bias the bias 0."""
        initial = self.site.initial.get(
            name, self.site.initial["head.weight"].new_zeros(self.site.task.classes)
        )
        return torch.stack([(update.weights or {}).get(name, initial) for update in updates])
