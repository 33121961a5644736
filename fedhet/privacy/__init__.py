"""What keeps the statistics that clients send from describing single samples."""
