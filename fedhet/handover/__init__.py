"""Using a trained model: `python -m fedhet export` and `python -m fedhet predict`.

It may import core, data and runs.
"""
