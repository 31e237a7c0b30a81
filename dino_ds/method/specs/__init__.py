"""Descriptions of what is learned in plain numbers, without torch: loss terms, teachers, heads, and who sees which crops."""
