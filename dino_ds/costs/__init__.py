"""The costs of a step: a micro-batch is rehearsed on fake tensors, and what DeepSpeed adds is arithmetic."""
