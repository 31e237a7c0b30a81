"""The only package that knows DeepSpeed: its engine, its optimizers and its traps."""
