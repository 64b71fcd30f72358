"""Parts that all chat dialects share: conversations to prompts, and answers to text, reasoning and tool calls.

A dialect makes a `Conversation`, asks `ChatModel.prepare` for a `PreparedChat`, submits its ids and sampling, and feeds
each answer's text to one `AnswerParser`. The parser's `ChatEvent`s are the answer, streamed or whole.
"""
