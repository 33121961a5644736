"""FedGMM: missing classes filled from mixtures that clients share (Nagaraju, Sen and Mohan).

Nagaraju, Sen and Mohan, "Handling data heterogeneity in federated learning with global data
distribution". A plug-in for any host: once, before the training, clients share a mixture of
Gaussians of each class, and draw from everyone's mixtures the samples that they lack.

    p_ic   = sum_k pi_ick N(mu_ick, diag var_ick)            (section 4.1)
    p_c    = sum_i n_ic p_ic / sum_i n_ic                    (algorithm 1, line 1)
    T_i    = max_c n_ic                                      (algorithm 1, line 3)
    gen_ic = max(0, T_i - n_ic)                              (algorithm 1, line 3)
    lr    <- (1 - psi) lr, after each round                  (algorithm 1, line 8)

p_ic is fitted by EM to client i's n_ic samples of class c, with pixels in [0, 1]. p_c has all
components, with the weights n_ic pi_ick / sum_i n_ic. Client i draws gen_ic samples of class c.

    fit    down: nothing
           up: `fedgmm.counts` (C,), `fedgmm.mixtures`: label (K,), pi (K,), mu (K, d), var (K, d)
    share  down: `fedgmm.mixtures` of all clients, `fedgmm.global_max` where it is the target
           up: `fedgmm.generated`, as it follows from `fedgmm.counts`
    train  down: x
           up: w_k, n_k

    client keeps: its generated samples
    server keeps: the mixtures until they are shared, then how many samples each client drew

Deviations and choices:
- The paper does not define how mixtures are "aggregated". Concatenation is the density of the
  pooled samples. Averaging component k over clients would mean nothing, since the labels of
  components are arbitrary.
- `num_examples`, and so p_i = N_i / sum N, counts the real samples; `agg_count=augmented` counts
  the generated ones too.
- A client keeps its samples as uint8, which takes a quarter of the memory of what it trains on and
  moves a pixel by 1/510 at most. It does not keep the mixtures to draw anew, because their size
  grows with the number of clients.
- The paper decays the learning rate of FedAvg and FedProx, its baselines, in the same way. Here psi
  is FedGMM's, and other methods have a constant rate by default, so a comparison by the defaults is
  not the paper's. `client.lr_decay=0.98` is, for all three: `client.lr_decay` and 1 - psi do not
  multiply; the smaller of the two applies.
- The paper claims privacy without analysis. With few samples, components are copies of images. So a
  class of fewer than `privacy.min_count` samples has no mixture, and no component of several has
  fewer than four times as many: EM gets fewer components, and those that are smaller in the end are
  merged with the closest one, which keeps the mean and the variance of the class. Its count is sent
  as 0, and the number of samples that it says it drew, which `agg_count=augmented` uses, follows
  from the counts that it has sent. With `privacy.min_count=0`, the paper's method, a warning
  names thin mixtures.

Defaults: 5 components and `psi = .02` are the paper's. Its momentum .9, weight decay, batch size
128 and one local epoch are settings of the client (conf/client).

mixtures.py has the form in which mixtures travel, and gaussians.py the equations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedhet.core import check, messages, streams
from fedhet.core.authors import (
    AnyTree,
    ClientContext,
    Expected,
    Extras,
    LocalSettings,
    Merged,
    Message,
    Phase,
    Plugin,
    Recorded,
    Result,
    RunSetup,
    Samples,
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
from fedhet.core.check import counted
from fedhet.core.counts import suppressed
from fedhet.core.trees import kind
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgmm import gaussians
from fedhet.methods.fedgmm.gaussians import TARGETS, Mixture
from fedhet.methods.fedgmm.mixtures import (
    MIXTURES,
    checked_size,
    content,
    counts_in,
    mixtures_in,
    pack,
    unpack,
)

COUNTS = "fedgmm.counts"  # as the extra is named in messages
# A class of many samples has so many times privacy.min_count behind each component: with fewer, the
# distance to a component distinguishes training samples from others (docs/promises_measured.md).
PER_COMPONENT = 4


def weights(params: AnyTree, batch: None, own: Tree) -> Tensor:
    """1 for each real sample and gen_weight for each generated one, (n,)."""
    return own["weights"]


@dataclass(frozen=True, kw_only=True)
class FedGMMPlugin(Plugin):
    """The phases `fit` and `share`, once each and with everyone, then training on more samples.

    The server's state is "mixtures", the packed ones of all clients, until they are shared;
    "global_max", the largest class of any client; "counts", client -> samples by class, until it
    has drawn; "generated", client -> how many samples it drew; and "lr_decay" of the run. That of a
    client is "samples": x (m, ...) uint8 and y (m,).
    """

    name = "fedgmm"

    components: int = setting(5, low=1)
    reg_covar: float = setting(1e-6, open_low=0)
    psi: float = setting(0.02, low=0, open_high=1)
    target: str | int = "client_max"
    min_class_samples: int = setting(2, low=1)
    max_components: int | None = setting(None, low=1)
    agg_count: str = setting("original", allowed=("original", "augmented"))
    gen_weight: float = setting(1.0, low=0)
    max_payload_mb: float = setting(1000.0, open_low=0)

    def __post_init__(self) -> None:
        if isinstance(self.target, str):
            check.one_of("plugin.fedgmm.target", self.target, TARGETS)
        else:
            check.integer("plugin.fedgmm.target", self.target, low=0)
        super().__post_init__()

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            ("used weights", "sample weights") if self.agg_count == "augmented" else ()
        )

    @property
    def breaks(self) -> Mapping[str, str]:
        exact = {"noise": "agg_count=augmented needs exact counts; use original"}
        return exact if self.needs else {}

    # ---- phase "fit"
    @serves
    def fit(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Fit one mixture to each class of which the client has enough samples, and send them.

        A class has at least `workspace.min_count` samples, and a component PER_COMPONENT times
        as many, unless it is the only one of its class: EM starts with fewer components, and those
        that are smaller in the end are merged with others.
        """
        workspace, data = ctx.workspace, _unit(ctx, msg.pid)
        classes, d = workspace.task.classes, math.prod(data.x.shape[1:])
        counts = suppressed(data.y.bincount(minlength=classes).cpu(), workspace.min_count)
        fewest = PER_COMPONENT * workspace.min_count
        components = {
            c: gaussians.components(n, self.components, fewest)
            for c, n in enumerate(counts.tolist())
            if n >= self.min_class_samples
        }
        n, k = int(counts.max()), max(components.values(), default=0)
        limits, name = workspace.limits, f"plugin.fedgmm.components={self.components}"
        limits.check_array(name, max(n, 2 * d), k, width=8)  # of samples, and of components
        if workspace.noise:
            limits.check_array(name, classes, self.components, d)
        checked_size("this client", sum(components.values()), d, self.max_payload_mb)
        mixtures: dict[int, Mixture] = {}
        not_converged = 0
        for c, k in components.items():
            x = data.x[data.y == c].flatten(1)
            seed = streams.integer(
                workspace.seed, f"fedgmm.em.{c}", "fedgmm.fit", msg.step, msg.pid
            )
            mixture, converged = gaussians.fit(x, k, reg_covar=self.reg_covar, seed=seed)
            # A component's samples are n pi, up to rounding.
            least = fewest * (1 - 1e-6) / len(x)
            mixtures[c] = gaussians.reduce(mixture, k, least) if fewest else mixture
            if not converged:
                not_converged += 1
                log.warning(
                    "fedgmm: client %d, class %d: EM has not converged; the mixture of its last"
                    " step is used",
                    msg.pid,
                    c,
                )
        sent: Extras = {"counts": counts, "mixtures": pack(mixtures, d)}
        if workspace.noise:
            sent["counts"], sent["mixtures"] = content(counts, mixtures, self.components, d)
        return Result(extras=sent, metrics={"fedgmm.not_converged": float(not_converged)}), state

    def _pool(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """The merge of `fit`: concatenate the clients' mixtures of each class.

        They are in the order of client ids, whatever that of the cohort.
        """
        workspace = step.workspace
        replies = sorted(updates, key=lambda update: update.pid)
        counts = torch.tensor([update["counts"].tolist() for update in replies])
        mixtures = [self._unpacked(workspace, update["mixtures"]) for update in replies]
        pooled: dict[int, Mixture] = {}
        for c in range(workspace.task.classes):
            of_class = [sent.get(c) for sent in mixtures]
            if (mixture := gaussians.aggregate(counts[:, c].tolist(), of_class)) is not None:
                pooled[c] = gaussians.reduce(mixture, self.max_components or len(mixture.pi))
        if absent := [c for c in range(workspace.task.classes) if c not in pooled]:
            log.warning(
                "fedgmm: no client has a mixture of the classes %s; nothing is generated for them",
                absent,
            )
        shares = [
            int(own[c]) / len(mixture.pi)
            for own, sent in zip(counts, mixtures, strict=True)
            for c, mixture in sent.items()
        ]
        thin = sum(share < 10 for share in shares)
        if thin and workspace.min_count < 5:  # components may be of two samples
            log.warning(
                "fedgmm: privacy: %d of %s have fewer than 10 samples per component; with"
                " privacy.min_count=%d their components may be near-copies of images",
                thin,
                counted(len(shares), "mixture"),
                workspace.min_count,
            )
        d = _pixels_of(workspace)
        packed = pack(pooled, d)
        components = len(packed["label"])
        megabytes = checked_size("all clients", components, d, self.max_payload_mb)
        log.info("fedgmm: %s, %.1f MB to each client", counted(components, "component"), megabytes)
        pids = [update.pid for update in replies]
        after = {
            "mixtures": packed,
            "global_max": int(counts.max()),
            "counts": dict(zip(pids, counts.tolist(), strict=True)),
        }
        recorded: Recorded = {
            "counts": counts,
            "pids": torch.tensor(pids),
            "components": components,
            "thin": thin,
            "megabytes": megabytes,
            "absent": len(absent),
        }
        return Merged({}, {**state, **after}, recorded)

    def _unpacked(self, workspace: Workspace, tree: Tree) -> dict[int, Mixture]:
        return unpack(tree, _pixels_of(workspace), workspace.task.classes, self.reg_covar)

    def _check_mixtures(self, workspace: Workspace, tree: Tree, update: messages.Upload) -> None:
        """Every class with enough samples has a mixture, of no more components than it may have."""
        mixtures = self._unpacked(workspace, tree)
        for c, n in enumerate(update.whole(COUNTS).tolist()):
            enough = n >= self.min_class_samples
            most = gaussians.components(n, self.components) if enough else 0
            k = len(mixtures[c].pi) if c in mixtures else 0
            if not min(1, most) <= k <= most:
                raise ValueError(
                    f"extra {MIXTURES!r}, class {c}: {counted(k, 'component')} of"
                    f" {counted(n, 'sample')}; expected: at least {min(1, most)}, at most {most},"
                    f" since a class of min_class_samples={self.min_class_samples} has a mixture"
                )

    # ---- phase "share"
    @serves
    def share(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Draw the samples that this client lacks of each class, once for the whole run."""
        workspace, data = ctx.workspace, _unit(ctx, msg.pid)
        classes, shape = workspace.task.classes, data.x.shape[1:]
        d = math.prod(shape)
        mixtures = unpack(msg["mixtures"], d, classes, self.reg_covar)
        largest = int(msg["global_max"]) if "global_max" in msg else 0
        lacking = partial(self._lacking, mixtures, largest)
        counts = data.y.bincount(minlength=classes).cpu()
        missing = lacking(counts)
        total = int(missing.sum())
        workspace.limits.check_array(f"plugin.fedgmm.target={self.target}", total, d)
        x = torch.empty(total, d, dtype=torch.uint8)
        for c, part in enumerate(x.split(missing.tolist())):
            if len(part):
                draws = streams.generator(
                    workspace.seed, f"fedgmm.draw.{c}", "fedgmm.share", msg.step, msg.pid
                )
                part.copy_(gaussians.sample(mixtures[c], len(part), draws).mul_(255).round_())
        y = torch.arange(classes, dtype=data.y.dtype).repeat_interleave(missing)
        # How many it lacks follows from its exact counts: it sends what follows from those that it
        # has sent.
        said = int(lacking(suppressed(counts, workspace.min_count)).sum())
        sent: Extras = {} if workspace.noise else {"generated": said}
        # Also where nothing is missing: the state shows that the phase has been here.
        return Result(extras=sent), {"samples": {"x": x.unflatten(1, shape), "y": y}}

    def _lacking(self, classes: Collection[int], global_max: int, counts: Tensor) -> Tensor:
        """How many samples of each class a client with these counts draws, from these classes."""
        available = torch.tensor([c in classes for c in range(len(counts))])
        return gaussians.generate_counts(counts, available, self.target, global_max)

    def _generated(self, state: State, pid: int) -> int | None:
        """How many samples a client drew, by the counts that it has sent.

        Where its counts were not accepted, nothing follows, and the number is not used.
        """
        if pid not in state["counts"]:
            return None
        classes = state["mixtures"]["label"].tolist()
        counts = torch.tensor(state["counts"][pid])
        return int(self._lacking(classes, state["global_max"], counts).sum())

    def _note(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """The merge of `share`: note how many samples each client drew, and drop the mixtures."""
        after = {**state, "mixtures": {}, "counts": {}}
        if step.workspace.noise:  # then no client sends how many
            return Merged({}, after)
        known = [update for update in updates if update.pid in state["counts"]]
        after["generated"] = {update.pid: int(update["generated"]) for update in known}
        return Merged({}, after, {"generated": sum(after["generated"].values())})

    # ---- server
    def setup(self, setup: RunSetup) -> State:
        task = setup.workspace.task
        task.check_classes("plugin 'fedgmm'")
        task.check_density(self.name)
        empty = {"mixtures": {}, "global_max": 0, "counts": {}, "generated": {}}
        return {**empty, "lr_decay": setup.lr_decay}

    def phases(self, setup: RunSetup) -> list[Phase]:
        return [
            Phase("fit", 1, self._pool, slot="", cohort=1.0),
            Phase("share", 1, self._note, slot="", cohort=1.0),
        ]

    def broadcast(self, step: Step, state: State) -> Extras:
        if step.phase != "share":
            return {}
        largest = {"global_max": state["global_max"]} if self.target == "global_max" else {}
        return {"mixtures": state["mixtures"], **largest}

    def expects(self, step: Step) -> dict[str, Expected]:
        workspace = step.workspace
        classes, noise = workspace.task.classes, workspace.noise
        if step.phase == "fit":
            least = 0 if noise else workspace.min_count
            counts = Expected(
                shape=(classes,),
                whole=True,
                check=lambda _, update: update.counts(COUNTS, update.num_examples, classes, least),
                repair=lambda shares, update: counts_in(shares.cpu(), update.num_examples),
            )
            mixtures = Expected(
                tree=True,
                check=partial(self._check_mixtures, workspace),
                repair=lambda tree, update: mixtures_in(
                    tree, update.whole(COUNTS), self.min_class_samples, self.reg_covar
                ),
            )
            return {"counts": counts, "mixtures": mixtures}
        if step.phase == "share" and not noise:
            return {"generated": Expected(whole=True, exactly=partial(self._generated, step.state))}
        return {}

    def local(self, step: Step, local: LocalSettings) -> LocalSettings:  # algorithm 1, line 8
        # The rate has client.lr_decay in it already; of the two decays the stronger applies.
        decay = min(1.0, (1 - self.psi) / step.state["lr_decay"])
        return replace(local, lr=local.lr * decay ** (step.number - 1))

    def weight(self, step: Step, state: State, update: Update) -> float:
        if self.agg_count == "original":
            return update.weight
        return update.weight * (1 + state["generated"].get(update.pid, 0) / update.n)

    # ---- client
    def data(self, samples: Samples, state: State) -> Samples:
        generated = state.get("samples")
        if generated is None:
            raise ValueError(
                "the client has no generated samples: phase 'fedgmm.share' has not reached it, or"
                " failed there"
            )
        x = generated["x"].to(samples.x.device).to(samples.x.dtype).div_(255)
        y = generated["y"].to(samples.x.device)
        return Samples(torch.cat([samples.x, x]), torch.cat([samples.y, y]))

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if self.gen_weight == 1:
            return []
        factors = ctx.data.x.new_full((len(ctx.data),), self.gen_weight)
        factors[: len(ctx.own)] = 1
        return [Term("weight", weights, {"weights": factors})]


def _pixels_of(workspace: Workspace) -> int:
    """The number of pixels of a sample."""
    return math.prod(workspace.task.inputs.shape[1:])


def _unit(ctx: ClientContext, pid: int) -> Samples:
    """The real training samples, with inputs in [0, 1].

    Raises:
        ValueError: the inputs are others, or the labels are not classes.
    """
    data, classes = ctx.workspace.unit(pid), ctx.workspace.task.classes
    first, last = (bound.item() for bound in data.y.aminmax())
    if data.y.ndim != 1 or data.y.is_floating_point() or first < 0 or last >= classes:
        raise ValueError(
            f"fedgmm needs labels 0 to {classes - 1}; client {pid} has {kind(data.y)} with others"
        )
    return data


@dataclass(frozen=True, kw_only=True)
class FedGMM(FedAvg):
    """FedAvg with the plug-in `fedgmm`."""

    name = "fedgmm"
    requires = FedGMMPlugin
