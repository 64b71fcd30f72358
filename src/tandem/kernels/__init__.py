"""Typed Python faces of the C++ core, each beside a plain reference. `ops.Ops` is what models are written in."""
