"""Settings of the user: the recipe (what is learned) and the ds JSON (how fast, on what hardware). No torch here."""
