"""The wall around DeepSpeed: the only room that knows its engine, its optimizers and its traps."""
