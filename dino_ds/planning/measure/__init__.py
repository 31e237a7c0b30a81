"""What bench and tools measure with: real steps to try, clocks, memory of fresh processes, tables."""
