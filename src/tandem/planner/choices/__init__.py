"""What was chosen for a plan, and why: one file for each choice."""
