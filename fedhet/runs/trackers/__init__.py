"""Trackers, which follow a run in another tool: TensorBoard, MLflow, Weights & Biases."""
