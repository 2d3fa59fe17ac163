"""Networks as PyTorch modules, whose keys are those of the usual checkpoints."""
