"""The built-in model: small, untied, and the same wherever and whenever it is made."""

import torch
from roles import largest_difference, weights

from verl.models.tiny import TinyModel

SMALL = TinyModel(hidden_size=32, intermediate_size=64)


def test_the_default_has_at_most_a_million_parameters_and_its_own_output_head():
    model = TinyModel().load_causal_lm("cpu")
    assert sum(p.numel() for p in model.parameters()) <= 1_000_000
    assert model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_weights_follow_the_seed_alone_and_the_generator_is_left_as_it_was():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights(SMALL.load_causal_lm("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        assert largest_difference(weights(SMALL.load_causal_lm("cpu")), first) == 0
    finally:
        torch.set_default_dtype(torch.float32)
    other = weights(TinyModel(hidden_size=32, intermediate_size=64, seed=1).load_causal_lm("cpu"))
    assert largest_difference(other, first) > 0


def test_backbone_tokenizer_and_weights_of_another_type_are_those_of_the_language_model():
    model, backbone = SMALL.load_causal_lm("cpu"), SMALL.load_backbone("cpu")
    assert largest_difference(weights(backbone), weights(model.base_model)) == 0
    assert not model.training
    assert not backbone.training
    tokenizer = SMALL.load_tokenizer()
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert SMALL.max_positions() == tokenizer.model_max_length == model.config.max_position_embeddings == 64
    double = TinyModel(hidden_size=32, intermediate_size=64, dtype="float64").load_causal_lm("cpu")
    assert largest_difference(weights(double), {name: x.double() for name, x in weights(model).items()}) == 0
