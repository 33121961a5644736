"""What a run leaves behind: its folder, its figures, and what the terminal shows."""
