"""What the user may set: the recipe (what is learned) and the ds JSON (how fast, on what hardware). No torch here."""
