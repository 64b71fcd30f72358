"""Tandem's experts inside vLLM: a plug-in that does nothing until `--additional-config '{"tandem": {}}'` is given."""
