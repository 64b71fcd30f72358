"""Model description: its layers, rotary tables, state, stored formats; read from `config.json` and never changed."""
