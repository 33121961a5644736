"""`python -m fedhet deploy node`: a SuperNode whose clients start in milliseconds."""
