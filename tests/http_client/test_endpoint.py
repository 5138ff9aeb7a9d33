"""Where a server is reached: faults that a configuration shows, and keys that it never holds."""

import pytest
from refusals import refusal

from verl.component import BuildContext, as_plain
from verl.errors import ConfigError
from verl.http_client.endpoint import Endpoint
from verl.utils.redact import redact_tree

SECRET = "sk-abcdef0123456789abcdef"


@pytest.mark.parametrize(
    "settings",
    [
        {"key_variable": SECRET},
        {"base_url": f"https://user:{SECRET}@host/v1"},
        {"base_url": f"https://host/v1?key={SECRET}"},
        {"headers": {"Authorization": f"Bearer {SECRET}"}},
        {"headers": {"X-Api-Key": "short"}},
        {"headers": {"X-Other": SECRET}},
    ],
)
def test_a_key_in_the_configuration_is_refused_without_being_shown(settings):
    with pytest.raises(ConfigError, match="key_variable") as refused:
        Endpoint(**{"base_url": "http://localhost:1/v1", **settings})
    assert SECRET not in str(refused.value)


def test_the_name_of_the_variable_is_saved_and_a_key_that_is_not_set_or_cannot_be_sent_is_an_error(monkeypatch):
    endpoint = Endpoint(base_url="http://localhost:1", key_variable="JUDGE_KEY")
    assert redact_tree(as_plain(endpoint)) == as_plain(endpoint)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with refusal("key_variable"):
        endpoint.build(BuildContext())
    monkeypatch.setenv("JUDGE_KEY", "ab\ncd")
    with refusal("key_variable") as refused:
        endpoint.build(BuildContext())
    assert "ab\ncd" not in str(refused.value)


def test_the_path_of_a_request_is_added_with_one_slash():
    assert Endpoint(base_url="http://h/v1/").url("/chat") == "http://h/v1/chat"
    assert Endpoint(base_url="http://h/score").url() == "http://h/score"
