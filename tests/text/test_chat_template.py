"""Chat templates render as in transformers, and hostile templates are contained."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from onedraw.errors import BadRequest, CorruptFile
from onedraw.text.chat_template import ChatTemplate

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
    [{"role": "user", "content": '  spaces \n\n and <tags> & "quotes" {{ braces }} {% if %} 日本語 🙂  '}],
    [{"role": "user", "content": ""}],
    [{"role": "assistant", "content": "so far"}, {"role": "assistant", "content": "so good"}],
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {}}}}
]
# Every feature in which the Jinja environment could differ from transformers'.
FEATURES = """
{%- set ns = namespace(count=0, last='') -%}
    {% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
    {%- if loop.index > 4 %}{% break %}{% endif -%}
    {%- set ns.count = ns.count + 1 -%}
  {% if message['role'] == 'assistant' %}
    {% generation %}
{{ message.content | trim }}{{ eos_token }}
    {% endgeneration %}
  {% else %}
{{ bos_token }}{{ message.role | upper }}: {{ message.content }}
  {% endif %}
    {% endfor %}
{%- macro dump(x) %}[{{ x | tojson }}|
{{- x | tojson(indent=2) }}|{{ x | tojson(sort_keys=true, separators=(',', ':')) }}]{% endmacro -%}
{%- if tools %}{{ dump(tools) }}{% endif -%}
{{ ns.count }} {{ dict(a=1).a }} {{ dict.fromkeys(['k'], 2).k }} {{ undefined_thing }} {{ style | default('plain') }}
{{- 'ab' * 3 }} {{ 2 ** 5 }} {{ strftime_now('%%') }} {{ messages | length }} {{ documents is none }}
{% if add_generation_prompt %}>>>{% endif %}
"""


def render_with_transformers(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, bos_token="<b>", eos_token="<e>", **kwargs)
    return str(rendered[0])


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer_path: Path) -> ChatTemplate:
    template = ChatTemplate.from_folder(tiny_tokenizer_path)
    assert template is not None
    return template


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"add_generation_prompt": False}])
def test_a_folders_template_renders_as_in_transformers(
    tiny: ChatTemplate, tiny_tokenizer_path: Path, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_tokenizer_path))
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
    assert tiny.render(messages, **options) == expected


def test_the_template_of_the_fixture_uses_its_arguments(tiny: ChatTemplate) -> None:
    messages = CONVERSATIONS[0]
    assert tiny.render(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.render(messages, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert tiny.render(messages, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"style": "x"}, {"add_generation_prompt": False}])
def test_every_feature_behaves_as_in_transformers(messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    template = ChatTemplate(FEATURES, bos_token="<b>", eos_token="<e>")
    assert template.render(messages, **options) == render_with_transformers(
        FEATURES, messages, **{"add_generation_prompt": True, **options}
    )


def test_json_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ tools | tojson }}", bos_token="", eos_token="")
    assert template.render([], tools=TOOLS) == json.dumps(TOOLS, ensure_ascii=False)


def test_reasoning_of_past_messages_is_available_under_both_names() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    messages = [{"role": "assistant", "reasoning": "r"}, {"role": "assistant", "thinking": "t"}, {"role": "user"}]
    template = ChatTemplate(source, bos_token="", eos_token="")
    assert template.render(messages) == render_with_transformers(source, messages, add_generation_prompt=True) == "r|r;t|t;|;"


# ---------------------------------------------------------------------- sources of templates


LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP, "[system]A[system]B[user]C[system]D[assistant]E[user]F"),
        (FIRST, "[system]A\n\nB[user]C\n\n<system>\nD\n</system>[assistant]E[user]F"),
        (SILENT, "[system]A\n\nB[user]C\n\n<system>\nD\n</system>[assistant]E[user]F"),
        (ALTERNATE, "[user]<system>\nA\n</system>\n\n<system>\nB\n</system>\n\nC\n\n<system>\nD\n</system>[assistant]E[user]F"),
    ],
    ids=["loop", "first", "silent", "alternate"],
)
def test_no_system_message_is_lost_wherever_it_stands(source: str, expected: str) -> None:
    """Agents send several, and between the turns; many templates show one, at the beginning, or none."""
    roles = {"A": "system", "B": "system", "C": "user", "D": "system", "E": "assistant", "F": "user"}
    messages = [{"role": role, "content": content} for content, role in roles.items()]
    template = ChatTemplate(source, bos_token="", eos_token="")
    assert template.render(messages) == expected
    plain = [message for message in messages if message["role"] != "system"]
    assert template.render(plain) == "[user]C[assistant]E[user]F"


def test_the_jinja_file_overrides_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config {{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    first = ChatTemplate.from_folder(tmp_path)
    assert first is not None
    assert first.render([]) == "config <b><e>"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    second = ChatTemplate.from_folder(tmp_path)
    assert second is not None
    assert second.render([]) == "file <b>"
    assert second.source == "file {{ bos_token }}"


def test_the_default_of_several_named_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([]) == "plain"


def test_a_gguf_template_has_its_bos_and_eos_tokens(tiny_metadata: dict[str, Any], tiny: ChatTemplate) -> None:
    template = ChatTemplate.from_gguf(tiny_metadata)
    assert template is not None
    assert template.render(CONVERSATIONS[1]) == tiny.render(CONVERSATIONS[1])
    tokens = ChatTemplate.from_gguf({**tiny_metadata, "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"})
    assert tokens is not None
    assert tokens.render([]) == "<|endoftext|><|im_end|>"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_gguf({}) is None


def test_a_template_with_a_syntax_error_is_refused_with_the_line() -> None:
    with pytest.raises(CorruptFile, match="line 2"):
        ChatTemplate("fine\n{% if %}", bos_token="", eos_token="")


# ---------------------------------------------------------------------- faulty and hostile templates


def render_error(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> BadRequest:
    template = ChatTemplate(source, bos_token="", eos_token="")
    with pytest.raises(BadRequest) as caught:
        template.render(messages or CONVERSATIONS[0], **kwargs)
    return caught.value


@pytest.mark.parametrize(
    "source",
    [
        "{% if x %}" * 1000 + "{% endif %}" * 1000,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for i in x %}" * 40 + "{% endfor %}" * 40,  # Python does not compile so many loops
    ],
    ids=("if", "brackets", "for"),
)
def test_a_template_that_is_nested_too_deep_is_refused(source: str) -> None:
    with pytest.raises(CorruptFile, match="nested too deep"):
        ChatTemplate(source, bos_token="", eos_token="")


def test_a_message_that_the_template_raises_reaches_the_caller() -> None:
    error = render_error("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in str(error)
    assert (error.code, error.param, error.status) == ("chat_template_error", "messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at.all }}",
        "{{ messages[0].content + none }}",
        "{{ 1 / 0 }}",
        "{{ messages | sum }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_an_error_inside_a_template_is_a_bad_request(source: str) -> None:
    assert render_error(source).code == "chat_template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'].open('x') }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.clear() }}",
    ],
)
def test_hostile_templates_get_no_access(source: str) -> None:
    """They are refused or print nothing: a forbidden attribute is undefined, which prints as an empty text."""
    messages = [{"role": "user", "content": "Hi"}]
    text = ""
    with contextlib.suppress(BadRequest):
        text = ChatTemplate(source, bos_token="", eos_token="").render(messages)
    assert text == ""
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_forbidden_attribute_is_refused_as_soon_as_it_is_used() -> None:
    assert "unsafe" in str(render_error("{{ ''.__class__.__mro__ }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set x = 'x' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
    ],
)
def test_a_template_cannot_produce_huge_values(source: str) -> None:
    assert "exceeds" in str(error := render_error(source)) or "Range" in str(error)


def test_messages_are_never_evaluated_as_a_template(tiny: ChatTemplate) -> None:
    content = "{{ 7 * 7 }}{% raw %}"
    assert content in tiny.render([{"role": "user", "content": content}])


def test_objects_with_methods_do_not_reach_a_template() -> None:
    assert render_error("{{ path }}", path=Path("x")).code == "chat_template_error"


def test_reserved_names_are_refused_as_template_arguments(tiny: ChatTemplate) -> None:
    with pytest.raises(BadRequest, match="messages"):
        tiny.render(CONVERSATIONS[0], **{"messages": []})
    assert tiny.render(CONVERSATIONS[0], **{"self": 1})


@pytest.mark.weights
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_smollm2s_template_renders_as_in_transformers(smollm2_path: Path, messages: list[dict[str, Any]]) -> None:
    from onedraw.checkpoints.gguf import GgufCheckpoint

    metadata = GgufCheckpoint(smollm2_path).metadata
    template = ChatTemplate.from_gguf(metadata)
    assert template is not None
    for add in (True, False):
        expected = render_with_transformers(metadata["tokenizer.chat_template"], messages, add_generation_prompt=add)
        assert template.render(messages, add_generation_prompt=add) == expected
