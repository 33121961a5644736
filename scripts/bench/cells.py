"""The cells of the benchmark: which systems run, and the goals for their figures.

docs/performance.md has the results. "best" compares the best single rounds, which a busy machine
disturbs least; "median" compares the medians of the repetitions' medians. Both sides of every ratio
come from the same alternating run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from harness import Goal, Result, System, alternate, ratio
from method_cells import methods

COHORT = 10  # clients in each round of W1 and W2
STATEFUL = ("fedala", "ditto", "moon")  # methods whose clients remember a model
SCHEMES = ("iid", "dirichlet", "pathological", "shards", "quantity", "natural")


def _workload(name: str, reps: int, more: dict[str, list[str]]) -> Result:
    """The systems that W1 and W2 have in common, and `more`."""
    systems = alternate(
        {
            "floor": ["floor.py", name],
            "fedhet": ["fedhet_system.py", name],
            "floor, 2 workers": ["floor.py", name, "--workers", "2"],
            "fedhet, 2 workers": ["fedhet_system.py", name, "engine.workers=2"],
            "Flower": ["flower_system.py", name],
            "Flower, 2 workers": ["flower_system.py", name, "--workers", "2"],
            "pfl": ["pfl_system.py", name],
            **more,
        },
        reps,
    )
    speedup = ratio(systems["fedhet"].best, systems["fedhet, 2 workers"].best)
    return Result([Goal("two workers against one, best", speedup, 1.7, least=True)], systems)


def w1(reps: int) -> Result:
    """The workload in which overheads dominate."""
    one_actor = f"engine.num_cpus={os.cpu_count()}"  # Ray starts as many actors as fit
    result = _workload(
        "W1",
        reps,
        {
            "fedhet, compiled": ["fedhet_system.py", "W1", "engine.compile=true"],
            "fedhet on Ray": ["fedhet_system.py", "W1", "engine=ray", one_actor],
        },
    )
    systems = result.systems
    floor = systems["floor"]
    fedhet = systems["fedhet"]
    compiled = ratio(systems["fedhet, compiled"].best, floor.best)
    flower = ratio(systems["Flower"].median, fedhet.median)
    ray = systems["fedhet on Ray"].median
    beyond_floor = None if ray is None or floor.median is None else ray - floor.median
    result.goals[:0] = [
        Goal("fedhet against the floor, best", ratio(fedhet.best, floor.best), 1.15),
        Goal("fedhet, compiled, against the floor, best", compiled, 0.85),
        Goal("fedhet against pfl, best", ratio(fedhet.best, systems["pfl"].best), 0.93),
        Goal("stock Flower against fedhet, median", flower, 2.5, least=True),
        Goal("a round on Flower's Ray engine minus the floor's, median", beyond_floor, 0.25, "s"),
    ]
    return result


def w2(reps: int) -> Result:
    """The workload in which arithmetic dominates."""
    result = _workload("W2", reps, {})
    systems = result.systems
    fedhet = systems["fedhet"].best
    result.goals[:0] = [
        Goal("fedhet against the floor, best", ratio(fedhet, systems["floor"].best), 1.05),
        Goal("fedhet against pfl, best", ratio(fedhet, systems["pfl"].best), 1.05),
    ]
    return result


def w0(reps: int) -> Result:
    """What a message costs: clients load the received weights and send them back."""
    idle = ["method._target_=pieces.Idle", "rounds=31"]
    workloads = {"2NN": "W1", "CNN": "W2"}
    systems = alternate(
        {model: ["fedhet_system.py", name, *idle] for model, name in workloads.items()}, reps
    )
    goals = []
    for model, bound in (("2NN", 1), ("CNN", 10)):
        seconds = systems[model].median
        ms = None if seconds is None else seconds * 1000 / COHORT
        goals.append(Goal(f"a client of the {model} that returns at once, median", ms, bound, "ms"))
    return Result(goals, systems)


def job(reps: int) -> Result:
    """A whole run of W1 from the shell: eleven rounds, the imports and the data preparation."""
    systems = alternate(
        {"fedhet": ["fedhet_system.py", "W1", "--job"], "Flower": ["flower_system.py", "W1"]}, reps
    )
    seconds = {name: system.value("total") for name, system in systems.items()}
    against = ratio(seconds["Flower"], seconds["fedhet"])
    return Result(
        [Goal("stock Flower's job against fedhet's", against, 3, least=True)],
        {
            name: System([{"total": rep["total"]} for rep in system.reps], system.absent)
            for name, system in systems.items()
        },
        [f"{name}: {total:.2f} s" for name, total in seconds.items() if total is not None],
    )


def memory(reps: int) -> Result:
    """Memory and time must not grow with the number of rounds and clients (memory.py)."""
    few = "1,000 clients"
    many = "10,000 clients"
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
    growth = systems["growth"].value("growth")
    peak = systems[many].value("gib")
    slowdown = ratio(systems[many].best, systems[few].best)
    goals = [
        Goal("resident memory after round 200 relative to that after round 10", growth, 1.02),
        Goal("10,000 clients of the 2NN, 100 per round: peak minus imports", peak, 1.2, "GiB"),
        # The ideal is 1; a tenth is for the noise of the machine.
        Goal("a round with 10,000 clients against one with 1,000, best", slowdown, 1.1),
    ]
    for workers in (1, 2):
        alive = systems[f"trees, {workers}"].value("trees")
        what = f"clients' trees alive in the server, workers: {workers}"
        goals.append(Goal(what, alive, workers + 2, "trees"))
    for method in STATEFUL:
        system = systems[method]
        state = f"{system.value('state') or 0:.2f} GiB"
        what = f"500 clients of {method} with {state} of state of the 2NN: peak of the process"
        goals.append(Goal(what, system.value("gib"), 3, "GiB"))
    return Result(goals, systems)


def start(reps: int) -> Result:
    """The time from a command to its help text, and to the end of the first round."""
    systems = alternate({"start": ["commands.py", "start"]}, reps)
    system = systems["start"]
    first = "from the command to the end of the first round, median"
    return Result(
        [
            Goal("python -m fedhet --help, median", system.value("help"), 1, "s"),
            Goal(first, system.value("first"), 8, "s"),
        ],
        systems,
    )


def server(reps: int) -> Result:
    """The server's sums at the size of ResNet-18 (aggregation.py, which alternates in-process)."""
    system = alternate({"server": ["aggregation.py", "--reps", str(reps)]}, 1)["server"]
    moved = system.value("bytes") or 0
    mean = f"the weighted mean against a plain copy of the same {moved / 1e6:,.0f} MB"
    return Result(
        [
            Goal(mean, system.value("of_copy"), 3),
            Goal("FedSA against the mean", system.value("fedsa"), 5),
        ],
        {"server": system},
    )


