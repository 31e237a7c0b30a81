"""The means by which bench and tools measure: real steps to try, clocks, memory of fresh processes, tables."""
