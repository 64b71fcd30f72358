"""GLM-5.3-Flash's text with a head: Transformers has it only beside images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Glm5NextTextConfig, Glm5NextTextModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel


class Glm5NextTextLM(Glm5NextPreTrainedModel, GenerationMixin):
    config: Glm5NextTextConfig

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **more: Any) -> CausalLMOutputWithPast:
        found = self.model(input_ids=input_ids, **more)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(found.last_hidden_state[:, rows]))


Glm5NextTextLM.config_class = Glm5NextTextConfig
