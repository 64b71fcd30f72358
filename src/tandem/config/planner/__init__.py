"""From wishes, model and machine to a `Plan`: memory is divided, and what does not fit is tried in tighter ways."""
