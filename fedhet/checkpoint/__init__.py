"""What a run needs to go on after its process was killed: `python -m fedhet resume=RUN`.

core/memory.py turns what objects remember into JSON and tensors, folder.py keeps checkpoints in
the run folder, steps.py decides when one is written and puts one back, and record/start.py prepares
the run folder of a run that goes on. No random generator is saved: every draw is a function of the
seed, the phase and the step.
"""
