"""Asks a Ray cluster (its argument) for its resources; engines/ray.py runs this file.

If a cluster does not answer, `ray.init` waits for minutes and ignores signals. A separate process
can be killed while it waits. The answer is one line of JSON on stdout: the resources of each node.
"""

import json
import logging
import os
import sys

import ray

ray.init(sys.argv[1], logging_level=logging.CRITICAL, log_to_driver=False)
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]), flush=True)
os._exit(0)  # Ray's own shutdown takes a second
