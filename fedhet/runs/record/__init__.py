"""The results of a run: its folder, its figures, and its output on a terminal."""
