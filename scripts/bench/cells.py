"""The cells (parts) of the benchmark: the systems to run, and the goals for their figures.

docs/performance.md has the results. "best" compares the best single rounds, because a busy machine
disturbs these least. "median" compares the medians of the repetitions' medians. Both sides of every
ratio come from the same alternating run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from harness import Cell, Goal, Systems
from method_cells import METHODS, OWN_ARITHMETIC

COHORT = 10  # clients in each round of W1 and W2
STATEFUL = ("fedala", "ditto", "moon")  # methods that keep a model in each client's state
DIGITS = ["fedavg", *OWN_ARITHMETIC]
NINE = [  # runs of the leaderboard
    "axes.method=[FedAvg,SGDM,FedNova]",
    'axes.setting=["digits, Dirichlet 0.1"]',
    "seed=0,1,2",
    "client.lr=0.1",
    "tune.budget=1",
    "tune.seeds=[1000]",
]
SCHEMES = ("iid", "dirichlet", "pathological", "shards", "quantity", "natural")
Measured = Callable[[Systems], float]


def _of(system: str, key: str, divisor: float = 1) -> Measured:
    return lambda systems: systems[system].value(key) / divisor


def _ratio(one: str, other: str, key: str = "best") -> Measured:
    return lambda systems: systems[one].value(key) / systems[other].value(key)


def _rate(sweep: str) -> Measured:
    """Return a function that measures runs per second."""
    return lambda systems: systems[sweep].value("runs") / systems[sweep].value("wall")


def _overhead(sweep: str) -> Measured:
    """Return a function that divides the time by the runs' own seconds, shared by two cores."""
    return lambda systems: systems[sweep].value("wall") / (systems[sweep].value("own") / 2)


def _systems(name: str) -> dict[str, list[str]]:
    """Return the systems that W1 and W2 have in common."""
    return {
        "floor": ["floor.py", "rounds", name],
        "fedhet": ["fedhet_system.py", "rounds", name],
        "fedhet, 2 workers": ["fedhet_system.py", "rounds", name, "engine.workers=2"],
        "Flower": ["flower_system.py", "rounds", name],
        "Flower, 2 workers": ["flower_system.py", "rounds", name, "2"],
        "pfl": ["pfl_system.py", "rounds", name],
    }


def _fused(experiment: str, *lines: str) -> dict[str, list[str]]:
    """Return an experiment without and with fused training of its clients and runs."""
    return {
        f"{experiment}, {fused}": ["commands.py", "together", *lines, f"engine.fused={fused}"]
        for fused in ("off", "auto")
    }


def _sweep(workers: int, figures: str = "figures=false") -> list[str]:
    """Return the command with 48 runs of the default job."""
    launcher = ["hydra/launcher=processes", f"hydra.launcher.workers={workers}"]
    return ["commands.py", "together", "-m", *launcher, "seed=range(0,48)", figures]


