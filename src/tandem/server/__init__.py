"""HTTP dialects, streaming, metrics, the engine process and its supervisor. `launch.serve(config)` is the way in."""
