"""The cost of each method, compared with its base method plus the method's own arithmetic."""

from __future__ import annotations

from harness import Cell, Goal

GENERATED_PER_CLASS = 60  # FedGMM's target
SERVER_STEPS = 50  # FedGen's steps on its generator in each round
SLACK = 1.15  # a method may take so many base rounds plus its own arithmetic

# The arithmetic that a method adds to its base method: as a fraction of the base method's round,
# and in words. It was timed once, as plain torch in the floor's loop. A plug-in of the same name is
# the same code. Without batch norm FedBN is FedAvg, so both run on a model with batch norm. The
# values of FedDyn, FedRep and FedProto are estimates; nobody has timed them yet.
OF_AN_OPTIMIZER = (0.0, "at most twelve operations per parameter and round in float64")
OWN_ARITHMETIC: dict[str, tuple[float, str]] = {
    "fedbabu": (0.0, "it sends less"),
    "local": (0.0, "it sends nothing"),
    "pooled": (0.1, "one client's steps on the samples of all of them, which are copied"),
    "fednova": (0.0, "a few numbers per client"),
    "fedsgd": (0.0, "one gradient instead of 60 steps"),
    "fedprox": (0.19, "g += mu (w - x) in each step"),
    "fedlex": (0.08, "g *= G in each step"),
    "sgdm": (0.14, "d = gamma d + g in each step, and a second mean, over d"),
    "scaffold": (
        0.09,
        "g += c - c_i in each step; the work of five means: each client's new control, its old one"
        " recovered, two more sums",
    ),
    "feddyn": (0.28, "g += alpha (w - x) - g_k in each step; two sums, and each client's new g_k"),
    "fedrep": (2.0, "ten epochs of the last layer before the epochs of the body; no head is sent"),
    "fedproto": (
        1.0,
        "class means of each batch's features and their distances; an inference pass over each"
        " client's data",
    ),
    "feddisk": (0.04, "a weight for each sample in each step"),
    "feddiskab": (0.04, "a weight for each sample in each step"),
    "fedgmm": (0.7, f"steps on generated samples, {GENERATED_PER_CLASS} of each missing class"),
    "fednorm": (0.1, "one inference pass over each client's data"),
    "fedsa": (0.03, "five times the mean of the same trees (its goal in the cell 'server')"),
    "moon": (1.06, "two more forward passes in each step, and the contrast of the features"),
    "fedntd": (0.7, "one more forward pass in each step, and the distillation"),
    "fedrod": (0.47, "the balanced softmax, and a step of the personal head with each step"),
    "ditto": (1.17, "a second training, with g += lam (v - x) in each step"),
    "fedbn": (0.0, "it sends less"),
    "fedala": (
        0.54,
        "a pass over 80 % of the samples in separate steps: the gradient of the last layer, and the"
        " mixing of that layer",
    ),
    "fedgen": (
        1.51,
        "the loss of a generated batch in each step;"
        f" {SERVER_STEPS} steps on the generator in each round",
    ),
    "fedpcl": (
        1.61,
        "contrasts of features instead of the cross entropy, clipping; an inference pass over each"
        " client's data",
    ),
    **dict.fromkeys(("fedavgm", "fedadam", "fedyogi", "fedadagrad"), OF_AN_OPTIMIZER),
}
# Phases before the training are kept short, because only the training rounds are compared.
SHORT_PHASES = {
    "fedlex": ["plugin.fedlex.c_exp=2", "plugin.fedlex.e_exp=1"],
    "fedgmm": [f"plugin.fedgmm.target={GENERATED_PER_CLASS}", "plugin.fedgmm.components=1"],
    "feddisk": [
        "plugin.feddisk.made_max_rounds=1",
        "plugin.feddisk.local_max_epochs=1",
        "plugin.feddisk.clf_max_epochs=1",
    ],
    "feddiskab": ["plugin.feddisk.clf_max_epochs=1"],
    "fedgen": [f"method.server_steps={SERVER_STEPS}"],
}


def _command(method: str, workload: str = "W1") -> list[str]:
    """Return the command for a method on the first ten clients, with five timed rounds.

    All ten clients take part in every round, so that every timed round uses their states. FedALA's
    first learning lasts until its loss settles. It is in the first of these rounds, so that
    FedALA's best round is a usual round.
    """
    options = ["rounds=6", f"method={method}", *SHORT_PHASES.get(method, [])]
    return ["fedhet_system.py", "same", workload, *options]


METHODS = Cell(
    "Training rounds of each method relative to FedAvg's, on W1's model and ten clients.",
    {
        "floor": ["floor.py", "rounds", "W1"],
        **{name: _command(name) for name in ("fedavg", *OWN_ARITHMETIC) if name != "fedbn"},
        **{f"{name}, batch norm": _command(name, "W1-norm") for name in ("fedavg", "fedbn")},
    },
    [
        Goal(
            f"{name}, best; own arithmetic {own:.2f}: {words}",
            lambda systems, name=name, model=", batch norm" if name == "fedbn" else "": (
                systems[name + model].value("best") / systems["fedavg" + model].value("best")
            ),
            SLACK + own,
        )
        for name, (own, words) in OWN_ARITHMETIC.items()
    ],
)
