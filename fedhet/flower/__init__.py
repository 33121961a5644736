"""Everything that knows how Flower carries messages and starts its apps."""
