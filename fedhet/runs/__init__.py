"""One run: its configuration, what is built of it, its record, and the command line.

config/          composition and checks of the configuration, and what a `_target_` may name
cli/             help, commands and exit codes
job.py           from a configuration to the objects of a run; `begin` creates the run folder
record/          the run folder and its form, figures, what the terminal shows, and `fedhet.load`
checkpoint.py    what a run needs to continue after its process was killed
stores.py        where the states of clients are kept
privacy/         the account of what clients have released
trackers/        TensorBoard, MLflow, Weights & Biases

It may import core, data and models.
"""
