"""Bugs of other stacks with the tokenizers and chat templates of real models; `model` is every one of them."""

from __future__ import annotations

from tests.actors.bugs_calls import *  # noqa: F403
from tests.actors.bugs_tokens import *  # noqa: F403
