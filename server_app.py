"""Flower's ServerApp: composes the run's configuration and runs it (fedhet/flower/apps.py)."""

from fedhet.runs import process

with process.imports():
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from fedhet.flower import apps

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Execute the run that Flower has started."""
    apps.serve(grid, context)
