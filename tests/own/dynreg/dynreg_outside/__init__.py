"""A method outside of fedhet."""
