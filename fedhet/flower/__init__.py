"""Everything that knows Flower: its message format, its Strategy and Server, its apps and nodes."""
