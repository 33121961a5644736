"""FedGMM (Nagaraju, Sen, Mohan, "Handling data heterogeneity in federated learning with global data
distribution").

Clients share a mixture of each class once, and fill their missing classes with samples of
everyone's mixtures.

    p_ic = sum_k pi_ick N(mu_ick, diag var_ick), EM on client i's pixels of class c in [0, 1]
    (section 4.1) p_c  = sum_i n_ic p_ic / sum_i n_ic: all components, with weights n_ic pi_ick /
    sum_i n_ic (algorithm 1, line 1) client i draws T_i - n_ic samples of each class c, T_i = max_c
    n_ic (line 3); lr <- (1 - psi) lr after each round (line 8)

    fit    down: nothing    up: `fedgmm.counts` (C,), `fedgmm.mixtures`: label, pi (K,), mu, var (K,
    d) share  down: `fedgmm.mixtures` of all, `fedgmm.global_max` where it is the target    up:
    `fedgmm.generated` train  down: x    up: w_k, n_k

    client keeps: its generated samples      server keeps: the mixtures until they are shared, then
        how many each client drew

"Aggregates" is not defined in the paper; concatenation is the pooled density, while averaging
component k over clients is meaningless, since labels of components are arbitrary. `num_examples`,
and so p_i = N_i / sum N, stays that of the real samples (`agg_count=augmented` counts all).
Momentum .9, weight decay, batch 128 and one local epoch are client settings. What a client keeps
are its samples as uint8, a quarter of what it trains on: their size does not depend on the number
of clients, as that of the mixtures does, which redrawing would have to keep. Rounding moves a pixel
by 1/510 at most. The paper claims privacy without analysis: few samples give components that are
near-copies of images, and a warning."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedhet import check, streams
from fedhet.client import FedClient
from fedhet.errors import ConfigError, RunFailed
from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture
from fedhet.messages import Broadcast, Update, kind
from fedhet.phases import Phase
from fedhet.plugin import Plugin
from fedhet.strategy import FedStrategy
from fedhet.task import Samples
from fedhet.trees import Tree

log = logging.getLogger("fedhet")
COUNTS, MIXTURES, GLOBAL_MAX, GENERATED = (
    "fedgmm.counts",
    "fedgmm.mixtures",
    "fedgmm.global_max",
    "fedgmm.generated",
)
KEPT = "fedgmm.samples"  # state: x (m, ...) uint8, y (m,)
MB = 10**6


def pack(mixtures: dict[int, Mixture], d: int) -> Tree:
    """Class -> mixture, as one tree in float32: label (K,), pi (K,), mu (K, d), var (K, d)."""
    parts = [Mixture(torch.zeros(0), torch.zeros(0, d), torch.zeros(0, d)), *mixtures.values()]
    label = torch.tensor(
        [c for c, mixture in mixtures.items() for _ in mixture.pi], dtype=torch.int64
    )
    return {"label": label} | {
        name: torch.cat([getattr(m, name).float() for m in parts]) for name in Mixture._fields
    }


def unpack(value: Any, d: int | None, classes: int) -> dict[int, Mixture]:
    """The inverse of `pack`, on the CPU, where scikit-learn and numpy make and draw mixtures; a
    ValueError names the class."""
    if (
        not isinstance(value, dict)
        or {name: t.ndim for name, t in value.items()} != {"label": 1, "pi": 1, "mu": 2, "var": 2}
        or len({len(t) for t in value.values()}) > 1
        or value["label"].is_floating_point()
    ):
        found = (
            {name: kind(t) for name, t in value.items()} if isinstance(value, dict) else kind(value)
        )
        raise ValueError(
            f"extra {MIXTURES!r} is {found}; whole label (K,), pi (K,), mu (K, d), var (K, d) are"
            " expected"
        )
    value = {name: t.cpu() for name, t in value.items()}
    label = value["label"]
    mixtures: dict[int, Mixture] = {}
    for c in label.unique().tolist():
        if not 0 <= c < classes:
            raise ValueError(f"extra {MIXTURES!r}: class {c}; classes go from 0 to {classes - 1}")
        mixtures[c] = Mixture(*(value[name][label == c] for name in Mixture._fields))
        try:
            maths.check_mixture(mixtures[c], d)
        except ValueError as error:
            raise ValueError(f"extra {MIXTURES!r}, class {c}: {error}") from error
    return mixtures


class FedGMMPlugin(Plugin):
    """Phases `fit` and `share`, once each and with everyone; then training on real and generated
    samples."""

    name = "fedgmm"

    def __init__(
        self,
        *,
        components: int = 5,
        reg_covar: float = 1e-6,
        psi: float = 0.02,
        target: str | int = "client_max",
        min_class_samples: int = 2,
        max_components: int | None = None,
        agg_count: str = "original",
        gen_weight: float = 1.0,
        max_payload_mb: float = 1000.0,
    ) -> None:
        at = "plugin.fedgmm."
        self.components = check.integer(f"{at}components", components, low=1)
        self.reg_covar = check.number(f"{at}reg_covar", reg_covar, open_low=0)
        self.psi = check.number(f"{at}psi", psi, low=0, open_high=1)
        self.target = (
            check.one_of(f"{at}target", target, maths.TARGETS)
            if isinstance(target, str)
            else check.integer(f"{at}target", target, low=0)
        )
        self.min_class_samples = check.integer(f"{at}min_class_samples", min_class_samples, low=1)
        self.max_components = check.optional(
            check.integer, f"{at}max_components", max_components, low=1
        )
        self.agg_count = check.one_of(f"{at}agg_count", agg_count, ("original", "augmented"))
        self.gen_weight = check.number(f"{at}gen_weight", gen_weight, low=0)
        self.max_payload_mb = check.number(f"{at}max_payload_mb", max_payload_mb, open_low=0)
        super().__init__(
            components=self.components,
            reg_covar=self.reg_covar,
            psi=self.psi,
            target=self.target,
            min_class_samples=self.min_class_samples,
            max_components=self.max_components,
            agg_count=self.agg_count,
            gen_weight=self.gen_weight,
            max_payload_mb=self.max_payload_mb,
        )
        self._dim: int | None = None
        self._shared: Tree = {}
        self._global_max = 0
        self._generated: dict[int, int] = {}

    def phases(self) -> list[Phase]:
        return [
            Phase("fit", 1, self._aggregate, check=self._check_fit, slot="", cohort=1.0),
            Phase("share", 1, self._shared_all, check=self._check_share, slot="", cohort=1.0),
        ]

    # ---- client
    def fit(self, msg: Broadcast) -> Update:
        """One mixture per class of which the client has enough samples."""
        site, pid = self.client.site, self.client.pid
        data = self._pixels()
        counts = data.y.bincount(minlength=site.task.classes)
        sizes = {c: n for c, n in enumerate(counts.tolist()) if n >= self.min_class_samples}
        d = math.prod(data.x.shape[1:])
        self._afford(
            "the mixtures of this client",
            sum(maths.components(n, self.components) for n in sizes.values()),
            d,
        )
        mixtures, failed = {}, 0
        for c, n in sizes.items():
            seed = streams.integer(site.seed, f"fedgmm.em.{c}", msg.phase, msg.step, pid)
            mixtures[c], converged = maths.fit(
                data.x[data.y == c].flatten(1),
                maths.components(n, self.components),
                reg_covar=self.reg_covar,
                seed=seed,
            )
            if not converged:
                log.warning(
                    "fedgmm: client %d, class %d: EM has not converged; its last step is used",
                    pid,
                    c,
                )
                failed += 1
        return Update(
            pid,
            self.client.num_examples,
            extras={COUNTS: counts.cpu(), MIXTURES: pack(mixtures, d)},
            metrics={"fedgmm.not_converged": float(failed)},
        )

    def share(self, msg: Broadcast) -> Update:
        """Draw what is missing of each class, once for the whole run."""
        site, pid = self.client.site, self.client.pid
        data = self._pixels()
        shape, classes = data.x.shape[1:], site.task.classes
        mixtures = unpack(msg.extras[MIXTURES], math.prod(shape), classes)
        available = torch.tensor([c in mixtures for c in range(classes)])
        global_max = msg.integer(GLOBAL_MAX) if GLOBAL_MAX in msg.extras else 0
        missing = maths.generate_counts(
            data.y.bincount(minlength=classes).cpu(), available, self.target, global_max
        )
        x = torch.empty(int(missing.sum()), math.prod(shape), dtype=torch.uint8)
        for c, part in enumerate(x.split(missing.tolist())):
            if len(part):
                draws = streams.generator(site.seed, f"fedgmm.draw.{c}", msg.phase, msg.step, pid)
                part.copy_(maths.sample(mixtures[c], len(part), draws).mul_(255).round_())
        y = torch.arange(classes, dtype=data.y.dtype).repeat_interleave(missing)
        self.client.state.put(
            KEPT, {"x": x.unflatten(1, shape), "y": y}
        )  # also where nothing is missing: it has been here
        return Update(pid, self.client.num_examples, extras={GENERATED: int(missing.sum())})

    def data(self, raw: Samples) -> Samples:
        if not self.client.msg.trains:  # the plug-in's own phases
            return raw
        kept = self.client.state.get(KEPT)
        if kept is None:
            raise ValueError(
                "it has no generated samples: phase 'fedgmm.share' has not reached it, or failed"
                " there"
            )
        kept = {name: t.to(raw.x.device) for name, t in kept.items()}
        return Samples(
            torch.cat([raw.x, kept["x"].to(raw.x.dtype).div_(255)]), torch.cat([raw.y, kept["y"]])
        )

    def sample_weights(self, data: Samples) -> Tensor | None:
        if self.gen_weight == 1:
            return None
        weights = data.x.new_full((len(data),), self.gen_weight)
        weights[: self.client.num_examples] = 1
        return weights

    def _pixels(self) -> Samples:
        """The real training samples in [0, 1], with labels that are classes."""
        site, pid = self.client.site, self.client.pid
        data = site.floating(site.task.clients[pid].train)
        low, high = (float(bound) for bound in data.x.aminmax())
        if not (low >= 0 and high <= 1):  # also where they are NaN
            raise ValueError(
                f"fedgmm models pixels in [0, 1], but those of client {pid} lie in [{low}, {high}]"
            )
        if (
            data.y.ndim != 1
            or data.y.is_floating_point()
            or not 0 <= int(data.y.min()) <= int(data.y.max()) < site.task.classes
        ):
            raise ValueError(
                f"fedgmm needs labels 0 to {site.task.classes - 1}; client {pid} has"
                f" {kind(data.y)}, from {data.y.min().item()} to {data.y.max().item()}"
            )
        return data

    # ---- server
    def setup(self) -> None:
        task = self.server.site.task
        if not task.classes:
            raise ConfigError("plugin 'fedgmm' needs a task with classes; this one has none")
        task.check_density(self.name)
        if (
            self.agg_count == "augmented"
            and self.server.base_weight(Update(0, num_examples=2)) != 2
        ):
            raise ConfigError(
                f"plugin 'fedgmm' refuses method={self.server.name} with"
                " plugin.fedgmm.agg_count=augmented: it adds drawn samples to n_k, by which this"
                " method does not weigh clients; use agg_count=original"
            )
        self._dim = None if task.test is None else math.prod(task.test.x.shape[1:])

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        if msg.phase == "fedgmm.share":
            msg.extras[MIXTURES] = self._shared
            if self.target == "global_max":
                msg.extras[GLOBAL_MAX] = self._global_max
        if msg.trains:
            msg.local = replace(msg.local, lr=msg.local.lr * (1 - self.psi) ** (msg.step - 1))

    def _check_fit(self, update: Update) -> None:
        counts, mixtures = self._received(update)
        for c, n in enumerate(counts):
            if (n >= self.min_class_samples) != (c in mixtures):
                raise ValueError(
                    f"extra {MIXTURES!r}, class {c}: {n} samples and"
                    f" {'a' if c in mixtures else 'no'} mixture; one is expected exactly from"
                    f" min_class_samples={self.min_class_samples} samples on"
                )
            if c in mixtures and len(mixtures[c].pi) > maths.components(n, self.components):
                raise ValueError(
                    f"extra {MIXTURES!r}, class {c}: {len(mixtures[c].pi)} components of {n}"
                    f" samples; at most {maths.components(n, self.components)} are expected"
                )
        if mixtures and self._dim is None:
            self._dim = next(iter(mixtures.values())).mu.shape[1]

    def _check_share(self, update: Update) -> None:
        update.integer(GENERATED)

    def _received(self, update: Update) -> tuple[list[int], dict[int, Mixture]]:
        classes = self.server.site.task.classes
        counts = update.counts(COUNTS, update.num_examples, classes)
        return counts.tolist(), unpack(update.extras.get(MIXTURES), self._dim, classes)

    def _aggregate(self, updates: Iterator[Update], old: Tree) -> Tree:
        """Concatenation in the order of client ids, whatever that of the cohort."""
        found = {update.pid: self._received(update) for update in updates}
        pids, classes = sorted(found), range(self.server.site.task.classes)
        mixtures: dict[int, Mixture] = {}
        for c in classes:
            pooled = maths.aggregate(
                [found[pid][0][c] for pid in pids], [found[pid][1].get(c) for pid in pids]
            )
            if pooled is not None:
                mixtures[c] = (
                    pooled
                    if self.max_components is None
                    else maths.reduce(pooled, self.max_components)
                )
        counts = torch.tensor([found[pid][0] for pid in pids])
        self._shared, self._global_max = pack(mixtures, self._dim or 0), int(counts.max())
        if absent := [c for c in classes if c not in mixtures]:
            log.warning(
                "fedgmm: no client has a mixture of the classes %s; nothing is generated for them",
                absent,
            )
        thin = ((counts >= self.min_class_samples) & (counts < 10 * self.components)).sum().item()
        if thin:
            log.warning(
                "fedgmm: privacy: %d of the %d mixtures are fitted to fewer than %d samples; their"
                " components may be near-copies of images",
                thin,
                sum(len(own) for _, own in found.values()),
                10 * self.components,
            )
        size = self._afford(
            "the mixtures of all clients", len(self._shared["label"]), self._dim or 0
        )
        log.info("fedgmm: %d components, %.1f MB to each client", len(self._shared["label"]), size)
        self.report = {
            "counts": counts,
            "pids": torch.tensor(pids),
            "components": len(self._shared["label"]),
            "thin": thin,
            "megabytes": size,
            "absent": len(absent),
        }
        return {}

    def _shared_all(self, updates: Iterator[Update], old: Tree) -> Tree:
        self._generated = {update.pid: int(update.scalar(GENERATED)) for update in updates}
        self._shared = {}
        self.report = {"generated": sum(self._generated.values())}
        return {}

    def _afford(self, what: str, k: int, d: int) -> float:
        """MB of k components; RunFailed above max_payload_mb."""
        size = k * (8 + 4 * (2 * d + 1)) / MB
        if size > self.max_payload_mb:
            raise RunFailed(
                f"fedgmm: {what} are {k} components of {d} pixels, {size:.1f} MB, above"
                f" plugin.fedgmm.max_payload_mb={self.max_payload_mb:g}; use fewer components,"
                " max_components, or smaller images"
            )
        return size

    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        return updates if self.agg_count == "original" else map(self._scaled, updates)

    def _scaled(self, update: Update) -> Update:
        update.weight *= 1 + self._generated.get(update.pid, 0) / update.num_examples
        return update


class FedGMMClient(FedClient):
    """Plain FedAvg training; the plug-in adds the samples."""


class FedGMM(FedStrategy):
    """FedAvg with the plug-in above (conf/method/fedgmm.yaml lists it)."""

    name = "fedgmm"
    client_cls = FedGMMClient
    requires = "fedgmm"
