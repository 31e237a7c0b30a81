"""Descriptions of what is learned, without torch: loss terms, teachers, heads, and who sees which crops."""
