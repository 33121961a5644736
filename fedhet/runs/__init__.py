"""One run: its configuration, its objects, its record, and the command line.

config/          composes and checks the configuration, and limits what a `_target_` may name
cli/             help, commands and exit codes
job.py           builds the objects of a run from its configuration; `begin` creates the run folder
record/          the run folder and its format, figures, the output on a terminal, `fedhet.load`
checkpoint.py    saves what a run needs to continue after its process was killed
stores.py        stores the states of clients
privacy/         accounts for the privacy loss of what clients have sent
trackers/        TensorBoard, MLflow, Weights & Biases

It may import core, data and models.
"""
