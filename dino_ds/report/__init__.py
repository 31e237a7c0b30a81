"""One self-contained HTML file about a run, or about several side by side."""
