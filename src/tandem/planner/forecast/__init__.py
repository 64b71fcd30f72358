"""What a plan will take and how fast it will be, before anything is loaded: for this machine and for others."""