def data(reps: int) -> Result:
    """Partitions, a client's images on their way to the model, and a full-size MNIST (data.py)."""
    systems = alternate(
        {
            **{scheme: ["data.py", "partition", scheme] for scheme in SCHEMES},
            "client": ["data.py", "client"],
            "mnist": ["data.py", "mnist"],
        },
        reps,
    )
    client = systems["client"]
    mnist = systems["mnist"]
    goals = []
    for scheme in SCHEMES:
        what = f"60,000 samples to 10,000 clients, {scheme}, after the imports"
        goals.append(Goal(what, systems[scheme].value("seconds"), 5, "s"))
    what = "a client's 500 images of 32x32x3: gathered, floating, normalised; best median"
    goals.append(Goal(what, min((rep["ms"] for rep in client.reps), default=None), 2, "ms"))
    what = "loading 60,000 + 10,000 images of MNIST and touching every pixel"
    goals.append(Goal(what, mnist.value("seconds"), 2, "s"))
    what = "its peak memory beyond the imports, relative to the size of the images"
    goals.append(Goal(what, mnist.value("memory"), 1.3))
    notes = []
    for library in ("torchvision", "huggingface"):
        ms = client.value(library)
        if ms is not None:
            notes.append(f"a client's 500 images through {library}'s transforms: {ms:.0f} ms")
    return Result(goals, systems, notes)


def deployment(reps: int) -> Result:
    """A round of three SuperNodes on this machine beyond its training (commands.py)."""
    bounds = {"stock": 4.0, "warm": 1.5}
    systems = alternate({name: ["commands.py", "deployment", name] for name in bounds}, reps)
    goals = [
        Goal(f"a round beyond the training, {name}, median", systems[name].median, bound, "s")
        for name, bound in bounds.items()
    ]
    return Result(goals, systems)


def experiment(reps: int) -> Result:
    """48 runs of the default job from the shell, on two cores (commands.py)."""
    systems = alternate(
        {
            "two": ["commands.py", "sweep", "48", "2"],
            "drawn": ["commands.py", "sweep", "48", "2", "figures=true"],
            "one": ["commands.py", "sweep", "48", "1"],
            "commands": ["commands.py", "sweep", "12", "0"],
        },
        reps,
    )
    two, drawn = systems["two"], systems["drawn"]

    def overhead(system: System) -> float | None:
        own = system.value("own")
        return ratio(system.value("wall"), own and own / 2)

    rates = {
        name: ratio(system.value("runs"), system.value("wall")) for name, system in systems.items()
    }
    notes = [f"{name}: {rate:.2f} runs per second" for name, rate in rates.items() if rate]
    if (figures := overhead(drawn)) is not None:
        notes.append(f"time against the runs' own seconds, where each draws figures: {figures:.2f}")
    return Result(
        [
            Goal(
                "runs per second on two cores against one",
                ratio(rates["two"], rates["one"]),
                1.7,
                least=True,
            ),
            Goal(
                "time against the runs' own seconds by cores",
                overhead(two),
                1.15,
            ),
            Goal(
                "against one command after the other",
                ratio(rates["two"], rates["commands"]),
                3,
                least=True,
            ),
        ],
        systems,
        notes,
    )


CELLS: dict[str, Callable[[int], Result]] = {
    "W1": w1,
    "W2": w2,
    "W0": w0,
    "job": job,
    "methods": methods,
    "memory": memory,
    "start": start,
    "server": server,
    "data": data,
    "deployment": deployment,
    "experiment": experiment,
}
