"""The cells of the benchmark: which systems run, and which goals their figures are held to
(docs/performance.md).

"best" compares the best single rounds, which a busy machine disturbs least; "median" the medians of
the repetitions' medians. Both sides of every ratio come from the same alternating run. A goal is in
the words of the table that set it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import ENVIRONMENT, HERE, Found, Goal, System, alternate, ratio

# FedGMM's target; FedGen's steps on its generator in a round
GENERATED_PER_CLASS, SERVER_STEPS = 60, 50
STATEFUL = ("fedala", "ditto", "moon")  # methods whose clients remember a model

# What a method adds to its host, in words; arithmetic.py times it. The plug-ins of these names are
# the same objects. Without batch norm FedBN is FedAvg: both run on a model that has it.
WORDS = {
    "fedbabu": "nothing: it sends less",
    "fednova": "nothing: a few numbers per client",
    "fedsgd": "nothing: one gradient in place of 60 steps",
    "fedprox": "g += mu (w - x) in each step",
    "fedlex": "g *= G in each step",
    "sgdm": "d = gamma d + g in each step, and a second mean, of d",
    "scaffold": (
        "g += c - c_i in each step; five means' worth: each client's new control, its old one"
        " recovered, two further sums"
    ),
    "feddisk": "a weight for each sample in each step",
    "feddiskab": "a weight for each sample in each step",
    "fedgmm": f"steps on generated samples, {GENERATED_PER_CLASS} of each missing class",
    "fednorm": "one inference pass over each client's data",
    "fedsa": "five times the mean of the same trees (its goal in the cell server)",
    "moon": "two more forward passes in each step, and the contrast of the features",
    "fedntd": "another forward pass in each step, and the distillation",
    "fedrod": "the balanced softmax, and a step of the personal head beside each step",
    "ditto": "a second training, with g += lam (v - x) in each step",
    "fedbn": "nothing: it sends less",
    "fedala": (
        "a pass over 80 % of the samples in steps of its own: the last layer's gradient, and that"
        " layer mixed"
    ),
    "fedgen": (
        f"the loss of a generated batch in each step; {SERVER_STEPS} steps on the generator in a"
        " round"
    ),
    "fedpcl": (
        "contrasts of features in place of the cross entropy, clipping; an inference pass over each"
        " client's data"
    ),
    "fedavgm": "three operations per parameter and round in float64",
    "fedadam": "twelve operations per parameter and round in float64",
    "fedyogi": "twelve operations per parameter and round in float64",
    "fedadagrad": "twelve operations per parameter and round in float64",
}
# Phases before the training are kept short: only the training rounds are compared.
SHORT = {
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


def _rounds(
    name: str, reps: int, commands: dict[str, list[str]]
) -> tuple[Found, Callable[[str], System]]:
    """What W1 and W2 have in common."""
    systems = alternate(
        {
            "floor": ["floor.py", name],
            "fedhet": ["fedhet_system.py", name],
            "floor, 2 workers": ["floor.py", name, "--workers", "2"],
            "fedhet, 2 workers": ["fedhet_system.py", name, "engine.workers=2"],
            "Flower": ["flower_system.py", name],
            "Flower, 2 workers": ["flower_system.py", name, "--workers", "2"],
            "pfl": ["pfl_system.py", name],
            **commands,
        },
        reps,
    )
    one, two = systems["fedhet"], systems["fedhet, 2 workers"]
    return (
        Found(
            [Goal("two workers against one, best", ratio(one.best, two.best), 1.7, least=True)],
            systems,
        ),
        systems.__getitem__,
    )


def w1(reps: int) -> Found:
    """The overhead-bound workload."""
    one_actor = f"engine.num_cpus={os.cpu_count()}"  # Ray starts as many actors as fit
    found, system = _rounds(
        "W1",
        reps,
        {
            "fedhet, compiled": ["fedhet_system.py", "W1", "engine.compile=true"],
            "fedhet on Ray": ["fedhet_system.py", "W1", "engine=ray", one_actor],
        },
    )
    floor, ours, ray = system("floor"), system("fedhet"), system("fedhet on Ray")
    beyond = None if ray.median is None or floor.median is None else ray.median - floor.median
    found.goals[:0] = [
        Goal("fedhet against the floor, best", ratio(ours.best, floor.best), 1.15),
        Goal(
            "fedhet, compiled, against the floor, best",
            ratio(system("fedhet, compiled").best, floor.best),
            0.85,
        ),
        Goal("fedhet against pfl, best", ratio(ours.best, system("pfl").best), 0.93),
        Goal(
            "stock Flower against fedhet, median",
            ratio(system("Flower").median, ours.median),
            2.5,
            least=True,
        ),
        Goal("a round on Flower's Ray engine beyond the floor's, median", beyond, 0.25, "s"),
    ]
    return found


def w2(reps: int) -> Found:
    """The compute-bound workload."""
    found, system = _rounds("W2", reps, {})
    ours = system("fedhet")
    found.goals[:0] = [
        Goal("fedhet against the floor, best", ratio(ours.best, system("floor").best), 1.05),
        Goal("fedhet against pfl, best", ratio(ours.best, system("pfl").best), 1.05),
    ]
    return found


def w0(reps: int) -> Found:
    """What a message costs: clients load the received weights and send them back; one worker in
    process, ten clients a round."""
    idle = ["method._target_=pieces.Idle", "rounds=31"]
    systems = alternate(
        {"2NN": ["fedhet_system.py", "W1", *idle], "CNN": ["fedhet_system.py", "W2", *idle]}, reps
    )

    def per_client(name: str) -> float | None:
        median = systems[name].median
        return None if median is None else median * 1000 / 10

    return Found(
        [
            Goal("a client of the 2NN that returns at once, median", per_client("2NN"), 1, "ms"),
            Goal("a client of the CNN that returns at once, median", per_client("CNN"), 10, "ms"),
        ],
        systems,
    )


def job(reps: int) -> Found:
    """A whole run of W1 from the shell: eleven rounds, imports and the making of the data
    included."""
    systems = alternate(
        {"fedhet": ["fedhet_system.py", "W1", "--job"], "Flower": ["flower_system.py", "W1"]}, reps
    )
    ours, flower = systems["fedhet"].value("total"), systems["Flower"].value("total")
    notes = [
        f"{name}: {seconds:.2f} s"
        for name, seconds in (("fedhet", ours), ("Flower", flower))
        if seconds is not None
    ]
    return Found(
        [Goal("stock Flower's job against fedhet's", ratio(flower, ours), 3, least=True)],
        {
            name: System([{"total": rep["total"]} for rep in system.reps], system.absent)
            for name, system in systems.items()
        },
        notes,
    )


def methods(reps: int) -> Found:
    """Training rounds of each method by those of its host, FedAvg, on W1's model and its first ten
    clients, with five timed rounds."""

    # All ten take part in every round: what they remember is there in every timed one. FedALA's
    # first learning, until it settles, is in the first of these, so its best round is one of the
    # usual ones.
    def command(method: str, workload: str = "W1") -> list[str]:
        return [
            "fedhet_system.py",
            workload,
            "--pixels",
            "--same",
            "rounds=6",
            f"method={method}",
            *SHORT.get(method, []),
        ]

    norm = {f"{method}, batch norm": command(method, "W1-norm") for method in ("fedavg", "fedbn")}
    plain = {method: command(method) for method in ("fedavg", *WORDS) if method != "fedbn"}
    systems = alternate(
        {"floor": ["floor.py", "W1"], **plain, **norm, "arithmetic": ["arithmetic.py"]}, reps
    )
    arithmetic, floor = (
        systems["arithmetic"],
        ratio(systems["floor"].best, systems["fedavg"].best) or 1.0,
    )
    # told by the floor's round, held against the host's
    own = {method: floor * (arithmetic.value(method) or 0.0) for method in WORDS}
    own["fedgmm"] = (
        arithmetic.value("generated") or 0.0
    )  # a step on a generated sample costs what one on a real sample costs

    def measured(method: str) -> float | None:
        kind = ", batch norm" if method == "fedbn" else ""
        return ratio(systems[method + kind].best, systems["fedavg" + kind].best)

    goals = [
        Goal(
            f"{method}, best; own arithmetic {own[method]:.2f}: {words}",
            measured(method),
            1.15 + own[method],
        )
        for method, words in WORDS.items()
    ]
    return Found(
        [
            *goals,
            Goal(
                "FedNorm's latents, in inference passes over the client's data",
                arithmetic.value("latents"),
                1.1,
            ),
        ],
        systems,
    )


def memory(reps: int) -> Found:
    """What is held, and that neither memory nor time grows with rounds and clients; memory.py says
    what runs."""
    few, many = "1,000 clients", "10,000 clients"
    systems = alternate(
        {
            few: ["memory.py", "clients", "1000", "6", "100"],
            many: ["memory.py", "clients", "10000", "6", "100"],
            "growth": ["memory.py", "growth"],
            **{f"trees, {workers}": ["memory.py", "trees", str(workers)] for workers in (1, 2)},
            **{method: ["memory.py", "states", method] for method in STATEFUL},
        },
        reps,
    )
    return Found(
        [
            Goal(
                "resident memory after round 200 by that after round 10",
                systems["growth"].value("growth"),
                1.02,
            ),
            Goal(
                "10,000 clients of the 2NN, 100 per round: peak beyond the imports",
                systems[many].value("gib"),
                1.2,
                "GiB",
            ),
            # A ratio of 1, with a tenth for the machine's noise.
            Goal(
                "a round with 10,000 clients against one with 1,000, best",
                ratio(systems[many].best, systems[few].best),
                1.1,
            ),
            *(
                Goal(
                    f"clients' trees alive in the server, workers: {workers}",
                    systems[f"trees, {workers}"].value("trees"),
                    workers + 2,
                    "trees",
                )
                for workers in (1, 2)
            ),
            *(
                Goal(
                    f"500 clients with {method}'s state of the 2NN,"
                    f" {systems[method].value('state') or 0:.2f} GiB of it: peak of the process",
                    systems[method].value("gib"),
                    3,
                    "GiB",
                )
                for method in STATEFUL
            ),
        ],
        systems,
    )


def start(reps: int) -> Found:
    """From the command to its help, and to the end of the first round."""
    systems = alternate({"start": ["start.py"]}, reps)
    return Found(
        [
            Goal("python -m fedhet --help, median", systems["start"].value("help"), 1, "s"),
            Goal(
                "from the command to the end of the first round, median",
                systems["start"].value("first"),
                8,
                "s",
            ),
        ],
        systems,
    )


def server(reps: int) -> Found:
    """The server's sums at ResNet-18 size; aggregation.py alternates its pieces in one process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        subprocess.run(
            [
                sys.executable,
                str(HERE / "aggregation.py"),
                "--reps",
                str(reps),
                "--json",
                str(path),
            ],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found = json.loads(path.read_text())
    return Found(
        [
            Goal(
                "the weighted mean against a plain copy of the same"
                f" {found['bytes'] / 1e6:,.0f} MB",
                found["of_copy"],
                3,
            ),
            Goal("FedSA against the mean", found["ratio"]["fedsa"], 5),
        ],
        {"server": System([found])},
    )


