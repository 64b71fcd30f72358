"""Requests to batches to tokens: sequences, scheduler, KV pages, prefix tree, runner, sampling, text."""
