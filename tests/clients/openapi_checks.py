"""A check for schemathesis, beside its own; `SCHEMATHESIS_HOOKS` names this file.

Its `positive_data_acceptance` wants every body that fits the document to be served. JSON schema cannot say all that a
server must refuse: a prompt without a token, two tools of one name, a field that another one needs. So that check is
replaced: such a body may be refused for what its values mean, never for its form.
"""

from __future__ import annotations

import json
import re
from typing import Any

import schemathesis

_SERVED = (*range(200, 400), 401, 403, 404, 409, 429, 503)  # as `positive_data_acceptance` has them
_OF_FORM = re.compile(
    r"expected `|missing required field|unknown field|none of the values|is empty; send JSON|is not valid (JSON|UTF-8)|"
    r"nested too deeply"
)
_CODES_OF_FORM = ("invalid_type", "invalid_json", "invalid_utf8")


@schemathesis.check
def refused_for_its_meaning_only(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    if not case.meta.generation.mode.is_positive or response.status_code in _SERVED:
        return
    assert response.status_code in (400, 413), f"{response.status_code} for a body that fits the document"
    error: Any = json.loads(response.content)["error"]
    code, message = (None, error) if isinstance(error, str) else (error.get("code"), error["message"])
    of_grammar = "grammar of the answer" in message  # the text of a grammar has a form of its own
    assert of_grammar or not _OF_FORM.search(message), f"the document is looser than the server: {message}"
    assert code not in _CODES_OF_FORM, f"the document is looser than the server: {message}"
