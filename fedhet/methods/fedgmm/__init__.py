"""FedGMM: missing classes filled from mixtures that clients share (Nagaraju, Sen and Mohan).

Nagaraju, Sen and Mohan, "Handling data heterogeneity in federated learning with global data
distribution". FedGMM is a plug-in for any base method. Once, before the training, each client
shares a mixture of Gaussians for each of its classes. Then it draws the samples that it lacks from
the mixtures of all clients.

    p_ic   = sum_k pi_ick N(mu_ick, diag var_ick)            (section 4.1)
    p_c    = sum_i n_ic p_ic / sum_i n_ic                    (algorithm 1, line 1)
    T_i    = max_c n_ic                                      (algorithm 1, line 3)
    gen_ic = max(0, T_i - n_ic)                              (algorithm 1, line 3)
    lr    <- (1 - psi) lr, after each round                  (algorithm 1, line 8)

Client i fits p_ic by EM to its n_ic samples of class c, with pixels in [0, 1]. p_c has the
components of all clients, with the weights n_ic pi_ick / sum_i n_ic. Client i draws gen_ic samples
of class c.

    fit    down: nothing
           up: `fedgmm.counts` (C,), `fedgmm.mixtures`: label (K,), pi (K,), mu (K, d), var (K, d)
    share  down: `fedgmm.mixtures` of all clients; with target=global_max also `fedgmm.global_max`
           up: `fedgmm.generated`, as it follows from `fedgmm.counts`
    train  down: what the base method sends
           up: what the base method sends

    client keeps: its generated samples
    server keeps: the mixtures until it has shared them, then how many samples each client drew

Deviations and choices:
- The paper does not define how to "aggregate" mixtures. Here the server concatenates them, which
  gives the density of the pooled samples. An average of component k over clients would have no
  meaning, because the order of components is arbitrary.
- `num_examples`, and so p_i = N_i / sum N, counts the real samples. `agg_count=augmented` also
  counts the generated samples.
- A client keeps its generated samples as uint8. They take a quarter of the memory of float32, and a
  pixel changes by at most 1/510. The client does not keep the mixtures to draw anew, because their
  size grows with the number of clients.
- The paper also decays the learning rate of its baselines FedAvg and FedProx by psi. Here psi is an
  option of FedGMM, and other methods have a constant rate by default. To compare as the paper does,
  set `client.lr_decay=0.98` for all three methods: `client.lr_decay` and 1 - psi do not multiply,
  but the smaller of them applies.
- The paper claims privacy without analysis. With few samples, components are copies of images.
  Therefore a class with fewer than `privacy.min_count` samples has no mixture, and the client sends
  its count as 0. If a mixture has several components, each has at least four times
  `privacy.min_count` samples. To reach this, EM starts with fewer components, and components that
  are too small in the end are merged with the closest component. Merging keeps the mean and the
  variance of the class. The client also sends how many samples it drew, for
  `agg_count=augmented`. This number follows from the counts that the client has sent. With
  `privacy.min_count=0`, the paper's method, a warning counts thin mixtures.

Defaults: 5 components and `psi = .02` are the paper's. The paper's momentum .9, weight decay, batch
size 128 and one local epoch are settings of the client (conf/client).

mixtures.py defines the form in which mixtures travel, and gaussians.py has the equations.
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
from fedhet.core.counts import suppressed
from fedhet.core.trees import kind
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgmm import gaussians
from fedhet.methods.fedgmm.mixtures import (
    MIXTURES,
    checked_size,
    content,
    counts_in,
    mixtures_in,
    pack,
    unpack,
)

COUNTS = "fedgmm.counts"  # the extra's name in messages
# Each of several components of a class has at least so many times privacy.min_count samples. With
# fewer, the distance to a component distinguishes training samples from other samples
# (docs/promises_measured.md).
PER_COMPONENT = 4


def weights(params: AnyTree, batch: None, own: Tree) -> Tensor:
    """Return 1 for each real sample and gen_weight for each generated sample, (n,)."""
    return own["weights"]


@dataclass(frozen=True, kw_only=True)
class FedGMMPlugin(Plugin):
    """Adds the phases `fit` and `share` with all clients, then trains on generated samples, too.

    The server's state has
    - "mixtures", the packed mixtures of all clients, until it has shared them;
    - "global_max", the size of the largest class of any client;
    - "counts", client -> number of samples by class, until the clients have drawn samples;
    - "generated", client -> how many samples it drew;
    - "lr_decay", the run's setting.

    A client's state is "samples": x (m, ...) uint8 and y (m,).
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
            check.one_of("plugin.fedgmm.target", self.target, gaussians.TARGETS)
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
        """Fit a mixture to each class with enough samples, and send the mixtures.

        A class needs at least `workspace.min_count` samples. If a mixture has several components,
        each has at least PER_COMPONENT times as many samples: EM starts with few enough components,
        and components that are smaller in the end are merged with other components.
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
        limits.check_array(name, max(n, 2 * d), k, width=8)  # (n, k) in EM; mu and var (k, d) each
        if workspace.noise:
            limits.check_array(name, classes, self.components, d)
        checked_size("this client", sum(components.values()), d, self.max_payload_mb)
        mixtures: dict[int, gaussians.Mixture] = {}
        not_converged = 0
        for c, k in components.items():
            x = data.x[data.y == c].flatten(1)
            seed = streams.integer(
                workspace.seed, f"fedgmm.em.{c}", "fedgmm.fit", msg.step, msg.pid
            )
            mixture, converged = gaussians.fit(x, k, reg_covar=self.reg_covar, seed=seed)
            # A component has n pi samples, up to rounding.
            least = fewest * (1 - 1e-6) / len(x)
            mixtures[c] = gaussians.reduce(mixture, k, least) if fewest else mixture
            if not converged:
                not_converged += 1
                log.warning(
                    "fedgmm: client %d, class %d: EM has not converged; the client sends the"
                    " mixture of EM's last step",
                    msg.pid,
                    c,
                )
        sent: Extras = {"counts": counts, "mixtures": pack(mixtures, d)}
        if workspace.noise:
            sent["counts"], sent["mixtures"] = content(counts, mixtures, self.components, d)
        return Result(extras=sent, metrics={"fedgmm.not_converged": float(not_converged)}), state

    def _pool(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Merge the phase `fit`: concatenate the clients' mixtures of each class.

        The mixtures are in the order of client ids, whatever the order of the replies.
        """
        workspace = step.workspace
        replies = sorted(updates, key=lambda update: update.pid)
        counts = torch.tensor([update["counts"].tolist() for update in replies])
        mixtures = [self._unpacked(workspace, update["mixtures"]) for update in replies]
        pooled: dict[int, gaussians.Mixture] = {}
        for c in range(workspace.task.classes):
            of_class = [sent.get(c) for sent in mixtures]
            if (mixture := gaussians.aggregate(counts[:, c].tolist(), of_class)) is not None:
                pooled[c] = gaussians.reduce(mixture, self.max_components or len(mixture.pi))
        if absent := [c for c in range(workspace.task.classes) if c not in pooled]:
            log.warning(
                "fedgmm: no client has a mixture of the classes %s; no samples of these classes are"
                " generated",
                absent,
            )
        shares = [
            int(own[c]) / len(mixture.pi)
            for own, sent in zip(counts, mixtures, strict=True)
            for c, mixture in sent.items()
        ]
        thin = sum(share < 10 for share in shares)
        if thin and workspace.min_count < 5:  # a component may have only two samples
            log.warning(
                "fedgmm: privacy: %d of %s have fewer than 10 samples per component; with"
                " privacy.min_count=%d their components may be near-copies of images",
                thin,
                check.counted(len(shares), "mixture"),
                workspace.min_count,
            )
        d = _pixels_of(workspace)
        packed = pack(pooled, d)
        components = len(packed["label"])
        megabytes = checked_size("all clients", components, d, self.max_payload_mb)
        log.info(
            "fedgmm: %s, %.1f MB to each client", check.counted(components, "component"), megabytes
        )
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

    def _unpacked(self, workspace: Workspace, tree: Tree) -> dict[int, gaussians.Mixture]:
        return unpack(tree, _pixels_of(workspace), workspace.task.classes, self.reg_covar)

    def _check_mixtures(self, workspace: Workspace, tree: Tree, update: messages.Upload) -> None:
        """Refuse missing mixtures, and mixtures with too many components.

        Raises:
            ValueError: a class with enough samples has no mixture, or a class has more components
                than its number of samples allows.
        """
        mixtures = self._unpacked(workspace, tree)
        for c, n in enumerate(update.whole(COUNTS).tolist()):
            enough = n >= self.min_class_samples
            most = gaussians.components(n, self.components) if enough else 0
            k = len(mixtures[c].pi) if c in mixtures else 0
            if not min(1, most) <= k <= most:
                raise ValueError(
                    f"extra {MIXTURES!r}, class {c}: {check.counted(k, 'component')} of"
                    f" {check.counted(n, 'sample')}; expected: at least {min(1, most)}, at most"
                    f" {most}, because a class with at least"
                    f" min_class_samples={self.min_class_samples} samples has a mixture"
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
        # `total` follows from the exact counts. The client reports the number that follows from the
        # suppressed counts, which it has sent, so that the number reveals nothing more.
        reported = int(lacking(suppressed(counts, workspace.min_count)).sum())
        sent: Extras = {} if workspace.noise else {"generated": reported}
        # The state is set even if no samples are missing: it shows `data` that `share` is done.
        return Result(extras=sent), {"samples": {"x": x.unflatten(1, shape), "y": y}}

    def _lacking(self, classes: Collection[int], global_max: int, counts: Tensor) -> Tensor:
        """Return how many samples of each class a client with these counts draws.

        Args:
            classes: the classes with a mixture.
            global_max: the size of the largest class of any client.
            counts: (C,) the client's samples by class.
        """
        available = torch.tensor([c in classes for c in range(len(counts))])
        return gaussians.generate_counts(counts, available, self.target, global_max)

    def _generated(self, state: State, pid: int) -> int | None:
        """Return how many samples a client drew, by the counts that it has sent.

        Return None if the server has not accepted the client's counts. It then ignores the number
        that the client reports.
        """
        if pid not in state["counts"]:
            return None
        classes = state["mixtures"]["label"].tolist()
        counts = torch.tensor(state["counts"][pid])
        return int(self._lacking(classes, state["global_max"], counts).sum())

    def _note(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Merge the phase `share`: note how many samples each client drew; drop the mixtures."""
        after = {**state, "mixtures": {}, "counts": {}}
        if step.workspace.noise:  # clients do not send how many
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
        # The rate already includes client.lr_decay. The stronger of the two decays applies.
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
    """Return the number of pixels of a sample."""
    return math.prod(workspace.task.inputs.shape[1:])


def _unit(ctx: ClientContext, pid: int) -> Samples:
    """Return the real training samples, with inputs in [0, 1].

    Raises:
        ValueError: the inputs are not in [0, 1], or the labels are not classes.
    """
    data, classes = ctx.workspace.unit(pid), ctx.workspace.task.classes
    first, last = (bound.item() for bound in data.y.aminmax())
    if data.y.ndim != 1 or data.y.is_floating_point() or first < 0 or last >= classes:
        raise ValueError(
            f"client {pid} has labels from {first} to {last} ({kind(data.y)}); fedgmm needs one"
            f" whole number per sample, from 0 to {classes - 1}"
        )
    return data


@dataclass(frozen=True, kw_only=True)
class FedGMM(FedAvg):
    """FedAvg with the plug-in `fedgmm`."""

    name = "fedgmm"
    requires = FedGMMPlugin
