"""Instruments: real steps to try, clocks, memory of fresh processes, tables. What bench and tools measure with."""
