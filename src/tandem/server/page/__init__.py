"""The page at `/`: chat, and what the experts do. Plain files, served as they lie in `static/`."""
