"""How models write tool calls and reasoning: one data file for each format, and who reads them."""