SPEEDUP = Goal(
    "two workers against one, best", _ratio("fedhet", "fedhet, 2 workers"), 1.7, least=True
)
CELLS = {
    "W1": Cell(
        "The workload in which overheads dominate.",
        {
            **_systems("W1"),
            "fedhet, compiled": ["fedhet_system.py", "rounds", "W1", "engine.compile=true"],
            "fedhet on Ray": [
                "fedhet_system.py",
                "rounds",
                "W1",
                "engine=ray",
                f"engine.num_cpus={os.cpu_count()}",  # Ray starts as many actors as fit
            ],
        },
        [
            Goal("fedhet against the floor, best", _ratio("fedhet", "floor"), 1.15),
            Goal(
                "fedhet, compiled, against the floor, best",
                _ratio("fedhet, compiled", "floor"),
                0.85,
            ),
            Goal("fedhet against pfl, best", _ratio("fedhet", "pfl"), 0.93),
            Goal(
                "stock Flower against fedhet, median",
                _ratio("Flower", "fedhet", "median"),
                2.5,
                least=True,
            ),
            Goal(
                "a round on Flower's Ray engine minus the floor's, median",
                lambda systems: (
                    systems["fedhet on Ray"].value("median") - systems["floor"].value("median")
                ),
                0.25,
                "s",
            ),
            SPEEDUP,
        ],
    ),
    "W2": Cell(
        "The workload in which arithmetic dominates.",
        _systems("W2"),
        [
            Goal("fedhet against the floor, best", _ratio("fedhet", "floor"), 1.05),
            Goal("fedhet against pfl, best", _ratio("fedhet", "pfl"), 1.05),
            SPEEDUP,
        ],
    ),
    "W0": Cell(
        "The cost of a message: clients load the received weights and send them back.",
        {
            model: ["fedhet_system.py", "rounds", name, "method._target_=pieces.Idle", "rounds=31"]
            for model, name in (("2NN", "W1"), ("CNN", "W2"))
        },
        [
            Goal(
                f"a client of the {model} that returns at once, median",
                _of(model, "median", COHORT / 1000),
                bound,
                "ms",
            )
            for model, bound in (("2NN", 1), ("CNN", 10))
        ],
    ),
    "ray": Cell(
        "The cost of a message on Ray: all 100 clients of W1 return at once, ten times each.",
        {
            "Ray": [
                *("fedhet_system.py", "rounds", "W1", "method._target_=pieces.Idle", "rounds=11"),
                *("engine=ray", f"engine.num_cpus={os.cpu_count()}", "fraction=1"),
            ]
        },
        [Goal("a client, median", _of("Ray", "median", 100 / 1000), 2.5, "ms")],
    ),
    "job": Cell(
        "A whole run of W1 from the shell: eleven rounds, the imports and the data preparation.",
        {
            "fedhet": ["fedhet_system.py", "job", "W1"],
            "Flower": ["flower_system.py", "rounds", "W1"],
        },
        [
            Goal(
                "stock Flower's job against fedhet's",
                _ratio("Flower", "fedhet", "total"),
                3,
                least=True,
            ),
            *(Goal(f"{name}'s job", _of(name, "total"), unit="s") for name in ("fedhet", "Flower")),
        ],
    ),
    "methods": METHODS,
    "memory": Cell(
        "Memory and time must not grow with the number of clients.",
        {
            "1,000 clients": ["fedhet_system.py", "clients", "1000"],
            "10,000 clients": ["fedhet_system.py", "clients", "10000"],
            "1,000,000 clients": ["fedhet_system.py", "many", "1000000"],
            **{method: ["fedhet_system.py", "states", method] for method in STATEFUL},
        },
        [
            Goal(
                "10,000 clients of the 2NN, 100 per round: peak minus imports",
                _of("10,000 clients", "gib"),
                1.2,
                "GiB",
            ),
            Goal(  # the ideal is 1; the machine's noise gets a tenth
                "a round with 10,000 clients against one with 1,000, best",
                _ratio("10,000 clients", "1,000 clients"),
                1.1,
            ),
            Goal(
                "1,000,000 clients of a logistic model, 1,000 per round: peak of the process",
                _of("1,000,000 clients", "gib"),
                1.3,
                "GiB",
            ),
            Goal(
                "the slowest of five rounds with them against the fastest",
                lambda systems: (
                    max(systems["1,000,000 clients"].reps[0]["rounds"])
                    / systems["1,000,000 clients"].value("best")
                ),
                1.3,
            ),
            *(
                goal
                for method in STATEFUL
                for goal in (
                    Goal(
                        f"500 clients of {method} with a state of the 2NN: peak of the process",
                        _of(method, "gib"),
                        3,
                        "GiB",
                    ),
                    Goal(f"the state of {method}'s clients", _of(method, "state"), unit="GiB"),
                )
            ),
        ],
    ),
    "start": Cell(
        "The time from a command to its help text, and to the end of the first round.",
        {"start": ["commands.py", "start"]},
        [
            Goal("python -m fedhet --help, median", _of("start", "help"), 1, "s"),
            Goal(
                "from the command to the end of the first round, median",
                _of("start", "first"),
                8,
                "s",
            ),
        ],
    ),
    "server": Cell(
        "The server's sums at the size of ResNet-18 (aggregation.py, which alternates in-process).",
        {"server": ["aggregation.py", "ratios"]},
        [
            Goal(
                "the weighted mean against a plain copy of the same trees",
                _of("server", "of_copy"),
                3,
            ),
            Goal("FedSA against the mean", _of("server", "fedsa"), 5),
            Goal("the trees", _of("server", "bytes", 1e6), unit="MB"),
        ],
    ),
    "data": Cell(
        "Partitions, and a client's images on their way to the model (data.py).",
        {
            **{scheme: ["data.py", "partition", scheme] for scheme in SCHEMES},
            "client": ["data.py", "client"],
        },
        [
            *(
                Goal(
                    f"60,000 samples to 10,000 clients, {scheme}, after the imports",
                    _of(scheme, "seconds"),
                    5,
                    "s",
                )
                for scheme in SCHEMES
            ),
            Goal(
                "a client's 500 images of 32x32x3: gathered, floating, normalised; median",
                _of("client", "ms"),
                2,
                "ms",
            ),
        ],
    ),
    "fused": Cell(
        "Clients and runs that train in one batch, against one after another (fused.py).",
        {
            **{
                f"{runs} runs, {fused}": [
                    *("fused.py", "steps", "64", "64", "32", str(runs), "10", fused)
                ]
                for runs in (1, 6)
                for fused in ("off", "60")
            },
            **{f"round, {fused}": ["fused.py", "rounds", "60", fused] for fused in ("off", "60")},
            **_fused("first_look", "experiment=first_look"),
            **_fused("FedGMM", "experiment=first_look", "axes.method=[FedGMM]"),
            **_fused("FedDisk", "experiment=first_look", "axes.method=[FedDisk]"),
            **_fused(
                "leaderboard",
                "experiment=leaderboard",
                "axes.setting=[digits*]",
                "client.lr=0.1",
                "tune.budget=1",
                "tune.seeds=[1000]",
                "seed=0,1,2",
            ),
        },
        [
            *(
                Goal(
                    f"gradient steps of {10 * runs} clients",
                    _ratio(f"{runs} runs, off", f"{runs} runs, 60", "step"),
                    bound,
                    least=True,
                )
                for runs, bound in ((1, 2.5), (6, 4))
            ),
            *(
                Goal(
                    f"a client's gradient step in a batch of {10 * runs}",
                    _of(f"{runs} runs, 60", "step", 1e-6),
                    bound,
                    "us",
                )
                for runs, bound in ((1, 60), (6, 40))
            ),
            Goal(
                "60 clients evaluate the global model",
                _of("round, 60", "evaluation", 1e-3),
                10,
                "ms",
            ),
            Goal(
                "a round of 60 clients with 8 steps and an evaluation",
                _ratio("round, off", "round, 60", "round"),
                2.5,
                least=True,
            ),
            Goal(
                "first_look, the whole command",
                _ratio("first_look, off", "first_look, auto", "wall"),
                1.7,
                least=True,
            ),
            *(
                Goal(
                    f"{method}'s own seconds",
                    _ratio(f"{method}, off", f"{method}, auto", "own"),
                    bound,
                    least=True,
                )
                for method, bound in (("FedGMM", 1.8), ("FedDisk", 3))
            ),
            Goal(
                "the leaderboard's digits part without tuning: runs per second",
                _ratio("leaderboard, off", "leaderboard, auto", "wall"),
                2.5,
                least=True,
            ),
        ],
    ),
    "auto": Cell(
        "Runs of the default job with `engine.fused=auto` and without (fused.py).",
        {
            f"{method}, {fused}": ["fused.py", "digits", method, fused]
            for method in DIGITS
            for fused in ("off", "auto")
        },
        [
            Goal(
                f"12 rounds of {method}",
                _ratio(f"{method}, off", f"{method}, auto", "total"),
                1,
                least=True,
            )
            for method in DIGITS
        ],
    ),
    "deployment": Cell(
        "A round of three SuperNodes on this machine beyond its training (commands.py).",
        {name: ["commands.py", "deployment", name] for name in ("stock", "warm")},
        [
            Goal(f"a round beyond the training, {name}, median", _of(name, "median"), bound, "s")
            for name, bound in (("stock", 4.0), ("warm", 1.5))
        ],
    ),
    "waits": Cell(
        "What experiments and reports take beyond their runs, on two cores (commands.py).",
        {
            **{f"report {runs}": ["commands.py", "report", str(runs)] for runs in (140, 2100)},
            "first_look": ["commands.py", "together", "experiment=first_look"],
            "leaderboard": ["commands.py", "together", "experiment=leaderboard", *NINE],
        },
        [
            *(
                Goal(f"the report of {runs} runs", _of(f"report {runs}", "wall"), bound, "s")
                for runs, bound in ((140, 3), (2100, 25))
            ),
            *(
                Goal(
                    f"{name} beyond its runs' own seconds by the cores",
                    lambda systems, name=name: (
                        systems[name].value("wall") - systems[name].value("own") / 2
                    ),
                    bound,
                    "s",
                )
                for name, bound in (("first_look", 47), ("leaderboard", 10))
            ),
        ],
    ),
    "experiment": Cell(
        "48 runs of the default job from the shell, on two cores (commands.py).",
        {
            "two": _sweep(2),
            "drawn": _sweep(2, "figures=true"),
            "one": _sweep(1),
            "commands": ["commands.py", "after_another", "12", "figures=false"],
        },
        [
            Goal(
                "runs per second on two cores against one",
                lambda systems: _rate("two")(systems) / _rate("one")(systems),
                1.7,
                least=True,
            ),
            Goal("time against the runs' own seconds by cores", _overhead("two"), 1.15),
            Goal(
                "against one command after the other",
                lambda systems: _rate("two")(systems) / _rate("commands")(systems),
                3,
                least=True,
            ),
            *(
                Goal(f"{name}: runs per second", _rate(name), unit="/s")
                for name in ("two", "drawn", "one", "commands")
            ),
            Goal(
                "time against the runs' own seconds, if each run draws figures", _overhead("drawn")
            ),
        ],
    ),
}