def data(reps: int) -> Found:
    """Who holds which samples, a client's images on their way to the model, and a full-size MNIST;
    data.py says what runs."""
    schemes = ("iid", "dirichlet", "pathological", "shards", "quantity", "natural")
    systems = alternate(
        {
            **{name: ["data.py", "partition", name] for name in schemes},
            "client": ["data.py", "client"],
            "mnist": ["data.py", "mnist"],
        },
        reps,
    )
    client, mnist = systems["client"], systems["mnist"]
    notes = [
        f"a client's 500 images by {name}'s transforms: {usual:.0f} ms"
        for name in ("torchvision", "huggingface")
        if (usual := client.value(name)) is not None
    ]
    return Found(
        [
            *(
                Goal(
                    f"60,000 samples to 10,000 clients, {name}, after the imports",
                    systems[name].value("seconds"),
                    5,
                    "s",
                )
                for name in schemes
            ),
            Goal(
                "a client's 500 images of 32x32x3: gathered, floating, normalised; best of the"
                " repetitions' medians",
                min((rep["ms"] for rep in client.reps), default=None),
                2,
                "ms",
            ),
            Goal(
                "loading 60,000 + 10,000 images of MNIST and touching every pixel",
                mnist.value("seconds"),
                2,
                "s",
            ),
            Goal(
                "its peak memory beyond the imports, by the images' size",
                mnist.value("memory"),
                1.3,
            ),
        ],
        systems,
        notes,
    )


CELLS: dict[str, Callable[[int], Found]] = {
    "W1": w1,
    "W2": w2,
    "W0": w0,
    "job": job,
    "methods": methods,
    "memory": memory,
    "start": start,
    "server": server,
    "data": data,
}
