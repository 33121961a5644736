"""Accounts for the privacy that the replies of clients with noise have spent."""
