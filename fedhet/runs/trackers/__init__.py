"""Where a run can be followed beside its folder: TensorBoard, MLflow, Weights & Biases."""
