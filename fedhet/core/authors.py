"""All names that the author of a method or a plug-in imports.

    from fedhet.core.authors import Client, ClientContext, Merged, Method, Step, setting, trees

docs/extending.md explains these names.
"""

from __future__ import annotations

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.client.training import Batch
from fedhet.core.errors import ConfigError, log
from fedhet.core.groups import LocalSettings
from fedhet.core.kernel import (
    Client,
    Expected,
    Merged,
    Message,
    Method,
    Phase,
    Plugin,
    Result,
    State,
    Step,
    Term,
    Update,
    as_given,
    serves,
)
from fedhet.core.messages import Extras, Recorded
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Scope, Workspace

__all__ = [
    "AnyTree",
    "Batch",
    "Client",
    "ClientContext",
    "ConfigError",
    "Expected",
    "Extras",
    "Fitted",
    "LocalSettings",
    "Merged",
    "Message",
    "Method",
    "Phase",
    "Plugin",
    "Prepared",
    "Recorded",
    "Result",
    "RunSetup",
    "Samples",
    "Scope",
    "State",
    "Step",
    "Term",
    "Tree",
    "Update",
    "Workspace",
    "as_given",
    "log",
    "serves",
    "setting",
    "trees",
]
