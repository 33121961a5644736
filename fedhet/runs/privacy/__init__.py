"""What replies tell of samples: counts of few, the noise, and the account of what was released."""
