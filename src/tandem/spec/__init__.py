"""What a model is: its layers, rotary tables, state, stored formats; read from `config.json` and never changed."""
