"""What a reply must meet before it is merged: its content, and how many must come."""
