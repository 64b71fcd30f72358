"""`prepare_wishes`: for dialects whose clients say how much to think to every model, whether it can or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tandem.engine.protocol import SamplingSettings
from tandem.errors import RequestError
from tandem.server.chat.conversation import Conversation
from tandem.server.chat.model import ChatModel, PreparedChat

Wishes = Mapping[str, tuple[str, str]]  # what is complained about: the conversation's field, the client's


async def prepare_wishes(
    chat: ChatModel,
    conversation: Conversation,
    sampling: SamplingSettings,
    wishes: Wishes,
    ignored: list[str],
    *,
    counting: bool = False,
) -> PreparedChat:
    """As `ChatModel.prepare`. Wishes that the model's chat template has no switch for are left out, and added to
    `ignored` as the client calls them, with what else of the request is."""
    while True:
        try:
            prepared = await chat.prepare(conversation, sampling, counting=counting)
            ignored += prepared.ignored
            return prepared
        except RequestError as error:
            field, path = wishes.get(error.param or "", ("", ""))
            if not field or getattr(conversation, field) is None:
                raise
            nothing: dict[str, Any] = {field: None}
            conversation = dataclasses.replace(conversation, **nothing)
            ignored.append(path)
