"""What `fedhet deploy init` fills in."""
