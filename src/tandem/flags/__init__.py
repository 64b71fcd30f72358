"""What was asked: every flag once, other engines' spellings, and what the environment says."""
