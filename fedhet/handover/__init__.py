"""Handing a trained model over: `python -m fedhet export` and `python -m fedhet predict`.

It may import core, data and runs.
"""
