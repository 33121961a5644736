"""Where clients run: in this process (local), under Flower's simulation on Ray (ray), or through
`flwr run` (flwr)."""
